// Warns of modules of an adapter that may be for another text encoder than the base.
#include <fmt/format.h>

#include <string>
#include <string_view>

#include "base/text.h"
#include "catalog/paths.h"
#include "plan/adapters.h"

namespace loadstone {

namespace {

std::string encoder_folder(unsigned encoder) {
  return encoder == 1 ? "text_encoder" : fmt::format("text_encoder_{}", encoder);
}

}  // namespace

// Encoders of a pipeline have modules of the same names. A folder with a name of its own is taken
// for the first.
void report_other_encoders(const Catalog& base, const Catalog& adapter,
                           const std::map<unsigned, std::vector<std::string>>& modules,
                           std::vector<Finding>& findings) {
  const std::string_view folder = file_name(base.root());
  const bool has_usual_name = folder == "text_encoder" || folder.starts_with("text_encoder_");
  for (const auto& [encoder, names] : modules) {
    const std::string expected = encoder_folder(encoder);
    if (folder == expected || (encoder == 1 && !has_usual_name)) continue;
    std::string message = fmt::format(
        "the adapter in '{}' has {} for the text encoder {} of a pipeline, which are merged into "
        "the base in '{}': {}",
        printable(adapter.root()), counted(names.size(), "module"), encoder, printable(base.root()),
        name_list(names));
    findings.push_back({.severity = Severity::warning,
                        .code = "merge.adapter",
                        .sources = names,
                        .message = std::move(message),
                        .suggestion = "leave them out by a pattern (--lora-ignore) if the base is "
                                      "another encoder",
                        .found = std::string(folder),
                        .expected = expected});
  }
}

}  // namespace loadstone

// Patterns of adapters that find nothing.
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "base/pattern.h"
#include "base/text.h"
#include "loadstone/quantized_tensors.h"
#include "plan/adapters.h"

namespace loadstone {

void report_idle_patterns(const Catalog& catalog, std::uint32_t first,
                          const std::vector<MergeAdapter>& adapters,
                          std::vector<Finding>& findings) {
  std::map<std::string, bool> is_used;  // by pattern
  for (std::size_t i = 0; i < adapters.size(); ++i) {
    const Catalog& adapter = *catalog.checkpoints().at(first + i);
    for (const std::string& text : adapters[i].ignore) {
      bool& found = is_used[text];
      if (found) continue;
      const Pattern pattern = compile_pattern(text, "plan.options", "ignore",
                                              pattern_memory(adapters[i].ignore.size()));
      const auto finds = [&](const auto& tensor) { return is_in(*pattern, tensor.name); };
      found = std::ranges::any_of(adapter.tensors(), finds) ||
              std::ranges::any_of(adapter.quantized().tensors(), finds);
    }
  }
  for (const auto& [text, found] : is_used) {
    if (found) continue;
    findings.push_back({.severity = Severity::warning,
                        .code = "plan.options",
                        .message = fmt::format("'{}' (lora-ignore) finds no tensor of an adapter",
                                               printable(text)),
                        .found = printable(text)});
  }
}

}  // namespace loadstone

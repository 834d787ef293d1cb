#include "verify/finding_of.h"

#include <fmt/format.h>

#include <utility>

#include "base/text.h"

namespace loadstone {

Finding finding_of(const Catalog& catalog, const TensorInfo& tensor, std::string code,
                   std::string found, std::string expected) {
  Finding finding;
  finding.severity = Severity::warning;
  finding.code = std::move(code);
  finding.sources.push_back(tensor.name);
  finding.message = fmt::format("{}: '{}': data: found {}; expected {}",
                                printable(catalog.shards()[tensor.shard].path, 400),
                                printable(tensor.name), found, expected);
  finding.found = std::move(found);
  finding.expected = std::move(expected);
  return finding;
}

}  // namespace loadstone

#include "verify/ties.h"

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "catalog/open_file.h"
#include "convert/tied_head.h"
#include "load/tie_values.h"
#include "verify/borrowed.h"
#include "verify/claim.h"

namespace loadstone {

std::vector<Finding> check_ties(const Catalog& catalog, Storage* storage,
                                std::uint64_t& bytes_read) {
  Storage& files = catalog.storage(storage);
  const std::string config = config_text({files}, catalog.root(), "config.json");
  std::vector<Finding> findings = check_tied_shapes(catalog, config);
  if (!findings.empty()) return findings;
  std::atomic<bool> stop = false;
  for (const auto& [embedding, head] : TiedHead(config).stored_in(catalog)) {
    const TieCheck check = {.name = catalog.tensors()[head].name,
                            .tied_to = catalog.tensors()[embedding].name,
                            .taken = embedding,
                            .other = head};
    auto finding = compare_tie(borrowed(catalog), check, files, stop, bytes_read);
    if (finding) findings.push_back(*std::move(finding));
  }
  return findings;
}

}  // namespace loadstone

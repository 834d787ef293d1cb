#include "verify/losses.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/text.h"
#include "loadstone/quantized_tensors.h"
#include "verify/error_size.h"

namespace loadstone {

namespace {

// Tensors whose values changed in the same change of encoding.
struct Changed {
  std::vector<std::string> names;
  ErrorSize error;    // the largest of all
  std::string worst;  // the tensor with the largest relative error
};
using Changes = std::map<std::pair<std::string, std::string>, Changed>;

// Moves differences of bytes between equal values to the list of equal tensors.
void accept_equal_values(const Catalog& first, VerifyReport& report) {
  std::erase_if(report.differences, [&](const Difference& each) {
    if (!each.error || each.error->largest != 0) return false;
    const auto tensor = first.find(each.name);
    const QuantizedTensor* const stored = tensor ? first.quantized().find(*tensor) : nullptr;
    std::string encoding = stored != nullptr ? stored->encoding
                           : tensor          ? std::string(first.tensors()[*tensor].encoding.name())
                                             : "the same encoding";
    report.quantized.push_back({each.name, std::move(encoding)});
    return true;
  });
}

// Returns the pairs whose values may differ although `report` does not list a difference.
std::vector<const Pair*> open_pairs(const Pairs& pairs, const VerifyReport& report) {
  std::set<std::string_view> different;
  for (const Difference& each : report.differences) different.insert(each.name);
  std::set<std::string_view> names;
  for (const Widened& each : report.rounded) names.insert(each.name);
  for (const QuantizationError& each : report.quantized) {
    if (each.largest != 0) names.insert(each.name);
  }
  std::vector<const Pair*> open;
  for (const Pair& pair : pairs.all()) {
    if (names.contains(pair.name) && !different.contains(pair.name)) open.push_back(&pair);
  }
  return open;
}

// Replaces the estimated errors of pairs by the errors of all their values.
void set_errors(const std::vector<const Pair*>& pairs, const std::vector<ErrorSize>& errors,
                VerifyReport& report) {
  std::map<std::string_view, QuantizationError> measured;
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    const Pair& pair = *pairs[i];
    measured[pair.name] = {pair.name, pair.second.encoding, errors[i].relative, errors[i].largest};
  }
  std::erase_if(report.rounded, [&](const Widened& each) { return measured.contains(each.name); });
  for (QuantizationError& each : report.quantized) {
    const auto found = measured.extract(each.name);
    if (found.empty()) continue;
    each.relative = found.mapped().relative;
    each.largest = found.mapped().largest;
  }
  for (auto& [name, error] : measured) report.quantized.push_back(std::move(error));
}

}  // namespace

void report_losses(const Pairs& pairs, const OpenShards& first, const OpenShards& second,
                   Jobs& jobs, VerifyReport& report) {
  accept_equal_values(first.catalog(), report);
  const std::vector<const Pair*> open = open_pairs(pairs, report);
  for (const Pair* const pair : open) {
    jobs.expect_instead(0, 2 * sizeof(float) * pair->first.value.shape.numel().value_or(0));
  }
  std::vector<ErrorSize> errors(open.size());
  jobs.run(open.size(), [&](std::size_t i, std::vector<std::byte>& scratch) {
    const Pair& pair = *open[i];
    errors[i] = size_of_difference(pair.name, pair.first.value, pair.second.value, first, second,
                                   jobs, scratch);
  });
  report.sampled = 0;
  report.bytes_read = jobs.bytes_done();
  set_errors(open, errors, report);
  Changes changes;
  for (std::size_t i = 0; i < open.size(); ++i) {
    const Pair& pair = *open[i];
    if (errors[i].largest == 0) continue;
    Changed& changed = changes[{pair.first.encoding, pair.second.encoding}];
    if (changed.worst.empty() || errors[i].relative > changed.error.relative) {
      changed.worst = pair.name;
      changed.error.relative = errors[i].relative;
    }
    changed.error.largest = std::max(changed.error.largest, errors[i].largest);
    changed.names.push_back(pair.name);
  }
  for (auto& [encodings, changed] : changes) {
    const std::size_t count = changed.names.size();
    report.findings.push_back(
        {.severity = Severity::error,
         .code = "verify.lossy",
         .target = changed.worst,
         .sources = std::move(changed.names),
         .message =
             fmt::format("the values of {} changed from {} to {}: largest error {:.2g}, "
                         "largest relative error {:.2g} ('{}')",
                         counted(count, "tensor"), encodings.first, encodings.second,
                         changed.error.largest, changed.error.relative, printable(changed.worst)),
         .found = encodings.second,
         .expected = encodings.first});
  }
}

}  // namespace loadstone

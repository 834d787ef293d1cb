#include "verify/report_pairs.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "boxes/cast_kind.h"
#include "verify/quantized.h"

namespace loadstone {

// Compares samples of differently quantized values, in parallel, except of pairs that `report`
// already lists as different. Returns a result per pair.
static std::vector<std::optional<SampledPair>> sampled_pairs(const Pairs& pairs,
                                                             const OpenShards& first,
                                                             const OpenShards& second, Jobs& jobs,
                                                             const VerifyReport& report) {
  std::set<std::string_view> different;
  for (const Difference& each : report.differences) different.insert(each.name);
  std::vector<const Pair*> wanted(pairs.all().size());
  std::vector<std::uint64_t> expected(wanted.size());
  std::uint64_t bytes_total = jobs.bytes_done();
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const Pair& pair = pairs.all()[i];
    if (pair.is_exact || different.contains(pair.name)) continue;
    wanted[i] = &pair;
    expected[i] = bytes_of_samples(pair, first.catalog(), second.catalog());
    bytes_total += expected[i];
  }
  jobs.expect_total(bytes_total);  // files that already differ are not read to their end
  std::vector<std::optional<SampledPair>> found(wanted.size());
  jobs.run(wanted.size(), [&](std::size_t i, std::vector<std::byte>&) {
    if (wanted[i] == nullptr) return;
    found[i] = compare_samples(*wanted[i], first, second, jobs.stop());
    jobs.expect_instead(expected[i], found[i]->bytes_read);
    static_cast<void>(jobs.goes_on(found[i]->bytes_read));
  });
  return found;
}

void report_pairs(const Pairs& pairs, const std::vector<ErrorSum>& rounded, const OpenShards& first,
                  const OpenShards& second, Jobs& jobs, VerifyReport& report) {
  auto sampled = sampled_pairs(pairs, first, second, jobs, report);
  std::set<std::string> different;
  for (const Difference& each : report.differences) different.insert(each.name);
  for (std::size_t i = 0; i < sampled.size(); ++i) {
    const Pair& pair = pairs.all()[i];
    if (different.contains(pair.name)) continue;
    if (sampled[i]) {
      report.quantized.push_back(std::move(sampled[i]->error));
      report.sampled += sampled[i]->is_sampled ? 1 : 0;
      if (auto& each = sampled[i]->difference) report.differences.push_back(*std::move(each));
    } else if (pair.first.is_quantized()) {
      const ErrorSize error = rounded[i].size();
      report.quantized.push_back({pair.name, pair.second.encoding, error.relative, error.largest});
    } else if (pair.first.encoding != pair.second.encoding) {
      const bool is_wider = is_exact(pair.first.value.dtype, pair.second.value.dtype);
      auto& rows = is_wider ? report.widened : report.rounded;
      rows.push_back({pair.name, pair.second.encoding, pair.first.encoding});
    }
  }
  report.bytes_read = jobs.bytes_done();
}

std::uint64_t bytes_to_compare(const Pairs& pairs, const Catalog& first, const Catalog& second) {
  std::uint64_t bytes = first.total_bytes() + second.total_bytes();
  std::set<const TensorInfo*> sampled;
  for (const Pair& pair : pairs.all()) {
    if (pair.is_exact) continue;
    for (const std::uint32_t tensor : pair.first.tensors) sampled.insert(&first.tensors()[tensor]);
    for (const std::uint32_t tensor : pair.second.tensors) {
      sampled.insert(&second.tensors()[tensor]);
    }
    bytes += bytes_of_samples(pair, first, second);
  }
  // Tied tensors have the same bytes, which the total counts once.
  for (const TensorInfo* const tensor : sampled) bytes -= std::min(bytes, tensor->byte_count());
  return bytes;
}

}  // namespace loadstone

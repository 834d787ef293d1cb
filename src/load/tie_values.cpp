#include "load/tie_values.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "boxes/cast_kind.h"
#include "boxes/decodings.h"
#include "catalog/open_shards.h"
#include "engine/run_team.h"
#include "engine/value_reader.h"
#include "kernels/cast.h"
#include "loadstone/error.h"
#include "loadstone/remote.h"

namespace loadstone {

namespace {

constexpr std::uint64_t staging_bytes = 1 << 18;  // for local files
constexpr std::uint64_t remote_staging_bytes_max = 4 << 20;
constexpr std::uint64_t staging_per_element = 4;  // bytes of staging per element of a window
// Bytes of memory per byte of staging, for two readers, their windows, and the windows as F32.
constexpr std::uint64_t memory_per_staging = 8;

// The difference between two tensors.
struct Distance {
  double largest = 0;       // largest difference of finite values
  std::uint64_t place = 0;  // index of the first element that differs
  std::uint64_t count = 0;  // number of elements that differ

  void add(std::uint64_t element, double first, double second) {
    if (first == second || (std::isnan(first) && std::isnan(second))) return;
    if (count++ == 0) place = element;
    const double difference = std::abs(first - second);
    if (std::isfinite(difference)) largest = std::max(largest, difference);
  }
};

// Adds the differences of two windows that are not equal. If the dtype has no casts, such a window
// counts as one difference.
template <typename Number>
void add_window(const std::array<std::vector<std::byte>, 2>& windows, Dtype dtype, Dtype wide,
                std::uint64_t begin, std::uint64_t elements, Distance& distance) {
  const CastKind way = cast_kind(dtype, wide);
  if (way != CastKind::same && way != CastKind::cast && way != CastKind::lossy) {
    if (distance.count++ == 0) distance.place = begin;
    return;
  }
  std::array<std::vector<Number>, 2> numbers;
  for (std::size_t i = 0; i < windows.size(); ++i) {
    numbers[i].resize(elements);
    cast_between(dtype, wide)
        .run(windows[i].data(), std::as_writable_bytes(std::span(numbers[i])).data(), elements);
  }
  for (std::size_t i = 0; i < elements; ++i) {
    distance.add(begin + i, numbers[0][i], numbers[1][i]);
  }
}

// Uses as much memory as allowed for remote tensors, because each window is one request.
std::uint64_t staging_of(const Catalog& catalog, const TieCheck& check,
                         std::uint64_t memory_bytes) {
  const auto is_far = [&](std::uint32_t tensor) {
    return is_remote(catalog.shards()[catalog.tensors()[tensor].shard].path);
  };
  if (!is_far(check.taken) && !is_far(check.other)) return staging_bytes;
  return std::clamp(memory_bytes / memory_per_staging, staging_bytes, remote_staging_bytes_max);
}

Finding difference_finding(const TieCheck& check, const std::string& taken,
                           const std::string& other, const Distance& distance) {
  Finding finding = {.severity = Severity::warning,
                     .code = "plan.tie",
                     .target = check.name,
                     .sources = {taken, other}};
  finding.message = fmt::format(
      "'{}' is tied to '{}', but the checkpoint contains two different values: loadstone uses "
      "'{}', and '{}' differs in {} {}, by {} at most, first at element {}",
      printable(check.name), printable(check.tied_to), printable(taken), printable(other),
      distance.count, distance.count == 1 ? "element" : "elements", distance.largest,
      distance.place);
  finding.suggestion = "to get both values, load into a model that does not tie these names";
  return finding;
}

}  // namespace

std::optional<Finding> compare_tie(const std::shared_ptr<const Catalog>& catalog,
                                   const TieCheck& check, Storage& storage, std::atomic<bool>& stop,
                                   std::uint64_t& bytes_read, std::uint64_t memory_bytes) {
  const auto& tensors = catalog->tensors();
  const std::array checked = {check.taken, check.other};
  const std::array recipes = {tensor_recipe(*catalog, check.taken),
                              tensor_recipe(*catalog, check.other)};
  const bool has_f64 =
      std::ranges::find(recipes, Dtype::f64, &TensorRecipe::dtype) != recipes.end();
  const Dtype wide = has_f64 ? Dtype::f64 : Dtype::f32;  // of differences
  const Dtype dtype = recipes[0].dtype == recipes[1].dtype ? recipes[0].dtype : wide;
  std::vector<std::uint32_t> needed;
  for (const TensorRecipe& recipe : recipes) {
    std::ranges::copy(sources_of(recipe.boxes, recipe.decodings), std::back_inserter(needed));
  }
  const OpenShards shards(*catalog, &storage, needed);
  const std::uint64_t staging = staging_of(*catalog, check, memory_bytes);
  std::array<ValueReader, 2> readers{
      {{*catalog, shards.sources(), staging, stop}, {*catalog, shards.sources(), staging, stop}}};
  for (std::size_t i = 0; i < readers.size(); ++i) {
    readers[i].open(recipes[i].as_value(tensors[checked[i]].name, dtype), recipes[i].decodings);
  }
  const std::uint64_t elements = recipes[0].shape.numel().value_or(0);
  const std::uint64_t step = staging / staging_per_element;
  std::array<std::vector<std::byte>, 2> windows;
  Distance distance;
  for (std::uint64_t begin = 0; begin < elements && !stop; begin += step) {
    const std::uint64_t end = std::min(begin + step, elements);
    for (std::size_t i = 0; i < readers.size(); ++i) {
      windows[i].resize(Encoding(dtype).byte_count(end - begin).value_or(0));
      readers[i].read(begin, end, windows[i]);
    }
    if (windows[0] == windows[1]) continue;
    const auto add = has_f64 ? add_window<double> : add_window<float>;
    add(windows, dtype, wide, begin, end - begin, distance);
  }
  bytes_read += readers[0].bytes_read() + readers[1].bytes_read();
  if (distance.count == 0) return std::nullopt;
  return difference_finding(check, tensors[check.taken].name, tensors[check.other].name, distance);
}

std::uint64_t compare_ties(const Plan& plan, Storage& storage, std::vector<Finding>& findings,
                           Observer* observer) {
  std::uint64_t bytes = 0;
  for (const TieCheck& check : plan.tie_checks) {
    std::atomic<bool> stop = false;  // one per run, because the team sets it at its end
    std::optional<Finding> finding;
    run_team(
        1, stop, observer,
        [&] {
          return Progress{0, plan.bytes_to_read};
        },
        [&] {
          finding = compare_tie(plan.catalog, check, storage, stop, bytes, plan.staging_bytes_max);
        });
    if (!finding) continue;
    if (check.is_error) {
      const TensorInfo& other = plan.catalog->tensors()[check.other];
      throw Error(finding->code, finding->message,
                  {.path = plan.catalog->shards()[other.shard].path, .tensor = other.name});
    }
    findings.push_back(*std::move(finding));
  }
  return bytes;
}

}  // namespace loadstone

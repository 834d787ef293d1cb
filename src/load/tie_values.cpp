#include "load/tie_values.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "base/text.h"
#include "boxes/cast_kind.h"
#include "catalog/open_shards.h"
#include "engine/team.h"
#include "engine/value_reader.h"
#include "loadstone/error.h"
#include "loadstone/remote.h"
#include "plan/decodings.h"

namespace loadstone {

namespace {

constexpr std::uint64_t staging_bytes = 1 << 18;  // of local files
constexpr std::uint64_t remote_staging_bytes_max = 4 << 20;
constexpr std::uint64_t staging_per_element = 4;  // of a window
constexpr std::uint64_t memory_per_staging = 8;   // both readers, their windows, and these as F32

// The distance of two values.
struct Distance {
  double largest = 0;       // of finite values
  std::uint64_t place = 0;  // element of the first difference
  std::uint64_t count = 0;  // of elements that differ

  void add(std::uint64_t element, double first, double second) {
    if (first == second || (std::isnan(first) && std::isnan(second))) return;
    if (count++ == 0) place = element;
    const double difference = std::abs(first - second);
    if (std::isfinite(difference)) largest = std::max(largest, difference);
  }
};

// The two tensors of a check. Not thread-safe.
class Pair {
 public:
  Pair(const std::shared_ptr<const Catalog>& catalog, const TieCheck& check, Storage& storage,
       std::atomic<bool>& stop, std::uint64_t staging)
      : sides_{tensor_recipe(*catalog, check.taken), tensor_recipe(*catalog, check.other)},
        wide_(is_any_f64() ? Dtype::f64 : Dtype::f32),
        dtype_(sides_[0].dtype == sides_[1].dtype ? sides_[0].dtype : wide_),
        stop_(stop),
        step_(staging / staging_per_element),
        shards_(*catalog, &storage, needed(*catalog, check)),
        readers_{{{*catalog, shards_.sources(), staging, stop_},
                  {*catalog, shards_.sources(), staging, stop_}}} {
    for (std::size_t i = 0; i < sides_.size(); ++i) {
      names_[i] = catalog->tensors()[i == 0 ? check.taken : check.other].name;
      open(i, dtype_);
    }
  }

  Distance compare() {
    const std::uint64_t elements = sides_[0].shape.numel().value_or(0);
    Distance distance;
    for (std::uint64_t begin = 0; begin < elements && !stop_; begin += step_) {
      const std::uint64_t end = std::min(begin + step_, elements);
      if (!is_same_window(begin, end)) add_window(begin, end, distance);
    }
    return distance;
  }

  [[nodiscard]] std::uint64_t bytes_read() const noexcept {
    return readers_[0].bytes_read() + readers_[1].bytes_read();
  }

 private:
  [[nodiscard]] bool is_any_f64() const {
    return std::ranges::any_of(sides_, [](const auto& side) { return side.dtype == Dtype::f64; });
  }

  static std::vector<bool> needed(const Catalog& catalog, const TieCheck& check) {
    std::vector<bool> shards(catalog.shards().size(), false);
    for (const std::uint32_t tensor : {check.taken, check.other}) {
      const TensorRecipe recipe = tensor_recipe(catalog, tensor);
      mark_shards(sources_of(recipe.boxes, recipe.decodings), catalog.tensors(), shards);
    }
    return shards;
  }

  void open(std::size_t side, Dtype dtype) {
    const TensorRecipe& recipe = sides_[side];
    readers_[side].open(recipe.as_value(names_[side], dtype), recipe.decodings);
  }

  bool is_same_window(std::uint64_t begin, std::uint64_t end) {
    const std::uint64_t bytes = Encoding(dtype_).byte_count(end - begin).value_or(0);
    for (std::size_t i = 0; i < readers_.size(); ++i) {
      windows_[i].resize(bytes);
      readers_[i].read(begin, end, windows_[i]);
    }
    return windows_[0] == windows_[1];
  }

  // Reads the window again as wide floats, where the dtype has a cast to them.
  void add_window(std::uint64_t begin, std::uint64_t end, Distance& distance) {
    const CastKind way = cast_kind(dtype_, wide_);
    if (way != CastKind::same && way != CastKind::cast && way != CastKind::lossy) {
      if (distance.count++ == 0) distance.place = begin;
      return;
    }
    wide_ == Dtype::f64 ? add_numbers<double>(begin, end, distance)
                        : add_numbers<float>(begin, end, distance);
  }

  template <typename Number>
  void add_numbers(std::uint64_t begin, std::uint64_t end, Distance& distance) {
    std::array<std::vector<Number>, 2> numbers;
    for (std::size_t i = 0; i < readers_.size(); ++i) {
      numbers[i].resize(end - begin);
      open(i, wide_);
      readers_[i].read(begin, end, std::as_writable_bytes(std::span(numbers[i])));
      open(i, dtype_);
    }
    for (std::size_t i = 0; i < numbers[0].size(); ++i) {
      distance.add(begin + i, numbers[0][i], numbers[1][i]);
    }
  }

  std::array<TensorRecipe, 2> sides_;
  Dtype wide_;   // of differences
  Dtype dtype_;  // that is compared
  std::atomic<bool>& stop_;
  std::uint64_t step_;  // elements of a window
  OpenShards shards_;
  std::array<ValueReader, 2> readers_;
  std::array<std::string, 2> names_;
  std::array<std::vector<std::byte>, 2> windows_;
};

// Each window of a remote tensor is a request, so these are as large as the memory allows.
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
      "'{}' is tied to '{}', and the checkpoint holds two values: '{}' is taken, and '{}' differs "
      "in {} {}, by {} at most, first at element {}",
      printable(check.name), printable(check.tied_to), printable(taken), printable(other),
      distance.count, distance.count == 1 ? "element" : "elements", distance.largest,
      distance.place);
  finding.suggestion = "load into a model that does not tie them to have both";
  return finding;
}

}  // namespace

std::optional<Finding> compare_tie(const std::shared_ptr<const Catalog>& catalog,
                                   const TieCheck& check, Storage& storage, std::atomic<bool>& stop,
                                   std::uint64_t& bytes_read, std::uint64_t memory_bytes) {
  Pair pair(catalog, check, storage, stop, staging_of(*catalog, check, memory_bytes));
  const Distance distance = pair.compare();
  bytes_read += pair.bytes_read();
  if (distance.count == 0) return std::nullopt;
  const auto& tensors = catalog->tensors();
  return difference_finding(check, tensors[check.taken].name, tensors[check.other].name, distance);
}

std::uint64_t compare_ties(const Plan& plan, Storage& storage, std::vector<Finding>& findings,
                           Observer* observer) {
  std::uint64_t bytes = 0;
  for (const TieCheck& check : plan.tie_checks) {
    std::atomic<bool> stop = false;  // a team sets it at its end
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

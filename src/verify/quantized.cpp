#include "verify/quantized.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <unordered_map>

#include "base/text.h"
#include "codec/decode.h"
#include "kernels/cast.h"
#include "kernels/whole_elements.h"
#include "verify/error_size.h"
#include "verify/numbers.h"
#include "verify/values.h"

namespace loadstone {

namespace {

constexpr std::uint64_t scale_chunk_bytes = 1 << 20;
// Sizes of samples, which suffice to distinguish a wrong scale or byte order from rounding. Tensors
// that are not larger than all samples together are compared completely.
constexpr std::uint64_t samples = 16;
constexpr std::uint64_t sample_elements = 4096;
// Relative rounding error of the bounds, which are computed in double precision from values decoded
// to F32.
constexpr double rounding = 0x1p-20;

struct Counts {
  std::uint64_t not_finite = 0;
  std::uint64_t not_positive = 0;
};

Counts count_scales(const TensorInfo& tensor, ByteSource& source, const std::atomic<bool>& stop) {
  Counts counts;
  const Dtype dtype = tensor.encoding.dtype();
  const std::size_t size = element_bytes(dtype);
  const Cast widen = cast_between(dtype, Dtype::f32);
  std::vector<std::byte> bytes;
  std::vector<float> values;
  for (std::uint64_t at = 0; at < tensor.byte_count() && !stop; at += scale_chunk_bytes) {
    bytes.resize(std::min(scale_chunk_bytes, tensor.byte_count() - at));
    source.read(tensor.offset_begin + at, bytes);
    if (dtype == Dtype::u8) {  // U8 scales are powers of two
      counts.not_finite += static_cast<std::uint64_t>(std::ranges::count(bytes, std::byte{0xff}));
      continue;
    }
    values.resize(bytes.size() / size);
    widen.run(bytes.data(), reinterpret_cast<std::byte*>(values.data()), values.size());
    for (const float value : values) {
      counts.not_finite += std::isfinite(value) ? 0u : 1u;
      counts.not_positive += value <= 0 ? 1u : 0u;
    }
  }
  return counts;
}

// The result of comparing samples of two sides.
struct Comparison {
  ErrorSum error;
  double allowed = 0;    // sum of squares of the largest possible differences
  double error_max = 0;  // limit if `allowed` is unknown
  bool is_bounded = true;
  std::uint64_t numbers = 0;
  std::uint64_t unexplained = 0;   // number of values that differ by more than their codes explain
  std::uint64_t first_number = 0;  // index of the first of these values
  std::string scale;               // describes a scale that is larger than the values need
  bool is_sampled = false;

  [[nodiscard]] double relative() const { return error.size().relative; }
  [[nodiscard]] double most() const {
    return is_bounded ? std::sqrt(allowed / error.power) : error_max;
  }
  [[nodiscard]] bool is_explained() const {
    return is_bounded ? unexplained == 0 && scale.empty() : relative() <= error_max;
  }
  [[nodiscard]] std::string text() const {
    if (!is_bounded) return fmt::format("a relative error of {:.3g}", relative());
    if (unexplained == 0) return scale;
    return fmt::format(
        "{} of {} values differ by more, first at element {}; a relative error of {:.3g}",
        unexplained, numbers, first_number, relative());
  }
};

// Number of values that are compared at a time.
constexpr std::uint64_t part_elements = 1 << 18;

// Finds scales that are too large, because they would make the bounds so wide that any code passes.
// If values lost most of their magnitude, their scale must not be larger than they need. Values
// with the same tolerance share a scale.
class ScaleCheck {
 public:
  void add(const std::vector<float>& numbers, const std::vector<float>& decoded,
           const std::vector<double>& tolerance) {
    struct Sums {
      double difference = 0;
      double power = 0;
    };
    std::unordered_map<double, Sums> groups;
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      const double step = double{numbers[i]} - double{decoded[i]};
      Sums& sums = groups[tolerance[i]];
      sums.difference += step * step;
      sums.power += double{numbers[i]} * double{numbers[i]};
    }
    for (const auto& [key, sums] : groups) {
      if (key > least && sums.difference > lost * sums.power) largest_.try_emplace(key);
    }
  }

  // Describes the first scale that is too large; empty if all scales are valid.
  std::string problem(Numbers& real, Numbers& quantized, std::uint64_t elements,
                      const std::atomic<bool>& stop) {
    if (largest_.empty()) return {};
    double of_tensor = 0;
    for (std::uint64_t at = 0; at < elements && !stop; at += part_elements) {
      const std::uint64_t end = std::min(at + part_elements, elements);
      const std::vector<double> tolerance = quantized.tolerance(at, end);
      const std::vector<float>& numbers = real.read(at, end);
      for (std::size_t i = 0; i < tolerance.size(); ++i) {
        const double number = std::abs(double{numbers[i]});
        of_tensor = std::max(of_tensor, number);
        const auto found = largest_.find(tolerance[i]);
        if (found == largest_.end()) continue;
        if (number >= found->second.number) found->second = {number, at + i};
      }
    }
    for (const auto& [tolerance, largest] : largest_) {
      if (tolerance <= quantized.tolerance_max(largest.number, of_tensor)) continue;
      return fmt::format(
          "codes whose scale is too large: the value {:.3g} of element {} loses most of its "
          "magnitude",
          largest.number, largest.element);
    }
    return {};
  }

 private:
  struct Largest {
    double number = 0;
    std::uint64_t element = 0;
  };
  static constexpr double lost = 0.25;  // as a share of the sum of squares
  // Values near the least F32 would need smaller scales than F32 has.
  static constexpr double least = 0x1p-120;

  std::map<double, Largest> largest_;  // by tolerance
};

// Compares a range of two sides that must represent the same original values: the values of an
// exact side, otherwise any values within the bounds of both sides.
void compare_range(Numbers& first, Numbers& second, std::uint64_t begin, std::uint64_t end,
                   Comparison& made, std::array<ScaleCheck, 2>& scales) {
  const std::vector<float> a = first.read(begin, end);
  const std::vector<float> b = second.read(begin, end);
  const bool is_bounded = first.is_bounded() && second.is_bounded();
  std::vector<double> a_tolerance;
  std::vector<double> b_tolerance;
  if (is_bounded) {
    a_tolerance = first.tolerance(begin, end);
    b_tolerance = second.tolerance(begin, end);
    if (!first.is_exact()) scales[0].add(b, a, a_tolerance);
    if (!second.is_exact()) scales[1].add(a, b, b_tolerance);
  }
  made.is_bounded = is_bounded;
  made.numbers += a.size();
  for (std::size_t i = 0; i < a.size(); ++i) {
    const bool is_equal = a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i]));
    if (is_equal && !std::isfinite(a[i])) continue;
    const double step = double{a[i]} - double{b[i]};
    made.error.add(double{a[i]}, double{b[i]});
    if (!is_bounded) continue;
    const double real = second.is_exact()
                            ? std::abs(double{b[i]})
                            : (std::abs(double{a[i]}) + a_tolerance[i]) / (1 - first.relative());
    const double bound =
        (first.relative() + second.relative()) * real + a_tolerance[i] + b_tolerance[i];
    made.allowed += bound * bound;
    // This is false for NaN, so a NaN counts as unexplained.
    const bool is_explained = std::abs(step) <= bound * (1 + rounding);
    if (!is_explained && made.unexplained++ == 0) made.first_number = begin + i;
  }
}

// Compares samples of a large tensor. Compares all of it if no sample differs, because the values
// may then be equal, and if it is not large.
Comparison compare_numbers(Numbers& first, Numbers& second, std::uint64_t elements,
                           const std::atomic<bool>& stop) {
  const Comparison none = {.error_max = std::max(first.error_max(), second.error_max())};
  Comparison made = none;
  std::array<ScaleCheck, 2> scales;
  made.is_sampled = elements > samples * sample_elements;
  for (std::uint64_t i = 0; made.is_sampled && i < samples; ++i) {  // the last reaches the end
    const bool is_last = i + 1 == samples;
    std::uint64_t begin = (elements - sample_elements) / (samples - 1) * i;
    if (is_last) begin = elements - sample_elements;
    begin -= begin % whole_elements;
    const std::uint64_t end = is_last ? elements : begin + sample_elements;
    compare_range(first, second, begin, end, made, scales);
  }
  if (made.error.difference == 0) {
    made = none;
    scales = {};
    for (std::uint64_t at = 0; at < elements && !stop; at += part_elements) {
      compare_range(first, second, at, std::min(at + part_elements, elements), made, scales);
    }
  }
  made.scale = scales[0].problem(second, first, elements, stop);
  if (made.scale.empty()) made.scale = scales[1].problem(first, second, elements, stop);
  return made;
}

std::string scales_that_are_not(std::uint64_t count) {
  return fmt::format("{} that {} not", counted(count, "scale"), count == 1 ? "is" : "are");
}

}  // namespace

std::vector<Finding> check_scales(const OpenShards& shards, const QuantizedTensors& stored,
                                  const std::atomic<bool>& stop) {
  const Catalog& catalog = shards.catalog();
  std::vector<Finding> findings;
  for (const QuantizedTensor& value : stored.tensors()) {
    const DecodeKernel* const kernel = find_decode_kernel(value.decoding.kernel);
    for (std::size_t i = 0; i < value.scales.size() && kernel != nullptr && !stop; ++i) {
      const TensorInfo& tensor = catalog.tensors()[value.scales[i]];
      const bool is_code = kernel->has_table_scales && tensor.encoding == Encoding(Dtype::u8);
      if (is_code || (i == 1 && value.has_zero_points)) continue;
      const Counts counts = count_scales(tensor, *shards.sources()[tensor.shard], stop);
      if (counts.not_finite > 0) {
        findings.push_back(
            finding_of(catalog, tensor, "q.nan", scales_that_are_not(counts.not_finite), "finite"));
      }
      // Formats with groups, such as GPTQ, store the scale 0 for a group of zeros.
      const bool can_be_zero = kernel->has_zero_scales || value.decoding.group_size != 0;
      if (counts.not_positive > 0 && !can_be_zero) {
        findings.push_back(finding_of(catalog, tensor, "q.scale_value",
                                      scales_that_are_not(counts.not_positive), "above zero"));
      }
    }
  }
  return findings;
}

SampledPair compare_samples(const Pair& pair, const OpenShards& first, const OpenShards& second,
                            std::atomic<bool>& stop) {
  Numbers a(first, stop);
  Numbers b(second, stop);
  a.open(pair.name, pair.first.value);
  b.open(pair.name, pair.second.value);
  const std::uint64_t elements = pair.first.value.shape.numel().value_or(0);
  const Comparison found = compare_numbers(a, b, elements, stop);
  const Side& stored = pair.second.is_quantized() ? pair.second : pair.first;
  const ErrorSize error = found.error.size();
  SampledPair result = {.error = {pair.name, stored.encoding, error.relative, error.largest},
                        .is_sampled = found.is_sampled,
                        .bytes_read = a.bytes_read() + b.bytes_read()};
  if (!found.is_explained()) {
    result.difference = Difference{
        .name = pair.name,
        .kind = DifferenceKind::values,
        .found = found.text(),
        .expected = fmt::format("at most {:.3g} for {}, and each value close to its decoded code",
                                found.most(), stored.encoding),
        .error = error};
  }
  return result;
}

std::uint64_t bytes_of_samples(const Pair& pair, const Catalog& first, const Catalog& second) {
  const std::uint64_t elements = pair.first.value.shape.numel().value_or(0);
  const double share =
      elements <= samples * sample_elements
          ? 1
          : static_cast<double>(samples * sample_elements) / static_cast<double>(elements);
  std::uint64_t bytes = 0;
  for (const std::uint32_t i : pair.first.tensors) bytes += first.tensors()[i].byte_count();
  for (const std::uint32_t i : pair.second.tensors) bytes += second.tensors()[i].byte_count();
  return static_cast<std::uint64_t>(share * static_cast<double>(bytes));
}

}  // namespace loadstone

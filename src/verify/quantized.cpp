#include "verify/quantized.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <span>
#include <utility>

#include "base/text.h"
#include "codec/decode.h"
#include "execute/value_reader.h"
#include "kernels/cast.h"
#include "verify/finding_of.h"
#include "verify/tensor_bytes.h"

namespace loadstone {

namespace {

constexpr std::uint64_t chunk_bytes = 1 << 20;
constexpr std::uint64_t staging_bytes = 4 << 20;
// Enough to tell a wrong scale or order of bytes from rounding, and little to read.
constexpr std::uint64_t samples = 16;
constexpr std::uint64_t sample_elements = 4096;
// Rounding to 8 bits leaves some 0.03 of a normal distribution, to 4 bits some 0.1; what is wrong
// is about 1. Distributions with heavy tails are rounded worse.
constexpr double error_max_8_bits = 0.15;
constexpr double error_max_4_bits = 0.5;

// Catalogs outlive what is done here.
std::shared_ptr<const Catalog> borrowed(const Catalog& catalog) {
  return {std::shared_ptr<const Catalog>(), &catalog};
}

struct Counts {
  std::uint64_t not_finite = 0;
  std::uint64_t not_positive = 0;
};

Counts count_scales(const TensorInfo& tensor, ByteSource& source) {
  Counts counts;
  const Dtype dtype = tensor.encoding.dtype();
  const std::size_t size = element_bytes(dtype);
  const Cast widen = cast_between(dtype, Dtype::f32);
  std::vector<std::byte> bytes;
  std::vector<float> values;
  for (std::uint64_t at = 0; at < tensor.byte_count(); at += chunk_bytes) {
    bytes.resize(std::min(chunk_bytes, tensor.byte_count() - at));
    source.read(tensor.offset_begin + at, bytes);
    if (dtype == Dtype::u8) {  // powers of two
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

bool is_bnb(const QuantizedTensor& value) { return value.decoding.kernel.starts_with("bnb_"); }

double error_max(std::string_view encoding) {
  const bool is_wide =
      encoding.starts_with("fp8") || encoding.starts_with("int8") || encoding == "mxfp8";
  return is_wide ? error_max_8_bits : error_max_4_bits;
}

// Any range of one side's numbers as F32.
class Numbers {
 public:
  Numbers(const OpenShards& shards, std::atomic<bool>& stop)
      : catalog_(shards.catalog()),
        reader_(borrowed(shards.catalog()), shards.sources(), staging_bytes, stop) {}

  void open(const std::string& name, const Shape& shape, const QuantizedTensor* stored,
            std::uint32_t tensor) {
    decodings_.clear();
    if (stored == nullptr) {
      box_ = whole_box(tensor, catalog_.tensors()[tensor]);
    } else {
      box_ = {
          .dims = {{.extent = shape.numel().value_or(0), .source_stride = 1, .target_stride = 1}}};
      if (stored->is_transposed) {
        const std::uint64_t rows = shape[shape.rank() - 2];
        const std::uint64_t columns = shape[shape.rank() - 1];
        const std::uint64_t matrices = shape.numel().value_or(0) / (rows * columns);
        box_.dims = {
            {matrices, rows * columns, rows * columns}, {rows, 1, columns}, {columns, rows, 1}};
      }
      decodings_.push_back(stored->decoding);
      decodings_.back().dtype = Dtype::f32;
      box_.source = stored->decoding.sources.front();
      box_.decoding = 0;
    }
    reader_.open({.name = name,
                  .boxes = {&box_, 1},
                  .decodings = decodings_,
                  .shape = shape,
                  .dtype = Dtype::f32});
  }

  const std::vector<float>& read(std::uint64_t begin, std::uint64_t end) {
    values_.resize(end - begin);
    reader_.read(begin, end, std::as_writable_bytes(std::span(values_)));
    return values_;
  }

  [[nodiscard]] std::uint64_t bytes_read() const noexcept { return reader_.bytes_read(); }

 private:
  const Catalog& catalog_;
  ValueReader reader_;
  Box box_;
  std::vector<Decoding> decodings_;
  std::vector<float> values_;
};

// The root of the mean square of the difference, over that of the first side's numbers.
double relative_error(Numbers& first, Numbers& second, std::uint64_t elements) {
  double difference = 0;
  double power = 0;
  const std::uint64_t parts = std::clamp<std::uint64_t>(elements / sample_elements, 1, samples);
  for (std::uint64_t i = 0; i < parts; ++i) {
    std::uint64_t begin = elements / parts * i;
    begin -= begin % whole_elements;
    const std::uint64_t end = std::min(begin + sample_elements, elements);
    const std::vector<float>& a = first.read(begin, end);
    const std::vector<float>& b = second.read(begin, end);
    for (std::size_t k = 0; k < a.size(); ++k) {
      const double step = double{a[k]} - double{b[k]};
      difference += step * step;
      power += double{a[k]} * double{a[k]};
    }
  }
  return difference == 0 ? 0 : std::sqrt(difference / power);
}

}  // namespace

std::vector<Finding> check_scales(const OpenShards& shards, const QuantizedTensors& stored) {
  const Catalog& catalog = shards.catalog();
  std::vector<Finding> findings = stored.findings();
  // A layout that nothing here decodes may be sound all the same.
  std::erase_if(findings, [](const Finding& finding) { return finding.code == "plan.encoding"; });
  for (const QuantizedTensor& value : stored.tensors()) {
    for (std::size_t i = 0; i < value.scales.size() && value.is_readable(); ++i) {
      const TensorInfo& tensor = catalog.tensors()[value.scales[i]];
      // Bytes of bitsandbytes that stand for scales.
      const bool is_code = is_bnb(value) && tensor.encoding == Encoding(Dtype::u8);
      if (is_code || (i == 1 && value.has_zero_points)) continue;
      const Counts counts = count_scales(tensor, *shards.sources()[tensor.shard]);
      if (counts.not_finite > 0) {
        findings.push_back(finding_of(catalog, tensor, "q.nan",
                                      fmt::format("{} scales that are not", counts.not_finite),
                                      "finite"));
      }
      // An empty block of bitsandbytes has the scale 0, and so has a group of zeros of GPTQ's kin.
      if (counts.not_positive > 0 && !is_bnb(value) && value.decoding.group_size == 0) {
        findings.push_back(finding_of(catalog, tensor, "q.scale_value",
                                      fmt::format("{} scales that are not", counts.not_positive),
                                      "above zero"));
      }
    }
  }
  return findings;
}

Shape QuantizedPairs::Side::shape() const {
  return stored != nullptr ? stored->shape() : catalog->tensors()[tensor].shape;
}

QuantizedPairs::QuantizedPairs(const Catalog& first, const Catalog& second,
                               const VerifyOptions& options)
    : first_(first),
      second_(second),
      first_stored_(find_quantized_tensors(first, options.storage)),
      second_stored_(find_quantized_tensors(second, options.storage)),
      in_first_(first.tensors().size(), false),
      in_second_(second.tensors().size(), false) {
  std::map<std::string_view, std::pair<const QuantizedTensor*, const QuantizedTensor*>> by_name;
  for (const QuantizedTensor& value : first_stored_.tensors()) {
    if (value.is_readable()) by_name[value.name].first = &value;
  }
  for (const QuantizedTensor& value : second_stored_.tensors()) {
    if (value.is_readable()) by_name[value.name].second = &value;
  }
  for (const auto& [name, sides] : by_name) add(std::string(name), sides.first, sides.second);
}

void QuantizedPairs::add(const std::string& name, const QuantizedTensor* first,
                         const QuantizedTensor* second) {
  if (first != nullptr && second != nullptr && first->encoding == second->encoding) return;
  Pair pair = {name, {&first_, first}, {&second_, second}};
  for (Side* const side : {&pair.first, &pair.second}) {
    if (side->stored != nullptr) continue;
    const auto index = side->catalog->find(name);
    if (!index || !side->catalog->tensors()[*index].encoding.is_dtype()) return;
    side->tensor = *index;
  }
  if (pair.first.shape() != pair.second.shape() || pair.first.shape().numel() == 0u) return;
  cover(pair.first, in_first_);
  cover(pair.second, in_second_);
  pairs_.push_back(std::move(pair));
}

void QuantizedPairs::cover(const Side& side, std::vector<bool>& covered) {
  if (side.stored == nullptr) {
    covered[side.tensor] = true;
    return;
  }
  for (const std::uint32_t source : side.stored->decoding.sources) covered[source] = true;
  for (const std::uint32_t source : side.stored->unneeded) covered[source] = true;
}

void QuantizedPairs::measure(const OpenShards& first_shards, const OpenShards& second_shards,
                             VerifyReport& report) const {
  if (pairs_.empty()) return;
  std::atomic<bool> stop = false;
  Numbers first(first_shards, stop);
  Numbers second(second_shards, stop);
  for (const Pair& pair : pairs_) {
    const Shape shape = pair.first.shape();
    first.open(pair.name, shape, pair.first.stored, pair.first.tensor);
    second.open(pair.name, shape, pair.second.stored, pair.second.tensor);
    const double error = relative_error(first, second, shape.numel().value_or(0));
    const QuantizedTensor* const stored =
        pair.second.stored != nullptr ? pair.second.stored : pair.first.stored;
    report.quantized.push_back({pair.name, stored->encoding, error});
    const double most = error_max(stored->encoding);
    if (!(error <= most)) {
      report.differences.push_back({pair.name, DifferenceKind::values,
                                    fmt::format("a relative error of {:.3g}", error),
                                    fmt::format("at most {} for {}", most, stored->encoding)});
    }
  }
  report.bytes_read += first.bytes_read() + second.bytes_read();
}

}  // namespace loadstone

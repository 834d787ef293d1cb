#include "verify/numbers.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <utility>

#include "codec/decode.h"
#include "loadstone/quantized_tensors.h"
#include "storage/forwarding.h"
#include "verify/element_reader.h"

namespace loadstone {

namespace {

constexpr std::uint64_t staging_bytes = 4 << 20;
// Scales are as small as the values allow, so the largest code represents less than twice the
// largest value. Codes that overflow F32 therefore have at most this magnitude.
constexpr double reach_max = 2.0 * std::numeric_limits<float>::max();

// A shard in which the bytes of some tensors are replaced by a fill byte.
class FilledSource final : public ForwardingSource {
 public:
  FilledSource(std::shared_ptr<ByteSource> source, std::uint32_t shard,
               const std::vector<Numbers::Filled>& filled)
      : ForwardingSource(std::move(source)), shard_(shard), filled_(filled) {}

  using ByteSource::read;
  void read(std::uint64_t offset, std::span<const std::span<std::byte>> pieces) override {
    read_by_pieces(offset, pieces, [&](auto at, auto piece) { read_piece(at, piece); });
  }

 private:
  void read_piece(std::uint64_t offset, std::span<std::byte> piece) {
    const std::uint64_t end = offset + piece.size();
    const auto covers = [&](const Numbers::Filled& each) {
      return each.shard == shard_ && each.offset_begin <= offset && end <= each.offset_end;
    };
    if (std::ranges::none_of(filled_, covers)) ForwardingSource::read(offset, {&piece, 1});
    for (const Numbers::Filled& each : filled_) {
      const std::uint64_t from = std::max(offset, each.offset_begin);
      const std::uint64_t until = std::min(end, each.offset_end);
      if (each.shard != shard_ || from >= until) continue;
      std::ranges::fill(piece.subspan(from - offset, until - from), each.byte);
    }
  }

  std::uint32_t shard_;
  const std::vector<Numbers::Filled>& filled_;
};

std::vector<std::shared_ptr<ByteSource>> filled_sources(
    std::span<const std::shared_ptr<ByteSource>> sources,
    const std::vector<Numbers::Filled>& filled) {
  std::vector<std::shared_ptr<ByteSource>> made;
  for (const auto& source : sources) {
    const auto shard = static_cast<std::uint32_t>(made.size());
    made.push_back(source == nullptr ? nullptr
                                     : std::make_shared<FilledSource>(source, shard, filled));
  }
  return made;
}

// Returns the bound on rounding errors; null if the kernel has no bound for these tensors.
const ErrorBound* bound_of(const Decoding& decoding, const Catalog& catalog) {
  const DecodeKernel* const kernel = find_decode_kernel(decoding.kernel);
  if (kernel == nullptr || kernel->error == nullptr) return nullptr;
  const std::uint32_t source = decoding.sources.front();
  const QuantizedTensor* const quantized = catalog.quantized().find(source);
  if (quantized == nullptr || quantized->has_zero_points) return nullptr;
  const Encoding data = catalog.tensors()[source].encoding;
  const bool fits = kernel->error->data == Dtype::u8 || data == Encoding(kernel->error->data);
  return fits ? kernel->error : nullptr;
}

// Returns the error bound shared by all decodings, or null.
const ErrorBound* bound_of(const TensorRecipe& value, const Catalog& catalog) {
  const ErrorBound* bound = nullptr;
  const auto is_decoded = [](const Box& box) { return box.decoding != no_decoding; };
  if (!std::ranges::all_of(value.boxes, is_decoded)) return nullptr;
  for (const Decoding& decoding : value.decodings) {
    const ErrorBound* const each = bound_of(decoding, catalog);
    if (each == nullptr || (bound != nullptr && each != bound)) return nullptr;
    bound = each;
  }
  return bound;
}

// Returns the limit for the relative error of all values together, for encodings without a bound
// per value.
double error_max_of(const TensorRecipe& value, const Catalog& catalog) {
  // GPTQ and AWQ do not choose the nearest code, and loadstone cannot encode E5M2 and zero points.
  // Codes in a wrong order have an error of about 1.4, doubled scales one of 1.
  constexpr double usual = 0.5;
  // Blocks with at most two bits per value keep little more than signs: weights have errors of up
  // to 0.8 there.
  constexpr double of_few_bits = 0.95;
  const auto has_few_bits = [&](const Decoding& decoding) {
    const Encoding encoding = catalog.tensors()[decoding.sources[0]].encoding;
    if (encoding.is_dtype()) return false;
    const BlockLayout block = layout(encoding.block_format());
    return block.bytes * 8 <= block.elements * 2 + block.elements / 8;
  };
  return std::ranges::any_of(value.decodings, has_few_bits) ? of_few_bits : usual;
}

}  // namespace

Numbers::Numbers(const OpenShards& shards, std::atomic<bool>& stop)
    : catalog_(shards.catalog()),
      sources_(filled_sources(shards.sources(), filled_)),
      reader_(shards.catalog(), sources_, staging_bytes, stop) {}

void Numbers::open(const std::string& name, const TensorRecipe& value) {
  is_exact_ = value.decodings.empty();
  bound_ = bound_of(value, catalog_);
  error_max_ = error_max_of(value, catalog_);
  value_ = &value;
  reader_.open(value.as_value(name, Dtype::f32), value.decodings);
}

const std::vector<float>& Numbers::read(std::uint64_t begin, std::uint64_t end) {
  values_.resize(end - begin);
  reader_.read(begin, end, std::as_writable_bytes(std::span(values_)));
  return values_;
}

void Numbers::fill(std::uint32_t tensor, std::byte byte) {
  const TensorInfo& info = catalog_.tensors()[tensor];
  filled_.push_back({info.shard, info.offset_begin, info.offset_begin + info.byte_count(), byte});
}

std::vector<double> Numbers::tolerance(std::uint64_t begin, std::uint64_t end) {
  std::vector<double> tolerance(end - begin, bound_ == nullptr ? 0 : bound_->constant);
  if (bound_ == nullptr) return tolerance;
  const auto add = [&](double part) {
    const std::vector<float>& reach = read(begin, end);
    for (std::size_t i = 0; i < tolerance.size(); ++i) {
      tolerance[i] += part * std::min(std::abs(double{reach[i]}), reach_max);
    }
  };
  for (const Decoding& decoding : value_->decodings) {
    fill(decoding.sources[0], bound_->top_code);
  }
  add(bound_->of_reach);
  if (bound_->of_outer > 0) {
    bool has_outer = false;
    for (const Decoding& decoding : value_->decodings) {
      if (decoding.sources.size() <= 2) continue;  // this tensor has no scales of scales
      fill(decoding.sources[1], bound_->top_scale);
      has_outer = true;
    }
    if (has_outer) add(bound_->of_outer);
  }
  filled_.clear();
  return tolerance;
}

double Numbers::tolerance_max(double of_group, double of_tensor) const noexcept {
  // Tensors that share a scale use the largest tensor's scale, and scales that are powers of two
  // may be up to twice as large as needed.
  constexpr double shared = 4;
  if (bound_ == nullptr) return 0;
  return bound_->constant + shared * (bound_->of_reach * of_group + bound_->of_outer * of_tensor);
}

}  // namespace loadstone

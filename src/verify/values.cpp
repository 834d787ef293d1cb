#include "verify/values.h"

#include <fmt/format.h>

#include <cstring>
#include <utility>

#include "base/text.h"
#include "kernels/gguf/block_scales.h"

namespace loadstone {

namespace {

template <typename Bits>
Bits load(const std::byte* from) noexcept {
  Bits bits;
  std::memcpy(&bits, from, sizeof bits);
  return bits;
}

// IEEE-like floats: all exponent bits set means infinite, or NaN if the mantissa is not 0.
template <typename Bits>
ValueCounts count_ieee(std::span<const std::byte> bytes, Bits exponent, Bits mantissa) noexcept {
  ValueCounts counts;
  for (std::size_t i = 0; i < bytes.size(); i += sizeof(Bits)) {
    const Bits bits = load<Bits>(bytes.data() + i);
    const bool special = (bits & exponent) == exponent;
    const bool is_nan = special && (bits & mantissa) != 0;
    counts.nan += is_nan ? 1 : 0;
    counts.infinite += special && !is_nan ? 1 : 0;
  }
  return counts;
}

std::uint64_t count_bytes(std::span<const std::byte> bytes, unsigned mask,
                          unsigned wanted) noexcept {
  std::uint64_t count = 0;
  for (const std::byte each : bytes) {
    count += (std::to_integer<unsigned>(each) & mask) == wanted ? 1 : 0;
  }
  return count;
}

template <typename Bits>
ValueCounts count_numbers(const FloatFormat& format, std::span<const std::byte> bytes) noexcept {
  constexpr auto magnitude = static_cast<Bits>(static_cast<Bits>(~Bits{0}) >> 1);
  const auto mantissa = static_cast<Bits>((Bits{1} << (format.digits - 1)) - 1);
  return count_ieee<Bits>(bytes, static_cast<Bits>(magnitude & ~mantissa), mantissa);
}

ValueCounts count_dtype(Dtype dtype, std::span<const std::byte> bytes) noexcept {
  ValueCounts counts;
  const FloatFormat& format = dtype_info(dtype).format;
  const unsigned width = bits(dtype) / (kind(dtype) == DtypeKind::complex ? 2 : 1);
  if (dtype == Dtype::boolean) counts.bad_bools = bytes.size() - count_bytes(bytes, 0xfe, 0);
  switch (format.non_finite) {
    case NonFinite::none:
      break;
    case NonFinite::ieee:
      if (width == 64) return count_numbers<std::uint64_t>(format, bytes);
      if (width == 32) return count_numbers<std::uint32_t>(format, bytes);
      if (width == 16) return count_numbers<std::uint16_t>(format, bytes);
      return count_numbers<std::uint8_t>(format, bytes);
    case NonFinite::all_ones: {
      const unsigned mask = dtype_info(dtype).is_signed ? 0x7f : 0xff;
      counts.nan = count_bytes(bytes, mask, mask);
      break;
    }
    case NonFinite::minus_zero:
      counts.nan = count_bytes(bytes, 0xff, 0x80);
      break;
  }
  return counts;
}

}  // namespace

ValueCounts& ValueCounts::operator+=(const ValueCounts& other) noexcept {
  nan += other.nan;
  infinite += other.infinite;
  bad_bools += other.bad_bools;
  bad_scales += other.bad_scales;
  return *this;
}

ValueCounts& ValueCounts::operator-=(const ValueCounts& other) noexcept {
  nan -= other.nan;
  infinite -= other.infinite;
  bad_bools -= other.bad_bools;
  bad_scales -= other.bad_scales;
  return *this;
}

std::size_t unit_bytes(Encoding encoding) noexcept {
  if (!encoding.is_dtype()) return layout(encoding.block_format()).bytes;
  const unsigned width = bits(encoding.dtype());
  return width < 8 ? 1 : width / 8;
}

ValueCounts count_values(Encoding encoding, std::span<const std::byte> bytes) noexcept {
  if (encoding.is_dtype()) return count_dtype(encoding.dtype(), bytes);
  ValueCounts counts;
  const std::size_t block = unit_bytes(encoding);
  for (std::size_t i = 0; i + block <= bytes.size(); i += block) {
    counts.bad_scales += has_nonfinite_scale(encoding.block_format(), bytes.data() + i) ? 1 : 0;
  }
  return counts;
}

Finding finding_of(const Catalog& catalog, const TensorInfo& tensor, std::string code,
                   std::string found, std::string expected) {
  std::string message = fmt::format("{}: '{}': data: found {}; expected {}",
                                    printable(catalog.shards()[tensor.shard].path, 400),
                                    printable(tensor.name), found, expected);
  return {.severity = Severity::warning,
          .code = std::move(code),
          .sources = {tensor.name},
          .message = std::move(message),
          .found = std::move(found),
          .expected = std::move(expected)};
}

}  // namespace loadstone

#include "fuzz/naive.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

namespace loadstone::fuzz {

namespace {

// Calls visit(index) for each index of the shape, in C order.
template <typename Visit>
void for_each_index(const Shape& shape, Visit visit) {
  std::vector<std::uint64_t> index(shape.rank(), 0);
  for (std::uint64_t left = shape.numel().value_or(0); left > 0; --left) {
    visit(index);
    for (std::size_t d = index.size(); d-- > 0;) {
      if (++index[d] < shape[d]) break;
      index[d] = 0;
    }
  }
}

std::uint64_t position(const Shape& shape, const std::vector<std::uint64_t>& index) {
  std::uint64_t at = 0;
  for (std::size_t d = 0; d < index.size(); ++d) at = at * shape[d] + index[d];
  return at;
}

// Returns a tensor of this shape; from(index) is the position of each element in the source.
template <typename From>
NaiveTensor gathered(const NaiveTensor& source, Shape shape, From from) {
  NaiveTensor made = {std::move(shape), source.dtype, {}};
  const std::size_t width = made.width();
  for_each_index(made.shape, [&](const std::vector<std::uint64_t>& index) {
    const auto* element = source.bytes.data() + from(index) * width;
    made.bytes.insert(made.bytes.end(), element, element + width);
  });
  return made;
}

template <typename Number>
Number as(const std::uint8_t* bytes) {
  Number number;
  std::memcpy(&number, bytes, sizeof number);
  return number;
}

struct FloatFormat {
  int exponent_bits;
  int mantissa_bits;
};

// Decodes a float of fewer than 32 bits.
double small_float(std::uint32_t code, FloatFormat format, bool has_infinity) {
  const std::uint32_t mantissa_count = 1u << format.mantissa_bits;
  const std::uint32_t exponent_max = (1u << format.exponent_bits) - 1;
  const std::uint32_t mantissa = code & (mantissa_count - 1);
  const std::uint32_t exponent = code >> format.mantissa_bits & exponent_max;
  const bool is_negative = (code >> (format.mantissa_bits + format.exponent_bits) & 1) != 0;
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  double number = 0;
  if (has_infinity && exponent == exponent_max) {
    number = mantissa == 0 ? std::numeric_limits<double>::infinity()
                           : std::numeric_limits<double>::quiet_NaN();
  } else if (!has_infinity && exponent == exponent_max && mantissa == mantissa_count - 1) {
    number = std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    number = std::ldexp(mantissa, 1 - bias - format.mantissa_bits);
  } else {
    number = std::ldexp(mantissa_count + mantissa,
                        static_cast<int>(exponent) - bias - format.mantissa_bits);
  }
  return is_negative ? -number : number;
}

// Rounds to nearest, ties to even, by trying both neighbours: positive codes are ordered by value.
std::uint16_t rounded(double number, FloatFormat format) {
  const auto sign = static_cast<std::uint16_t>(std::signbit(number) ? 0x8000 : 0);
  const std::uint32_t infinity = ((1u << format.exponent_bits) - 1) << format.mantissa_bits;
  if (std::isnan(number)) return static_cast<std::uint16_t>(sign | infinity | (infinity >> 1));
  const double size = std::fabs(number);
  std::uint32_t low = 0;
  std::uint32_t high = infinity;
  while (high - low > 1) {
    const std::uint32_t middle = (low + high) / 2;
    (small_float(middle, format, true) <= size ? low : high) = middle;
  }
  if (std::isinf(size)) return static_cast<std::uint16_t>(sign | infinity);
  const double below = small_float(low, format, true);
  // `above` is the value that would follow the largest one if the format had no infinity.
  const double step =
      low == 0 ? small_float(1, format, true) : below - small_float(low - 1, format, true);
  const double above = high == infinity ? below + step : small_float(high, format, true);
  const bool up = size - below > above - size || (size - below == above - size && (low & 1) != 0);
  return static_cast<std::uint16_t>(sign | (up ? high : low));
}

constexpr FloatFormat half = {5, 10};
constexpr FloatFormat bfloat = {8, 7};

bool is_float(Dtype dtype) {
  return dtype == Dtype::f16 || dtype == Dtype::bf16 || dtype == Dtype::f32 || dtype == Dtype::f64;
}

void append(std::vector<std::uint8_t>& bytes, const void* number, std::size_t width) {
  const auto* begin = static_cast<const std::uint8_t*>(number);
  bytes.insert(bytes.end(), begin, begin + width);
}

// Casts integers directly, because 64-bit integers need more precision than F64 has.
float as_float(const std::uint8_t* bytes, Dtype dtype) {
  if (dtype == Dtype::i64) return static_cast<float>(as<std::int64_t>(bytes));
  if (dtype == Dtype::u64) return static_cast<float>(as<std::uint64_t>(bytes));
  return static_cast<float>(naive_number(bytes, dtype));
}

}  // namespace

NaiveTensor unpacked(const std::vector<std::uint8_t>& bytes, Shape shape, Dtype dtype) {
  NaiveTensor tensor = {std::move(shape), dtype, bytes};
  const unsigned element_bits = bits(dtype);
  if (element_bits % 8 == 0) return tensor;
  tensor.bytes.assign(tensor.numel(), 0);
  for (std::uint64_t i = 0; i < tensor.numel() * element_bits; ++i) {
    const unsigned bit = bytes[i / 8] >> (i % 8) & 1u;
    tensor.bytes[i / element_bits] |= static_cast<std::uint8_t>(bit << (i % element_bits));
  }
  return tensor;
}

std::vector<std::uint8_t> packed(const NaiveTensor& tensor) {
  const unsigned element_bits = bits(tensor.dtype);
  if (element_bits % 8 == 0) return tensor.bytes;
  std::vector<std::uint8_t> bytes((tensor.numel() * element_bits + 7) / 8, 0);
  for (std::uint64_t i = 0; i < tensor.numel() * element_bits; ++i) {
    const unsigned bit = tensor.bytes[i / element_bits] >> (i % element_bits) & 1u;
    bytes[i / 8] |= static_cast<std::uint8_t>(bit << (i % 8));
  }
  return bytes;
}

double naive_number(const std::uint8_t* bytes, Dtype dtype) {
  switch (dtype) {
    case Dtype::f64:
      return as<double>(bytes);
    case Dtype::f32:
      return as<float>(bytes);
    case Dtype::f16:
      return small_float(as<std::uint16_t>(bytes), half, true);
    case Dtype::bf16:
      return small_float(as<std::uint16_t>(bytes), bfloat, true);
    case Dtype::f8_e4m3:
      return small_float(*bytes, {4, 3}, false);
    case Dtype::f8_e5m2:
      return small_float(*bytes, {5, 2}, true);
    case Dtype::u8:
      return *bytes;
    case Dtype::i8:
      return as<std::int8_t>(bytes);
    case Dtype::u16:
      return as<std::uint16_t>(bytes);
    case Dtype::i16:
      return as<std::int16_t>(bytes);
    case Dtype::u32:
      return as<std::uint32_t>(bytes);
    case Dtype::i32:
      return as<std::int32_t>(bytes);
    case Dtype::u64:
      return static_cast<double>(as<std::uint64_t>(bytes));
    case Dtype::i64:
      return static_cast<double>(as<std::int64_t>(bytes));
    default:
      return 0;
  }
}

bool naive_can_cast(Dtype source, Dtype target) {
  if (source == target) return true;
  const bool is_number = is_float(source) || kind(source) == DtypeKind::integer ||
                         source == Dtype::f8_e4m3 || source == Dtype::f8_e5m2;
  return is_number && is_float(target);
}

NaiveTensor naive_cast(const NaiveTensor& tensor, Dtype dtype) {
  if (tensor.dtype == dtype) return tensor;
  NaiveTensor made = {tensor.shape, dtype, {}};
  for (std::uint64_t i = 0; i < tensor.numel(); ++i) {
    const std::uint8_t* element = tensor.bytes.data() + i * tensor.width();
    if (dtype == Dtype::f64) {
      const double number = naive_number(element, tensor.dtype);
      append(made.bytes, &number, sizeof number);
    } else if (dtype == Dtype::f32) {
      const float number = as_float(element, tensor.dtype);
      append(made.bytes, &number, sizeof number);
    } else {  // casts to F32 first, as torch does
      const std::uint16_t number =
          rounded(as_float(element, tensor.dtype), dtype == Dtype::f16 ? half : bfloat);
      append(made.bytes, &number, sizeof number);
    }
  }
  return made;
}

bool same_numbers(const std::vector<std::uint8_t>& first, const std::vector<std::uint8_t>& second,
                  Dtype dtype) {
  if (first == second) return true;
  if (first.size() != second.size() || !is_float(dtype)) return false;
  const std::size_t width = bits(dtype) / 8;
  for (std::size_t at = 0; at + width <= first.size(); at += width) {
    if (std::memcmp(first.data() + at, second.data() + at, width) == 0) continue;
    if (!std::isnan(naive_number(first.data() + at, dtype)) ||
        !std::isnan(naive_number(second.data() + at, dtype))) {
      return false;
    }
  }
  return true;
}

NaiveTensor naive_permute(const NaiveTensor& tensor, const std::vector<std::size_t>& order) {
  std::vector<std::uint64_t> extents;
  for (const std::size_t dim : order) extents.push_back(tensor.shape[dim]);
  std::vector<std::uint64_t> from(order.size());
  return gathered(tensor, Shape(std::move(extents)), [&](const std::vector<std::uint64_t>& index) {
    for (std::size_t d = 0; d < order.size(); ++d) from[order[d]] = index[d];
    return position(tensor.shape, from);
  });
}

NaiveTensor naive_slice(const NaiveTensor& tensor, std::size_t dim, std::uint64_t start,
                        std::uint64_t size, std::uint64_t step) {
  auto extents = tensor.shape.extents();
  extents[dim] = size;
  return gathered(tensor, Shape(std::move(extents)), [&](std::vector<std::uint64_t> index) {
    index[dim] = start + index[dim] * step;
    return position(tensor.shape, index);
  });
}

NaiveTensor naive_concat(const std::vector<NaiveTensor>& tensors, std::size_t dim) {
  auto extents = tensors.front().shape.extents();
  extents[dim] = 0;
  for (const NaiveTensor& each : tensors) extents[dim] += each.shape[dim];
  NaiveTensor made = {Shape(std::move(extents)), tensors.front().dtype, {}};
  for_each_index(made.shape, [&](std::vector<std::uint64_t> index) {
    const NaiveTensor* part = tensors.data();
    for (; index[dim] >= part->shape[dim]; ++part) index[dim] -= part->shape[dim];
    append(made.bytes, part->bytes.data() + position(part->shape, index) * part->width(),
           part->width());
  });
  return made;
}

NaiveTensor naive_stack(const std::vector<NaiveTensor>& tensors, std::size_t dim) {
  std::vector<NaiveTensor> parts = tensors;
  for (NaiveTensor& part : parts) {
    auto extents = part.shape.extents();
    extents.insert(extents.begin() + static_cast<std::ptrdiff_t>(dim), 1);
    part.shape = Shape(std::move(extents));
  }
  return naive_concat(parts, dim);
}

void naive_copy(const Box& box, const NaiveTensor& source, NaiveTensor& target) {
  std::vector<std::uint64_t> extents;
  for (const BoxDim& dim : box.dims) extents.push_back(dim.extent);
  const std::size_t width = target.width();
  for_each_index(Shape(std::move(extents)), [&](const std::vector<std::uint64_t>& index) {
    std::uint64_t from = box.source_offset;
    std::uint64_t to = box.target_offset;
    for (std::size_t d = 0; d < index.size(); ++d) {
      from += index[d] * box.dims[d].source_stride;
      to += index[d] * box.dims[d].target_stride;
    }
    std::memcpy(target.bytes.data() + to * width, source.bytes.data() + from * width, width);
  });
}

}  // namespace loadstone::fuzz

// Compares the kernels with a plain loop (bnb_reference.h) and with recorded outputs of
// bitsandbytes. python/tests/convert/test_bnb_kernels.py compares the kernels on more inputs.
#include "kernels/bnb.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "kernels/bnb_reference.h"
#include "kernels/cast.h"
#include "kernels/forced_target.h"
#include "kernels/number.h"
#include "support/sha256.h"

namespace loadstone {
namespace {

using Bytes = std::vector<std::byte>;
using Floats = std::vector<float>;
constexpr float all_finite = std::numeric_limits<float>::max();
using reference::Kind;
using reference::numbers_of;
using reference::ramp;

constexpr std::array dtypes = {Dtype::f32, Dtype::bf16, Dtype::f16};
constexpr std::array dialects = {BnbDialect::cpu, BnbDialect::cuda};
constexpr std::array kinds = {Kind::normal, Kind::wide,      Kind::small,  Kind::ties,
                              Kind::zeros,  Kind::subnormal, Kind::special};
constexpr std::array codes = {Bnb4Code::nf4, Bnb4Code::fp4};

template <typename Number>
Bytes bytes_of(const std::vector<Number>& numbers) {
  Bytes bytes(numbers.size() * sizeof(Number));
  if (!bytes.empty()) std::memcpy(bytes.data(), numbers.data(), bytes.size());
  return bytes;
}

Bytes cast(const Bytes& bytes, Dtype source, Dtype target) {
  const std::uint64_t count = bytes.size() / element_bytes(source);
  Bytes result(count * element_bytes(target));
  cast_between(source, target).run(bytes.data(), result.data(), count);
  return result;
}

// Returns F32 values after rounding them to the dtype.
Floats rounded(const Floats& numbers, Dtype dtype) {
  const Bytes bytes = cast(cast(bytes_of(numbers), Dtype::f32, dtype), dtype, Dtype::f32);
  Floats result(numbers.size());
  std::memcpy(result.data(), bytes.data(), bytes.size());
  return result;
}

std::string hex(const Bytes& bytes, std::size_t count) {
  std::string text;
  for (std::size_t i = 0; i < count; ++i) {
    text += "0123456789abcdef"[std::to_integer<unsigned>(bytes[i]) / 16];
    text += "0123456789abcdef"[std::to_integer<unsigned>(bytes[i]) % 16];
  }
  return text;
}

std::string short_sha(const Bytes& bytes) { return test::sha256(bytes).substr(0, 16); }

// Compares values and treats all NaNs as equal. Another test checks NaN payloads.
bool same_floats(const Bytes& found, const Floats& expected) {
  if (found.size() != 4 * expected.size()) return false;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const auto value = number::load_raw<float>(found.data() + 4 * i);
    if (std::isnan(value) && std::isnan(expected[i])) continue;
    if (std::bit_cast<std::uint32_t>(value) != std::bit_cast<std::uint32_t>(expected[i])) {
      return false;
    }
  }
  return true;
}

struct Made {
  Bytes data;
  Bytes absmax;
  std::uint64_t first_wrong = 0;
  bool operator==(const Made&) const = default;
};

Made encode4(const Bnb4& form, Dtype source, const Bytes& numbers) {
  const std::uint64_t count = numbers.size() / element_bytes(source);
  const std::uint64_t blocks = (count + form.block_size - 1) / form.block_size;
  Made made{Bytes((count + 1) / 2), Bytes(4 * blocks)};
  made.first_wrong =
      encode_bnb4(form, source, numbers.data(), count, made.data.data(), made.absmax.data());
  return made;
}

Bytes decode4(const Bnb4& form, const Made& made, std::uint64_t count, Dtype target) {
  Bytes numbers(count * element_bytes(target));
  decode_bnb4(form, 0, count, made.data.data(), made.absmax.data(), target, numbers.data());
  return numbers;
}

Made encode8(BnbDialect dialect, Dtype source, const Bytes& numbers, std::uint64_t columns) {
  const std::uint64_t rows = numbers.size() / element_bytes(source) / columns;
  Made made{Bytes(rows * columns), Bytes(4 * rows)};
  made.first_wrong = encode_bnb_int8(dialect, source, numbers.data(), rows, columns,
                                     made.data.data(), made.absmax.data());
  return made;
}

Bytes decode8(const Made& made, std::uint64_t columns, Dtype target) {
  Bytes numbers(made.data.size() * element_bytes(target));
  decode_bnb_int8(0, made.data.size(), columns, made.data.data(), made.absmax.data(), target,
                  numbers.data());
  return numbers;
}

std::uint64_t first_not_finite(const Floats& numbers) {
  const auto wrong =
      std::ranges::find_if(numbers, [](float number) { return !std::isfinite(number); });
  return static_cast<std::uint64_t>(wrong - numbers.begin());
}

// ---- outputs of bitsandbytes 0.50.2 on a CPU

TEST(BnbTest, TablesAreThoseOfTheFormat) {
  const auto sha = [](auto values) { return test::sha256(std::as_bytes(values)).substr(0, 16); };
  EXPECT_EQ(sha(bnb4_values(Bnb4Code::nf4)), "8501941daa1b8a90");
  EXPECT_EQ(sha(bnb4_values(Bnb4Code::fp4)), "b830bcf8857895e5");
  EXPECT_EQ(sha(bnb_dynamic_map()), "e732639a65f497b4");
  EXPECT_EQ(test::sha256({}).substr(0, 16), "e3b0c44298fc1c14");  // control
}

TEST(BnbTest, TheRampGivesTheKnownBytes) {
  for (const Dtype dtype : dtypes) {
    const Bytes numbers = cast(bytes_of(ramp(131)), Dtype::f32, dtype);
    const Bnb4 nf4{.code = Bnb4Code::nf4};
    const Made made = encode4(nf4, dtype, numbers);
    EXPECT_EQ(made.data.size(), 66u);
    EXPECT_EQ(hex(made.data, 16), "04c16e29f3b05d17e29f3c05d18e2af4");
    EXPECT_EQ(short_sha(made.data), "f134bef9b82c06ad");
    EXPECT_EQ(made.absmax, bytes_of(Floats{0.78125f, 0.78125f, 0.625f}));
    EXPECT_EQ(short_sha(decode4(nf4, made, 131, Dtype::f32)), "aff9d959b6c61aa7");
    EXPECT_EQ(short_sha(decode4(nf4, made, 131, Dtype::bf16)), "5df151693dd45ba2");

    const Bnb4 fp4{.code = Bnb4Code::fp4};
    const Made other = encode4(fp4, dtype, numbers);
    EXPECT_EQ(hex(other.data, 16), "bf5a92a63c4be5a02d63c4be2a12d73f");
    EXPECT_EQ(short_sha(other.data), "fd31cb32ed1c756f");
    EXPECT_EQ(short_sha(decode4(fp4, other, 131, Dtype::bf16)), "5bce25255d63f064");
  }
}

TEST(BnbTest, NestedStatisticsGiveTheKnownBytes) {
  Floats numbers = ramp(38417);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    numbers[i] *= 1.0f + static_cast<float>(i / 64 % 37) / 32.0f;
  }
  const Made made = encode4({}, Dtype::f32, bytes_of(numbers));
  EXPECT_EQ(made.absmax.size(), 4 * 601u);
  EXPECT_EQ(short_sha(made.data), "7a17437b78ca7269");
  const float offset = bnb_nested_offset(made.absmax.data(), 601);
  EXPECT_EQ(offset, 0x1.36c5cp+0f);
  Made nested{Bytes(601), Bytes(12)};
  encode_bnb_nested(BnbDialect::cpu, made.absmax.data(), 601, offset, all_finite,
                    nested.data.data(), nested.absmax.data());
  EXPECT_EQ(short_sha(nested.data), "8bb1dc9acc0ec605");
  EXPECT_EQ(nested.absmax, bytes_of(Floats{0.44832993f, 0.44832993f, 0.44620132f}));
  const Bytes map = bytes_of(Floats(bnb_dynamic_map().begin(), bnb_dynamic_map().end()));
  Bytes rebuilt(4 * 601);
  decode_bnb_nested(0, 601, nested.data.data(), nested.absmax.data(), map.data(), offset,
                    rebuilt.data());
  EXPECT_EQ(short_sha(rebuilt), "c45292102f45e1f9");
}

TEST(BnbTest, RowsOfInt8GiveTheKnownBytes) {
  Floats numbers = ramp(300);
  std::fill_n(numbers.begin() + 100, 50, 0.0f);
  const Made made = encode8(BnbDialect::cpu, Dtype::f32, bytes_of(numbers), 50);
  EXPECT_EQ(short_sha(made.data), "d860b7c2d6937d36");
  EXPECT_EQ(made.absmax,
            bytes_of(Floats{0.78125f, 0.765625f, 0.0f, 0.765625f, 0.78125f, 0.765625f}));
  const std::array<std::int8_t, 8> start = {-127, -33, 61, -102, -8, 86, -76, 18};
  EXPECT_EQ(std::memcmp(made.data.data(), start.data(), 8), 0);
  EXPECT_EQ(short_sha(decode8(made, 50, Dtype::f32)), "49b7e06032d0fe9e");
}

TEST(BnbTest, DialectsDifferInSignsOfZeroAndInEmptyBlocks) {
  Floats numbers(64, 0.0f);
  numbers[0] = 1.0f;
  numbers[1] = 1e-4f;
  numbers[2] = -1e-4f;
  for (const auto& [dialect, first_byte, second_byte] :
       {std::tuple{BnbDialect::cpu, "38", "00"}, std::tuple{BnbDialect::cuda, "30", "80"}}) {
    const Bnb4 form{.code = Bnb4Code::fp4, .dialect = dialect};
    const Made made = encode4(form, Dtype::f32, bytes_of(numbers));
    EXPECT_EQ(hex(made.data, 2), std::string(first_byte) + second_byte);
    Floats expected(64, 0.0f);
    expected[0] = 1.0f;
    EXPECT_EQ(decode4(form, made, 64, Dtype::f32), bytes_of(expected));
  }
  for (const auto& [dialect, absmax, byte] :
       {std::tuple{BnbDialect::cpu, 1e-38f, "77"}, std::tuple{BnbDialect::cuda, 0.0f, "00"}}) {
    Floats tail = numbers_of(Kind::normal, 64, 1);
    tail.resize(104, 0.0f);
    const Bnb4 form{.dialect = dialect};
    const Made made = encode4(form, Dtype::f32, bytes_of(tail));
    EXPECT_EQ(number::load_raw<float>(made.absmax.data() + 4), absmax);
    for (std::size_t i = 32; i < 52; ++i) ASSERT_EQ(hex({made.data[i]}, 1), byte);
    const Bytes decoded = decode4(form, made, 104, Dtype::f32);
    for (std::size_t i = 64; i < 104; ++i) {
      ASSERT_EQ(number::load_raw<float>(decoded.data() + 4 * i), 0.0f);
    }
  }
}

// ---- comparisons with a plain loop

TEST(BnbTest, FourBitsAreThoseOfAPlainLoop) {
  for (const std::size_t count :
       std::vector<std::size_t>{1, 2, 31, 32, 63, 64, 65, 127, 131, 1000, 4096, 4099, 9001}) {
    for (const Kind kind : kinds) {
      for (const Dtype dtype : dtypes) {
        const Floats numbers =
            rounded(numbers_of(kind, count, static_cast<unsigned>(count)), dtype);
        const Bytes source = cast(bytes_of(numbers), Dtype::f32, dtype);
        for (const std::uint32_t block_size : {32u, 64u, 256u, 4096u}) {
          for (const Bnb4Code code : codes) {
            for (const BnbDialect dialect : dialects) {
              const Bnb4 form{.code = code, .dialect = dialect, .block_size = block_size};
              const Made made = encode4(form, dtype, source);
              const auto expected = reference::encode_4bit(form, numbers);
              ASSERT_EQ(made.data, expected.data) << count << " " << static_cast<int>(kind);
              ASSERT_TRUE(same_floats(made.absmax, expected.absmax));
              ASSERT_EQ(made.first_wrong, first_not_finite(numbers));
              const Floats values = reference::decode_4bit(form, expected, count);
              ASSERT_TRUE(same_floats(decode4(form, made, count, Dtype::f32), values));
              for (const Dtype target : {Dtype::bf16, Dtype::f16}) {
                const Bytes wide = cast(decode4(form, made, count, target), target, Dtype::f32);
                ASSERT_TRUE(same_floats(wide, rounded(values, target)));
              }
            }
          }
        }
      }
    }
  }
}

TEST(BnbTest, RowsOfInt8AreThoseOfAPlainLoop) {
  for (const std::size_t columns :
       std::vector<std::size_t>{1, 2, 7, 15, 16, 17, 31, 32, 33, 64, 100, 257}) {
    for (const Kind kind : kinds) {
      for (const Dtype dtype : dtypes) {
        const Floats numbers =
            rounded(numbers_of(kind, 5 * columns, static_cast<unsigned>(columns)), dtype);
        const Bytes source = cast(bytes_of(numbers), Dtype::f32, dtype);
        for (const BnbDialect dialect : dialects) {
          const Made made = encode8(dialect, dtype, source, columns);
          const auto expected = reference::encode_int8(dialect, numbers, columns);
          ASSERT_EQ(made.data, expected.data) << columns << " " << static_cast<int>(kind);
          ASSERT_TRUE(same_floats(made.absmax, expected.absmax));
          ASSERT_EQ(made.first_wrong, first_not_finite(rounded(numbers, Dtype::f16)));
          const Floats values = reference::decode_int8(expected, columns);
          ASSERT_TRUE(same_floats(decode8(made, columns, Dtype::f32), values));
          for (const Dtype target : {Dtype::bf16, Dtype::f16}) {
            const Bytes wide = cast(decode8(made, columns, target), target, Dtype::f32);
            ASSERT_TRUE(same_floats(wide, rounded(values, target)));
          }
        }
      }
    }
  }
}

// The rows contain all small BF16 values. F16 cannot represent many of them, and the rounding
// affects the scales.
TEST(BnbTest, Int8RoundsToF16First) {
  std::vector<std::uint16_t> row;
  for (std::uint16_t bits = 0; bits <= 0x3900; ++bits) row.push_back(bits);  // up to 2^-13
  for (std::uint16_t most = 0x3900; most < 0x3e00; most = static_cast<std::uint16_t>(most + 7)) {
    row.back() = most;
    const Bytes source = bytes_of(row);
    Floats numbers(row.size());
    const Bytes wide = cast(source, Dtype::bf16, Dtype::f32);
    std::memcpy(numbers.data(), wide.data(), wide.size());
    const Made made = encode8(BnbDialect::cpu, Dtype::bf16, source, row.size());
    ASSERT_EQ(made.data, reference::encode_int8(BnbDialect::cpu, numbers, row.size()).data) << most;
    ASSERT_EQ(made, encode8(BnbDialect::cpu, Dtype::f32, wide, row.size())) << most;
  }
}

TEST(BnbTest, NestedStatisticsAreThoseOfAPlainLoop) {
  for (const std::size_t count : std::vector<std::size_t>{1, 2, 255, 256, 257, 600, 5000}) {
    for (unsigned seed = 0; seed < 6; ++seed) {
      Floats scales = numbers_of(Kind::normal, count, seed);
      for (float& scale : scales) scale = seed == 0 ? 0.25f : std::abs(scale);
      const Bytes bytes = bytes_of(scales);
      const float offset = seed == 1 ? 0.7f : bnb_nested_offset(bytes.data(), count);
      for (const BnbDialect dialect : dialects) {
        const auto expected = reference::encode_nested(dialect, scales, offset);
        Made made{Bytes(count), Bytes(expected.absmax.size() * 4)};
        encode_bnb_nested(dialect, bytes.data(), count, offset, all_finite, made.data.data(),
                          made.absmax.data());
        ASSERT_EQ(made.data, expected.data) << count << " " << seed;
        ASSERT_EQ(made.absmax, bytes_of(expected.absmax));
        const Bytes map = bytes_of(Floats(bnb_dynamic_map().begin(), bnb_dynamic_map().end()));
        const Floats values = reference::decode_nested(expected, offset);
        for (const std::size_t begin : {std::size_t{0}, count / 2}) {
          Bytes part(4 * (count - begin));
          decode_bnb_nested(begin, count, made.data.data() + begin,
                            made.absmax.data() + begin / 256 * 4, map.data(), offset, part.data());
          ASSERT_TRUE(same_floats(
              part, Floats(values.begin() + static_cast<std::ptrdiff_t>(begin), values.end())));
        }
      }
    }
  }
}

// ---- windows, addresses, instruction sets

// Returns a copy of a window's bytes at an odd address, so a sanitizer detects reads outside the
// window.
Bytes shifted(const Bytes& bytes, std::size_t begin, std::size_t end) {
  Bytes part(1 + end - begin);
  std::copy(bytes.begin() + static_cast<std::ptrdiff_t>(begin),
            bytes.begin() + static_cast<std::ptrdiff_t>(end), part.begin() + 1);
  return part;
}

TEST(BnbTest, WindowsGiveTheBytesOfTheWhole) {
  constexpr std::size_t count = 5003;
  std::mt19937 random(5);
  for (const Dtype dtype : dtypes) {
    const std::size_t size = element_bytes(dtype);
    const Bytes source = cast(bytes_of(numbers_of(Kind::normal, count, 9)), Dtype::f32, dtype);
    for (const std::uint32_t block_size : {32u, 128u}) {
      const Bnb4 form{.code = Bnb4Code::fp4, .block_size = block_size};
      const Made whole = encode4(form, dtype, source);
      Made parts{{}, {}};
      for (std::size_t at = 0; at < count;) {
        const std::size_t end = std::min(count, at + block_size * (1 + random() % 5));
        const Bytes window = shifted(source, at * size, end * size);
        Bytes data(1 + (end - at + 1) / 2);
        Bytes absmax(1 + 4 * ((end - at + block_size - 1) / block_size));
        EXPECT_EQ(encode_bnb4(form, dtype, window.data() + 1, end - at, data.data() + 1,
                              absmax.data() + 1),
                  end - at);
        parts.data.insert(parts.data.end(), data.begin() + 1, data.end());
        parts.absmax.insert(parts.absmax.end(), absmax.begin() + 1, absmax.end());
        at = end;
      }
      EXPECT_EQ(parts.data, whole.data);
      EXPECT_EQ(parts.absmax, whole.absmax);
      const Bytes decoded = decode4(form, whole, count, dtype);
      for (int round = 0; round < 200; ++round) {
        const std::size_t begin = random() % count;
        const std::size_t end = begin + random() % (count + 1 - begin);
        const Bytes data = shifted(whole.data, begin / 2, (end + 1) / 2);
        const Bytes absmax =
            shifted(whole.absmax, begin / block_size * 4,
                    std::max(begin / block_size, (end + block_size - 1) / block_size) * 4);
        Bytes part(1 + (end - begin) * size + 1, std::byte{0x5a});
        decode_bnb4(form, begin, end, data.data() + 1, absmax.data() + 1, dtype, part.data() + 1);
        ASSERT_EQ(std::memcmp(part.data() + 1, decoded.data() + begin * size, (end - begin) * size),
                  0);
        ASSERT_EQ(part.back(), std::byte{0x5a});
      }
    }
  }
}

TEST(BnbTest, WindowsOfRowsGiveTheBytesOfTheWhole) {
  constexpr std::size_t columns = 77;
  constexpr std::size_t rows = 9;
  std::mt19937 random(6);
  for (const Dtype dtype : dtypes) {
    const std::size_t size = element_bytes(dtype);
    const Bytes source =
        cast(bytes_of(numbers_of(Kind::normal, rows * columns, 9)), Dtype::f32, dtype);
    const Made whole = encode8(BnbDialect::cpu, dtype, source, columns);
    for (std::size_t row = 0; row < rows; ++row) {
      const Bytes window = shifted(source, row * columns * size, (row + 1) * columns * size);
      Bytes data(1 + columns);
      Bytes absmax(5);
      EXPECT_EQ(encode_bnb_int8(BnbDialect::cpu, dtype, window.data() + 1, 1, columns,
                                data.data() + 1, absmax.data() + 1),
                columns);
      EXPECT_EQ(std::memcmp(data.data() + 1, whole.data.data() + row * columns, columns), 0);
      EXPECT_EQ(std::memcmp(absmax.data() + 1, whole.absmax.data() + 4 * row, 4), 0);
    }
    const Bytes decoded = decode8(whole, columns, dtype);
    for (int round = 0; round < 200; ++round) {
      const std::size_t begin = random() % (rows * columns);
      const std::size_t end = begin + 1 + random() % (rows * columns - begin);
      const Bytes data = shifted(whole.data, begin, end);
      const Bytes absmax =
          shifted(whole.absmax, begin / columns * 4, ((end - 1) / columns + 1) * 4);
      Bytes part(1 + (end - begin) * size + 1, std::byte{0x5a});
      decode_bnb_int8(begin, end, columns, data.data() + 1, absmax.data() + 1, dtype,
                      part.data() + 1);
      ASSERT_EQ(std::memcmp(part.data() + 1, decoded.data() + begin * size, (end - begin) * size),
                0);
      ASSERT_EQ(part.back(), std::byte{0x5a});
    }
  }
}

TEST(BnbTest, ANaNIsThePlainOne) {
  const Made made = encode4({}, Dtype::f32, bytes_of(Floats(64, -NAN)));
  EXPECT_EQ(made.absmax, bytes_of(std::vector<std::uint32_t>{0x7fc00000}));
  EXPECT_EQ(decode4({}, made, 64, Dtype::f32),
            bytes_of(std::vector<std::uint32_t>(64, 0x7fc00000)));
  EXPECT_EQ(decode4({}, made, 64, Dtype::bf16), bytes_of(std::vector<std::uint16_t>(64, 0x7fc0)));
  EXPECT_EQ(decode4({}, made, 64, Dtype::f16), bytes_of(std::vector<std::uint16_t>(64, 0x7e00)));
  const Made rows = encode8(BnbDialect::cpu, Dtype::f32, bytes_of(Floats(64, -NAN)), 64);
  EXPECT_EQ(rows.absmax, bytes_of(std::vector<std::uint32_t>{0x7fc00000}));
  EXPECT_EQ(decode8(rows, 64, Dtype::bf16), bytes_of(std::vector<std::uint16_t>(64, 0x7fc0)));
}

// Returns the output of every kernel for these values.
std::vector<Bytes> everything_of(const Bytes& source, Dtype dtype) {
  const std::uint64_t count = source.size() / element_bytes(dtype);
  std::vector<Bytes> all;
  for (const BnbDialect dialect : dialects) {
    for (const Bnb4Code code : codes) {
      for (const std::uint32_t block_size : {32u, 64u, 4096u}) {
        const Bnb4 form{.code = code, .dialect = dialect, .block_size = block_size};
        const Made made = encode4(form, dtype, source);
        all.insert(all.end(), {made.data, made.absmax});
        for (const Dtype target : dtypes) all.push_back(decode4(form, made, count, target));
      }
    }
    const Made rows = encode8(dialect, dtype, source, 53);
    all.insert(all.end(), {rows.data, rows.absmax});
    for (const Dtype target : dtypes) all.push_back(decode8(rows, 53, target));
  }
  return all;
}

TEST(BnbTest, EveryInstructionSetGivesTheSameBytes) {
  std::set<std::int64_t> seen;
  for (const Kind kind : kinds) {
    for (const Dtype dtype : dtypes) {
      const Bytes source = cast(bytes_of(numbers_of(kind, 53 * 181, 4)), Dtype::f32, dtype);
      const std::vector<Bytes> expected = everything_of(source, dtype);
      for (const std::int64_t isa : hwy::SupportedAndGeneratedTargets()) {
        const ForcedTarget forced(isa);
        seen.insert(hwy::SupportedTargets());  // control: each target must really be forced
        EXPECT_TRUE(everything_of(source, dtype) == expected)
            << hwy::TargetName(isa) << " " << name(dtype) << " " << static_cast<int>(kind);
      }
    }
  }
  EXPECT_EQ(seen.size(), hwy::SupportedAndGeneratedTargets().size());
}

TEST(BnbTest, BlockSizesAreThoseOfTheLibrary) {
  for (std::uint64_t size = 0; size < 10000; ++size) {
    const bool is_one = size == 32 || size == 64 || size == 128 || size == 256 || size == 512 ||
                        size == 1024 || size == 2048 || size == 4096;
    EXPECT_EQ(is_bnb_block_size(size), is_one) << size;
  }
}

}  // namespace
}  // namespace loadstone

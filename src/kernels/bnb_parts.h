// Checks the components of a bitsandbytes weight before any allocation. Files, plans and tensors in
// memory are checked by the same rules.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "kernels/bnb.h"
#include "loadstone/shape.h"

namespace loadstone {

enum class BnbEncoding : std::uint8_t { nf4, fp4, int8 };

[[nodiscard]] constexpr std::string_view name(BnbEncoding encoding) noexcept {
  switch (encoding) {
    case BnbEncoding::nf4:
      return "nf4";
    case BnbEncoding::fp4:
      return "fp4";
    case BnbEncoding::int8:
      return "int8";
  }
  return {};
}

// Returns the 4-bit code of an encoding; nullopt for int8.
[[nodiscard]] constexpr std::optional<Bnb4Code> bnb4_code(BnbEncoding encoding) noexcept {
  switch (encoding) {
    case BnbEncoding::nf4:
      return Bnb4Code::nf4;
    case BnbEncoding::fp4:
      return Bnb4Code::fp4;
    case BnbEncoding::int8:
      break;
  }
  return std::nullopt;
}

// Number of elements of the weight and of each component.
struct BnbSizes {
  std::uint64_t elements = 0;  // elements of the weight
  std::uint64_t data = 0;
  std::uint64_t absmax = 0;
  std::uint64_t nested_absmax = 0;
};

// `name` is "data", "absmax", "code", "nested_absmax", "nested_code" or "nested_offset".
struct BnbPart {
  std::string name;
  Dtype dtype = Dtype::u8;
  Shape shape;
};

// A violated rule. `code` is an error code.
struct BnbProblem {
  std::string code;
  std::string part;
  std::string message;
  std::string found;
  std::string expected;
};

// Returns nullopt if the sizes overflow 64 bits, or if an int8 weight has fewer than 2 dimensions.
[[nodiscard]] std::optional<BnbSizes> bnb_sizes(BnbEncoding encoding, const Shape& shape,
                                                std::uint64_t block_size) noexcept;

// Checks the components of a weight. Scales are nested if a component has a nested name. The tables
// ("code", "nested_code") are optional. The packed data of nf4 and fp4 may have any dtype with the
// right number of bytes.
[[nodiscard]] std::optional<BnbProblem> check_bnb_parts(BnbEncoding encoding, const Shape& shape,
                                                        std::uint64_t block_size,
                                                        std::span<const BnbPart> parts);

// Checks that all `count` F32 scales are finite.
[[nodiscard]] std::optional<BnbProblem> check_bnb_scales(std::string_view part,
                                                         const std::byte* scales,
                                                         std::uint64_t count);
// Checks that the 16 F32 are the values of the encoding: bitsandbytes decodes with no other table.
[[nodiscard]] std::optional<BnbProblem> check_bnb_code(Bnb4Code code, const std::byte* values);
// Checks that the 256 F32 values of nested scales are finite and ascending, as every encoder writes
// them.
[[nodiscard]] std::optional<BnbProblem> check_bnb_nested_code(const std::byte* values);

}  // namespace loadstone

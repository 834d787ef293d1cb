#include "loadstone/dtype.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <numeric>
#include <string>

#include "base/checked.h"

namespace loadstone {

namespace {

struct BlockRow {
  std::string_view name;
  BlockLayout layout;
};

// One entry per BlockFormat, in its order.
constexpr auto block_rows = std::to_array<BlockRow>({
    {"Q4_0", {32, 18}},     {"Q4_1", {32, 20}},    {"Q5_0", {32, 22}},     {"Q5_1", {32, 24}},
    {"Q8_0", {32, 34}},     {"Q8_1", {32, 36}},    {"Q2_K", {256, 84}},    {"Q3_K", {256, 110}},
    {"Q4_K", {256, 144}},   {"Q5_K", {256, 176}},  {"Q6_K", {256, 210}},   {"Q8_K", {256, 292}},
    {"IQ2_XXS", {256, 66}}, {"IQ2_XS", {256, 74}}, {"IQ3_XXS", {256, 98}}, {"IQ1_S", {256, 50}},
    {"IQ4_NL", {32, 18}},   {"IQ3_S", {256, 110}}, {"IQ2_S", {256, 82}},   {"IQ4_XS", {256, 136}},
    {"IQ1_M", {256, 56}},   {"TQ1_0", {256, 54}},  {"TQ2_0", {256, 66}},   {"MXFP4", {32, 17}},
    {"NVFP4", {64, 36}},    {"Q1_0", {128, 18}},   {"Q2_0", {64, 18}},
});
static_assert(block_rows.size() == static_cast<std::size_t>(BlockFormat::q2_0) + 1);

struct UserName {
  std::string_view name;
  Dtype dtype;
};

// Short names that users type, and old names of torch.
constexpr auto user_names = std::to_array<UserName>({
    {"byte", Dtype::u8},
    {"cfloat", Dtype::c64},
    {"char", Dtype::i8},
    {"double", Dtype::f64},
    {"float", Dtype::f32},
    {"float4_e2m1fn_x2", Dtype::f4},  // torch's dtype with two values per element
    {"fp16", Dtype::f16},
    {"fp32", Dtype::f32},
    {"fp64", Dtype::f64},
    {"half", Dtype::f16},
    {"int", Dtype::i32},
    {"long", Dtype::i64},
    {"short", Dtype::i16},
});

bool same_letters(std::string_view a, std::string_view b) noexcept {
  return std::ranges::equal(
      a, b, [](unsigned char x, unsigned char y) { return std::tolower(x) == std::tolower(y); });
}

template <typename Rows>
std::optional<std::uint8_t> row_of(const Rows& rows, std::string_view name) noexcept {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (same_letters(rows[i].name, name)) return static_cast<std::uint8_t>(i);
  }
  return std::nullopt;
}

}  // namespace

std::optional<Dtype> parse_dtype_name(std::string_view name) noexcept {
  const auto* const found = std::ranges::find(dtype_table, name, &DtypeInfo::name);
  return found == dtype_table.end() ? std::nullopt : std::optional(found->dtype);
}

std::optional<Dtype> parse_dtype(std::string_view name) noexcept {
  constexpr std::string_view prefix = "torch.";
  if (same_letters(name.substr(0, prefix.size()), prefix)) name.remove_prefix(prefix.size());
  if (const auto found = row_of(dtype_table, name)) return static_cast<Dtype>(*found);
  for (const DtypeInfo& known : dtype_table) {
    if (!known.torch_name.empty() && same_letters(known.torch_name, name)) return known.dtype;
  }
  for (const UserName& known : user_names) {
    if (same_letters(known.name, name)) return known.dtype;
  }
  return std::nullopt;
}

BlockLayout layout(BlockFormat format) noexcept {
  return block_rows[static_cast<std::size_t>(format)].layout;
}

std::string_view Encoding::name() const noexcept {
  return is_dtype_ ? dtype_table[code_].name : block_rows[code_].name;
}

std::optional<Encoding> parse_encoding(std::string_view name) noexcept {
  if (const auto found = row_of(dtype_table, name)) return static_cast<Dtype>(*found);
  if (const auto found = row_of(block_rows, name)) return static_cast<BlockFormat>(*found);
  return std::nullopt;
}

std::optional<std::uint64_t> Encoding::byte_count(std::uint64_t elements) const noexcept {
  BlockLayout unit{};  // the smallest run of elements that fills whole bytes
  if (is_dtype_) {
    const std::uint32_t width = bits(dtype());
    const std::uint32_t shared = std::gcd(width, 8u);
    unit = {8 / shared, width / shared};
  } else {
    unit = block_rows[code_].layout;
  }
  if (elements % unit.elements != 0) return std::nullopt;
  return checked_mul(elements / unit.elements, unit.bytes);
}

}  // namespace loadstone

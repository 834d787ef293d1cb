#include "kernels/bnb_parts.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/checked.h"
#include "kernels/number.h"

namespace loadstone {

namespace {

// Returns count / size, rounded up.
constexpr std::uint64_t parts_of(std::uint64_t count, std::uint64_t size) noexcept {
  return count / size + (count % size != 0 ? 1u : 0u);
}

const BnbPart* find(std::span<const BnbPart> parts, std::string_view name) noexcept {
  const auto part = std::ranges::find(parts, name, &BnbPart::name);
  return part == parts.end() ? nullptr : &*part;
}

// The dtype and size that one component must have.
struct Rule {
  std::string_view part;
  Dtype dtype;
  std::uint64_t count;
  bool is_required = true;
};

std::optional<BnbProblem> check_rule(const Rule& rule, std::span<const BnbPart> parts) {
  const BnbPart* const part = find(parts, rule.part);
  const std::string expected = Shape({rule.count}).text();
  if (part == nullptr) {
    if (!rule.is_required) return std::nullopt;
    return BnbProblem{"q.scale_missing", std::string(rule.part),
                      "a component of the weight is missing", "nothing", expected};
  }
  if (part->dtype != rule.dtype) {
    return BnbProblem{"q.dtype", part->name, "a component of the weight has a different dtype",
                      std::string(name(part->dtype)), std::string(name(rule.dtype))};
  }
  if (part->shape.numel() != rule.count) {
    return BnbProblem{"q.scale_shape", part->name,
                      "the size of a component does not fit the shape of the weight",
                      part->shape.text(), expected};
  }
  return std::nullopt;
}

std::optional<BnbProblem> check_data(BnbEncoding encoding, const Shape& shape,
                                     const BnbSizes& sizes, std::span<const BnbPart> parts) {
  const BnbPart* const data = find(parts, "data");
  const bool is_int8 = encoding == BnbEncoding::int8;
  const std::string expected = std::to_string(sizes.data) + " bytes for " + shape.text();
  if (data == nullptr) {
    return BnbProblem{"q.scale_missing", "data", "the data of the weight is missing", "nothing",
                      expected};
  }
  if (is_int8 && data->dtype != Dtype::i8) {
    return BnbProblem{"q.dtype", "data", "a component of the weight has a different dtype",
                      std::string(name(data->dtype)), std::string(name(Dtype::i8))};
  }
  const auto count = data->shape.numel();
  const auto bytes = count ? Encoding(data->dtype).byte_count(*count) : std::nullopt;
  if (bytes != sizes.data) {
    return BnbProblem{"q.shape", "data", "the number of bytes does not fit the number of values",
                      bytes ? std::to_string(*bytes) + " bytes" : data->shape.text(), expected};
  }
  return std::nullopt;
}

std::optional<BnbProblem> check_names(std::span<const BnbPart> parts,
                                      std::initializer_list<std::string_view> known) {
  for (const BnbPart& part : parts) {
    if (std::ranges::find(known, part.name) != known.end()) continue;
    std::string expected;
    for (const std::string_view one : known) {
      expected += (expected.empty() ? "" : ", ") + std::string(one);
    }
    return BnbProblem{"q.scale_unused", part.name, "the encoding has no component of this name",
                      part.name, expected};
  }
  return std::nullopt;
}

std::optional<BnbProblem> check_rules(std::initializer_list<Rule> rules,
                                      std::span<const BnbPart> parts) {
  for (const Rule& rule : rules) {
    if (auto problem = check_rule(rule, parts)) return problem;
  }
  return std::nullopt;
}

}  // namespace

std::optional<BnbSizes> bnb_sizes(BnbEncoding encoding, const Shape& shape,
                                  std::uint64_t block_size) noexcept {
  const auto elements = shape.numel();
  // The factor 8 ensures that 4 bytes per decoded element cannot overflow later.
  if (!elements || !checked_mul(*elements, 8)) return std::nullopt;
  BnbSizes sizes{.elements = *elements};
  if (encoding == BnbEncoding::int8) {
    if (shape.rank() < 2) return std::nullopt;
    sizes.data = sizes.elements;
    sizes.absmax = 1;
    for (std::size_t dim = 0; dim + 1 < shape.rank(); ++dim) {
      const auto rows = checked_mul(sizes.absmax, shape[dim]);
      if (!rows) return std::nullopt;
      sizes.absmax = *rows;
    }
    return sizes;
  }
  sizes.data = parts_of(sizes.elements, 2);
  sizes.absmax = parts_of(sizes.elements, block_size);
  sizes.nested_absmax = parts_of(sizes.absmax, bnb_nested_block_size);
  return sizes;
}

std::optional<BnbProblem> check_bnb_parts(BnbEncoding encoding, const Shape& shape,
                                          std::uint64_t block_size,
                                          std::span<const BnbPart> parts) {
  const bool is_int8 = encoding == BnbEncoding::int8;
  if (!is_int8 && !is_bnb_block_size(block_size)) {
    return BnbProblem{"q.group_size", "data", "bitsandbytes does not support this block size",
                      std::to_string(block_size), "32, 64, 128, 256, 512, 1024, 2048 or 4096"};
  }
  const auto sizes = bnb_sizes(encoding, shape, block_size);
  if (!sizes) {
    return BnbProblem{"q.shape", "data", "a weight cannot have this shape", shape.text(),
                      is_int8 ? "two dimensions or more" : ""};
  }
  if (is_int8) {
    if (auto problem = check_names(parts, {"data", "absmax"})) return problem;
    if (auto problem = check_data(encoding, shape, *sizes, parts)) return problem;
    return check_rule({"absmax", Dtype::f32, sizes->absmax}, parts);
  }
  if (auto problem = check_names(
          parts, {"data", "absmax", "code", "nested_absmax", "nested_code", "nested_offset"})) {
    return problem;
  }
  if (auto problem = check_data(encoding, shape, *sizes, parts)) return problem;
  const bool is_nested = std::ranges::any_of(
      parts, [](const BnbPart& part) { return part.name.starts_with("nested_"); });
  if (auto problem = check_rules({{"absmax", is_nested ? Dtype::u8 : Dtype::f32, sizes->absmax},
                                  {"code", Dtype::f32, 16, false}},
                                 parts)) {
    return problem;
  }
  if (!is_nested) return std::nullopt;
  return check_rules({{"nested_absmax", Dtype::f32, sizes->nested_absmax},
                      {"nested_code", Dtype::f32, 256, false},
                      {"nested_offset", Dtype::f32, 1}},
                     parts);
}

std::optional<BnbProblem> check_bnb_scales(std::string_view part, const std::byte* scales,
                                           std::uint64_t count) {
  for (std::uint64_t i = 0; i < count; ++i) {
    const auto scale = number::load_raw<float>(scales + 4 * i);
    if (std::isfinite(scale)) continue;
    return BnbProblem{"q.nan", std::string(part), "a scale is not finite",
                      (scale != scale ? "NaN at " : "an infinity at ") + std::to_string(i),
                      "finite values"};
  }
  return std::nullopt;
}

std::optional<BnbProblem> check_bnb_code(Bnb4Code code, const std::byte* values) {
  const auto own = bnb4_values(code);
  for (std::size_t i = 0; i < own.size(); ++i) {
    const auto value = number::load_raw<float>(values + 4 * i);
    if (value == own[i]) continue;
    return BnbProblem{"q.code", "code", "the table of codes differs from the encoding's table",
                      std::to_string(value) + " at " + std::to_string(i), std::to_string(own[i])};
  }
  return std::nullopt;
}

std::optional<BnbProblem> check_bnb_nested_code(const std::byte* values) {
  const std::uint64_t count = bnb_dynamic_map().size();
  if (auto problem = check_bnb_scales("nested_code", values, count)) return problem;
  const auto at = [&](std::uint64_t i) { return number::load_raw<float>(values + 4 * i); };
  for (std::uint64_t i = 1; i < count; ++i) {
    if (at(i) > at(i - 1)) continue;
    return BnbProblem{"q.code", "nested_code", "the table of codes is not in ascending order",
                      std::to_string(at(i)) + " at " + std::to_string(i),
                      "more than " + std::to_string(at(i - 1))};
  }
  return std::nullopt;
}

}  // namespace loadstone

#include "convert/kept_blocks.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "codec/gguf/gguf.h"
#include "convert/container.h"

namespace loadstone {

namespace {

constexpr std::string_view bytes_kernel = "bytes";

// Units of the elements that a box counts, and what becomes of one.
struct Units {
  std::uint64_t before;
  std::uint64_t after;
};

// Counts whole blocks in other units. False: the box moves less than whole blocks.
bool recount(Box& box, Units units) {
  const auto is_whole = [&](std::uint64_t count) { return count % units.before == 0; };
  const auto counted = [&](std::uint64_t count) { return count / units.before * units.after; };
  if (!is_whole(box.source_offset) || !is_whole(box.target_offset)) return false;
  bool has_run = false;
  for (BoxDim& dim : box.dims) {
    if (dim.extent <= 1) continue;
    if (dim.source_stride == 1 && dim.target_stride == 1 && !has_run) {
      if (!is_whole(dim.extent)) return false;
      dim.extent = counted(dim.extent);
      has_run = true;
      continue;
    }
    if (!is_whole(dim.source_stride) || !is_whole(dim.target_stride)) return false;
    dim.source_stride = counted(dim.source_stride);
    dim.target_stride = counted(dim.target_stride);
  }
  if (!has_run) return false;
  std::erase_if(box.dims, [](const BoxDim& dim) { return dim.extent == 1; });
  box.source_offset = counted(box.source_offset);
  box.target_offset = counted(box.target_offset);
  return true;
}

// The one format that all boxes copy; nothing where there are several, or numbers.
template <typename SourceOf>
std::optional<BlockFormat> format_of(const Catalog& catalog, const std::vector<Box>& boxes,
                                     SourceOf source_of) {
  std::optional<BlockFormat> format;
  for (const Box& box : boxes) {
    const std::optional<std::uint32_t> source = source_of(box);
    if (!source || *source >= catalog.tensors().size()) return std::nullopt;
    const Encoding encoding = catalog.tensors()[*source].encoding;
    if (encoding.is_dtype()) return std::nullopt;
    if (format && *format != encoding.block_format()) return std::nullopt;
    format = encoding.block_format();
  }
  return format;
}

// The boxes of a recipe in bytes; nothing where it is not made of whole blocks of one format.
std::optional<std::vector<Box>> boxes_of_bytes(const Catalog& catalog, const TargetRecipe& recipe) {
  const auto format = source_blocks(catalog, recipe);
  const auto& extents = recipe.shape.extents();
  if (recipe.merge != nullptr) return std::nullopt;  // it is of numbers
  if (!format || extents.empty() || recipe.shape.numel() == 0u) return std::nullopt;
  const BlockLayout block = layout(*format);
  if (extents.back() % block.elements != 0) return std::nullopt;
  std::vector<Box> boxes = recipe.boxes;
  for (Box& box : boxes) {
    if (!recount(box, {block.elements, block.bytes})) return std::nullopt;
  }
  return boxes;
}

// Not thread-safe.
class Keeper {
 public:
  Keeper(const Catalog& catalog, Recipes& recipes) : catalog_(catalog), recipes_(recipes) {}

  void keep(TargetRecipe& recipe) {
    auto boxes = boxes_of_bytes(catalog_, recipe);
    if (!boxes) return;
    recipe.shape = shape_of_bytes(*source_blocks(catalog_, recipe), recipe.shape);
    for (Box& box : *boxes) box.decoding = decoding_of(box.source);
    recipe.boxes = *std::move(boxes);
    recipe.dtype = Dtype::u8;
  }

 private:
  std::uint32_t decoding_of(std::uint32_t source) {
    const auto [known, is_new] =
        decodings_.try_emplace(source, static_cast<std::uint32_t>(recipes_.decodings.size()));
    if (is_new) {
      recipes_.decodings.push_back(block_decoding(source, catalog_.tensors()[source], Dtype::u8));
    }
    return known->second;
  }

  const Catalog& catalog_;
  Recipes& recipes_;
  std::map<std::uint32_t, std::uint32_t> decodings_;  // by source
};

}  // namespace

std::optional<BlockFormat> source_blocks(const Catalog& catalog, const TargetRecipe& recipe) {
  return format_of(catalog, recipe.boxes, [](const Box& box) {
    return box.decoding == no_decoding ? std::optional(box.source) : std::nullopt;
  });
}

bool can_keep_blocks(const Catalog& catalog, const TargetRecipe& recipe) {
  return boxes_of_bytes(catalog, recipe).has_value();
}

void keep_blocks(const Catalog& catalog, const std::function<bool(const std::string&)>& wanted,
                 Recipes& recipes) {
  Keeper keeper(catalog, recipes);
  for (TargetRecipe& recipe : recipes.targets) {
    const bool is_floating = kind(recipe.dtype) == DtypeKind::floating;
    if (is_floating && !recipe.boxes.empty() && wanted(recipe.target)) keeper.keep(recipe);
  }
}

// Nothing for a target that keeps no blocks.
static std::optional<PlainForm> kept_blocks(const Plan& plan, const PlannedTarget& target) {
  if (target.dtype != Dtype::u8 || target.recipe.boxes.empty()) return std::nullopt;
  const auto source_of = [&](const Box& box) -> std::optional<std::uint32_t> {
    if (box.decoding >= plan.decodings.size()) return std::nullopt;
    const Decoding& decoding = plan.decodings[box.decoding];
    if (decoding.kernel != bytes_kernel || decoding.sources.empty()) return std::nullopt;
    return decoding.sources.front();
  };
  const auto format = format_of(*plan.catalog, target.recipe.boxes, source_of);
  auto extents = target.shape.extents();
  if (!format || extents.empty()) return std::nullopt;
  const BlockLayout block = layout(*format);
  if (extents.back() % block.bytes != 0) return std::nullopt;
  // Recipes of a caller may cut bytes anywhere.
  for (Box box : target.recipe.boxes) {
    if (!recount(box, {block.bytes, block.elements})) return std::nullopt;
  }
  extents.back() = extents.back() / block.bytes * block.elements;
  return PlainForm{*format, Shape(std::move(extents))};
}

PlainForm plain_form(const Conversion& conversion, const PlannedTarget& target) {
  const bool may_keep = container_of(conversion.format).holds_blocks();
  if (auto blocks = may_keep ? kept_blocks(conversion.plan, target) : std::nullopt) {
    return *std::move(blocks);
  }
  return {target.dtype, target.shape};
}

}  // namespace loadstone

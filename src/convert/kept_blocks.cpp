#include "convert/kept_blocks.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/text.h"
#include "boxes/dims.h"
#include "codec/block_grid.h"
#include "codec/decode.h"
#include "codec/fp4/blocks.h"
#include "codec/gguf/gguf.h"
#include "convert/separate_experts.h"
#include "convert/write/container.h"
#include "formats/gguf_shapes.h"
#include "loadstone/quantized_tensors.h"
#include "loadstone/tensor_reader.h"
#include "plan/fidelity.h"

namespace loadstone {

namespace {

constexpr std::string_view bytes_kernel = "bytes";

// Reasons why codes cannot stay in GGUF's blocks.
constexpr std::string_view mxfp4_needs = "do not fill whole MXFP4 blocks of GGUF";
constexpr std::string_view nvfp4_needs =
    "cannot stay in NVFP4 blocks of GGUF, which need rows of whole blocks of 64 values, a name "
    "that ends in '.weight', and a global scale that can be multiplied: a divisor needs an exact "
    "inverse in F32";

// A change of units: `before` units of a box become `after` units, such as elements and bytes of a
// block.
struct Units {
  std::uint64_t before;
  std::uint64_t after;
};

// Converts a box to other units. Returns false if the box copies parts of blocks.
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

// Returns the decoding that a box copies from; null if it copies from a source.
const Decoding* decoding_of(const std::vector<Decoding>& decodings, const Box& box) {
  return box.decoding < decodings.size() ? &decodings[box.decoding] : nullptr;
}

// Returns the block format that all boxes copy; nullopt if they copy several formats, or values.
template <typename FormatOf>
std::optional<BlockFormat> format_of(const std::vector<Box>& boxes, FormatOf format_of_box) {
  std::optional<BlockFormat> format;
  for (const Box& box : boxes) {
    const std::optional<BlockFormat> each = format_of_box(box);
    if (!each || (format && *format != *each)) return std::nullopt;
    format = each;
  }
  return format;
}

std::optional<BlockFormat> format_of_source(const Catalog& catalog, std::uint32_t source) {
  if (source >= catalog.tensors().size()) return std::nullopt;
  const Encoding encoding = catalog.tensors()[source].encoding;
  return encoding.is_dtype() ? std::nullopt : std::optional(encoding.block_format());
}

bool is_whole_source(const Catalog& catalog, const TargetRecipe& recipe) {
  if (recipe.boxes.size() != 1) return false;
  const Box& box = recipe.boxes.front();
  return box.source < catalog.tensors().size() && box.decoding == no_decoding &&
         catalog.tensors()[box.source].shape == recipe.shape &&
         copies_all(box, recipe.shape.numel().value_or(0));
}

// Returns the boxes of a recipe in bytes; nullopt if a box splits blocks of the format.
// `is_whole_source`: the recipe copies a whole tensor, so blocks may span its rows.
std::optional<std::vector<Box>> boxes_of_bytes(BlockFormat format, const TargetRecipe& recipe,
                                               bool is_whole_source) {
  const auto& extents = recipe.shape.extents();
  if (recipe.merge != nullptr) return std::nullopt;  // merges need values
  if (recipe.boxes.empty() || extents.empty() || recipe.shape.numel() == 0u) return std::nullopt;
  const BlockLayout block = layout(format);
  if (extents.back() % block.elements != 0 && !is_whole_source) return std::nullopt;
  std::vector<Box> boxes = recipe.boxes;
  for (Box& box : boxes) {
    if (!recount(box, {block.elements, block.bytes})) return std::nullopt;
  }
  return boxes;
}

}  // namespace

std::optional<BlockFormat> source_blocks(const Catalog& catalog, const TargetRecipe& recipe) {
  return format_of(recipe.boxes, [&](const Box& box) {
    return box.decoding == no_decoding ? format_of_source(catalog, box.source) : std::nullopt;
  });
}

std::optional<BlockFormat> blocks_to_keep(const Catalog& catalog,
                                          const std::vector<Decoding>& decodings,
                                          const TargetRecipe& recipe) {
  const auto format = format_of(recipe.boxes, [&](const Box& box) -> std::optional<BlockFormat> {
    if (box.decoding == no_decoding) return format_of_source(catalog, box.source);
    const Decoding* const decoding = decoding_of(decodings, box);
    if (decoding == nullptr || !mxfp4_blocks_of(*decoding, catalog.tensors())) return {};
    return BlockFormat::mxfp4;
  });
  const bool is_whole = is_whole_source(catalog, recipe);
  return format && boxes_of_bytes(*format, recipe, is_whole) ? format : std::nullopt;
}

void keep_blocks(const Catalog& catalog, const std::function<bool(const TargetRecipe&)>& wanted,
                 Recipes& recipes) {
  // Decodings that yield bytes, by their source and by the decoding that they replace.
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::uint32_t> known;
  const auto bytes_of = [&](const Box& box) {
    const auto [made, is_new] = known.try_emplace(
        {box.source, box.decoding}, static_cast<std::uint32_t>(recipes.decodings.size()));
    if (is_new) {
      recipes.decodings.push_back(
          box.decoding == no_decoding
              ? block_decoding(box.source, catalog.tensors()[box.source], Dtype::u8)
              : *mxfp4_blocks_of(recipes.decodings[box.decoding], catalog.tensors()));
    }
    return made->second;
  };
  for (TargetRecipe& recipe : recipes.targets) {
    const bool is_floating = kind(recipe.dtype) == DtypeKind::floating;
    if (!is_floating || recipe.boxes.empty() || !wanted(recipe)) continue;
    const auto format = blocks_to_keep(catalog, recipes.decodings, recipe);
    if (!format) continue;
    recipe.boxes = *boxes_of_bytes(*format, recipe, is_whole_source(catalog, recipe));
    recipe.shape = shape_of_bytes(*format, recipe.shape);
    for (Box& box : recipe.boxes) box.decoding = bytes_of(box);
    recipe.dtype = Dtype::u8;
  }
}

// Returns true if a box copies decoded values of NVFP4.
static bool decodes_nvfp4(const Catalog& catalog, const Box& box) {
  const QuantizedTensor* const quantized =
      box.decoding == no_decoding ? nullptr : catalog.quantized().find(box.source);
  return quantized != nullptr && quantized->encoding == "nvfp4";
}

// Returns true if GGUF can store the global scale of a tensor: GGUF multiplies by it, but some
// styles store a divisor.
static bool has_factor(const std::shared_ptr<const Catalog>& catalog, const Box& box) {
  const Decoding& decoding = catalog->quantized().find(box.source)->decoding;
  const DecodeKernel* const kernel = find_decode_kernel(decoding.kernel);
  if (kernel == nullptr || !kernel->divides_by_outer) return true;
  TensorReader reader(catalog, catalog->tensors()[decoding.sources.back()].name, Dtype::f32);
  std::vector<float> divisors(reader.elements());
  reader.read(0, divisors.size(), std::as_writable_bytes(std::span(divisors)));
  return std::ranges::all_of(divisors, [](float each) { return same_factor(each).has_value(); });
}

std::map<std::string, Quantization, std::less<>> keep_nvfp4(
    const std::shared_ptr<const Catalog>& catalog, const Recipes& recipes) {
  std::map<std::string, Quantization, std::less<>> kept;
  Plan plan;
  plan.catalog = catalog;
  plan.decodings = recipes.decodings;
  Fidelities fidelities(plan);
  for (const TargetRecipe& recipe : recipes.targets) {
    const auto may_stay = [&](const Box& box) {
      return decodes_nvfp4(*catalog, box) && has_factor(catalog, box);
    };
    const bool has_scale_name = recipe.target.ends_with(".weight");
    if (!has_scale_name || recipe.boxes.empty() || !std::ranges::all_of(recipe.boxes, may_stay)) {
      continue;
    }
    PlannedTarget target;
    target.shape = recipe.shape;
    target.recipe.boxes = recipe.boxes;
    const Quantization same = {.encoding = "nvfp4-gguf"};
    if (fidelities.of(std::move(target), same) != Fidelity::lossy)
      kept.emplace(recipe.target, same);
  }
  return kept;
}

// Returns the companions of all blocks of the first checkpoint that the output does not keep.
static std::vector<std::uint32_t> companions_of_blocks(const Catalog& catalog,
                                                       const std::vector<bool>& kept) {
  std::vector<std::uint32_t> found;
  for (const QuantizedTensor& each : catalog.quantized().tensors()) {
    if (each.data >= catalog.tensors_of(0).end || kept[each.data]) continue;
    if (catalog.tensors()[each.data].encoding.is_dtype()) continue;
    for (const std::uint32_t companion : each.companions()) found.push_back(companion);
    found.insert(found.end(), each.unneeded.begin(), each.unneeded.end());
  }
  return found;
}

std::vector<std::uint32_t> drop_block_scales(const Catalog& catalog, Recipes& recipes) {
  std::vector<bool> kept(catalog.tensors().size(), false);
  for (const Decoding& decoding : recipes.decodings) {
    if (decoding.kernel == bytes_kernel) kept.at(decoding.sources.front()) = true;
  }
  const std::vector<std::uint32_t> dropped = companions_of_blocks(catalog, kept);
  std::vector<bool> marks(catalog.tensors().size(), false);
  for (const std::uint32_t source : dropped) marks[source] = true;
  const auto is_dropped = [&](const Box& box) {
    return box.decoding == no_decoding && marks[box.source];
  };
  if (!dropped.empty()) {
    std::erase_if(recipes.targets, [&](const TargetRecipe& recipe) {
      return !recipe.boxes.empty() && std::ranges::all_of(recipe.boxes, is_dropped);
    });
  }
  return dropped;
}

// Returns the format of the blocks whose bytes a decoding yields; nullopt if it yields values.
static std::optional<BlockFormat> format_given(const Catalog& catalog, const Decoding& decoding) {
  if (gives_mxfp4_blocks(decoding)) return BlockFormat::mxfp4;
  if (decoding.kernel != bytes_kernel || decoding.sources.empty()) return std::nullopt;
  return format_of_source(catalog, decoding.sources.front());
}

// Returns the original shape of a kept tensor that files store folded; null if they store it
// unfolded.
static const Shape* unfolded_shape(const Plan& plan, const PlannedTarget& target) {
  if (target.dtype != Dtype::u8 || target.recipe.boxes.size() != 1) return nullptr;
  const Decoding* const made = decoding_of(plan.decodings, target.recipe.boxes.front());
  if (made == nullptr || made->kernel != bytes_kernel) return nullptr;
  const TensorInfo& source = plan.catalog->tensors()[made->sources.front()];
  return has_cut_blocks(source.encoding, source.shape) ? &source.shape : nullptr;
}

// Returns the stored type of a target that keeps blocks; nullopt if it keeps no blocks.
static std::optional<StoredType> kept_blocks(const Plan& plan, const PlannedTarget& target) {
  if (target.dtype != Dtype::u8 || target.recipe.boxes.empty()) return std::nullopt;
  const auto format = format_of(target.recipe.boxes, [&](const Box& box) {
    const Decoding* const decoding = decoding_of(plan.decodings, box);
    return decoding != nullptr ? format_given(*plan.catalog, *decoding) : std::nullopt;
  });
  auto extents = target.shape.extents();
  if (!format || extents.empty()) return std::nullopt;
  const BlockLayout block = layout(*format);
  if (extents.back() % block.bytes != 0) return std::nullopt;
  // The caller's recipes may split blocks anywhere.
  for (Box box : target.recipe.boxes) {
    if (!recount(box, {block.bytes, block.elements})) return std::nullopt;
  }
  extents.back() = extents.back() / block.bytes * block.elements;
  Shape shape(std::move(extents));
  const bool is_folded = unfolded_shape(plan, target) != nullptr;
  return StoredType{*format, is_folded ? folded_shape(*format, shape) : shape};
}

StoredType stored_type(const Conversion& conversion, const PlannedTarget& target) {
  const bool may_keep = container_of(conversion.format).holds_blocks();
  if (auto blocks = may_keep ? kept_blocks(conversion.plan, target) : std::nullopt) {
    return *std::move(blocks);
  }
  return {target.dtype, target.shape};
}

void add_folded_shapes(Conversion& conversion) {
  for (const PlannedTarget& target : conversion.plan.targets) {
    const Shape* const shape = unfolded_shape(conversion.plan, target);
    if (shape == nullptr) continue;
    conversion.metadata.insert_or_assign(std::string(gguf_shape_prefix) + target.name,
                                         gguf_shape_value(*shape));
  }
}

bool keeps_source_codes(const Conversion& conversion) {
  return !conversion.options.contains("quantize");
}

std::vector<RepackedTensor> repacked_blocks(const Conversion& conversion) {
  std::vector<RepackedTensor> repacked;
  const Plan& plan = conversion.plan;
  for (const PlannedTarget& target : plan.targets) {
    const auto is_packed = [&](const Box& box) {
      const Decoding* const decoding = decoding_of(plan.decodings, box);
      return decoding != nullptr && gives_mxfp4_blocks(*decoding);
    };
    const bool is_kept = target.quantization && keeps_source_codes(conversion);
    if (!is_kept && !std::ranges::any_of(target.recipe.boxes, is_packed)) continue;
    RepackedTensor& tensor = repacked.emplace_back();
    tensor.name = target.name;
    tensor.shape = stored_type(conversion, target).shape;
    tensor.quantization.encoding = is_kept ? target.quantization->encoding : "mxfp4-gguf";
    tensor.targets = {target.name};
  }
  return repacked;
}

std::vector<Finding> check_numbers(const Plan& plan, Severity severity, SeparateExperts& separate) {
  std::vector<Finding> findings;
  for (const PlannedTarget& target : plan.targets) {
    const auto is_decoded = [&](const Box& box) {
      const Decoding* const decoding = decoding_of(plan.decodings, box);
      return decoding != nullptr && mxfp4_blocks_of(*decoding, plan.catalog->tensors());
    };
    const std::vector<Box>& boxes = target.recipe.boxes;
    const bool is_nvfp4 = std::ranges::any_of(
        boxes, [&](const Box& box) { return decodes_nvfp4(*plan.catalog, box); });
    if (target.quantization || (!is_nvfp4 && std::ranges::none_of(boxes, is_decoded))) continue;
    findings.push_back(
        {.severity = severity,
         .code = "convert.lossy",
         .target = target.name,
         .message = fmt::format("the codes of '{}' {} {}", printable(target.name),
                                target.shape.text(), is_nvfp4 ? nvfp4_needs : mxfp4_needs),
         .suggestion =
             fmt::format("{}decode them with --dequantize, or choose a type with --quantize",
                         separate.keep_blocks(target) ? separate.advice() + ", " : std::string())});
  }
  return findings;
}

}  // namespace loadstone

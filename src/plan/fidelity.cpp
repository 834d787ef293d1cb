#include "plan/fidelity.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "boxes/block_boxes.h"
#include "codec/decode.h"
#include "codec/encode.h"
#include "codec/gguf/gguf.h"
#include "codec/tensor_table.h"

namespace loadstone {

namespace {

std::optional<BlockGrid> source_grid(const Plan& plan, const Box& box) {
  const auto& tensors = plan.catalog->tensors();
  const bool is_stored = box.decoding == no_decoding;
  if (is_stored && tensors[box.source].encoding.is_dtype()) return std::nullopt;
  PreparedDecoder form;
  const auto problem =
      check_decoding(tensors,
                     is_stored ? block_decoding(box.source, tensors[box.source], Dtype::f32)
                               : plan.decodings[box.decoding],
                     form);
  return problem ? std::nullopt : form.decoder->grid();
}

const Shape& source_shape(const Plan& plan, const Box& box) {
  return box.decoding == no_decoding ? plan.catalog->tensors()[box.source].shape
                                     : plan.decodings[box.decoding].shape;
}

// Returns true if all values of a float dtype are values of another.
bool holds(Dtype to, Dtype from) noexcept {
  if (to == from) return true;
  const FloatFormat& wide = dtype_info(to).format;
  const FloatFormat& narrow = dtype_info(from).format;
  return narrow.digits > 0 && wide.digits >= narrow.digits && wide.largest >= narrow.largest &&
         wide.smallest <= narrow.smallest;
}

// Returns true if the dtype represents all products of codes and scales. Decoders compute in F32.
bool holds_products(Dtype to, const std::optional<BlockGrid>& grid) noexcept {
  if (to == Dtype::f32 || to == Dtype::f64) return true;
  if (to != Dtype::bf16 || !grid || grid->scale != Dtype::f8_e8m0) return false;
  // The smallest scale is 2^-127, and the smallest BF16 value is 2^-133.
  return std::ranges::all_of(grid->codes,
                             [](float code) { return code == 0 || std::abs(code) >= 0x1p-6F; });
}

}  // namespace

const Fidelities::Relation& Fidelities::relation(const BlockGrid& to, const BlockGrid& from) {
  const auto key = [](const BlockGrid& grid) {
    return Codes(grid.codes.data(), grid.codes.data() + grid.codes.size());
  };
  const auto [found, is_new] = relations_.try_emplace({key(to), key(from)});
  if (is_new && contains_codes(to, from)) found->second = {true, has_headroom(to, from)};
  return found->second;
}

Fidelity Fidelities::of_codes(const PlannedTarget& target) {
  const auto to = exact_grid(*target.quantization, target.shape, target.dtype);
  if (!to) return Fidelity::lossy;
  const bool shares = !target.quantization->group.empty() ||
                      (target.recipe.boxes.size() > 1 && to->scale == Dtype::f8_e4m3);
  Fidelity worst = Fidelity::exact;
  for (const Box& box : target.recipe.boxes) {
    auto from = source_grid(plan_, box);
    if (!from) return Fidelity::lossy;
    if (!relation(*to, *from).is_contained) {
      from->codes = from->symmetric_codes;
      if (!relation(*to, *from).is_contained) return Fidelity::lossy;
      worst = Fidelity::exact_where_scales_fit;
    }
    const bool is_inside =
        blocks_are_within(box, source_shape(plan_, box), *from, target.shape, *to);
    if (!is_inside && !relation(*to, *from).has_headroom) return Fidelity::lossy;
    worst = std::max(worst, fidelity_of_scales(*from, *to, is_inside, shares));
  }
  return worst;
}

Fidelity Fidelities::of_floats(const PlannedTarget& target) const {
  const bool is_held = std::ranges::all_of(target.recipe.boxes, [&](const Box& box) {
    const Encoding stored = plan_.catalog->tensors()[box.source].encoding;
    const DecodeKernel* const kernel =
        box.decoding == no_decoding ? nullptr
                                    : find_decode_kernel(plan_.decodings[box.decoding].kernel);
    if (kernel != nullptr && kernel->makes_bytes) return true;  // codes that are moved
    const bool is_float = box.decoding == no_decoding && stored.is_dtype();
    return is_float ? holds(target.dtype, stored.dtype())
                    : holds_products(target.dtype, source_grid(plan_, box));
  });
  return is_held ? Fidelity::exact : Fidelity::lossy;
}

Fidelity Fidelities::of(const PlannedTarget& target) {
  if (target.recipe.merge != nullptr) return Fidelity::lossy;
  return target.quantization ? of_codes(target) : of_floats(target);
}

Fidelity Fidelities::of(PlannedTarget target, Quantization quantization) {
  target.dtype = Dtype::f32;  // conversions decode codes to F32 before they encode them again
  quantization.exact_first = quantization.exact_first.value_or(true);
  target.quantization = std::move(quantization);
  return of(target);
}

}  // namespace loadstone

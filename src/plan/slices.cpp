// Slices the recipes of targets that the live model has only in part. The recipes are first
// made for whole tensors.
#include <fmt/format.h>

#include <algorithm>

#include "base/text.h"
#include "boxes/copy_box.h"
#include "boxes/slice.h"
#include "plan/planner.h"

namespace loadstone {

namespace {

// Slices a constant.
Constant slice_constant(const Recipe& recipe, Dtype dtype, const std::vector<Box>& boxes,
                        std::uint64_t elements) {
  const std::size_t bytes = bits(dtype) / 8;
  std::vector<std::byte> made(elements * bytes);
  for (const Box& box : boxes) {
    copy_box(box.dims, cast_between(dtype, dtype),
             recipe.constant->data() + box.source_offset * bytes, bytes,
             made.data() + box.target_offset * bytes, bytes);
  }
  return std::make_shared<const std::vector<std::byte>>(std::move(made));
}

// Slices the recipe. Returns the reason if that is impossible, otherwise an empty string.
std::string slice_recipe(const Target& target, PlannedTarget& planned) {
  Recipe& recipe = planned.recipe;
  if (planned.quantization) return "loadstone cannot quantize a part of a tensor during the load";
  if (recipe.merge != nullptr)
    return "loadstone cannot merge an adapter into a part of a tensor during the load";
  if (recipe.origin != Origin::checkpoint && recipe.origin != Origin::constant) return {};
  const bool is_constant = recipe.origin == Origin::constant;
  if (is_constant && bits(planned.dtype) % 8 != 0) {
    return fmt::format("its value of dtype {} has elements smaller than a byte",
                       name(planned.dtype));
  }
  const std::uint64_t elements = target.shape.numel().value_or(0);
  std::vector<Box> boxes = recipe.boxes;
  if (is_constant) boxes = {{.dims = {{elements, 1, 1}}}};
  if (const auto misfit = slice_boxes(boxes, target.shape, *target.slice)) return misfit->message;
  const auto is_whole = [&](const Box& box) { return moves_whole_bytes(box, bits(planned.dtype)); };
  if (!std::ranges::all_of(boxes, is_whole)) {
    return fmt::format("the part begins or ends inside a byte of {}", name(planned.dtype));
  }
  const std::uint64_t kept = target.slice->shape.numel().value_or(0);
  if (is_constant) {
    recipe.constant = slice_constant(recipe, planned.dtype, boxes, kept);
    return {};
  }
  recipe.boxes = std::move(boxes);
  const auto is_decoded = [](const Box& box) { return box.decoding != no_decoding; };
  if (kept == 0 && std::ranges::any_of(recipe.boxes, is_decoded)) {
    recipe.boxes.clear();  // nothing to decode
    recipe.origin = Origin::constant;
    recipe.constant = std::make_shared<const std::vector<std::byte>>();
  }
  return {};
}

}  // namespace

void Planner::take_slices() {
  std::size_t count = 0;
  std::uint64_t whole_bytes = 0;
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < plan_.targets.size(); ++i) {
    const Target& target = skeleton_.targets[i];
    if (!target.slice) continue;
    PlannedTarget& planned = plan_.targets[i];
    planned.slice_begin = target.slice->begin;
    planned.slice_groups = target.slice->groups;
    if (roots_[i] == i) {
      const std::string obstacle = slice_recipe(target, planned);
      ++count;
      whole_bytes += planned.byte_count();
      planned.shape = target.slice->shape;
      bytes += planned.byte_count();
      if (obstacle.empty()) continue;
      fail(i, {.code = "plan.slice",
               .message =
                   fmt::format("the model contains only {} of '{}', {}: {}", target.slice->text(),
                               printable(target.name), target.shape.text(), obstacle),
               .found = target.slice->text()});
    }
    planned.shape = target.slice->shape;
  }
  if (count == 0) return;
  add({.severity = Severity::info,
       .code = "plan.slice",
       .message = fmt::format("this rank loads its part of {}: {} of {}",
                              counted(count, "distributed tensor"), human_bytes(bytes),
                              human_bytes(whole_bytes))});
}

}  // namespace loadstone

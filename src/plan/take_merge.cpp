// Targets whose recipes are merges.
#include <fmt/format.h>

#include "base/text.h"
#include "boxes/cast_kind.h"
#include "boxes/merges.h"
#include "plan/planner.h"

namespace loadstone {

// Sums are of F32, so what they read is never rounded for the sake of a target that reads it too.
void Planner::keep_numbers(const TargetRecipe& recipe) {
  for_each_box(recipe, [&](const Box& box) {
    if (box.decoding != no_decoding) rounded_[box.decoding].try_emplace(Dtype::f32, box.decoding);
  });
}

// The sum is computed in F32 and rounded once, whatever its terms are. False: the target has
// failed.
bool Planner::take_merge(std::size_t root, const std::shared_ptr<const Merge>& merge) {
  const Target& target = skeleton_.targets[root];
  PlannedTarget& planned = plan_.targets[root];
  auto found = check_merge(*merge, target.shape.numel().value_or(0), plan_.catalog->tensors(),
                           plan_.decodings);
  const CastKind way = cast_kind(Dtype::f32, planned.dtype);
  if (!found && way != CastKind::same && way != CastKind::cast) {
    found = MergeDefect{"dtype",
                        {.message = "a sum is of floats of whole bytes",
                         .found = std::string(name(planned.dtype)),
                         .expected = {},
                         .box = {}}};
  }
  if (!found) {
    planned.recipe.merge = merge;
    return true;
  }
  fail(root, {.code = "plan.box",
              .message = fmt::format("the merge of '{}' does not fit: {}: {}",
                                     printable(target.name), found->field, found->defect.message),
              .found = std::move(found->defect.found),
              .expected = std::move(found->defect.expected)});
  return false;
}

}  // namespace loadstone

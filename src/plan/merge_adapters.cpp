// Merges adapters into the targets of a model, regardless of the targets' origins.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/text.h"
#include "boxes/cast_kind.h"
#include "boxes/decodings.h"
#include "boxes/merges.h"
#include "codec/encode.h"
#include "loadstone/quantized_tensors.h"
#include "plan/adapters.h"
#include "plan/planner.h"

namespace loadstone {

namespace {

// Shifts the decoding indices in an adapter's boxes, because the adapter's decodings were appended
// to those of the plan.
void move_decodings(std::vector<Box>& boxes, std::uint32_t by) {
  for (Box& box : boxes) {
    if (box.decoding != no_decoding) box.decoding += by;
  }
}

void move_decodings(Merge& merge, std::uint32_t by) {
  for (Term& term : merge.terms) {
    move_decodings(term.boxes, by);
    if (!term.low_rank) continue;
    move_decodings(term.low_rank->left, by);
    move_decodings(term.low_rank->right, by);
    move_decodings(term.low_rank->magnitudes, by);
  }
}

// Returns the encoding of a target's codes, such as "Q4_K", or the target's dtype.
std::string stored_encoding(const Catalog& catalog, const PlannedTarget& target) {
  if (target.recipe.boxes.empty() || kind(target.dtype) == DtypeKind::floating) {
    return std::string(name(target.dtype));
  }
  const std::uint32_t source = target.recipe.boxes.front().source;
  const QuantizedTensor* const quantized = catalog.quantized().find(source);
  return quantized != nullptr ? quantized->encoding
                              : std::string(catalog.tensors()[source].encoding.name());
}

}  // namespace

// Returns the reason why an adapter cannot change the target; empty if it can. Also empty for a
// target without a value, which already has a finding.
std::string Planner::obstacle_of(std::size_t root) const {
  const PlannedTarget& planned = plan_.targets[root];
  const Origin origin = planned.recipe.origin;
  if (origin == Origin::excluded) return {};
  if (origin != Origin::checkpoint) {
    return fmt::format("its value does not come from the checkpoint, but has origin {}",
                       name(origin));
  }
  const bool is_number = std::ranges::all_of(planned.recipe.boxes, [&](const Box& box) {
    const Encoding encoding = encoding_of(box, plan_.catalog->tensors(), plan_.decodings);
    const bool is_plain = box.decoding == no_decoding && is_plain_fp8(*plan_.catalog, box.source);
    return is_plain || (encoding.is_dtype() && is_merged_dtype(encoding.dtype()));
  });
  if (is_number && is_merged_dtype(planned.dtype)) return {};
  return fmt::format(
      "the model stores it as {}, but an adapter can be added only to floats of 16 bits or more; "
      "merge the adapter into a file first: 'loadstone merge BASE --lora ADAPTER -o TARGET', or "
      "loadstone.merge(BASE, TARGET, lora=ADAPTER)",
      stored_encoding(*plan_.catalog, planned));
}

// Returns the checkpoint's name for a target with one whole source, otherwise an empty string.
std::string Planner::source_name(std::size_t root) const {
  const PlannedTarget& planned = plan_.targets[root];
  if (planned.recipe.origin != Origin::checkpoint || planned.recipe.boxes.size() != 1) return {};
  const Box& box = planned.recipe.boxes.front();
  const bool is_straight = box.source_offset == 0 && box.target_offset == 0 &&
                           box.dims.size() <= 1 &&
                           std::ranges::all_of(box.dims, [](const BoxDim& dim) {
                             return dim.source_stride == 1 && dim.target_stride == 1;
                           });
  const TensorInfo& source = plan_.catalog->tensors()[box.source];
  const Shape& shape =
      box.decoding == no_decoding ? source.shape : plan_.decodings[box.decoding].shape;
  if (!is_straight || shape != planned.shape) return {};
  const QuantizedTensor* const quantized = plan_.catalog->quantized().find(box.source);
  return quantized == nullptr ? source.name : quantized->name;
}

MergeDrafts Planner::drafts() const {
  MergeDrafts drafts;
  for (std::size_t i = 0; i < roots_.size(); ++i) {
    const std::string& name = skeleton_.targets[i].name;
    const std::string& root = skeleton_.targets[roots_[i]].name;
    if (!is_saved(roots_[i])) continue;
    if (roots_[i] != i && options_.tie == TiePolicy::keep) {
      drafts.other_names.emplace(name, root);
      continue;
    }
    MergeDraft& draft = drafts.items[name];
    draft.source.shape = plan_.targets[i].shape;
    draft.source.dtype = plan_.targets[roots_[i]].dtype;
    draft.source.is_number = true;
    draft.obstacle = obstacle_of(roots_[i]);
  }
  for (std::size_t i = 0; i < roots_.size(); ++i) {
    if (roots_[i] != i || !is_saved(i)) continue;
    std::string name = source_name(i);
    if (name.empty() || drafts.contains(name)) continue;  // names of the model have priority
    drafts.other_names.emplace(std::move(name), skeleton_.targets[i].name);
  }
  return drafts;
}

// Returns the ties whose names have separate drafts.
std::vector<DraftTie> Planner::ties_of(const MergeDrafts& drafts) const {
  std::vector<DraftTie> ties;
  for (std::size_t i = 0; i < roots_.size(); ++i) {
    if (roots_[i] != i || members(i).empty() || !is_saved(i)) continue;
    DraftTie tie;
    for (const std::size_t member : members(i)) {
      const std::string& name = skeleton_.targets[member].name;
      if (drafts.items.contains(name)) tie.push_back(name);
    }
    if (tie.size() > 1) ties.push_back(std::move(tie));
  }
  return ties;
}

void Planner::merge_adapters() {
  if (options_.adapters.empty()) return;
  MergeDrafts base = drafts();
  MergeNumbers numbers(plan_.catalog);
  const AdapterPlaces places(base.names());
  for (std::uint32_t i = 0; i < options_.adapters.size(); ++i) {
    add_adapter(*plan_.catalog, i + 1, options_.adapters[i], places, numbers, base, plan_.findings);
  }
  report_idle_patterns(*plan_.catalog, 1, options_.adapters, plan_.findings);
  const auto decodings_begin = static_cast<std::uint32_t>(plan_.decodings.size());
  for (Decoding& decoding : numbers.take_decodings()) {
    plan_.decodings.push_back(std::move(decoding));
  }
  split_ties(split_roots(*plan_.catalog, ties_of(base), base, plan_.findings));
  settle_checks(base);
  for (const auto& [name, draft] : base.items) {
    const std::size_t target = index_.at(name);
    const auto root = base.items.find(skeleton_.targets[roots_[target]].name);
    if (roots_[target] == target || !draft.is_adapted() || root == base.items.end()) continue;
    root->second.add_same(draft);
  }
  for (auto& [name, draft] : base.items) {
    const std::size_t root = index_.at(name);
    if (!draft.is_adapted() || roots_[root] != root ||
        plan_.targets[root].recipe.origin != Origin::checkpoint)
      continue;
    take_draft(root, std::move(draft), decodings_begin);
  }
}

void Planner::take_draft(std::size_t root, MergeDraft draft, std::uint32_t decodings_begin) {
  Recipe& recipe = plan_.targets[root].recipe;
  recipe.decided_by = std::move(draft.decided_by);
  if (draft.is_replaced) {
    recipe.boxes = std::move(draft.boxes);
    move_decodings(recipe.boxes, decodings_begin);
    if (!check_dtypes(root, nullptr)) return;
  }
  if (draft.merge.terms.empty() || plan_.targets[root].shape.numel() == 0u) return;
  move_decodings(draft.merge, decodings_begin);
  decode_to_f32(recipe.boxes);
  static_cast<void>(take_merge(root, std::make_shared<const Merge>(std::move(draft.merge))));
}

// Makes the boxes read F32 decodings, because sums are computed in F32. The original decodings are
// kept, because other targets may use them in a narrower dtype.
void Planner::decode_to_f32(std::vector<Box>& boxes) {
  for (Box& box : boxes) {
    if (box.decoding == no_decoding || plan_.decodings[box.decoding].dtype == Dtype::f32) continue;
    const auto [known, is_new] = f32_decodings_.try_emplace(
        box.decoding, static_cast<std::uint32_t>(plan_.decodings.size()));
    if (is_new) {
      Decoding wide = plan_.decodings[box.decoding];
      wide.dtype = Dtype::f32;
      plan_.decodings.push_back(std::move(wide));
    }
    box.decoding = known->second;
  }
}

// Lets encoders search for exact scales of decoded values, and keeps these values in F32, because
// a narrower dtype may round them.
void Planner::encode_exactly() {
  for (PlannedTarget& planned : plan_.targets) {
    std::vector<Box>& boxes = planned.recipe.boxes;
    if (!planned.quantization || planned.recipe.merge != nullptr || boxes.empty()) continue;
    if (!planned.quantization->exact_first.value_or(true)) continue;
    const bool are_codes =
        std::ranges::all_of(boxes, [](const Box& box) { return box.decoding != no_decoding; });
    QuantizedLayout form;
    const auto problem =
        prepare_quantization(*planned.quantization, planned.shape, Dtype::f32, form);
    if (!are_codes || problem || !can_be_exact_first(form)) continue;
    planned.quantization->exact_first = true;
    planned.dtype = Dtype::f32;
    decode_to_f32(boxes);
  }
}

// Keeps the decodings of a merge in F32, because sums are computed in F32 and their inputs must not
// be rounded for another target.
void Planner::keep_numbers(const TargetRecipe& recipe) {
  for_each_box(recipe, [&](const Box& box) {
    if (box.decoding != no_decoding) rounded_[box.decoding].try_emplace(Dtype::f32, box.decoding);
  });
}

// The sum is computed in F32 and rounded once, whatever the dtypes of its terms are. Returns false
// if the target has failed.
bool Planner::take_merge(std::size_t root, const std::shared_ptr<const Merge>& merge) {
  const Target& target = skeleton_.targets[root];
  PlannedTarget& planned = plan_.targets[root];
  auto found = check_merge(*merge, target.shape.numel().value_or(0), plan_.catalog->tensors(),
                           plan_.decodings);
  const CastKind way = cast_kind(Dtype::f32, planned.dtype);
  if (!found && way != CastKind::same && way != CastKind::cast) {
    found = Problem{"the target of a merge must have a float dtype with whole bytes",
                    std::string(name(planned.dtype)),
                    {},
                    "dtype"};
  }
  if (!found) {
    planned.recipe.merge = merge;
    return true;
  }
  return fail(root, with_problem({.code = "plan.box",
                                  .message = fmt::format("the merge of '{}' does not fit",
                                                         printable(target.name))},
                                 *found));
}

}  // namespace loadstone

// Determines the recipe of each target, or the problem that prevents one.
#include <fmt/format.h>

#include <algorithm>
#include <unordered_set>

#include "base/text.h"
#include "boxes/cast_kind.h"
#include "boxes/check_boxes.h"
#include "boxes/decodings.h"
#include "catalog/deepspeed.h"
#include "codec/encode.h"
#include "kernels/quantize.h"
#include "plan/origins.h"
#include "plan/planner.h"

namespace loadstone {

// Returns true if checkpoints store the target under its own name or under the name of a tie.
bool Planner::is_saved(std::size_t root) const {
  const auto saved = [&](std::size_t i) {
    const TargetKind kind = skeleton_.targets[i].kind;
    return kind == TargetKind::parameter || kind == TargetKind::persistent_buffer;
  };
  return saved(root) || std::ranges::any_of(members(root), saved);
}

void Planner::resolve(std::size_t root) {
  const Target& target = skeleton_.targets[root];
  PlannedTarget& planned = plan_.targets[root];
  if (!is_saved(root)) {
    resolve_unsaved(root);
    return;
  }
  Produced* const produced = choose_produced(root);
  std::uint32_t culprit = 0;
  const SourceUse taking =
      produced == nullptr ? SourceUse::plain : choose_source_use(target, *produced, culprit);
  planned.dtype = final_dtype(target, produced, taking);
  if (!Encoding(planned.dtype).byte_count(target.shape.numel().value_or(0))) {
    fail(root, {.code = "plan.shape",
                .message = fmt::format("'{}': the size as {} does not fit in 64 bits",
                                       printable(target.name), name(planned.dtype)),
                .found = target.shape.text()});
    return;
  }
  if (produced == nullptr) {
    resolve_missing(root);
    const Origin origin = planned.recipe.origin;
    if (origin != Origin::excluded && origin != Origin::kept) quantize(root);
  } else {
    if (refuse_gaps(root, *produced) || refuse_codes(root, *produced, taking, culprit)) return;
    planned.recipe.origin = Origin::checkpoint;
    if (!find_boxes(root, *produced, taking) || !check_dtypes(root, produced)) return;
    if (!refuse_other_names(root, *produced)) quantize(root);
  }
}

void Planner::resolve_unsaved(std::size_t root) {
  const Target& target = skeleton_.targets[root];
  Recipe& recipe = plan_.targets[root].recipe;
  const auto has_value = [&](std::size_t i) { return skeleton_.targets[i].has_value; };
  if (has_value(root) || std::ranges::any_of(members(root), has_value)) {
    recipe.origin = Origin::constructor;
    return;
  }
  recipe.origin = Origin::excluded;
  if (!skeleton_.values_known) {
    recipe.reason = "a skeleton file does not contain the constructor's value";
    return;
  }
  const auto bytes = human_bytes(plan_.targets[root].byte_count());
  fail(root, {.code = "plan.no_value",
              .message = fmt::format(
                  "'{}' ({}, {}) is never saved in checkpoints, and the model has no value for it",
                  printable(target.name), name(target.kind), bytes),
              .suggestion = "build the model with its buffers in memory, not on the meta device"});
}

// Marks the target as having no value. The caller must add the finding.
void Planner::leave_without_value(std::size_t target, std::string reason) {
  Recipe& recipe = plan_.targets[target].recipe;
  recipe.origin = Origin::excluded;
  recipe.boxes.clear();
  recipe.merge.reset();
  recipe.constant.reset();
  recipe.reason = std::move(reason);
}

bool Planner::fail(std::size_t target, Finding finding) {
  leave_without_value(target, finding.code);
  finding.severity = Severity::error;
  finding.target = skeleton_.targets[target].name;
  add(std::move(finding));
  return false;
}

// Returns true if sources are missing, and the target has therefore failed.
bool Planner::refuse_gaps(std::size_t root, const Produced& produced) {
  const Target& target = skeleton_.targets[root];
  const SeriesGaps gaps = production_.source_gaps(produced, target.shape);
  if (gaps.ok()) return false;
  lacking_.add(target.name, gaps);
  leave_without_value(root, gaps.code());
  return true;
}

void Planner::quantize(std::size_t root) {
  const Target& target = skeleton_.targets[root];
  auto asked = options_.quantize.find(target.name);
  const bool is_root = asked != options_.quantize.end();
  for (const std::size_t member : members(root)) {
    if (asked != options_.quantize.end()) break;
    asked = options_.quantize.find(skeleton_.targets[member].name);
  }
  if (asked == options_.quantize.end()) return;
  PlannedTarget& planned = plan_.targets[root];
  QuantizedLayout form;
  auto problem = prepare_quantization(asked->second, target.shape, planned.dtype, form);
  if (!problem && !members(root).empty()) {
    const std::size_t other = is_root ? members(root).back() : root;
    problem = Problem{"a tied tensor would be quantized under only one of its names",
                      skeleton_.targets[other].name};
  }
  if (!problem && planned.recipe.origin != Origin::checkpoint) {
    problem = Problem{"only tensors with origin checkpoint can be quantized",
                      std::string(name(planned.recipe.origin))};
  }
  if (!problem && shares_scale(asked->second, form)) {
    const auto [first, is_new] = group_stacks_.try_emplace(asked->second.group, form.stack);
    if (first->second != form.stack) {
      problem = Problem{"other tensors of its group are stacks with a different number of matrices",
                        target.shape.text(), fmt::format("{} matrices", first->second)};
    }
  }
  for (std::size_t i = 1; i < form.parts.size() && !problem; ++i) {
    const std::string part = target.name + "." + form.parts[i].name;
    if (index_.contains(part))
      problem = Problem{"a component would have the name of another target", part};
  }
  if (!problem) {
    planned.quantization = asked->second;
    return;
  }
  Finding finding = {.code = "plan.quantize", .sources = {target.name}};
  finding.message = fmt::format("'{}' cannot be quantized to {}", printable(asked->first),
                                printable(asked->second.encoding));
  fail(root, with_problem(std::move(finding), *problem));
}

// Returns false if the target has failed.
bool Planner::find_boxes(std::size_t root, const Produced& produced, SourceUse taking) {
  const Target& target = skeleton_.targets[root];
  const auto sources = [&] { return production_.source_names(produced); };
  if (produced.recipe != Produced::none) {
    return find_recipe_boxes(root, produced, taking);
  }
  View view;
  if (auto problem = production_.view_of(produced, view)) {
    if (problem->expected.empty()) problem->expected = target.shape.text();
    Finding finding = {.code = "plan.shape", .sources = sources()};
    finding.message = fmt::format("'{}' cannot be made from {}", printable(target.name),
                                  name_list(finding.sources));
    return fail(root, with_problem(std::move(finding), *problem));
  }
  if (view.shape != target.shape) {
    Finding finding = {.code = "plan.shape", .sources = sources()};
    if (taking != SourceUse::plain) {
      finding = codes_.refuse(produced.members.front().source, target.name, target.dtype);
    }
    finding.message = fmt::format("'{}' has shape {} in the checkpoint ({}), but {} in the model",
                                  printable(target.name), view.shape.text(), name_list(sources()),
                                  target.shape.text());
    finding.found = view.shape.text();
    finding.expected = target.shape.text();
    if (const auto advice = shape_advice(view.shape); !advice.empty()) finding.suggestion = advice;
    return fail(root, std::move(finding));
  }
  return set_boxes(root, boxes_of(view));
}

// Returns false if the target has failed.
bool Planner::set_boxes(std::size_t root, std::vector<Box> boxes) {
  Recipe& recipe = plan_.targets[root].recipe;
  recipe.boxes = std::move(boxes);
  const bool is_empty = skeleton_.targets[root].shape.numel() == 0u;
  const bool has_blocks = std::ranges::any_of(recipe.boxes, [&](const Box& box) {
    const std::uint32_t count = production_.numbers_begin();
    const std::uint32_t source = box.source < count ? box.source : box.source - count;
    return !plan_.catalog->tensors()[source].encoding.is_dtype();
  });
  if (!is_empty || !has_blocks) return decode_boxes(root);
  // A tensor without elements needs no decoding.
  recipe.boxes.clear();
  recipe.origin = Origin::constant;
  recipe.constant = std::make_shared<const std::vector<std::byte>>();
  return true;
}

// Returns false if the target has failed.
bool Planner::find_recipe_boxes(std::size_t root, const Produced& produced, SourceUse taking) {
  const Target& target = skeleton_.targets[root];
  const TargetRecipe& made = options_.recipes.targets[produced.recipe];
  Recipe& recipe = plan_.targets[root].recipe;
  recipe.decided_by = made.decided_by;
  if (made.shape != target.shape) {
    return fail(root, {.code = "plan.shape",
                       .sources = production_.source_names(produced),
                       .message = fmt::format("the recipe of '{}' makes {}, but the model needs {}",
                                              printable(target.name), made.shape.text(),
                                              target.shape.text()),
                       .found = made.shape.text(),
                       .expected = target.shape.text()});
  }
  if (made.constant != nullptr) return take_constant(root, made);
  recipe.boxes = made.boxes;
  const auto& tensors = plan_.catalog->tensors();
  if (auto defect =
          check_boxes(recipe.boxes, target.shape.numel().value_or(0), tensors, plan_.decodings)) {
    Finding finding = {.code = "plan.box", .sources = production_.source_names(produced)};
    finding.message = fmt::format("the recipe of '{}' does not fit", printable(target.name));
    return fail(root, with_problem(std::move(finding), *defect));
  }
  if (made.merge != nullptr) return take_merge(root, made.merge);
  if (taking == SourceUse::numbers && !decode_recipe(root)) return false;
  const Dtype wanted = plan_.targets[root].dtype;
  const bool is_rounded = decoded_dtype(made.dtype) != Dtype::f32;
  for (Box& box : recipe.boxes) {
    if (box.decoding >= options_.recipes.decodings.size()) continue;
    box.decoding = rounded_decoding(box.decoding, decoded_dtype(is_rounded ? made.dtype : wanted));
  }
  // The engine casts once, from source to target, so a recipe must not require an additional
  // rounding.
  for (const Box& box : recipe.boxes) {
    const Encoding encoding = encoding_of(box, tensors, plan_.decodings);
    const bool is_moved = tensors[box.source].encoding == Encoding(made.dtype);
    if (wanted == made.dtype || !encoding.is_dtype() || is_moved) continue;
    if (is_exact(encoding.dtype(), made.dtype)) continue;
    return fail(root, {.code = "plan.recipe",
                       .sources = {tensors[box.source].name},
                       .message = fmt::format("the recipe of '{}' casts {} to {}, but the model "
                                              "needs {}: a second cast would round twice",
                                              printable(target.name), encoding.name(),
                                              name(made.dtype), name(wanted)),
                       .found = std::string(name(made.dtype)),
                       .expected = std::string(name(wanted))});
  }
  return true;
}

// Returns false if the target has failed.
bool Planner::take_constant(std::size_t root, const TargetRecipe& made) {
  const Target& target = skeleton_.targets[root];
  PlannedTarget& planned = plan_.targets[root];
  const std::uint64_t elements = target.shape.numel().value_or(0);
  const bool fits = Encoding(made.dtype).byte_count(elements) == made.constant->size();
  const CastKind way = cast_kind(made.dtype, planned.dtype);
  if (!fits || way == CastKind::mismatch || way == CastKind::counted || way == CastKind::no_cast) {
    return fail(root, {.code = fits ? "plan.dtype" : "plan.recipe",
                       .message = fmt::format(
                           "the constant of '{}' has {} bytes of {}, but the model needs {} {}",
                           printable(target.name), made.constant->size(), name(made.dtype),
                           name(planned.dtype), target.shape.text()),
                       .found = std::string(name(made.dtype)),
                       .expected = std::string(name(planned.dtype))});
  }
  planned.recipe.origin = Origin::constant;
  planned.recipe.constant = made.constant;
  const auto& computed_from = options_.recipes.computed_from;
  planned.recipe.decided_by.insert(planned.recipe.decided_by.end(), computed_from.begin(),
                                   computed_from.end());
  if (way != CastKind::same) {
    planned.recipe.constant = cast_constant(*made.constant, made.dtype, planned.dtype);
  }
  return true;
}

// Returns false if the target has failed.
bool Planner::check_dtypes(std::size_t root, const Produced* produced) {
  const Target& target = skeleton_.targets[root];
  const PlannedTarget& planned = plan_.targets[root];
  const auto& tensors = plan_.catalog->tensors();
  std::unordered_set<std::uint64_t> seen;
  if (planned.recipe.merge != nullptr) return true;  // see take_merge()
  const bool is_cast = produced != nullptr && produced->recipe != Produced::none &&
                       options_.recipes.targets[produced->recipe].dtype == planned.dtype;
  for (const Box& box : planned.recipe.boxes) {
    const TensorInfo& source = tensors[box.source];
    const Encoding encoding = encoding_of(box, tensors, plan_.decodings);
    const CastKind way = cast_kind(encoding, planned.dtype);
    if (way == CastKind::same) continue;
    if (!seen.insert(std::uint64_t{box.decoding} << 32 | box.source).second) continue;
    Finding finding = {.sources = {source.name},
                       .found = std::string(encoding.name()),
                       .expected = std::string(name(planned.dtype))};
    if (way == CastKind::mismatch || (way == CastKind::counted && !is_cast)) {
      finding.code = "plan.dtype";
      finding.message = fmt::format("'{}' is {} in the checkpoint ('{}'), but the model needs {}",
                                    printable(target.name), finding.found, printable(source.name),
                                    finding.expected);
      return fail(root, std::move(finding));
    }
    if (way == CastKind::no_cast) {
      finding.code = "plan.encoding";
      finding.message =
          encoding.is_dtype()
              ? fmt::format("loadstone has no cast from {} ('{}') to {} ('{}')", finding.found,
                            printable(source.name), finding.expected, printable(target.name))
              : fmt::format("unsupported encoding {}: '{}' cannot be decoded for '{}'",
                            finding.found, printable(source.name), printable(target.name));
      return fail(root, std::move(finding));
    }
    Finding& cast = casts_[{encoding.dtype(), planned.dtype}];
    cast.severity = way == CastKind::lossy ? Severity::warning : Severity::info;
    cast.sources.push_back(source.name);
  }
  for (const Box& box : planned.recipe.boxes) {
    if (moves_whole_bytes(box, bits(planned.dtype))) continue;
    return fail(
        root,
        {.code = "plan.encoding",
         .sources = {tensors[box.source].name},
         .message = fmt::format(
             "'{}': elements of {} can be moved only in whole bytes, but its recipe splits a byte",
             printable(target.name), name(planned.dtype)),
         .found = std::string(name(planned.dtype))});
  }
  return true;
}

Dtype Planner::final_dtype(const Target& target, const Produced* produced, SourceUse taking) const {
  const bool is_component = taking == SourceUse::component;
  if (kind(target.dtype) != DtypeKind::floating || is_component) return target.dtype;
  if (options_.dtype) return *options_.dtype;
  // The dtype of codes is not a dtype of values, so `dtype_from_file` ignores it.
  const bool is_plain = produced != nullptr && taking == SourceUse::plain;
  if (!options_.dtype_from_file || !is_plain) return target.dtype;
  if (produced->recipe != Produced::none) {
    const Dtype made = options_.recipes.targets[produced->recipe].dtype;
    return kind(made) == DtypeKind::floating ? made : target.dtype;
  }
  if (produced->members.empty()) return target.dtype;
  const auto& tensors = plan_.catalog->tensors();
  const Encoding first = tensors[produced->members.front().source].encoding;
  const bool is_one = std::ranges::all_of(produced->members, [&](const Member& member) {
    return tensors[member.source].encoding == first;
  });
  const bool is_floating = first.is_dtype() && kind(first.dtype()) == DtypeKind::floating;
  return is_one && is_floating ? first.dtype() : target.dtype;
}

MissingPolicy Planner::missing_policy(std::size_t root) const {
  const std::string& name = skeleton_.targets[root].name;
  if (const auto own = options_.caller.missing_of.find(name);
      own != options_.caller.missing_of.end()) {
    return own->second;
  }
  const auto pattern = missing_patterns_.first_match(name);
  return pattern ? options_.missing_patterns[*pattern].second : options_.missing;
}

// Returns the memory that the live model already has for the target. All names of a tie share one
// tensor, so memory under any name counts.
const Held* Planner::held_by_model(std::size_t root) const {
  if (skeleton_.targets[root].held) return &*skeleton_.targets[root].held;
  for (const std::size_t tie : members(root)) {
    if (skeleton_.targets[tie].held) return &*skeleton_.targets[tie].held;
  }
  return nullptr;
}

// Keeps the existing value, with its dtype and encoding.
bool Planner::keep(std::size_t root) {
  const Held* const held = held_by_model(root);
  PlannedTarget& planned = plan_.targets[root];
  if (held == nullptr || options_.quantize.contains(planned.name)) return false;
  planned.recipe.origin = Origin::kept;
  planned.dtype = held->dtype;
  kept_names_.push_back(planned.name);
  return true;
}

void Planner::resolve_missing(std::size_t root) {
  const Target& target = skeleton_.targets[root];
  PlannedTarget& planned = plan_.targets[root];
  const MissingPolicy policy = missing_policy(root);
  if (policy == MissingPolicy::keep && keep(root)) return;
  const std::optional<Origin> given = missing_row(policy).gives;
  if (!given && options_.caller.explained.contains(target.name)) {
    planned.recipe.reason = "plan.missing";
    return;
  }
  Finding finding = {.code = "plan.missing", .target = target.name, .sources = {target.name}};
  for (const std::size_t tie : members(root)) {
    if (tie != root) finding.sources.push_back(skeleton_.targets[tie].name);
  }
  finding.message = fmt::format("'{}' ({}, {} {}, {}) is not in the checkpoint",
                                printable(target.name), name(target.kind), name(planned.dtype),
                                target.shape.text(), human_bytes(planned.byte_count()));
  if (finding.sources.size() > 1) {
    finding.message += ", under none of its names " + name_list(finding.sources);
  }
  if (const auto known = options_.caller.expected_sources.find(target.name);
      known != options_.caller.expected_sources.end()) {
    finding.sources = {known->second};
    finding.message += fmt::format(": expected {}", name_list(finding.sources));
  }
  gaps_.push_back({root, plan_.findings.size()});
  if (!given) {
    static_cast<void>(fail(root, std::move(finding)));
    return;
  }
  planned.recipe.origin = *given;
  const auto has_value = [&](std::size_t i) {
    return skeleton_.targets[i].has_value &&
           skeleton_.targets[i].kind == TargetKind::persistent_buffer;
  };
  // The constructor's value of a buffer takes precedence over the initialiser.
  if (given == Origin::initialiser &&
      (has_value(root) || std::ranges::any_of(members(root), has_value))) {
    planned.recipe.origin = Origin::constructor;
    planned.dtype = target.dtype;
  }
  finding.message += fmt::format(": {}", origin_row(planned.recipe.origin).planned);
  finding.severity = Severity::warning;
  add(std::move(finding));
}

}  // namespace loadstone

// Decides which targets get decoded values of quantized tensors, and adds their decodings.
#include <fmt/format.h>

#include <algorithm>

#include "base/text.h"
#include "boxes/cast_kind.h"
#include "boxes/decodings.h"
#include "boxes/merges.h"
#include "catalog/transform_claim.h"
#include "codec/tensor_table.h"
#include "plan/planner.h"

namespace loadstone {

// Marks all tensors that have targets. Runs before the use of any component is decided, because the
// use depends on the targets of the component's scales.
void Planner::mark_taken_codes() {
  if (plan_.catalog->quantized().empty()) return;
  for (const std::string& name : options_.caller.known_sources) {
    if (const auto known = plan_.catalog->find(name)) codes_.mark_known(*known);
  }
  // A recipe's decoding may read only some components of a quantized tensor. The unread ones are
  // marked too, so that they are not reported as unused.
  for (const Decoding& decoding : plan_.decodings) {
    codes_.mark_components(decoding.sources.front(), accounted_);
  }
  for (const Produced& item : production_.items()) {
    if (!index_.contains(item.name)) continue;
    if (item.recipe == Produced::none) {
      for (const Member& member : item.members) {
        if (!member.is_numbers) codes_.mark_taken(member.source);
      }
      continue;
    }
    for (const Box& box : options_.recipes.targets[item.recipe].boxes) {
      const bool is_source = box.source < plan_.catalog->tensors().size();
      if (is_source && box.decoding == no_decoding) codes_.mark_taken(box.source);
    }
  }
}

// Switches sources to decoded values if necessary. If a source is usable neither as a component nor
// as values, `culprit` receives the first such source.
SourceUse Planner::choose_source_use(const Target& target, Produced& produced,
                                     std::uint32_t& culprit) {
  SourceUse all = SourceUse::plain;
  const auto join = [&](SourceUse one, std::uint32_t source) {
    if (one == SourceUse::plain || all == SourceUse::neither) return;
    const bool is_mixed = all != SourceUse::plain && all != one;
    if (one == SourceUse::neither || is_mixed) culprit = source;
    all = is_mixed ? SourceUse::neither : one;
  };
  if (produced.recipe == Produced::none) {
    const Shape* const shape = production_.is_whole(produced) ? &target.shape : nullptr;
    for (Member& member : produced.members) {
      SourceUse one = codes_.source_use(member.source, target.dtype, shape);
      if (member.is_numbers && one != SourceUse::numbers) one = SourceUse::neither;
      join(one, member.source);
      member.is_numbers = one == SourceUse::numbers;
    }
    return all;
  }
  for (const Box& box : options_.recipes.targets[produced.recipe].boxes) {
    const bool is_source = box.source < plan_.catalog->tensors().size();
    if (!is_source || box.decoding != no_decoding) continue;
    SourceUse one = codes_.source_use(box.source, target.dtype, nullptr);
    const bool has_blocks = !plan_.catalog->tensors()[box.source].encoding.is_dtype();
    if (has_blocks && one == SourceUse::component) one = SourceUse::neither;  // not for boxes
    join(one, box.source);
  }
  return all;
}

// Returns true if the target failed, because its source is usable neither as a component nor as
// values, or cannot be decoded.
bool Planner::refuse_codes(std::size_t root, const Produced& produced, SourceUse taking,
                           std::uint32_t culprit) {
  const Target& target = skeleton_.targets[root];
  if (taking == SourceUse::neither) {
    // The caller reports this target.
    if (options_.caller.explained.contains(target.name)) return false;
    codes_.mark_components(culprit, accounted_);
    fail(root, codes_.refuse(culprit, target.name, target.dtype));
    return true;
  }
  if (taking != SourceUse::numbers) return false;
  for (const Member& member : produced.members) {
    const QuantizedTensor* const quantized = codes_.find(member.source);
    if (quantized == nullptr || quantized->is_readable()) continue;
    codes_.mark_components(member.source, accounted_);
    Finding finding = quantized->defect;
    if (target.name != quantized->name) {
      finding.message = fmt::format("'{}': {}", printable(target.name), finding.message);
    }
    fail(root, std::move(finding));
    return true;
  }
  return false;
}

std::uint32_t Planner::decoding_of(std::uint32_t tensor, Dtype dtype) {
  const auto [known, is_new] =
      decodings_.try_emplace({tensor, dtype}, static_cast<std::uint32_t>(plan_.decodings.size()));
  if (is_new) plan_.decodings.push_back(numbers_decoding(*plan_.catalog, tensor, dtype));
  return known->second;
}

// Returns the decoding of a recipe in the target's dtype. Kernels round the F32 values that they
// compute, so decoding to a narrower dtype gives the same bits as a later cast.
std::uint32_t Planner::rounded_decoding(std::uint32_t given, Dtype dtype) {
  const Decoding& decoding = options_.recipes.decodings[given];
  if (decoding.dtype != Dtype::f32) return given;
  auto& known = rounded_[given];
  const bool is_first = known.empty();
  const auto [found, is_new] = known.try_emplace(
      dtype, is_first ? given : static_cast<std::uint32_t>(plan_.decodings.size()));
  if (is_new && !is_first) plan_.decodings.push_back(decoding);
  plan_.decodings[found->second].dtype = dtype;
  return found->second;
}

// Makes the boxes of decoded values and of blocks refer to decodings. Returns false if the target
// has failed.
bool Planner::decode_boxes(std::size_t root) {
  PlannedTarget& planned = plan_.targets[root];
  const auto& tensors = plan_.catalog->tensors();
  for (Box& box : planned.recipe.boxes) {
    if (box.decoding != no_decoding) continue;
    const bool is_numbers = box.source >= production_.numbers_begin();
    if (is_numbers) box.source -= production_.numbers_begin();
    const TensorInfo& source = tensors[box.source];
    if (!is_numbers && source.encoding.is_dtype()) continue;
    box.decoding = decoding_of(box.source, is_numbers ? decoded_dtype(planned.dtype) : Dtype::u8);
    codes_.mark_components(box.source, accounted_);
    PreparedDecoder form;
    auto problem = check_decoding(tensors, plan_.decodings[box.decoding], form);
    if (!problem) continue;
    Finding finding = {.code = "plan.encoding", .sources = {source.name}};
    finding.message =
        fmt::format("'{}' (encoding {}) cannot be decoded into '{}'", printable(source.name),
                    source.encoding.name(), printable(planned.name));
    return fail(root, with_problem(std::move(finding), *problem));
  }
  return true;
}

// Decodes the sources of a recipe whose boxes were made for the undecoded tensors. The boxes remain
// valid if there is exactly one value per code. Returns false if the target has failed.
bool Planner::decode_recipe(std::size_t root) {
  const auto& tensors = plan_.catalog->tensors();
  std::vector<Box> boxes = plan_.targets[root].recipe.boxes;
  for (Box& box : boxes) {
    if (box.decoding != no_decoding) continue;
    const QuantizedTensor* const quantized = codes_.find(box.source);
    const bool is_dtype = tensors[box.source].encoding.is_dtype();
    if (quantized == nullptr && is_dtype) continue;
    if (quantized != nullptr &&
        (quantized->decoding.shape != tensors[box.source].shape || quantized->is_transposed)) {
      Finding finding =
          codes_.refuse(box.source, plan_.targets[root].name, skeleton_.targets[root].dtype);
      codes_.mark_components(box.source, accounted_);
      return fail(root, std::move(finding));
    }
    box.source += production_.numbers_begin();
  }
  return set_boxes(root, std::move(boxes));
}

// Reports scales of unquantized weights, unless a target uses them.
void Planner::report_unused_scales() {
  for (const Finding& finding : plan_.catalog->quantized().findings()) {
    if (finding.severity == Severity::error) continue;
    const auto is_claimed = [&](const std::string& name) {
      const Produced* const item = production_.find(name);
      return item != nullptr && item->is_claimed;
    };
    if (std::ranges::any_of(finding.sources, is_claimed)) continue;
    if (options_.unexpected != UnexpectedPolicy::error) {
      for (const std::string& name : finding.sources) {
        if (const auto known = plan_.catalog->find(name)) accounted_[*known] = true;
      }
    }
    add(finding);
  }
}

// Rejects weights that need transforms, unless a target gets the stored transforms too. A
// checkpoint that does not store its transforms is accepted if no codes are decoded, because the
// library's modules then apply them.
void Planner::refuse_transforms() {
  std::optional<Finding> found = transform_finding(*plan_.catalog);
  if (!found) return;
  const auto& parts = plan_.catalog->checkpoints();
  const Catalog& base = parts.empty() ? *plan_.catalog : *parts.front();
  bool are_stored = false;
  for (const TensorInfo& tensor : base.tensors()) {
    if (!is_transform(base.quantization_claim(), tensor.name)) continue;
    are_stored = true;
    const Produced* const item = production_.find(tensor.name);
    if (item != nullptr && item->is_claimed) return;
  }
  if (are_stored || !plan_.decodings.empty()) add(*std::move(found));
}

// Rejects codes whose scales are unused, because they are meaningless in any dtype. Runs after all
// recipes are known.
void Planner::refuse_lone_codes() {
  if (plan_.catalog->quantized().empty()) return;
  std::vector<bool> delivered = delivered_codes(plan_);
  for (const std::string& name : options_.caller.known_sources) {
    if (const auto known = plan_.catalog->find(name)) delivered[*known] = true;
  }
  for (std::size_t i = 0; i < plan_.targets.size(); ++i) {
    const PlannedTarget& target = plan_.targets[i];
    if (options_.caller.explained.contains(target.name)) continue;
    auto lone = codes_.find_lone(target, delivered);
    if (!lone) continue;
    codes_.mark_components(lone->tensor, accounted_);
    fail(i, std::move(lone->error));
  }
}

}  // namespace loadstone

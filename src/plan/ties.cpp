// Decides which value the names of a tie share, how the checkpoint's values for the other names are
// used, and when tied names become separate tensors. All decisions about ties are in this file.
#include "plan/ties.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "base/text.h"
#include "catalog/tensor_values.h"
#include "plan/planner.h"
#include "skeleton/ties.h"

namespace loadstone {

namespace {

// Names of a tie that share one value: no adapter changed them, or adapters changed them equally.
struct SameValue {
  std::string root;
  const MergeDraft* draft = nullptr;
  std::vector<std::string> others;
};

bool share_value(const Catalog& catalog, const MergeDraft& first, const MergeDraft& second) {
  if (!first.is_adapted() || !second.is_adapted()) {
    return first.is_adapted() == second.is_adapted();
  }
  const auto& tensors = catalog.tensors();
  if (first.is_replaced != second.is_replaced ||
      first.merge.terms.size() != second.merge.terms.size() ||
      first.products.size() != second.products.size())
    return false;
  if (first.is_replaced &&
      !are_equal(catalog, tensors[first.replacement], tensors[second.replacement]))
    return false;
  return std::ranges::equal(first.products, second.products,
                            [&](const AddedProduct& a, const AddedProduct& b) {
                              return are_equal_products(catalog, first.merge.terms[a.term], a,
                                                        second.merge.terms[b.term], b);
                            });
}

Finding split_finding(const std::vector<SameValue>& values) {
  std::vector<std::string> changed;
  std::vector<std::string> kept;
  for (const SameValue& value : values) {
    auto& names = value.draft->is_adapted() ? changed : kept;
    names.push_back(value.root);
    names.insert(names.end(), value.others.begin(), value.others.end());
  }
  std::string message =
      kept.empty()
          ? fmt::format(
                "adapters change the tied names {} differently, so each becomes a separate tensor",
                name_list(changed))
          : fmt::format(
                "adapters change {}, which {} tied to {}: {} the base's value as {} of "
                "{} own",
                name_list(changed), changed.size() == 1 ? "is" : "are", name_list(kept),
                kept.size() == 1 ? "the latter keeps" : "the latter keep",
                kept.size() == 1 ? "a tensor" : "tensors", kept.size() == 1 ? "its" : "their");
  Finding finding = {.severity = Severity::warning,
                     .code = "merge.tie",
                     .target = changed.front(),
                     .message = std::move(message),
                     .suggestion = "to change all the names, pass --tie keep or tie=\"keep\""};
  finding.sources = std::move(changed);
  return finding;
}

}  // namespace

TieRoots split_roots(const Catalog& catalog, const std::vector<DraftTie>& ties,
                     const MergeDrafts& drafts, std::vector<Finding>& findings) {
  TieRoots roots;
  for (const DraftTie& tie : ties) {
    std::vector<SameValue> values;
    for (const std::string& name : tie) {
      const MergeDraft& draft = drafts.items.at(name);
      const auto same = std::ranges::find_if(values, [&](const SameValue& value) {
        return share_value(catalog, *value.draft, draft);
      });
      if (same == values.end()) {
        values.push_back({name, &draft, {}});
      } else {
        same->others.push_back(name);
      }
    }
    if (values.size() == 1) continue;
    findings.push_back(split_finding(values));
    for (const std::string& name : tie) {
      const auto value = std::ranges::find_if(values, [&](const SameValue& each) {
        return each.root == name || std::ranges::find(each.others, name) != each.others.end();
      });
      roots.emplace(name, value->root);
    }
  }
  return roots;
}

void Planner::find_groups() {
  for (std::size_t i = 0; i < skeleton_.targets.size(); ++i) {
    index_.emplace(skeleton_.targets[i].name, i);
  }
  roots_ = tie_roots(skeleton_.targets);
  for (std::size_t i = 0; i < roots_.size(); ++i) add_to_groups(i);
}

void Planner::add_to_groups(std::size_t target) {
  if (roots_[target] == target) return;
  auto& group = groups_[roots_[target]];
  if (group.empty()) group.push_back(roots_[target]);
  group.push_back(target);
}

const std::vector<std::size_t>& Planner::members(std::size_t root) const {
  static const std::vector<std::size_t> none;
  const auto found = groups_.find(root);
  return found == groups_.end() ? none : found->second;
}

// Returns the item that provides the value of a tie. Any name of the tie can provide it, because
// all names share one tensor. The root's own name has priority.
Produced* Planner::choose_produced(std::size_t root) {
  Produced* chosen = production_.find(skeleton_.targets[root].name);
  if (chosen != nullptr) chosen->is_claimed = true;
  for (const std::size_t tie : members(root)) {
    Produced* const other = production_.find(skeleton_.targets[tie].name);
    if (other == nullptr) continue;
    other->is_claimed = true;
    if (chosen == nullptr) chosen = other;
  }
  return chosen;
}

// Returns true if the target failed, because the checkpoint has a different shape under another
// name of the tie.
bool Planner::refuse_other_names(std::size_t root, const Produced& chosen) {
  const Target& target = skeleton_.targets[root];
  for (const std::size_t tie : members(root)) {
    const Produced* const other = production_.find(skeleton_.targets[tie].name);
    if (other == nullptr || other == &chosen) continue;
    const auto shape = shape_of(*other);
    if (!shape || *shape == target.shape) {
      compare_later(root, tie, chosen, *other);
      continue;
    }
    fail(root, {.code = "plan.shape",
                .sources = production_.source_names(*other),
                .message = fmt::format(
                    "'{}' is tied to '{}' and has shape {} in the checkpoint, but {} in the model",
                    printable(skeleton_.targets[tie].name), printable(target.name), shape->text(),
                    target.shape.text()),
                .found = shape->text(),
                .expected = target.shape.text()});
    return true;
  }
  return false;
}

// Returns nullopt if a rule cannot make the tensor.
std::optional<Shape> Planner::shape_of(const Produced& produced) const {
  if (produced.recipe != Produced::none) return options_.recipes.targets[produced.recipe].shape;
  View view;
  if (production_.view_of(produced, view)) return std::nullopt;
  return view.shape;
}

// Returns true if both items use one whole tensor in the same way, so that their sources can be
// compared.
bool Planner::has_same_boxes(const Produced& first, const Produced& second) const {
  if (first.members.size() != 1 || second.members.size() != 1) return false;
  if (production_.is_whole(first) && production_.is_whole(second)) return true;
  if (first.recipe == Produced::none || second.recipe == Produced::none) return false;
  const TargetRecipe& a = options_.recipes.targets[first.recipe];
  const TargetRecipe& b = options_.recipes.targets[second.recipe];
  const auto is_one = [](const TargetRecipe& recipe) {
    return recipe.boxes.size() == 1 && recipe.merge == nullptr;
  };
  if (!is_one(a) || !is_one(b)) return false;
  Box box = b.boxes.front();
  box.source = a.boxes.front().source;
  box.decoding = a.boxes.front().decoding;
  return box == a.boxes.front();
}

// Adds a check that compares the two tensors during the load, because their values are unknown
// until then.
void Planner::compare_later(std::size_t root, std::size_t tie, const Produced& chosen,
                            const Produced& other) {
  const auto& tensors = plan_.catalog->tensors();
  const bool is_error = options_.unexpected == UnexpectedPolicy::error;
  Finding finding = {.target = skeleton_.targets[tie].name,
                     .sources = production_.source_names(other)};
  finding.code = "plan.tie";
  const std::string names =
      fmt::format("'{}' is tied to '{}', and the checkpoint contains both: loadstone uses '{}'",
                  printable(skeleton_.targets[tie].name), printable(skeleton_.targets[root].name),
                  printable(chosen.name));
  if (!has_same_boxes(chosen, other)) {
    finding.severity = is_error ? Severity::error : Severity::warning;
    finding.message =
        names + "; it cannot compare the two, because they are made from several sources";
    add(std::move(finding));
    return;
  }
  const std::uint32_t taken = chosen.members.front().source;
  const std::uint32_t second = other.members.front().source;
  const bool is_one_tensor = tensors[taken].shard == tensors[second].shard &&
                             tensors[taken].offset_begin == tensors[second].offset_begin &&
                             tensors[taken].encoding == tensors[second].encoding;
  if (is_one_tensor) return;
  finding.message = names + ", and the load compares them";
  add(std::move(finding));
  plan_.tie_checks.push_back({.name = skeleton_.targets[tie].name,
                              .tied_to = skeleton_.targets[root].name,
                              .taken = taken,
                              .other = second,
                              .is_error = is_error});
}

// Gives each name with a new root the recipe of its old root. Runs before adapters change the
// recipe.
void Planner::split_ties(const TieRoots& roots) {
  std::vector<std::pair<std::size_t, std::size_t>> changed;
  std::vector<std::size_t> fresh;  // new roots
  for (std::size_t i = 0; i < roots_.size(); ++i) {
    const auto root = roots.find(skeleton_.targets[i].name);
    if (root == roots.end()) continue;
    const std::size_t old = roots_[i];
    changed.emplace_back(i, index_.at(root->second));
    if (old == i) continue;
    plan_.targets[i].dtype = plan_.targets[old].dtype;
    plan_.targets[i].recipe = plan_.targets[old].recipe;
    if (changed.back().second == i) fresh.push_back(i);
  }
  for (const auto& [target, root] : changed) roots_[target] = root;
  if (changed.empty()) return;
  groups_.clear();
  for (std::size_t i = 0; i < roots_.size(); ++i) add_to_groups(i);
  for (const std::size_t root : fresh) take_own_value(root);
}

// Resolves a name that is now a separate tensor again if the checkpoint has a tensor for that name.
void Planner::take_own_value(std::size_t root) {
  if (production_.find(skeleton_.targets[root].name) == nullptr) return;
  forget_check(root);
  for (const std::size_t tie : members(root)) forget_check(tie);
  resolve(root);
}

void Planner::forget_check(std::size_t tie) {
  const std::string& name = skeleton_.targets[tie].name;
  std::erase_if(plan_.tie_checks, [&](const TieCheck& check) { return check.name == name; });
  std::erase_if(plan_.findings, [&](const Finding& finding) {
    return finding.code == "plan.tie" && finding.target == name;
  });
}

// If adapters change a tied tensor, its names must have equal values in the checkpoint, so a
// difference becomes an error. If adapters replace the tensor, the check is dropped.
void Planner::settle_checks(const MergeDrafts& drafts) {
  std::vector<std::size_t> idle;
  for (TieCheck& check : plan_.tie_checks) {
    const auto root = drafts.items.find(check.tied_to);
    if (root == drafts.items.end() || !root->second.is_adapted()) continue;
    check.is_error = true;
    if (root->second.is_replaced) idle.push_back(index_.at(check.name));
  }
  for (const std::size_t tie : idle) forget_check(tie);
}

void Planner::resolve_tie(std::size_t tie) {
  PlannedTarget& planned = plan_.targets[tie];
  planned.dtype = plan_.targets[roots_[tie]].dtype;
  planned.recipe = {};
  planned.recipe.origin = Origin::tie;
  planned.recipe.tie_of = skeleton_.targets[roots_[tie]].name;
}

}  // namespace loadstone

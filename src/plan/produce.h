// Lists the tensors that the checkpoint provides after the rules are applied to its names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "boxes/view.h"
#include "catalog/lacking.h"
#include "loadstone/catalog.h"
#include "loadstone/name_hash.h"
#include "loadstone/plan.h"
#include "plan/rules.h"

namespace loadstone {

// A source that a rule matched. The groups are views of its name.
struct Member {
  std::uint32_t source = 0;
  std::string_view name;  // name of the tensor; for codes, of the quantized tensor
  std::uint32_t pattern = 0;
  std::vector<std::string_view> groups;
  bool is_numbers = false;  // used as decoded values
};

// One provided tensor: an unchanged source, the result of a rule, or a recipe.
struct Produced {
  static constexpr std::uint32_t none = UINT32_MAX;

  std::string name;
  std::vector<Member> members;  // in the rule's order
  std::uint32_t rule = none;
  std::uint32_t part = 0;       // index into the rule's targets
  std::uint32_t recipe = none;  // index into Recipes::targets
  bool is_claimed = false;      // used by a target
};

// Several sources that provide the same name.
struct Contest {
  std::size_t winner = 0;             // index of the item that is used
  std::vector<std::uint32_t> losers;  // sources
};

// The tensors that the checkpoint provides. Not thread-safe while changed.
class Production {
 public:
  Production(const Catalog& catalog, const CompiledRules& rules, const PlanOptions& options);

  [[nodiscard]] std::deque<Produced>& items() noexcept { return items_; }
  [[nodiscard]] Produced* find(std::string_view name);
  [[nodiscard]] const std::vector<Contest>& contests() const noexcept { return contests_; }
  // Returns the number of matched names for each pattern of each rule, in the order of the rules.
  [[nodiscard]] std::vector<std::size_t> matches() const;

  // Returns the view of the item's sources after its rule, if it has one. Not for recipes. Indices
  // from numbers_begin() refer to decoded values of sources. Undecoded blocks are viewed as bytes.
  [[nodiscard]] std::optional<Problem> view_of(const Produced& item, View& view) const;
  // Returns true if the item is an unchanged source, possibly under a new name.
  [[nodiscard]] bool is_whole(const Produced& item) const;
  // Returns the missing and stray sources that prevent a joining rule from making its target.
  // `shape` is the shape that the model expects.
  [[nodiscard]] SeriesGaps source_gaps(const Produced& item, const Shape& shape) const;
  [[nodiscard]] std::vector<std::string> source_names(const Produced& item) const;
  [[nodiscard]] std::uint32_t numbers_begin() const noexcept {
    return static_cast<std::uint32_t>(catalog_.tensors().size());
  }

 private:
  void add_recipes(const Recipes& recipes, std::vector<bool>& taken);
  void add_named(Member member);
  void add_match(Member member, const RuleMatch& match);
  void add(std::string name, std::uint32_t rule, std::uint32_t part, Member member, bool joins);
  void order_members();
  [[nodiscard]] View member_view(const Member& member) const;
  [[nodiscard]] std::optional<Problem> joined_view(const Produced& item, const Rule& rule,
                                                   View& view) const;
  [[nodiscard]] std::optional<Problem> split_view(const Produced& item, const Rule& rule,
                                                  View& view) const;

  const Catalog& catalog_;
  const CompiledRules& rules_;
  std::deque<Produced> items_;
  NameMap<std::size_t> index_;  // keys are views into items_
  std::vector<Contest> contests_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::size_t> matches_;  // by rule and pattern
};

}  // namespace loadstone

// Declares the steps of make_plan(). Each step fills in a part of the plan.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/pattern.h"
#include "catalog/lacking.h"
#include "loadstone/name_hash.h"
#include "loadstone/plan.h"
#include "plan/adapters.h"
#include "plan/balance.h"
#include "plan/codes.h"
#include "plan/prefix.h"
#include "plan/produce.h"
#include "plan/rules.h"
#include "plan/ties.h"
#include "plan/values.h"

namespace loadstone {

// Used once. Not thread-safe.
class Planner {
 public:
  Planner(std::shared_ptr<const Catalog> catalog, const Skeleton& skeleton,
          const PlanOptions& options);

  // Makes the plan. Counts costs for SinkKind::memory only, because a writer of files counts its
  // own costs.
  [[nodiscard]] Plan run(SinkKind sink) &&;

 private:
  // A target without a source, for which a suggestion is made.
  struct Gap {
    std::size_t target = 0;
    std::size_t finding = 0;
  };

  void check_options() const;
  void check_recipes();

  // ties.cpp
  void find_groups();
  void add_to_groups(std::size_t target);
  [[nodiscard]] Produced* choose_produced(std::size_t root);
  [[nodiscard]] bool refuse_other_names(std::size_t root, const Produced& chosen);
  [[nodiscard]] std::optional<Shape> shape_of(const Produced& produced) const;
  [[nodiscard]] bool has_same_boxes(const Produced& first, const Produced& second) const;
  void compare_later(std::size_t root, std::size_t tie, const Produced& chosen,
                     const Produced& other);
  void split_ties(const TieRoots& roots);
  void take_own_value(std::size_t root);
  void forget_check(std::size_t tie);
  void settle_checks(const MergeDrafts& drafts);
  void resolve_tie(std::size_t tie);

  // resolve.cpp: recipes
  void resolve(std::size_t root);
  void resolve_unsaved(std::size_t root);
  [[nodiscard]] bool refuse_gaps(std::size_t root, const Produced& produced);
  [[nodiscard]] bool find_boxes(std::size_t root, const Produced& produced, SourceUse taking);
  [[nodiscard]] bool find_recipe_boxes(std::size_t root, const Produced& produced,
                                       SourceUse taking);
  [[nodiscard]] bool set_boxes(std::size_t root, std::vector<Box> boxes);
  [[nodiscard]] bool take_constant(std::size_t root, const TargetRecipe& made);
  [[nodiscard]] bool check_dtypes(std::size_t root, const Produced* produced);
  void quantize(std::size_t root);
  [[nodiscard]] Dtype final_dtype(const Target& target, const Produced* produced,
                                  SourceUse taking) const;
  void resolve_missing(std::size_t root);
  [[nodiscard]] MissingPolicy missing_policy(std::size_t root) const;
  [[nodiscard]] bool keep(std::size_t root);
  [[nodiscard]] const Held* held_by_model(std::size_t root) const;
  void leave_without_value(std::size_t target, std::string reason);
  bool fail(std::size_t target, Finding finding);  // returns false

  // merge_adapters.cpp
  void keep_numbers(const TargetRecipe& recipe);
  [[nodiscard]] bool take_merge(std::size_t root, const std::shared_ptr<const Merge>& merge);

  // slices.cpp
  void take_slices();

  // merge_adapters.cpp
  void merge_adapters();
  [[nodiscard]] MergeDrafts drafts() const;
  [[nodiscard]] std::vector<DraftTie> ties_of(const MergeDrafts& drafts) const;
  [[nodiscard]] std::string obstacle_of(std::size_t root) const;
  [[nodiscard]] std::string source_name(std::size_t root) const;
  void take_draft(std::size_t root, MergeDraft draft, std::uint32_t decodings_begin);
  void decode_to_f32(std::vector<Box>& boxes);
  void encode_exactly();

  // numbers.cpp: decoded values of quantized tensors
  void mark_taken_codes();
  void report_unused_scales();
  [[nodiscard]] SourceUse choose_source_use(const Target& target, Produced& produced,
                                            std::uint32_t& culprit);
  [[nodiscard]] bool refuse_codes(std::size_t root, const Produced& produced, SourceUse taking,
                                  std::uint32_t culprit);
  [[nodiscard]] std::uint32_t decoding_of(std::uint32_t tensor, Dtype dtype);
  [[nodiscard]] std::uint32_t rounded_decoding(std::uint32_t given, Dtype dtype);
  [[nodiscard]] bool decode_boxes(std::size_t root);
  [[nodiscard]] bool decode_recipe(std::size_t root);
  void refuse_lone_codes();
  void refuse_transforms();

  // unmatched.cpp: unused sources and missing targets
  void report_contests();
  void report_unexpected();
  void report_kept();
  [[nodiscard]] bool report_lone_adapter();
  void report_patterns();
  void suggest();
  void fold_casts();

  // placement.cpp
  void place();
  void place_by_entries(std::vector<std::string>& devices);
  void place_as_held(std::vector<std::string>& devices);
  void report_idle(const std::string& path);
  void report_uncovered(const std::vector<std::size_t>& uncovered);
  void settle(PlannedTarget& target, const std::string& device);
  void refuse_slice_on_disk(std::size_t target);
  void check_offload();
  void check_budget();

  [[nodiscard]] const std::vector<std::size_t>& members(std::size_t root) const;
  [[nodiscard]] bool is_saved(std::size_t root) const;
  void add(Finding finding) { plan_.findings.push_back(std::move(finding)); }

  const Skeleton& skeleton_;
  const PlanOptions& options_;
  Stripping stripping_;
  CompiledRules rules_;
  NamePatterns missing_patterns_;
  Production production_;
  Codes codes_;
  // Components of decoded or rejected tensors, which are not reported as unused.
  std::vector<bool> accounted_;
  std::map<std::pair<std::uint32_t, Dtype>, std::uint32_t> decodings_;  // by tensor and dtype
  // Variants of recipes' decodings in other dtypes, by the index of the original decoding.
  std::unordered_map<std::uint32_t, std::map<Dtype, std::uint32_t>> rounded_;
  // F32 variants, by the index of the original decoding
  std::map<std::uint32_t, std::uint32_t> f32_decodings_;
  Plan plan_;
  NameMap<std::size_t> index_;      // target name -> index in the skeleton
  std::vector<std::size_t> roots_;  // index of the root of each target's tie; else its own index
  // Root -> names that are tied to it.
  std::unordered_map<std::size_t, std::vector<std::size_t>> groups_;
  std::vector<Gap> gaps_;
  LackingSeries lacking_;
  std::vector<std::string> kept_names_;
  std::vector<std::string> unexpected_names_;  // in the order of their findings
  std::size_t unexpected_begin_ = 0;           // index of their first finding in plan_.findings
  std::map<std::pair<Dtype, Dtype>, Finding> casts_;
  std::map<std::string, std::uint64_t> group_stacks_;  // by scale group: number of stacked matrices
};

}  // namespace loadstone

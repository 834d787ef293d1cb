#include "convert/merge.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>

#include "base/named.h"
#include "base/refuse_option.h"
#include "base/text.h"
#include "boxes/cast_kind.h"
#include "boxes/view.h"
#include "codec/tensor_table.h"
#include "convert/tied_head.h"
#include "convert/values.h"
#include "loadstone/merge.h"
#include "loadstone/quantized_tensors.h"
#include "plan/adapter_names.h"
#include "plan/adapters.h"
#include "plan/merge_numbers.h"
#include "plan/ties.h"

namespace loadstone {

namespace {

// Properties of a merge method. The table is indexed by MergeMethod.
struct MethodRow {
  std::string_view name;
  bool has_base;  // the first model is the base, from which differences are computed
  Pruning pruning;
  bool elects_signs;
};
constexpr MethodRow methods[] = {
    {"linear", false, Pruning::none, false},         {"slerp", false, Pruning::none, false},
    {"task-arithmetic", true, Pruning::none, false}, {"ties", true, Pruning::smallest, true},
    {"dare-linear", true, Pruning::random, false},   {"dare-ties", true, Pruning::random, true},
};

static_assert(std::size(methods) == static_cast<std::size_t>(MergeMethod::dare_ties) + 1);

const MethodRow& method_row(MergeMethod method) noexcept {
  return methods[static_cast<std::size_t>(method)];
}

void check_method(const MergeOptions& merge) {
  const std::size_t models = merge.weights.size();
  const auto& [name, has_base, pruning, elects_signs] = method_row(merge.method);
  if (merge.method == MergeMethod::slerp && models != 2) {
    refuse_option("method", "slerp merges exactly two models", std::to_string(models), "2");
  }
  if (has_base && models < 2) {
    refuse_option("method", "this method needs a base and at least one other model",
                  std::to_string(models), "at least 2");
  }
  if (merge.method != MergeMethod::linear && merge.weights.front() != 1) {
    refuse_option("weights", "the base of this method cannot have a weight",
                  fmt::format("{}", merge.weights.front()), "1");
  }
  const double density = merge.density.value_or(1);
  if (!(density > 0 && density <= 1)) {
    refuse_option("density", "the density must be greater than 0 and at most 1",
                  fmt::format("{}", density));
  }
  if (merge.density && pruning == Pruning::none)
    refuse_option("density", "this method keeps all differences, so it has no density");
  if (merge.seed && pruning != Pruning::random) {
    refuse_option("seed", "this method makes no random choices, so it has no seed");
  }
  if (!std::isfinite(merge.scale.value_or(1))) refuse_option("scale", "a scale must be finite");
  if (merge.scale && !has_base)
    refuse_option("scale", "this method does not use differences, so it has no scale");
  if (merge.normalise && merge.method == MergeMethod::slerp) {
    refuse_option("normalise", "this method does not divide by the sum of the weights");
  }
}

// Returns true if weights nearly cancel, so that dividing by their sum would magnify errors.
bool cancel(double sum, double magnitudes) noexcept {
  constexpr double growth_max = 1000;
  return !(std::abs(sum) * growth_max >= magnitudes) || magnitudes == 0;
}

// Checks that the weights do not cancel: all together and, if signs are elected, in every subset.
void check_divisors(std::span<const float> weights, bool elects_signs) {
  // Largest number of weights whose subsets are all checked.
  constexpr std::size_t choices_max = 16;
  const auto refuse_sum = [](double sum) {
    refuse_option("normalise",
                  "the sum of the weights is 0 or nearly 0, so loadstone cannot divide by it",
                  fmt::format("{}", sum), "weights with the same sign, or normalise disabled");
  };
  const auto is_above = [](float weight) { return weight > 0; };
  if (std::ranges::all_of(weights, is_above)) return;
  double all = 0;
  double all_magnitudes = 0;
  for (const float weight : weights) {
    all += weight;
    all_magnitudes += std::abs(weight);
  }
  if (cancel(all, all_magnitudes)) refuse_sum(all);
  if (!elects_signs) return;
  // A difference with weight 0 has no sign, so it is never elected.
  std::vector<float> chosen;
  std::ranges::copy_if(weights, std::back_inserter(chosen), [](float each) { return each != 0; });
  if (chosen.size() > choices_max) {
    refuse_option("normalise", "too many weights to normalise, because some are negative",
                  std::to_string(chosen.size()), fmt::format("at most {}", choices_max));
  }
  for (std::uint32_t bits = 1; bits < 1u << chosen.size(); ++bits) {
    double sum = 0;
    double magnitudes = 0;
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      if ((bits >> i & 1) == 0) continue;
      sum += chosen[i];
      magnitudes += std::abs(chosen[i]);
    }
    if (cancel(sum, magnitudes)) refuse_sum(sum);
  }
}

// Returns the merge operation of the options, still without terms.
Merge merge_of(const MergeOptions& options) {
  Merge merge = {.factor = options.weights.front()};
  if (options.method == MergeMethod::linear) return merge;
  if (options.method == MergeMethod::slerp) {
    merge.op = MergeOp::slerp;
    return merge;
  }
  merge.op = MergeOp::differences;
  merge.factor = options.scale.value_or(1);
  merge.density = options.density.value_or(1);
  merge.seed = options.seed.value_or(0);
  const MethodRow& row = method_row(options.method);
  merge.pruning = merge.density == 1 ? Pruning::none : row.pruning;
  merge.elects_signs = row.elects_signs;
  merge.is_mean = options.normalise.value_or(merge.elects_signs);
  if (merge.is_mean) {
    check_divisors(std::span(options.weights).subspan(1), merge.elects_signs);
  }
  return merge;
}

// Returns the models' weights. For a normalised linear merge, they add up to 1.
std::vector<float> weights_of(const MergeOptions& options) {
  std::vector<float> weights = options.weights;
  if (options.method != MergeMethod::linear || !options.normalise.value_or(false)) return weights;
  check_divisors(weights, false);
  double sum = 0;
  for (const float weight : weights) sum += weight;
  for (float& weight : weights) weight = static_cast<float>(weight / sum);
  return weights;
}

void check(const Catalog& catalog, const ConvertOptions& options) {
  const MergeOptions& merge = *options.merge;
  const std::size_t given = merge.weights.size() + merge.adapters.size();
  const std::size_t there = std::max<std::size_t>(catalog.checkpoints().size(), 1);
  if (merge.weights.empty())
    refuse_option("weights", "the first checkpoint of a merge must be a model");
  if (given != there) {
    refuse_option(
        "weights", "each checkpoint of the catalog must be a model or an adapter",
        fmt::format("{} models and {} adapters", merge.weights.size(), merge.adapters.size()),
        counted(there, "checkpoint"));
  }
  if (merge.tie == TiePolicy::keep && merge.adapters.empty()) {
    refuse_option("tie", "this option needs adapters (lora)", "keep");
  }
  const auto is_factor = [](float factor) { return std::isfinite(factor); };
  const bool are_finite = std::ranges::all_of(merge.weights, is_factor) &&
                          std::ranges::all_of(merge.adapters, is_factor, &MergeAdapter::factor);
  if (!are_finite) refuse_option("weights", "weights and factors must be finite");
  if (names_are_given(options)) {
    refuse_option(
        "rules",
        "a merge keeps the names of its first model: to change names, convert the merged model");
  }
  check_method(merge);
  if (options.experts != ExpertLayout::keep) {
    refuse_option("experts",
                  "a merge keeps the layout of its first model: to change the layout, convert the "
                  "merged model");
  }
}

// Not thread-safe.
class Merger {
 public:
  Merger(const std::shared_ptr<const Catalog>& catalog, const ConvertOptions& options,
         std::vector<Finding>& findings)
      : catalog_(*catalog),
        options_(options),
        findings_(findings),
        numbers_(catalog),
        head_(options.folder.config,
              catalog->checkpoints().empty() ? *catalog : *catalog->checkpoints().front()) {}

  Values run() {
    MergeOptions merge = *options_.merge;
    merge.weights = weights_ = weights_of(merge);
    if (refuses_factors()) return {};
    const Merge first = merge_of(merge);
    for (auto& [name, source] : numbers_.sources(0, findings_)) {
      MergeDraft& draft = drafts_.items[name];
      draft.boxes = numbers_.boxes(source);
      if (source.is_number) draft.merge = first;
      draft.source = source;
    }
    for (std::uint32_t model = 1; model < merge.weights.size(); ++model) add_model(model);
    if (merge.weights.size() > 1) tell_complex();
    if (first.pruning == Pruning::random) draw_ties_once();
    if (!merge.adapters.empty()) add_ties();
    const AdapterPlaces places(drafts_.names());
    for (std::uint32_t i = 0; i < merge.adapters.size(); ++i) {
      const auto checkpoint = static_cast<std::uint32_t>(merge.weights.size() + i);
      add_adapter(catalog_, checkpoint, merge.adapters[i], places, numbers_, drafts_, findings_);
    }
    settle_ties();
    report_idle_patterns(catalog_, static_cast<std::uint32_t>(merge.weights.size()), merge.adapters,
                         findings_);
    return values();
  }

 private:
  void fail(const std::string& target, std::string message, std::string found = {},
            std::string expected = {}) {
    findings_.push_back({.severity = Severity::error,
                         .code = "merge.models",
                         .target = target,
                         .sources = {target},
                         .message = std::move(message),
                         .found = std::move(found),
                         .expected = std::move(expected)});
  }

  // Rejects adapters as models, because the product of averaged factors is not the average of the
  // products.
  bool refuses_factors() {
    if (weights_.size() == 1 && weights_.front() == 1) return false;
    const auto& models = catalog_.checkpoints();
    for (std::uint32_t model = 0; model < weights_.size(); ++model) {
      const Catalog& each = models.empty() ? catalog_ : *models[model];
      const auto factor =
          std::ranges::find_if(each.tensors(), is_factor_of_adapter, &TensorInfo::name);
      if (factor == each.tensors().end()) continue;
      fail(factor->name,
           fmt::format("the model in '{}' is an adapter ('{}'), whose matrices cannot be merged "
                       "separately: the product of means is not the mean of products",
                       printable(each.shown_path()), printable(factor->name)));
      findings_.back().code = "merge.adapter";
      findings_.back().suggestion =
          "merge the adapters into their base: 'loadstone merge BASE --lora A:0.5 --lora B:0.5 -o "
          "TARGET', or loadstone.merge(BASE, TARGET, lora={A: 0.5, B: 0.5})";
      return true;
    }
    return false;
  }

  void add_model(std::uint32_t model) {
    const MergeSources sources = numbers_.sources(model, findings_);
    const std::string root = printable(catalog_.checkpoints()[model]->shown_path());
    for (auto& [name, draft] : drafts_.items) {
      const auto found = sources.find(name);
      if (found == sources.end()) {
        fail(name, fmt::format("'{}' is missing from the model in '{}'", printable(name), root));
        continue;
      }
      const MergeSource& source = found->second;
      if (source.shape != draft.source.shape || source.is_number != draft.source.is_number) {
        fail(name,
             fmt::format("'{}' has a different dtype or shape in the model in '{}'",
                         printable(name), root),
             fmt::format("{} {}", source.shape.text(), loadstone::name(source.dtype)),
             fmt::format("{} {}", draft.source.shape.text(), loadstone::name(draft.source.dtype)));
        continue;
      }
      const TensorInfo& tensor = catalog_.tensors()[source.tensor];
      if (!source.is_number && (is_fp8(tensor) || is_foreign_float(tensor))) {
        fail(name, fmt::format(
                       "'{}' has the encoding {}, whose values are unknown, so it cannot be merged",
                       printable(name), loadstone::name(source.dtype)));
      }
      if (!source.is_number) continue;
      draft.merge.terms.push_back(
          {.factor = weights_[model], .boxes = numbers_.boxes(source), .low_rank = {}});
    }
    for (const auto& [name, source] : sources) {
      if (drafts_.contains(name)) continue;
      fail(name, fmt::format("'{}' of the model in '{}' is missing from the first model",
                             printable(name), root));
    }
  }

  // Warns that complex tensors are not merged. Integers need no warning, because they are not
  // weights.
  void tell_complex() {
    for (const auto& [name, draft] : drafts_.items) {
      if (draft.source.is_number || kind(draft.source.dtype) != DtypeKind::complex) continue;
      fail(name,
           fmt::format(
               "'{}' is {}, which loadstone does not merge: the output gets the first model's",
               printable(name), loadstone::name(draft.source.dtype)));
      findings_.back().severity = Severity::warning;
    }
  }

  // Keeps tied names in the file equal under random pruning: all tensors of one shape with one row
  // per token are pruned at the same elements.
  void draw_ties_once() {
    std::map<std::string, std::string> firsts;
    for (auto& [name, draft] : drafts_.items) {
      if (!head_.has_token_rows(draft.source.shape)) continue;
      const auto [first, is_new] = firsts.try_emplace(draft.source.shape.text(), name);
      if (!is_new) draft.merge.draws_as = first->second;
    }
    const auto has = [&](std::string_view name) { return drafts_.items.contains(name); };
    for (const auto& [name, draft] : drafts_.items) {
      const auto head = head_.head_of(name, has);
      if (!head || !has(*head) || *head == draft.merge.draws_as) continue;
      drafts_.items.at(*head).merge.draws_as =
          draft.merge.draws_as.empty() ? name : draft.merge.draws_as;
    }
  }

  // Handles heads that the config ties to embeddings: with the policy `split`, adds drafts for
  // them, otherwise ties them to the embedding's draft.
  void add_ties() {
    const auto has = [&](std::string_view name) { return drafts_.items.contains(name); };
    for (const auto& [name, draft] : drafts_.items) {
      if (const auto head = head_.head_of(name, has)) ties_.push_back({name, *head});
    }
    for (const DraftTie& tie : ties_) {
      const MergeDraft& root = drafts_.items.at(tie.front());
      const auto stored = drafts_.items.find(tie.back());
      if (stored != drafts_.items.end()) stored_.insert(tie.back());
      if (options_.merge->tie == TiePolicy::split) {
        if (stored == drafts_.items.end()) drafts_.items.emplace(tie.back(), root);
      } else {
        if (stored != drafts_.items.end()) kept_heads_.emplace(tie.back(), stored->second);
        drafts_.items.erase(tie.back());
        drafts_.other_names.emplace(tie.back(), tie.front());
      }
    }
  }

  void settle_ties() {
    if (options_.merge->tie == TiePolicy::split) {
      roots_ = split_roots(catalog_, ties_, drafts_, findings_);
      for (const DraftTie& tie : ties_) {
        const auto root = roots_.find(tie.back());
        if (root != roots_.end() || stored_.contains(tie.back())) continue;
        drafts_.at(tie.front()).add_same(drafts_.at(tie.back()));
        drafts_.items.erase(tie.back());
      }
    } else {
      // The file has both names, so both change in the same way.
      for (const auto& [head, base] : kept_heads_) {
        drafts_.items.emplace(head, changed_alike(base, drafts_.at(head)));
      }
    }
    if (options_.merge->tie == TiePolicy::split) refuse_unknown_ties();
  }

  // Returns the draft of a stored head that changes like its embedding: low-rank products are added
  // to the head's own value.
  static MergeDraft changed_alike(const MergeDraft& head, const MergeDraft& root) {
    MergeDraft draft = root.is_replaced ? root : head;
    draft.source = head.source;
    if (root.is_replaced || !root.is_adapted()) return draft;
    for (const AddedProduct& product : root.products) {
      draft.products.push_back(product);
      draft.products.back().term = draft.merge.terms.size();
      draft.merge.terms.push_back(root.merge.terms[product.term]);
    }
    draft.merge.row_elements = root.merge.row_elements;
    return draft;
  }

  // Rejects changes of an embedding that the config ties to unknown names, because the tied tensors
  // would no longer be equal.
  void refuse_unknown_ties() {
    for (const auto& [name, draft] : drafts_.items) {
      const bool is_known = std::ranges::any_of(
          ties_, [&](const DraftTie& tie) { return std::ranges::find(tie, name) != tie.end(); });
      const Shape& shape = draft.source.shape;
      const bool has_twin = std::ranges::any_of(drafts_.items, [&](const auto& other) {
        return other.first != name && other.second.source.shape == shape;
      });
      if (!draft.is_adapted() || is_known || !head_.may_tie(name, shape, has_twin)) continue;
      fail(name, fmt::format("an adapter changes '{}', which the config (tie_word_embeddings) or "
                             "the architecture ties to another tensor, whose name is unknown",
                             printable(name)));
      findings_.back().code = "merge.tie";
      findings_.back().suggestion =
          "change all names of the tied tensor (--tie keep, tie=\"keep\"), or merge while you load "
          "the model (lora=)";
    }
  }

  // Drops the base's tensor together with its components.
  void drop(const MergeSource& source, std::vector<std::uint32_t>& dropped) const {
    dropped.push_back(source.tensor);
    const QuantizedTensor* const codes = catalog_.quantized().find(source.tensor);
    if (codes == nullptr) return;
    const std::vector<std::uint32_t> companions = codes->companions();
    dropped.insert(dropped.end(), companions.begin(), companions.end());
  }

  [[nodiscard]] bool is_block(const MergeSource& source) const {
    return !catalog_.tensors()[source.tensor].encoding.is_dtype();
  }

  // Blocks that become blocks again are decoded to F32, so that they are rounded only once.
  [[nodiscard]] Dtype dtype_of(const MergeSource& source) const {
    if (!source.is_decoded) return source.dtype;
    const bool makes_blocks =
        options_.format == FileFormat::gguf && !options_.quantize.formats.empty();
    if (is_block(source) && makes_blocks && !options_.dtype) return Dtype::f32;
    return decoded_dtype(options_.dtype.value_or(options_.block_dtype));
  }

  // Returns recipes for changed tensors only. The conversion decides later about unchanged blocks.
  Values values() {
    Values values;
    for (auto& [name, draft] : drafts_.items) {
      const bool is_merged = !draft.merge.terms.empty() || draft.merge.factor != 1;
      const bool is_split = roots_.contains(name);
      const bool stays = !is_merged && !draft.is_replaced && !is_split;
      if (stays && (!draft.source.is_decoded || is_block(draft.source))) continue;
      if (draft.is_replaced || kept_heads_.contains(name)) drop(draft.source, values.dropped);
      if (is_split && !is_merged && !draft.is_replaced && is_block(draft.source)) {
        const std::uint32_t tensor = draft.source.tensor;
        draft.boxes = boxes_of(source_view(tensor, catalog_.tensors()[tensor]));
      }
      TargetRecipe recipe = {.target = name,
                             .shape = draft.source.shape,
                             .dtype = dtype_of(draft.source),
                             .boxes = std::move(draft.boxes),
                             .decided_by = std::move(draft.decided_by)};
      const bool is_empty = recipe.shape.numel() == 0u;
      if (is_merged && !is_empty) {
        recipe.merge = std::make_shared<const Merge>(std::move(draft.merge));
      }
      values.recipes.targets.push_back(std::move(recipe));
    }
    values.unties = !roots_.empty();
    values.recipes.decodings = numbers_.take_decodings();
    const std::uint32_t end = catalog_.tensors_of(0).end;
    for (const QuantizedTensor& each : catalog_.quantized().tensors()) {
      const bool is_block = each.data < end && !catalog_.tensors()[each.data].encoding.is_dtype();
      if (is_block) continue;  // blocks may be kept, with their scales
      for (const std::uint32_t source : each.unneeded) {
        if (source < end) values.dropped.push_back(source);
      }
    }
    return values;
  }

  const Catalog& catalog_;
  const ConvertOptions& options_;
  std::vector<Finding>& findings_;
  MergeNumbers numbers_;
  MergeDrafts drafts_;
  std::vector<float> weights_;
  TiedHead head_;
  std::vector<DraftTie> ties_;                 // pairs of an embedding and a head
  std::set<std::string, std::less<>> stored_;  // heads that are in the file
  std::map<std::string, MergeDraft> kept_heads_;
  TieRoots roots_;  // names of ties that are split
};

}  // namespace

std::string_view name(MergeMethod method) noexcept {
  const auto index = static_cast<std::size_t>(method);
  return index < std::size(methods) ? methods[index].name : std::string_view();
}

std::optional<MergeMethod> parse_merge_method(std::string_view text) noexcept {
  return from_name<MergeMethod>(text);
}

Values merged_values(const std::shared_ptr<const Catalog>& catalog, const ConvertOptions& options,
                     std::vector<Finding>& findings) {
  check(*catalog, options);
  return Merger(catalog, options, findings).run();
}

}  // namespace loadstone

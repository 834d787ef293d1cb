#include "plan/adapters.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <span>
#include <tuple>
#include <utility>

#include "base/pattern.h"
#include "base/text.h"
#include "catalog/adapter_config.h"
#include "catalog/conv1d.h"
#include "catalog/tensor_values.h"
#include "loadstone/error.h"
#include "loadstone/quantized_tensors.h"
#include "plan/adapter_stacks.h"

namespace loadstone {

namespace {

constexpr const char* unfit = "merge.adapter";       // the adapter does not fit the base
constexpr const char* malformed = "format.adapter";  // the adapter is inconsistent

// Not thread-safe.
class Adder {
 public:
  Adder(const Catalog& catalog, std::uint32_t checkpoint, const MergeAdapter& adapter,
        const AdapterPlaces& places, MergeNumbers& numbers, MergeDrafts& drafts,
        std::vector<Finding>& findings)
      : catalog_(catalog),
        adapter_(catalog.checkpoints().at(checkpoint)),
        checkpoint_(checkpoint),
        first_tensor_(catalog.tensors_of(checkpoint).begin),
        options_(adapter),
        places_(places),
        numbers_(numbers),
        drafts_(drafts),
        findings_(findings),
        configs_(adapter_configs(*adapter_)) {}

  void run() {
    const std::size_t begin = findings_.size();
    for (auto& [name, source] : numbers_.sources(checkpoint_, findings_)) sort_in(name, source);
    for (const auto& [name, module] : modules_) {
      try {
        add(name, module);
      } catch (const Error& error) {
        if (error.code() != unfit && error.code() != malformed) throw;
        const Where& where = error.where();
        fail(module.names, fmt::format("{} ({})", error.message(), printable(name)), where.found,
             where.expected);
        findings_.back().code = error.code();
      }
    }
    if (!has_match_) advise_on_names(begin);
    report_other_encoders(*catalog_.checkpoints().front(), *adapter_, encoders_, findings_);
    for (const AdapterConfig& config : configs_) require_saved_modules(config);
    if (!is_used_) fail({}, "it has no tensors to merge, or patterns exclude all of them");
    for (const AdapterConfig& config : configs_) report_doubts(config, *adapter_, findings_);
  }

 private:
  // Requires tensors for the modules that the adapter's configuration declares as trained in full.
  // Ignores modules that the base lacks, because PEFT lists several usual names for the head.
  void require_saved_modules(const AdapterConfig& config) {
    for (const std::string& module : config.saved_modules()) {
      const auto is_inside = [&](const std::string& name) {
        return ("." + name).find("." + module + ".") != std::string::npos;
      };
      const auto is_of_adapter = [&](const auto& tensor) { return is_inside(tensor.name); };
      if (std::ranges::any_of(adapter_->tensors(), is_of_adapter)) continue;
      const auto is_lost = [&](const std::string& name) {
        return is_inside(name) && !is_ignored(name) && !drafts_.at(name).is_replaced;
      };
      const std::vector<std::string> names = drafts_.names();
      if (std::ranges::none_of(names, is_lost)) continue;
      fail({}, fmt::format("its configuration lists '{}' in modules_to_save (trained in full), but "
                           "the adapter contains no tensor of this module",
                           printable(module)));
      findings_.back().code = malformed;
      findings_.back().suggestion =
          "to keep the base's tensors of this module, exclude the module with a pattern "
          "(--lora-ignore)";
    }
  }

  void fail(std::vector<std::string> sources, const std::string& what, std::string found = {},
            std::string expected = {}) {
    findings_.push_back(
        {.severity = Severity::error,
         .code = unfit,
         .message = fmt::format("the adapter in '{}': {}", printable(adapter_->shown_path()), what),
         .found = std::move(found),
         .expected = std::move(expected)});
    findings_.back().sources = std::move(sources);
  }

  void unused(const std::string& name, std::string_view why) {
    findings_.push_back(
        {.severity = Severity::error,
         .code = "merge.unused",
         .sources = {name},
         .message = fmt::format("'{}' of the adapter in '{}' has no effect: {}", printable(name),
                                printable(adapter_->shown_path()), why),
         .suggestion =
             options_.ignore.empty()
                 ? "if it belongs to another model, exclude it with a pattern (--lora-ignore)"
                 : "if it belongs to another model, exclude it with an additional pattern"});
  }

  // If the base has no module of the adapter, their names probably come from different libraries.
  void advise_on_names(std::size_t begin) {
    const std::vector<std::string> base = drafts_.names();
    for (Finding& finding : std::span(findings_).subspan(begin)) {
      if (finding.code != "merge.unused" || base.empty()) continue;
      finding.suggestion = fmt::format(
          "the base has none of the adapter's modules; its names are such as '{}'. If the adapter "
          "was made for this model, its names are those of another library: merge it into the "
          "checkpoint that has these names, such as the model's original file",
          printable(base.front()));
    }
  }

  [[nodiscard]] bool is_ignored(const std::string& name) {
    if (patterns_.size() != options_.ignore.size()) {
      for (const std::string& text : options_.ignore) {
        patterns_.push_back(compile_pattern(text, "plan.options", "ignore",
                                            pattern_memory(options_.ignore.size())));
      }
    }
    return std::ranges::any_of(patterns_,
                               [&](const Pattern& pattern) { return is_in(*pattern, name); });
  }

  void sort_in(const std::string& name, const MergeSource& source) {
    if (is_ignored(name)) return;
    is_used_ = true;
    AdapterName parsed = adapter_name(name);
    if (parsed.role == AdapterRole::unknown) {
      unused(name, "it belongs to a method that is not LoRA");
      return;
    }
    if (parsed.role == AdapterRole::value) {
      replace(name, source);
      return;
    }
    AdapterModule& module = modules_[parsed.module];
    module.names.push_back(name);
    const bool is_embedding =
        parsed.role == AdapterRole::embedding_left || parsed.role == AdapterRole::embedding_right;
    module.is_embedding = module.is_embedding || is_embedding;
    using Part = std::optional<AdapterPart> AdapterModule::*;
    constexpr std::array<Part, 8> parts = {
        &AdapterModule::right,      &AdapterModule::left,           &AdapterModule::right,
        &AdapterModule::left,       &AdapterModule::alpha,          &AdapterModule::magnitude,
        &AdapterModule::difference, &AdapterModule::bias_difference};
    auto& part = module.*parts.at(static_cast<std::size_t>(parsed.role));
    if (part) {
      fail({name, part->name}, "two tensors have the same role in a module");
      findings_.back().code = malformed;
      return;
    }
    part = AdapterPart{name, source};
  }

  // Replaces a base tensor that was trained in full: one of modules_to_save, or a bias.
  void replace(const std::string& name, const MergeSource& source) {
    const auto places = places_.find_value(name);
    if (places.empty()) {
      unused(name, "it is not a LoRA matrix, and the base has no tensor of this name");
      return;
    }
    has_match_ = true;
    if (is_ambiguous(name, {name}, places)) return;
    const std::string& target = places.front().name;
    MergeDraft& draft = drafts_.at(target);
    if (!draft.obstacle.empty()) {
      fail({name}, fmt::format("'{}' cannot be replaced: {}", printable(target), draft.obstacle));
      return;
    }
    if (draft.source.shape != source.shape || !source.is_number || !draft.source.is_number) {
      fail({name}, fmt::format("'{}' does not fit the base's tensor", printable(name)),
           source.shape.text(), draft.source.shape.text());
      return;
    }
    if (!draft.merge.terms.empty() || draft.is_replaced) {
      // Two names of a tie may be replaced if both get the same values.
      const bool is_equal = draft.is_replaced && draft.merge.terms.empty() &&
                            are_equal(catalog_, catalog_.tensors()[draft.replacement],
                                      catalog_.tensors()[source.tensor]);
      if (is_equal && options_.factor == 1) {
        draft.decided_by.push_back(source.tensor);
        return;
      }
      fail({name}, fmt::format("'{}' replaces '{}', but an earlier adapter already changed that "
                               "tensor to different values",
                               printable(name), printable(drafts_.root_of(target))));
      return;
    }
    if (options_.factor != 1) {
      fail({name},
           fmt::format("'{}' replaces the base's tensor, which is possible only with the factor 1",
                       printable(name)),
           fmt::format("{}", options_.factor), "1");
      if (name.find(".base_layer.") != std::string::npos) {
        findings_.back().suggestion =
            "exclude PEFT's copy of the base with --lora-ignore base_layer";
      }
      return;
    }
    draft.boxes = numbers_.boxes(source);
    draft.merge = {};
    draft.is_replaced = true;
    draft.replacement = source.tensor;
  }

  // Returns true, and adds an error, if the name can refer to different tensors of the base.
  [[nodiscard]] bool is_ambiguous(const std::string& name, const std::vector<std::string>& sources,
                                  const std::vector<AdapterPlace>& places) {
    const std::string root = drafts_.root_of(places.front().name);
    const auto is_root = [&](const AdapterPlace& each) {
      return drafts_.root_of(each.name) == root;
    };
    if (std::ranges::all_of(places, is_root)) return false;
    std::vector<std::string> names;
    for (const AdapterPlace& place : places) names.push_back(place.name);
    fail(sources,
         fmt::format("'{}' can refer to {} of the base", printable(name), name_list(names)));
    findings_.back().suggestion =
        "give the adapter's tensors the base's full names, or exclude them with a pattern "
        "(--lora-ignore)";
    return true;
  }

  void add(const std::string& name, const AdapterModule& module) {
    const auto places = places_.find(name);
    if (places.empty()) {
      if (add_experts(name, module)) return;
      for (const std::string& each : module.names) {
        unused(each, "the base has no weight for its module");
      }
      return;
    }
    has_match_ = true;
    if (is_ambiguous(name, module.names, places)) return;
    AdapterPlace place = places.front();
    if (place.part == AdapterPlace::Part::expert) {
      place.is_transposed = is_transposed_stack(place.name, shape_of_);
    }
    if (place.encoder > 0) encoders_[place.encoder].push_back(name);
    if (module.bias_difference) add_bias_difference(place, *module.bias_difference);
    if (module.difference) add_difference(place, module);
    if (module.has_product() && !module.difference) {
      require_both(module);
      const AdapterConfig* const config = config_of(name);
      const std::string key = config == nullptr ? name : key_in_config(name, *config);
      add_product(key, module, place, product_of(module, numbers_));
    }
  }

  // Adds the products of a module that adapts all experts. Returns false for other modules.
  bool add_experts(const std::string& name, const AdapterModule& module) {
    const AdapterConfig* const config = config_of(name);
    if (config == nullptr || config->parameters().empty() || !module.has_product()) return false;
    require_both(module);
    const auto experts =
        expert_products(name, product_of(module, numbers_), *config, places_, shape_of_);
    for (const auto& [place, product, key] : experts) add_product(key, module, place, product);
    has_match_ = has_match_ || !experts.empty();
    return !experts.empty();
  }

  static void require_both(const AdapterModule& module) {
    if (module.left && module.right) return;
    refuse_malformed("a module has only one of its two LoRA matrices");
  }

  void add_bias_difference(const AdapterPlace& place, const AdapterPart& difference) {
    constexpr std::string_view weight = ".weight";
    std::string bias = place.name;
    const bool has_bias = bias.ends_with(weight) && place.part == AdapterPlace::Part::all;
    if (has_bias) bias.replace(bias.size() - weight.size(), weight.size(), ".bias");
    if (has_bias && drafts_.contains(bias)) {
      add_values(bias, difference);
    } else {
      unused(difference.name, "the base has no bias for its module");
    }
  }

  // ComfyUI ignores the matrices of a module that has a difference too.
  void add_difference(const AdapterPlace& place, const AdapterModule& module) {
    if (module.left || module.right) {
      refuse_malformed("a module has LoRA matrices and also a difference (.diff)");
    }
    for (const auto& part : {module.alpha, module.magnitude}) {
      if (part) unused(part->name, "a difference (.diff) is added without a scale");
    }
    if (place.part != AdapterPlace::Part::all) {
      refuse_unfit(fmt::format("a difference (.diff) cannot be added to a part of '{}'",
                               printable(place.name)));
    }
    add_values(place.name, *module.difference);
  }

  // Adds a difference that has the shape of the base's tensor.
  void add_values(const std::string& target, const AdapterPart& difference) {
    MergeDraft& draft = drafts_.at(target);
    require_floats(target, draft, {&difference});
    const MergeSource& source = difference.source;
    if (source.shape != draft.source.shape) {
      refuse_unfit(fmt::format("a difference does not fit the shape of '{}'", printable(target)),
                   source.shape.text(), draft.source.shape.text());
    }
    const auto [known, is_new] = given_.try_emplace(
        {drafts_.root_of(target), AdapterPlace::Part::all, 0, 0}, difference.name);
    const AddedProduct added = {target, draft.merge.terms.size(), source.tensor, source.tensor};
    Term term = {.factor = options_.factor, .boxes = numbers_.boxes(source), .low_rank = {}};
    term.is_added = true;
    if (!is_new) {
      if (!is_repeated(draft, term, added)) {
        refuse_malformed("the adapter changes one tensor twice", known->second);
      }
      draft.decided_by.push_back(source.tensor);
      return;
    }
    draft.merge.terms.push_back(std::move(term));
    draft.products.push_back(added);
  }

  void require_floats(const std::string& target, const MergeDraft& draft,
                      std::initializer_list<const AdapterPart*> parts) {
    if (!draft.obstacle.empty()) {
      refuse_unfit(
          fmt::format("the adapter cannot change '{}': {}", printable(target), draft.obstacle));
    }
    const auto is_number = [](const AdapterPart* part) { return part->source.is_number; };
    if (!draft.source.is_number || !std::ranges::all_of(parts, is_number)) {
      refuse_unfit("an adapter can be added only to decoded floats");
    }
  }

  void add_product(const std::string& name, const AdapterModule& module, const AdapterPlace& place,
                   const AdapterProduct& product) {
    MergeDraft& draft = drafts_.at(place.name);
    require_floats(place.name, draft, {&*module.left, &*module.right});
    const AdapterConfig* const config = config_of(name);
    const TensorInfo* const alpha =
        module.alpha ? &adapter_->tensors()[module.alpha->source.tensor - first_tensor_] : nullptr;
    Term term = {.factor = options_.factor *
                           scale_of_product(*adapter_, name, product.rank, alpha, config)};
    if (!std::isfinite(term.factor)) {
      refuse_malformed("the scale of a LoRA product is NaN, infinite or too large for F32",
                       fmt::format("{}", term.factor));
    }
    LowRank& low_rank = term.low_rank.emplace();
    const bool is_transposed =
        place.part == AdapterPlace::Part::expert
            ? set_stack(draft.source.shape, place, product, low_rank)
            : set_rows(draft.source.shape, place, product,
                       module.is_embedding || is_conv1d(place.name, product, config), low_rank);
    set_matrices(module, product, is_transposed, low_rank);
    set_magnitudes(module, product, config, is_transposed, low_rank);
    const std::uint64_t width = row_elements(place, draft.source.shape);
    if (draft.merge.row_elements != 0 && draft.merge.row_elements != width) {
      refuse_unfit(
          "two LoRA products need the tensor as matrices with different numbers of columns");
    }
    draft.merge.row_elements = width;
    const std::size_t number = draft.merge.terms.size();
    const AddedProduct added = {place.name, number, module.left->source.tensor,
                                module.right->source.tensor, is_transposed};
    if (module.alpha) draft.decided_by.push_back(module.alpha->source.tensor);
    if (!is_first(place, draft, term, added, module.left->name)) {
      draft.decided_by.insert(draft.decided_by.end(), {added.left, added.right});
      return;
    }
    draft.merge.terms.push_back(std::move(term));
    draft.products.push_back(added);
  }

  // Returns true if the adapter adds an equal term under a different name of the tensor.
  [[nodiscard]] bool is_repeated(const MergeDraft& draft, const Term& term,
                                 const AddedProduct& added) const {
    return std::ranges::any_of(draft.products, [&](const AddedProduct& each) {
      return each.name != added.name && each.left >= first_tensor_ &&
             are_equal_products(catalog_, draft.merge.terms[each.term], each, term, added);
    });
  }

  // Returns false if the adapter repeats the same product under another name of a tie.
  [[nodiscard]] bool is_first(const AdapterPlace& place, const MergeDraft& draft, const Term& term,
                              const AddedProduct& added, const std::string& source) {
    const auto [known, is_new] = given_.try_emplace(
        {drafts_.root_of(place.name), place.part, place.expert, place.share}, source);
    if (is_new) return true;
    if (is_repeated(draft, term, added)) return false;
    refuse_malformed("the adapter has two products for one weight", known->second);
  }

  // Returns true for a transposed weight. peft ignores the configuration for an nn.Linear.
  [[nodiscard]] bool is_conv1d(std::string_view name, const AdapterProduct& product,
                               const AdapterConfig* config) {
    const bool is_declared = config != nullptr && config->is_transposed();
    if (!is_conv1d_weight(name)) return is_declared && product.in != product.out;
    if (is_declared) return true;
    if (!has_conv1d_) {
      has_conv1d_ = has_conv1d(*catalog_.checkpoints().front(), nullptr).value_or(false);
    }
    return *has_conv1d_;
  }

  [[nodiscard]] const AdapterConfig* config_of(const std::string& module) const {
    for (const AdapterConfig& config : configs_) {
      if (module.starts_with(config.prefix())) return &config;
    }
    return nullptr;
  }

  [[nodiscard]] bool set_stack(const Shape& shape, const AdapterPlace& place,
                               const AdapterProduct& product, LowRank& low_rank) const {
    const bool is_transposed = set_expert(shape, place, product, low_rank);
    if (place.shares > 1 && drafts_.contains(place.name + "_bias")) {
      refuse_unfit(
          "experts with biases interleave gate and up rows, so no LoRA product can be added");
    }
    return is_transposed;
  }

  void set_matrices(const AdapterModule& module, const AdapterProduct& product, bool is_transposed,
                    LowRank& low_rank) {
    View left = product.left;
    View right = product.right;
    if (is_transposed) {
      static_cast<void>(transpose(left, 0, 1));
      static_cast<void>(transpose(right, 0, 1));
    }
    low_rank.left = numbers_.boxes(module.left->source, left);
    low_rank.right = numbers_.boxes(module.right->source, right);
    if (is_transposed) std::swap(low_rank.left, low_rank.right);
  }

  void set_magnitudes(const AdapterModule& module, const AdapterProduct& product,
                      const AdapterConfig* config, bool is_transposed, LowRank& low_rank) {
    if (!module.magnitude) {
      if (config != nullptr && config->has_magnitudes()) {
        refuse_malformed("a module has no magnitudes, but the configuration has use_dora: true");
      }
      return;
    }
    if (config != nullptr && !config->has_magnitudes()) {
      refuse_malformed("a module has magnitudes, but the configuration has use_dora: false");
    }
    if (options_.factor != 1) {
      refuse_unfit(
          "DoRA can be merged only with the factor 1, for which its magnitudes were trained",
          fmt::format("{}", options_.factor), "1");
    }
    loadstone::set_magnitudes(*module.magnitude, product, is_transposed, numbers_, low_rank);
  }

  const Catalog& catalog_;
  std::shared_ptr<const Catalog> adapter_;
  std::uint32_t checkpoint_;
  const ShapeOf shape_of_ = [this](const std::string& name) {
    return drafts_.contains(name) ? &drafts_.at(name).source.shape : nullptr;
  };
  std::uint32_t first_tensor_;  // index of the adapter's first tensor in the joined catalog
  const MergeAdapter& options_;
  const AdapterPlaces& places_;
  MergeNumbers& numbers_;
  MergeDrafts& drafts_;
  std::vector<Finding>& findings_;
  std::vector<AdapterConfig> configs_;
  std::optional<bool> has_conv1d_;  // for the base; nullopt: not yet known
  std::vector<Pattern> patterns_;
  bool is_used_ = false;
  bool has_match_ = false;  // the base has a tensor or a module of the adapter
  std::map<unsigned, std::vector<std::string>> encoders_;  // modules by AdapterPlace::encoder
  // Weights to which the adapter adds a product, each with the name of one tensor of the product.
  std::map<std::tuple<std::string, AdapterPlace::Part, std::uint64_t, std::uint64_t>, std::string>
      given_;
  std::map<std::string, AdapterModule, std::less<>> modules_;
};

}  // namespace

void add_adapter(const Catalog& catalog, std::uint32_t checkpoint, const MergeAdapter& adapter,
                 const AdapterPlaces& places, MergeNumbers& numbers, MergeDrafts& drafts,
                 std::vector<Finding>& findings) {
  Adder(catalog, checkpoint, adapter, places, numbers, drafts, findings).run();
}

}  // namespace loadstone

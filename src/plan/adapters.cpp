#include "plan/adapters.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <tuple>
#include <utility>

#include "base/pattern.h"
#include "base/text.h"
#include "catalog/adapter_config.h"
#include "catalog/conv1d.h"
#include "catalog/tensor_values.h"
#include "loadstone/error.h"
#include "loadstone/quantized_tensors.h"

namespace loadstone {

namespace {

constexpr const char* unfit = "merge.adapter";       // the adapter does not fit the base
constexpr const char* malformed = "format.adapter";  // the adapter is inconsistent
// PEFT's prefix for tensor names. An adapter with this prefix has its scale only in its config.
constexpr std::string_view peft_prefix = "base_model.model.";

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
    report_other_encoders(*catalog_.checkpoints().front(), *adapter_, encoders_, findings_);
    for (const AdapterConfig& config : configs_) require_saved_modules(config);
    if (!is_used_) fail({}, "it has no tensors to merge, or patterns exclude all of them");
    for (const AdapterConfig& config : configs_) {
      for (const std::string& doubt : config.doubts()) {
        findings_.push_back({.severity = Severity::warning,
                             .code = malformed,
                             .message = fmt::format("the configuration of the adapter in '{}' {}",
                                                    printable(adapter_->root()), doubt)});
      }
    }
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
         .message = fmt::format("the adapter in '{}': {}", printable(adapter_->root()), what),
         .found = std::move(found),
         .expected = std::move(expected)});
    findings_.back().sources = std::move(sources);
  }

  [[noreturn]] static void refuse(std::string message, std::string found = {},
                                  std::string expected = {}) {
    throw Error(unfit, std::move(message),
                {.found = std::move(found), .expected = std::move(expected)});
  }

  [[noreturn]] static void refuse_itself(std::string message, std::string found = {},
                                         std::string expected = {}) {
    throw Error(malformed, std::move(message),
                {.found = std::move(found), .expected = std::move(expected)});
  }

  void unused(const std::string& name, std::string_view why) {
    findings_.push_back(
        {.severity = Severity::error,
         .code = "merge.unused",
         .sources = {name},
         .message = fmt::format("'{}' of the adapter in '{}' has no effect: {}", printable(name),
                                printable(adapter_->root()), why),
         .suggestion =
             options_.ignore.empty()
                 ? "if it belongs to another model, exclude it with a pattern (--lora-ignore)"
                 : "if it belongs to another model, exclude it with an additional pattern"});
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
    constexpr std::array<Part, 6> parts = {&AdapterModule::right, &AdapterModule::left,
                                           &AdapterModule::right, &AdapterModule::left,
                                           &AdapterModule::alpha, &AdapterModule::magnitude};
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
    const auto target = places_.find_value(name);
    if (!target) {
      unused(name, "it is not a LoRA matrix, and the base has no tensor of this name");
      return;
    }
    MergeDraft& draft = drafts_.at(*target);
    if (!draft.obstacle.empty()) {
      fail({name}, fmt::format("'{}' cannot be replaced: {}", printable(*target), draft.obstacle));
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
                               printable(name), printable(drafts_.root_of(*target))));
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

  void add(const std::string& name, const AdapterModule& module) {
    std::vector<std::string> ambiguous;
    auto place = places_.find(name, ambiguous);
    const auto means_first = [&](const std::string& each) {
      return drafts_.root_of(each) == drafts_.root_of(ambiguous.front());
    };
    if (!ambiguous.empty() && std::ranges::all_of(ambiguous, means_first)) {
      place = AdapterPlace{.name = ambiguous.front()};  // all names refer to one tensor
    } else if (!ambiguous.empty()) {
      fail(module.names,
           fmt::format("'{}' can refer to {}", printable(name), name_list(ambiguous)));
      return;
    }
    if (!place) {
      for (const std::string& each : module.names) {
        unused(each, "the base has no weight for its module");
      }
      return;
    }
    if (!module.left || !module.right) {
      refuse_itself("a module has only one of its two LoRA matrices");
    }
    if (place->encoder > 0) encoders_[place->encoder].push_back(name);
    MergeDraft& draft = drafts_.at(place->name);
    if (!draft.obstacle.empty()) {
      refuse(fmt::format("the adapter cannot change '{}': {}", printable(place->name),
                         draft.obstacle));
    }
    if (!draft.source.is_number || !module.left->source.is_number ||
        !module.right->source.is_number) {
      refuse("the LoRA product can be added only to decoded floats");
    }
    const AdapterConfig* const config = config_of(name);
    const AdapterProduct product = product_of(module);
    Term term = {.factor = options_.factor * scale_of(name, module, product.rank, config)};
    if (!std::isfinite(term.factor)) {
      refuse_itself("the scale of a LoRA product is NaN, infinite or too large for F32",
                    fmt::format("{}", term.factor));
    }
    LowRank& low_rank = term.low_rank.emplace();
    const bool is_transposed =
        place->part == AdapterPlace::Part::expert
            ? set_expert(draft.source.shape, *place, product, low_rank)
            : set_rows(draft.source.shape, *place, product,
                       module.is_embedding || is_conv1d(place->name, product, config), low_rank);
    set_matrices(module, product, is_transposed, low_rank);
    set_magnitudes(module, product, config, is_transposed, low_rank);
    const std::uint64_t width = row_elements(*place, draft.source.shape);
    if (draft.merge.row_elements != 0 && draft.merge.row_elements != width) {
      refuse("two LoRA products need the tensor as matrices with different numbers of columns");
    }
    draft.merge.row_elements = width;
    const std::size_t number = draft.merge.terms.size();
    const AddedProduct added = {place->name, number, module.left->source.tensor,
                                module.right->source.tensor, is_transposed};
    if (module.alpha) draft.decided_by.push_back(module.alpha->source.tensor);
    if (!is_first(*place, draft, term, added, module.left->name)) {
      draft.decided_by.insert(draft.decided_by.end(), {added.left, added.right});
      return;
    }
    draft.merge.terms.push_back(std::move(term));
    draft.products.push_back(added);
  }

  // Returns false if the adapter repeats the same product under another name of a tie.
  [[nodiscard]] bool is_first(const AdapterPlace& place, const MergeDraft& draft, const Term& term,
                              const AddedProduct& added, const std::string& source) {
    const auto [known, is_new] = given_.try_emplace(
        {drafts_.root_of(place.name), place.part, place.expert, place.share}, source);
    if (is_new) return true;
    const auto is_same = [&](const AddedProduct& each) {
      return each.name != added.name && each.left >= first_tensor_ &&
             are_equal_products(catalog_, draft.merge.terms[each.term], each, term, added);
    };
    if (std::ranges::any_of(draft.products, is_same)) return false;
    refuse_itself("the adapter has two products for one weight", known->second);
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

  [[nodiscard]] float scale_of(const std::string& name, const AdapterModule& module,
                               std::uint64_t rank, const AdapterConfig* config) const {
    const std::string_view full = name;
    std::optional<float> configured;
    if (config != nullptr) {
      const bool has_prefix = full.starts_with(peft_prefix);
      const std::size_t skipped = has_prefix ? peft_prefix.size() : config->prefix().size();
      configured = config->scale(std::string(full.substr(skipped)), rank);
    }
    if (module.alpha) {
      const std::uint32_t alpha = module.alpha->source.tensor - first_tensor_;
      return stored_scale(*adapter_, adapter_->tensors()[alpha], rank, configured);
    }
    if (configured) return *configured;
    if (full.starts_with(peft_prefix)) {
      refuse_itself("the adapter's scale is in adapter_config.json, which is missing");
    }
    return 1;
  }

  // Returns the factors as matrices. A convolution's weight counts as [out, in * height * width].
  [[nodiscard]] AdapterProduct product_of(const AdapterModule& module) const {
    const Shape& left = module.left->source.shape;
    const Shape& right = module.right->source.shape;
    AdapterProduct product = {.left = numbers_.view(module.left->source),
                              .right = numbers_.view(module.right->source)};
    const std::uint64_t left_count = left.numel().value_or(0);
    const std::uint64_t right_count = right.numel().value_or(0);
    const bool is_sound = left.rank() >= 2 && left.rank() == right.rank() && left_count > 0 &&
                          right_count > 0 && left[0] * left[1] == left_count && left[1] == right[0];
    if (!is_sound) {
      refuse_itself("the shapes of a module's two LoRA matrices do not fit each other", left.text(),
                    right.text());
    }
    product.out = left[0];
    product.rank = left[1];
    product.in = right_count / right[0];
    static_cast<void>(reshape(product.left, {product.out, product.rank}));
    static_cast<void>(reshape(product.right, {product.rank, product.in}));
    return product;
  }

  // Returns the number of columns of the base's tensor when viewed as a matrix.
  [[nodiscard]] static std::uint64_t row_elements(const AdapterPlace& place, const Shape& shape) {
    if (place.part == AdapterPlace::Part::expert) return shape.rank() == 3 ? shape[2] : 0;
    return shape.rank() < 2 || shape[0] == 0 ? 0 : shape.numel().value_or(0) / shape[0];
  }

  [[noreturn]] static void misfit(const AdapterPlace& place, const AdapterProduct& product,
                                  const Shape& shape) {
    refuse(fmt::format("a LoRA product does not fit the shape of '{}'", printable(place.name)),
           fmt::format("[{}, {}]", product.out, product.in), shape.text());
  }

  // Returns true if the product is added as its transpose, which `may_be_transposed` allows.
  [[nodiscard]] bool set_rows(const Shape& shape, const AdapterPlace& place,
                              const AdapterProduct& product, bool may_be_transposed,
                              LowRank& low_rank) const {
    const std::uint64_t width = row_elements(place, shape);
    const std::uint64_t rows = width == 0 ? 0 : shape[0];
    const bool is_transposed = may_be_transposed && width == product.out && rows == product.in;
    low_rank.rank = product.rank;
    low_rank.rows = is_transposed ? product.in : product.out;
    low_rank.columns = is_transposed ? product.out : product.in;
    if (width != low_rank.columns || low_rank.rows > rows) misfit(place, product, shape);
    const std::uint64_t rest = rows - low_rank.rows;
    const bool is_pair = place.name.ends_with("gate_up_proj.weight");
    const bool is_half = rest == low_rank.rows;
    bool fits = false;
    switch (place.part) {
      case AdapterPlace::Part::first:
        fits = is_pair ? is_half : rest > 0 && rest % 2 == 0;
        break;
      case AdapterPlace::Part::middle:  // keys are followed by as many rows of values
        fits = rest > low_rank.rows;
        low_rank.row_begin = fits ? rest - low_rank.rows : 0;
        break;
      case AdapterPlace::Part::last:
        fits = is_pair ? is_half : rest > low_rank.rows;
        low_rank.row_begin = rest;
        break;
      default:
        fits = rest == 0;
    }
    if (!fits) misfit(place, product, shape);
    return is_transposed;
  }

  // Returns true for a stack [experts, in, out], to which the product's transpose is added.
  [[nodiscard]] bool set_expert(const Shape& shape, const AdapterPlace& place,
                                const AdapterProduct& product, LowRank& low_rank) const {
    const std::uint64_t out = place.shares * product.out;
    const bool has_expert = shape.rank() == 3 && place.expert < shape[0];
    const bool is_straight = has_expert && shape[1] == out && shape[2] == product.in;
    const bool is_transposed = has_expert && shape[1] == product.in && shape[2] == out;
    if (!is_straight && !is_transposed) misfit(place, product, shape);
    if (is_straight && is_transposed) {
      refuse(fmt::format("the layout of the experts in '{}' is ambiguous", printable(place.name)),
             fmt::format("[{}, {}]", product.out, product.in), shape.text());
    }
    if (drafts_.contains(place.name + "_bias")) {
      refuse("experts with biases interleave gate and up rows, so no LoRA product can be added");
    }
    low_rank.rank = product.rank;
    low_rank.rows = is_straight ? product.out : product.in;
    low_rank.columns = is_straight ? product.in : product.out;
    low_rank.row_begin = place.expert * shape[1];
    (is_straight ? low_rank.row_begin : low_rank.column_begin) += place.share * product.out;
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
        refuse_itself("a module has no magnitudes, but the configuration has use_dora: true");
      }
      return;
    }
    if (config != nullptr && !config->has_magnitudes()) {
      refuse_itself("a module has magnitudes, but the configuration has use_dora: false");
    }
    const MergeSource& source = module.magnitude->source;
    const std::uint64_t count = source.shape.numel().value_or(0);
    const bool is_by_row = source.shape.rank() > 0 && source.shape[0] == product.out;
    if (!is_by_row || count != product.out || !source.is_number) {
      refuse_itself("a module needs one magnitude for each row", source.shape.text(),
                    fmt::format("[{}]", product.out));
    }
    if (is_transposed || low_rank.rows != product.out) {
      refuse("loadstone does not merge magnitudes of columns");
    }
    if (options_.factor != 1) {
      refuse("DoRA can be merged only with the factor 1, for which its magnitudes were trained",
             fmt::format("{}", options_.factor), "1");
    }
    View view = numbers_.view(source);
    static_cast<void>(reshape(view, {count}));
    low_rank.magnitudes = numbers_.boxes(source, view);
  }

  const Catalog& catalog_;
  std::shared_ptr<const Catalog> adapter_;
  std::uint32_t checkpoint_;
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


#include "convert/values.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "base/named.h"
#include "base/text.h"
#include "boxes/cast_kind.h"
#include "catalog/expert_series.h"
#include "catalog/lacking.h"
#include "codec/encode.h"
#include "codec/fp4/blocks.h"
#include "convert/experts.h"
#include "convert/json_text.h"
#include "convert/write/container.h"
#include "loadstone/error.h"
#include "loadstone/quantized_tensors.h"
#include "loadstone/recipe_builder.h"

namespace loadstone {

namespace {

using BuiltValue = RecipeBuilder::Value;

// Returns true if codes that the output can store as blocks may be kept. Until loadstone decides
// which, their recipes yield values.
bool keeps_codes(const ConvertOptions& options, bool is_decoded) noexcept {
  return !is_decoded && !options.dtype && container_of(options.format).holds_blocks();
}

// Not thread-safe.
class ValueDecoder {
 public:
  ValueDecoder(const std::shared_ptr<const Catalog>& catalog, const ConvertOptions& options,
               bool is_decoded, const std::set<std::string, std::less<>>& broken,
               std::vector<Finding>& findings)
      : catalog_(*catalog),
        options_(options),
        is_decoded_(is_decoded),
        broken_(broken),
        findings_(findings),
        naming_(expert_naming(string_member(options.folder.config, "model_type"))),
        builder_(catalog),
        is_read_(catalog_.tensors().size(), false) {}

  Values run() {
    take_quantized();
    for (std::uint32_t i = 0; i < catalog_.tensors().size(); ++i) {
      const TensorInfo& tensor = catalog_.tensors()[i];
      if (is_read_[i] || !tensor.encoding.is_dtype()) continue;
      plain_.emplace(tensor.name, i);
    }
    if (options_.experts == ExpertLayout::fused) fuse();
    if (options_.experts == ExpertLayout::separate) separate();
    if (options_.experts != ExpertLayout::keep) require_experts();
    for (const auto& [name, value] : decoded_) {
      if (!used_.contains(name)) add(name, value);
    }
    Values values;
    values.recipes = builder_.finish();
    values.dropped = std::move(dropped_);
    return values;
  }

 private:
  void take_quantized() {
    const bool keeps = keeps_codes(options_, is_decoded_);
    if (!is_decoded_ && !keeps) return;
    const QuantizedTensors& all = catalog_.quantized();
    if (is_decoded_)
      findings_.insert(findings_.end(), all.findings().begin(), all.findings().end());
    for (const QuantizedTensor& quantized : all.tensors()) {
      if (!quantized.is_readable() || !catalog_.tensors()[quantized.data].encoding.is_dtype())
        continue;  // the planner decodes blocks
      const bool may_keep =
          quantized.encoding == "nvfp4" || mxfp4_blocks_of(quantized.decoding, catalog_.tensors());
      if (keeps && !may_keep) continue;
      for (const std::uint32_t source : quantized.decoding.sources) is_read_.at(source) = true;
      for (const std::uint32_t source : quantized.unneeded) is_read_.at(source) = true;
      dropped_.insert(dropped_.end(), quantized.unneeded.begin(), quantized.unneeded.end());
      const Dtype dtype = decoded_dtype(options_.dtype.value_or(options_.block_dtype));
      decoded_.emplace(quantized.name, builder_.numbers(quantized, dtype));
    }
  }

  // Returns a value by its name: decoded if the tensor is quantized, otherwise as stored.
  [[nodiscard]] std::optional<BuiltValue> value(const std::string& name) {
    if (const auto known = decoded_.find(name); known != decoded_.end()) return known->second;
    if (plain_.contains(name)) return builder_.source(name);
    return std::nullopt;
  }

  [[nodiscard]] std::set<std::string> names() const {
    std::set<std::string> all;
    for (const auto& [name, index] : plain_) all.insert(name);
    for (const auto& [name, made] : decoded_) all.insert(name);
    return all;
  }

  void add(const std::string& name, BuiltValue value) {
    try {
      builder_.add(name, value);
    } catch (const Error& error) {
      fail(name, "plan.duplicate", error.message(), {});
    }
  }

  void fail(const std::string& target, std::string code, const std::string& what,
            std::vector<std::string> sources) {
    findings_.push_back({.severity = Severity::error,
                         .code = std::move(code),
                         .target = target,
                         .sources = std::move(sources),
                         .message = fmt::format("'{}': {}", printable(target), what)});
  }

  // ---- From single experts to one tensor: gate and up [experts, 2 * inner, hidden], down
  // [experts, hidden, inner]

  struct Experts {
    std::map<std::uint64_t, std::array<std::string, 3>> names;
    ExpertWords words = ExpertWords::usual;
    std::string first;  // the first expert tensor found in the layer
    std::string other;  // first tensor that uses the other ExpertWords
  };

  void fuse() {
    if (!is_decoded_)
      refuse_codes([this](const std::string& name) -> std::optional<std::string> {
        const auto found = expert_name(name);
        return found ? std::optional(fused_name(found->prefix, naming_)) : std::nullopt;
      });
    std::map<std::string, Experts> blocks;
    for (const std::string& name : names()) {
      if (auto found = expert_name(name)) {
        const auto [block, is_new] = blocks.try_emplace(found->prefix);
        Experts& experts = block->second;
        if (is_new) experts.first = name;
        if (!is_new && experts.words != found->words) experts.other = name;
        experts.names[found->expert][static_cast<std::size_t>(found->role)] = name;
        experts.words = found->words;
      }
    }
    std::set<std::string, std::less<>> fused;
    for (const auto& [prefix, experts] : blocks) {
      if (refuse_broken(prefix)) continue;
      if (!experts.other.empty()) {
        fail(fused_name(prefix, naming_), "plan.duplicate",
             fmt::format("its experts are stored under two sets of names, '{}' and '{}'",
                         printable(experts.first), printable(experts.other)),
             {experts.first, experts.other});
        continue;
      }
      try {
        fuse_block(prefix, experts);
        fused.emplace(block_of(prefix));
      } catch (const Error& error) {
        fail(fused_name(prefix, naming_), "plan.shape",
             "experts cannot be joined: " + error.message(), {});
      }
    }
    rename_rest(fused, fused_name);
  }

  // Renames the remaining tensors of the blocks.
  void rename_rest(const std::set<std::string, std::less<>>& blocks,
                   std::string (*renamed)(std::string, const ExpertNaming&)) {
    for (const std::string& name : names()) {
      if (used_.contains(name) || !is_in_block(blocks, name)) continue;
      const std::string other = renamed(name, naming_);
      if (other == name) continue;
      add(other, *value(name));
      used_.insert(name);
    }
  }

  // Rejects experts that are stored as codes, because codes are meaningless without their scales,
  // which would not move with them. `block_of_name`: returns the experts that a tensor belongs to;
  // nullopt for other tensors.
  template <typename BlockOfName>
  void refuse_codes(BlockOfName block_of_name) {
    std::set<std::string> told;
    for (const QuantizedTensor& quantized : catalog_.quantized().tensors()) {
      if (decoded_.contains(quantized.name)) continue;
      const auto block = block_of_name(quantized.name);
      if (!block || !told.insert(*block).second) continue;
      const std::uint32_t data = quantized.data;
      const std::string& source =
          data == QuantizedTensor::none ? quantized.name : catalog_.tensors()[data].name;
      fail(*block, "plan.encoding",
           fmt::format("loadstone cannot change the layout of the quantized experts in '{}'",
                       printable(source)),
           {source});
      findings_.back().suggestion = advice_on_codes(quantized);
    }
  }

  // A conversion that quantizes decodes the experts first, and finds scales that fit again.
  [[nodiscard]] std::string advice_on_codes(const QuantizedTensor& quantized) const {
    const WrittenEncoding* const written = find_written_encoding(quantized.encoding);
    const bool is_written = written != nullptr && !written->is_bitsandbytes() &&
                            options_.format == FileFormat::safetensors &&
                            options_.experts == ExpertLayout::separate;
    return is_written ? fmt::format(
                            "to encode them again, pass --quantize {}; to decode them, "
                            "pass --dequantize",
                            quantized.encoding)
                      : "decode them with --dequantize";
  }

  // Returns true for an incomplete layer, whose experts are never joined, and turns its finding
  // into an error.
  [[nodiscard]] bool refuse_broken(const std::string& prefix) {
    if (!broken_.contains(prefix)) return false;
    const auto known = std::ranges::find(findings_, prefix, &Finding::target);
    if (known != findings_.end()) known->severity = Severity::error;
    return true;
  }

  // Joins the experts of a layer. Their numbering has no gaps, so a missing tensor means a missing
  // projection.
  void fuse_block(const std::string& prefix, const Experts& experts) {
    SeriesGaps missing;
    for (std::uint64_t e = 0; e < experts.names.size(); ++e) {
      const auto known = experts.names.find(e);
      for (const ExpertRole role : expert_roles) {
        const auto index = static_cast<std::size_t>(role);
        if (known != experts.names.end() && !known->second[index].empty()) continue;
        missing.absent.push_back(
            fmt::format("{}.{}.{}.weight", prefix, e, name(role, experts.words)));
      }
    }
    missing.absent_count = missing.absent.size();
    if (!missing.ok()) {
      LackingSeries lacking;
      lacking.add(fused_name(prefix, naming_), missing);
      std::ranges::move(lacking.findings(), std::back_inserter(findings_));
      return;
    }
    std::vector<BuiltValue> gate_up;
    std::vector<BuiltValue> down;
    for (const auto& [expert, names] : experts.names) {
      gate_up.push_back(builder_.concat({*value(names[0]), *value(names[1])}, 0));
      down.push_back(*value(names[2]));
    }
    const BuiltValue joined = builder_.stack(gate_up, 0);
    const BuiltValue joined_down = builder_.stack(down, 0);
    add(fused_name(prefix, naming_) + ".gate_up_proj", joined);
    add(fused_name(prefix, naming_) + ".down_proj", joined_down);
    for (const auto& [expert, names] : experts.names) used_.insert(names.begin(), names.end());
  }

  // Adds an error if nothing changed and no tensor is an expert with the requested layout: such
  // experts may stay unchanged.
  void require_experts() {
    if (!used_.empty() || has_errors(findings_)) return;
    const bool is_fused = options_.experts == ExpertLayout::fused;
    const auto is_expert = [&](const std::string& name) {
      return is_fused ? name.ends_with(fused_gate_up) : expert_name(name).has_value();
    };
    if (std::ranges::any_of(names(), is_expert)) return;
    findings_.push_back(
        {.severity = Severity::error,
         .code = "plan.options",
         .message = fmt::format(
             "no tensor is an expert in a layout that this version of loadstone can make {}",
             name(options_.experts)),
         .suggestion = "omit --experts, or change the layout of the experts with rules"});
  }

  // ---- From one tensor to single experts

  void separate() {
    constexpr std::string_view suffix = ".gate_up_proj";
    const auto prefix_of = [&](const std::string& name) -> std::optional<std::string> {
      if (!name.ends_with(fused_gate_up)) return std::nullopt;
      return name.substr(0, name.size() - suffix.size());
    };
    if (!is_decoded_) refuse_codes(prefix_of);
    std::set<std::string, std::less<>> blocks;
    for (const std::string& name : names()) {
      const auto prefix = prefix_of(name);
      if (!prefix) continue;
      try {
        separate_block(*prefix);
        blocks.emplace(block_of(*prefix));
      } catch (const Error& error) {
        fail(*prefix, "plan.shape", "experts cannot be separated: " + error.message(), {name});
      }
    }
    rename_rest(blocks, separate_name);
  }

  void separate_block(const std::string& prefix) {
    const std::string gate_up_name = prefix + ".gate_up_proj";
    const std::string down_name = prefix + ".down_proj";
    const auto maybe_down = value(down_name);
    if (!maybe_down) {
      fail(prefix, "plan.missing", fmt::format("'{}' is missing", printable(down_name)),
           {down_name});
      return;
    }
    BuiltValue gate_up = *value(gate_up_name);
    BuiltValue down = *maybe_down;
    if (builder_.shape(gate_up).rank() != 3 || builder_.shape(down).rank() != 3) {
      throw Error("plan.shape", "tensors of experts must have three dimensions");
    }
    if (builder_.shape(gate_up).numel() == 0u || builder_.shape(down).numel() == 0u) {
      throw Error("plan.shape", "the tensors of experts have no elements");
    }
    // Only the layout [experts, hidden, inner] can have these sizes.
    if (builder_.shape(gate_up)[2] == 2 * builder_.shape(down)[1]) {
      gate_up = builder_.transpose(gate_up, 1, 2);
      down = builder_.transpose(down, 1, 2);
    }
    const Shape wide = builder_.shape(gate_up);  // copies, because the builder may move its shapes
    const Shape narrow = builder_.shape(down);
    if (wide[0] != narrow[0] || wide[1] != 2 * narrow[2] || wide[2] != narrow[1]) {
      throw Error("plan.shape", "the sizes of its two tensors do not fit each other: " +
                                    wide.text() + " and " + narrow.text());
    }
    // Experts with biases (GPT-OSS) alternate gate and up.
    const auto bias = value(prefix + ".gate_up_proj_bias");
    const std::uint64_t inner = narrow[2];
    const auto part = [&](BuiltValue of, ExpertRole role) {
      const auto index = static_cast<std::uint64_t>(role);
      return bias ? builder_.slice(of, 0, index, inner, 2)
                  : builder_.slice(of, 0, index * inner, inner);
    };
    const std::uint64_t count = wide[0];
    cut_ += 3 * count;
    if (const std::uint64_t most = cut_experts_max(catalog_); cut_ > most) {
      throw Error(
          "plan.shape",
          fmt::format(
              "{} experts would become {} tensors, but a file of this size can contain {} at most",
              count, 3 * count, most));
    }
    const std::string module = separate_name(prefix, naming_);
    for (std::uint64_t e = 0; e < count; ++e) {
      const auto target = [&](ExpertRole role, const char* what) {
        return fmt::format("{}.{}.{}.{}", module, e, name(role, naming_.words), what);
      };
      const BuiltValue both = one(gate_up, e);
      for (const ExpertRole role : {ExpertRole::gate, ExpertRole::up}) {
        add(target(role, "weight"), part(both, role));
        if (bias) add(target(role, "bias"), part(one(*bias, e), role));
      }
      add(target(ExpertRole::down, "weight"), one(down, e));
      const auto down_bias = value(prefix + ".down_proj_bias");
      if (down_bias) add(target(ExpertRole::down, "bias"), one(*down_bias, e));
    }
    for (const char* suffix :
         {".gate_up_proj", ".down_proj", ".gate_up_proj_bias", ".down_proj_bias"}) {
      used_.insert(prefix + suffix);
    }
  }

  [[nodiscard]] BuiltValue one(BuiltValue all, std::uint64_t expert) {
    auto extents = builder_.shape(all).extents();
    extents.erase(extents.begin());
    return builder_.reshape(builder_.slice(all, 0, expert, 1), Shape(std::move(extents)));
  }

  const Catalog& catalog_;
  const ConvertOptions& options_;
  bool is_decoded_;
  const std::set<std::string, std::less<>>& broken_;
  std::vector<Finding>& findings_;
  ExpertNaming naming_;
  RecipeBuilder builder_;
  std::vector<bool> is_read_;
  std::map<std::string, BuiltValue> decoded_;
  std::map<std::string, std::uint32_t, std::less<>> plain_;
  std::set<std::string> used_;  // values that were fused, separated or renamed
  std::uint64_t cut_ = 0;       // number of tensors from cut stacks
  std::vector<std::uint32_t> dropped_;
};

}  // namespace

std::string_view name(ExpertLayout layout) noexcept {
  return name_among({"keep", "fused", "separate"}, layout);
}

std::optional<ExpertLayout> expert_layout(std::string_view text) noexcept {
  return from_name<ExpertLayout>(text);
}

bool names_are_given(const ConvertOptions& options) noexcept {
  return !options.rules.empty() || !options.recipes.targets.empty();
}

bool decodes(const Catalog& catalog, const ConvertOptions& options) {
  if (options.dequantize || options.merge) return true;
  if (options.quantize.formats.empty() || names_are_given(options)) return false;
  // Weights that cannot be decoded are errors, not tensors to copy.
  return catalog.quantized().has_readable() || has_errors(catalog.quantized().findings());
}

Values decoded_values(const std::shared_ptr<const Catalog>& catalog, const ConvertOptions& options,
                      bool is_decoded, const std::set<std::string, std::less<>>& broken,
                      std::vector<Finding>& findings) {
  if (names_are_given(options)) return {};
  const bool has_codes = keeps_codes(options, is_decoded) && catalog->quantized().has_readable();
  if (!is_decoded && !has_codes && options.experts == ExpertLayout::keep) return {};
  return ValueDecoder(catalog, options, is_decoded, broken, findings).run();
}

}  // namespace loadstone

#include "fuzz/skeleton_input.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "fuzz/checkpoint_input.h"
#include "fuzz/mutate.h"
#include "loadstone/error.h"
#include "loadstone/recipe_builder.h"

namespace loadstone::fuzz {

namespace {

constexpr auto dtypes =
    std::to_array<Dtype>({Dtype::bf16, Dtype::f32, Dtype::f16, Dtype::f64, Dtype::u8, Dtype::i64,
                          Dtype::f8_e4m3, Dtype::c128, Dtype::f4, Dtype::boolean, Dtype::i32});

void change(Target& target, Skeleton& skeleton, Input& input) {
  switch (input.below(7)) {
    case 0:
      target.dtype = input.pick(dtypes);
      break;
    case 1: {
      auto extents = target.shape.extents();
      std::ranges::reverse(extents);
      target.shape = Shape(std::move(extents));
      break;
    }
    case 2: {
      auto extents = target.shape.extents();
      extents.push_back(input.below(5));
      target.shape = Shape(std::move(extents));
      break;
    }
    case 3:
      target.tie_of = input.pick(skeleton.targets).name;
      break;
    case 4:
      target.kind = static_cast<TargetKind>(input.below(4));
      break;
    case 5:
      target.name = tensor_name(input);
      break;
    default:
      target.has_value = true;
  }
}

constexpr auto patterns = std::to_array<const char*>(
    {R"((.*)\.weight)", R"(model\.(.*))", R"((.*)experts\.(\d+)\.up_proj\.weight)",
     R"((.*)experts\.(\d+)\.gate_proj\.weight)", R"((.*)experts\.(\d+)\.down_proj\.weight)", "(.*)",
     R"(blk\.(\d+)\.attn_q\.weight)", "a.*", R"((.*)q_proj(.*))", "", "(", R"((\d+)*x|(.*)+)"});
constexpr auto templates =
    std::to_array<const char*>({"$1.weight", "$1", "$1experts.up_proj", "$1experts.gate_up_proj",
                                "t", "a.weight", "$1.$2", "$2", "$$", "$9", "$1a", "", "model.$1"});

Rule rule_of(Input& input) {
  Rule rule;
  rule.op = static_cast<RuleOp>(input.below(9));
  for (std::uint64_t count = 1 + input.below(3); count > 0; --count) {
    rule.sources.emplace_back(input.pick(patterns));
  }
  for (std::uint64_t count = 1 + input.below(3); count > 0; --count) {
    rule.targets.emplace_back(input.pick(templates));
  }
  const auto dim = [&] { return static_cast<std::int64_t>(input.below(6)) - 2; };
  for (std::uint64_t count = input.below(4); count > 0; --count) rule.dims.push_back(dim());
  for (std::uint64_t count = input.below(4); count > 0; --count) {
    rule.sizes.push_back(input.chance(10) ? input.large_number() : input.below(70));
  }
  rule.start = input.below(8);
  for (std::uint64_t count = input.below(3); count > 0; --count) {
    constexpr auto steps =
        std::to_array<RuleOp>({RuleOp::transpose, RuleOp::permute, RuleOp::slice, RuleOp::reshape});
    RuleStep step = {.op = input.pick(steps),
                     .dims = {dim()},
                     .sizes = {input.below(64)},
                     .start = input.below(4)};
    if (step.op == RuleOp::transpose) step.dims.push_back(dim());
    rule.then.push_back(std::move(step));
  }
  return rule;
}

// Returns rules that have been written to JSON, changed or not, and read back.
Rules rules_for(Input& input) {
  Rules rules;
  for (std::uint64_t count = input.below(4); count > 0; --count) rules.push_back(rule_of(input));
  if (rules.empty()) return rules;
  return rules_from_json(mutated_json(rules_to_json(rules), input, input.chance(30) ? 2 : 0));
}

Recipes recipes_for(const std::shared_ptr<const Catalog>& catalog, const Skeleton& skeleton,
                    Input& input) {
  RecipeBuilder builder(catalog);
  for (std::uint64_t count = input.below(4); count > 0; --count) {
    try {
      RecipeBuilder::Value value = builder.source(input.pick(catalog->tensors()).name);
      if (input.chance(50)) value = builder.transpose(value, 0, -1);
      if (input.chance(30)) value = builder.stack({value, value}, 0);
      if (input.chance(30)) {
        const std::uint64_t start = input.below(3);
        value = builder.slice(value, 0, start, 1 + input.below(3));
      }
      if (input.chance(30)) value = builder.cast(value, input.pick(dtypes));
      builder.add(input.chance(70) ? input.pick(skeleton.targets).name : tensor_name(input), value);
    } catch (const Error&) {
      continue;  // the builder rejects this recipe
    }
  }
  const std::string text = to_json(builder.finish(), *catalog);
  return recipes_from_json(*catalog, mutated_json(text, input, input.chance(30) ? 3 : 0));
}

std::optional<Quantization> quantization_of(Input& input) {
  static constexpr auto encodings = std::to_array<const char*>(
      {"nf4", "fp4", "int8", "int8-channel", "fp8", "fp8-channel", "fp8-block", "int4", "int4-awq",
       "nvfp4", "mxfp4", "mxfp8", "none", "q4_k"});
  static constexpr auto dialects = std::to_array<const char*>(
      {"", "", "exact", "modelopt-compat", "modelopt-export", "bnb-cpu", "bnb-cuda", "?"});
  Quantization quantization = {.encoding = input.pick(encodings),
                               .dialect = input.pick(dialects),
                               .block_size = 64,
                               .nested = false,
                               .nested_offset = {},
                               .group = {}};
  if (input.chance(20)) quantization.block_size = 16u << input.below(9);
  quantization.nested = input.chance(20);
  if (input.chance(10)) quantization.nested_offset = 0.25F;
  if (input.chance(20)) quantization.group = "g";
  return quantization;
}

void choose_devices(PlanOptions& options, Input& input, const std::string& offload_folder) {
  static constexpr auto modules = std::to_array<const char*>(
      {"", "model", "model.layers.0", "model.layers.1", "a", "lm_head", "model.layers", "blk"});
  static constexpr auto devices =
      std::to_array<const char*>({"cpu", "disk", "cuda:0", "meta", "cuda:1", "gpu?"});
  if (input.chance(20)) options.device_map.mode = static_cast<DeviceMapMode>(input.below(4));
  for (std::uint64_t count = input.below(4); count > 0; --count) {
    const char* module = input.pick(modules);
    options.device_map.entries.emplace_back(module, input.pick(devices));
  }
  for (std::uint64_t count = input.below(3); count > 0; --count) {
    const char* device = input.pick(devices);
    options.max_memory.emplace_back(
        device, input.chance(10) ? input.large_number() : input.number() & 0xffff);
  }
  if (input.chance(20)) options.no_split_modules = {input.pick(modules)};
  if (input.chance(70)) options.offload_folder = offload_folder;
}

}  // namespace

Skeleton skeleton_for(const Catalog& catalog, Input& input) {
  Skeleton skeleton = Skeleton::from_catalog(catalog);
  for (std::uint64_t changes = input.below(6); changes > 0 && !skeleton.targets.empty();
       --changes) {
    const std::size_t at = input.below(skeleton.targets.size());
    if (input.chance(20)) {
      skeleton.targets.erase(skeleton.targets.begin() + static_cast<std::ptrdiff_t>(at));
    } else if (input.chance(20)) {
      Target added = skeleton.targets[at];
      added.name = tensor_name(input);
      skeleton.targets.push_back(std::move(added));
    } else {
      change(skeleton.targets[at], skeleton, input);
    }
  }
  if (input.chance(40)) {
    return Skeleton::from_json(mutated_json(skeleton.to_json(), input, input.chance(50) ? 2 : 0));
  }
  return skeleton;
}

PlanOptions plan_options_for(const std::shared_ptr<const Catalog>& catalog,
                             const Skeleton& skeleton, Input& input,
                             const std::string& offload_folder) {
  PlanOptions options;
  if (input.chance(30)) options.rules = rules_for(input);
  if (input.chance(20) && !skeleton.targets.empty() && !catalog->tensors().empty()) {
    options.recipes = recipes_for(catalog, skeleton, input);
  }
  if (input.chance(20)) options.dtype = input.pick(dtypes);
  options.dtype_from_file = input.chance(10);
  if (input.chance(30)) choose_devices(options, input, offload_folder);
  for (std::uint64_t count = input.below(3); count > 0 && !skeleton.targets.empty(); --count) {
    const std::string& name = input.pick(skeleton.targets).name;
    options.quantize.emplace(name, *quantization_of(input));
  }
  // Plans with missing tensors are often executed, because two of the policies accept them.
  static constexpr auto policies = std::to_array<MissingPolicy>(
      {MissingPolicy::zeros, MissingPolicy::initialise, MissingPolicy::error});
  options.missing = input.pick(policies);
  options.unexpected = static_cast<UnexpectedPolicy>(input.below(3));
  options.staging_bytes_max = std::uint64_t{8} << input.below(20);
  options.mmap = input.chance(10);
  options.caller.knows_all_sources = input.chance(10);
  return options;
}

// Chooses options for a GGUF file: encodings, metadata and splitting.
static void write_gguf(Input& input, ConvertOptions& options) {
  static constexpr auto formats =
      std::to_array<const char*>({"q4_0", "q8_0", "q6_k", "q4_k_m", "f16", "none", "iq2_xs"});
  options.format = FileFormat::gguf;
  options.is_split = !options.one_file;
  options.beyond_ggml = input.chance(50);
  options.quantize.style.reset();
  for (QuantizeFormat& format : options.quantize.formats) {
    format.quantization = {};
    format.quantization.encoding = input.pick(formats);
  }
  if (input.chance(90)) {
    options.metadata.emplace("general.architecture", MetadataValue{.value = "llama"});
  }
  const auto number = [](std::uint64_t value) {
    return MetadataValue{.value = value, .type = MetadataType::u32};
  };
  if (input.chance(50)) options.metadata.emplace("llama.block_count", number(input.below(4)));
  if (input.chance(20)) {
    options.metadata.emplace("general.alignment", number(std::uint64_t{1} << input.below(14)));
  }
}

ConvertOptions convert_options_for(const std::shared_ptr<const Catalog>& catalog, Input& input) {
  ConvertOptions options;
  if (input.chance(30)) options.dtype = input.pick(dtypes);
  if (input.chance(20)) options.rules = rules_for(input);
  if (input.chance(15) && !catalog->tensors().empty()) {
    options.recipes = recipes_for(catalog, Skeleton::from_catalog(*catalog), input);
  }
  options.experts = static_cast<ExpertLayout>(input.chance(40) ? input.below(3) : 0);
  static constexpr auto quantize_patterns =
      std::to_array<const char*>({"", "weight", "layers", "(", "up_proj"});
  for (std::uint64_t count = input.chance(50) ? 1 + input.below(2) : 0; count > 0; --count) {
    options.quantize.formats.push_back(
        {.pattern = input.pick(quantize_patterns), .quantization = *quantization_of(input)});
  }
  if (input.chance(50)) options.quantize.include.emplace_back(input.pick(quantize_patterns));
  if (input.chance(10)) options.quantize.exclude.emplace_back(input.pick(quantize_patterns));
  options.quantize.style = static_cast<QuantizeStyle>(input.below(2));
  options.quantize.allow_non_finite = input.chance(20);
  if (input.chance(20)) {
    options.folder.config = R"({"model_type": "llama", "num_hidden_layers": 2})";
    options.folder.config = mutated_json(options.folder.config, input, 2);
    options.folder.files.push_back({.name = "tokenizer.json", .text = "{}", .copy_of = {}});
  }
  options.unexpected = static_cast<UnexpectedPolicy>(input.below(3));
  options.one_file = input.chance(50);
  if (input.chance(40)) options.shard_bytes_max = 1 + input.number() % 20000;
  options.staging_bytes_max = std::uint64_t{1} << input.below(24);
  if (input.chance(10)) options.memory_bytes_max = input.large_number();
  options.threads = static_cast<unsigned>(input.below(4));
  options.dequantize = input.chance(40);
  if (input.chance(30)) write_gguf(input, options);
  return options;
}

}  // namespace loadstone::fuzz

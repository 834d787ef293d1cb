#include "catalog/adapter_config.h"

#include <fmt/format.h>
#include <simdjson.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <set>
#include <span>
#include <utility>
#include <variant>

#include "base/json_dom.h"
#include "base/python_json.h"
#include "base/repeated_field.h"
#include "base/text.h"
#include "base/words.h"
#include "catalog/assembled_file.h"
#include "catalog/open_file.h"
#include "catalog/paths.h"
#include "kernels/cast.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

constexpr const char* adapter_code = "format.adapter";
constexpr std::uint64_t adapter_config_bytes_max = 16u << 20;

[[noreturn]] void refuse_adapter(std::string message, std::string field, std::string found = {},
                                 std::string expected = {}) {
  throw Error(
      adapter_code, std::move(message),
      {.field = std::move(field), .found = printable(found), .expected = std::move(expected)});
}

// Returns nullopt if the field is missing or null.
template <typename Value>
std::optional<Value> typed_member(const dom::object& object, const std::string& field) {
  const auto element = object[field];
  if (element.error() != simdjson::SUCCESS || element.is_null()) return std::nullopt;
  const auto value = json_as<Value>(element);
  if (!value) refuse_adapter("a field of the adapter's configuration has the wrong type", field);
  return value;
}

// Accepts 0 and negative values, as peft does.
double alpha_of(double number, const std::string& field) {
  if (std::isfinite(number)) return number;
  refuse_adapter("alpha must be a finite number", field, fmt::format("{}", number));
}

double rank_of(double number, const std::string& field) {
  constexpr double rank_max = 1u << 31;
  if (number >= 1 && number <= rank_max && number == std::floor(number)) return number;
  refuse_adapter("a rank must be a whole number", field, fmt::format("{}", number),
                 fmt::format("1 to {}", rank_max));
}

std::string text_of(ByteSource& file) {
  const std::uint64_t bytes = file.identity().bytes;
  if (bytes > adapter_config_bytes_max) {
    throw Error(adapter_code, "the file is too large to be an adapter's configuration",
                {.path = file.path(),
                 .found = human_bytes(bytes),
                 .expected = "at most " + human_bytes(adapter_config_bytes_max)});
  }
  std::string text(bytes, '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

// Rejects initialisations that change the base when training starts, and that peft repeats when it
// loads the adapter. The products of such an adapter are relative to the changed base. The methods
// named here leave the base unchanged.
void refuse_other_base(const dom::object& object, const std::string& field) {
  const auto method = json_as<std::string_view>(object[field]);
  if (!method || is_word(*method, "gaussian orthogonal eva")) return;
  refuse_adapter("the adapter was trained on a base whose weights its method had changed",
                 "init_lora_weights", std::string(*method),
                 "an adapter that peft converted to LoRA");
}

// Fields that are rejected, because with them an adapter is more than products to add to the base:
// peft's variants of LoRA, layers that the base lacks, tensors that are not products.
constexpr std::string_view refused_fields =
    "megatron_config corda_config lora_ga_config velora_config monteclora_config kasa_config "
    "arrow_config use_bdlora use_qalora alora_invocation_tokens layer_replication lora_bias "
    "trainable_token_indices";

// Fields that this file reads, and fields that do not change the values of a merge. Together with
// refused_fields, these are all fields of peft 0.21.
constexpr std::string_view read_fields =
    "alpha_pattern fan_in_fan_out init_lora_weights lora_alpha modules_to_save peft_type r "
    "rank_pattern target_parameters use_dora use_rslora";
constexpr std::string_view idle_fields =
    "auto_mapping base_model_name_or_path bias ensure_weight_tying eva_config exclude_modules "
    "inference_mode layers_pattern layers_to_transform loftq_config lora_dropout megatron_core "
    "peft_version qalora_group_size revision runtime_config target_modules task_type";

// Returns false for false, null, [] and {}, which mean that a field is not used.
bool is_set(dom::element element) {
  if (element.is_null()) return false;
  if (const auto array = json_as<dom::array>(element)) return array->begin() != array->end();
  if (const auto object = json_as<dom::object>(element)) return object->size() > 0;
  return json_as<bool>(element).value_or(true);
}

// Throws Error if the text is not a JSON object.
dom::object object_of(dom::parser& parser, std::string_view text, const char* field) {
  const PythonJson json = python_json(text);
  if (json.fault) {
    throw Error(
        adapter_code,
        fmt::format("the adapter's configuration is not a JSON object: {}", json.fault->message),
        {.field = field, .byte_offset = json.fault->offset});
  }
  if (json.has_infinite) {
    refuse_adapter("a number of the adapter's configuration is NaN or infinite", field);
  }
  const auto result = parsed_json(parser, json.text);
  const auto object = json_as<dom::object>(result);
  if (!object) refuse_adapter("the adapter's configuration is not a JSON object", field);
  if (auto twice = repeated_field(result.value_unsafe())) {
    refuse_adapter("a field appears twice in the adapter's configuration", *std::move(twice));
  }
  return *object;
}

// See AdapterConfig::swaps_stacks().
std::optional<bool> swaps_stacks_in(std::optional<std::string_view> version) {
  if (!version) return std::nullopt;
  constexpr std::pair<unsigned, unsigned> first = {0, 19};
  std::pair<unsigned, unsigned> found;
  const char* const end = version->data() + version->size();
  const auto major = std::from_chars(version->data(), end, found.first);
  if (major.ec != std::errc() || major.ptr == end || *major.ptr != '.') return std::nullopt;
  if (std::from_chars(major.ptr + 1, end, found.second).ec != std::errc()) return std::nullopt;
  return found >= first;
}

}  // namespace

AdapterConfig::AdapterConfig(std::string_view text, std::string_view prefix) : prefix_(prefix) {
  dom::parser parser;
  const dom::object object = object_of(parser, text, adapter_config_name);
  const auto field = [&](std::string_view name) { return prefix_ + std::string(name); };
  refuse_other_base(object, field("init_lora_weights"));
  if (const auto type = typed_member<std::string_view>(object, field("peft_type"))) {
    if (*type != "LORA") {
      refuse_adapter("loadstone merges only LoRA adapters", "peft_type", std::string(*type),
                     "LORA");
    }
  }
  for_each_word(refused_fields, [&](std::string_view name) {
    const auto element = object[field(name)];
    if (element.error() == simdjson::SUCCESS && is_set(element.value_unsafe())) {
      refuse_adapter("loadstone does not merge adapters that set this field", std::string(name));
    }
  });
  rank_ = rank_of(typed_member<double>(object, field("r")).value_or(8), "r");
  alpha_ = alpha_of(typed_member<double>(object, field("lora_alpha")).value_or(8), "lora_alpha");
  has_root_scale_ = typed_member<bool>(object, field("use_rslora")).value_or(false);
  is_transposed_ = typed_member<bool>(object, field("fan_in_fan_out")).value_or(false);
  has_magnitudes_ = typed_member<bool>(object, field("use_dora")).value_or(false);
  const auto add_rules = [&](const char* name, const auto& checked, Rules& rules) {
    const auto patterns = typed_member<dom::object>(object, field(name));
    if (!patterns) return;
    std::vector<std::string_view> keys;
    for (const auto item : *patterns) {
      const auto number = json_as<double>(item.value);
      if (!number) refuse_adapter("a value in this field is not a number", name);
      keys.push_back(item.key);
      rules.numbers.push_back(checked(*number, name));
    }
    rules.patterns = ModulePatterns(keys, adapter_code, name);
    rules.keys.assign(keys.begin(), keys.end());
    rules.are_sorted = std::ranges::is_sorted(keys);
  };
  const auto add_names = [&](const char* of, std::vector<std::string>& names) {
    const auto list = json_as<dom::array>(object[field(of)]);
    if (!list) return;
    for (const auto item : *list) {
      const auto name = json_as<std::string_view>(item);
      if (!name) refuse_adapter("a name in this field is not a string", of);
      names.emplace_back(*name);
    }
  };
  add_names("modules_to_save", saved_modules_);
  add_names("target_parameters", parameters_);
  swaps_stacks_ = swaps_stacks_in(typed_member<std::string_view>(object, field("peft_version")));
  add_rules("rank_pattern", rank_of, ranks_);
  add_rules("alpha_pattern", alpha_of, alphas_);
  for (const auto item : object) {
    std::string_view name = item.key;
    if (!name.starts_with(prefix_) || !is_set(item.value)) continue;
    name.remove_prefix(prefix_.size());
    if (!is_word(name, read_fields) && !is_word(name, idle_fields)) unknown_.emplace_back(name);
  }
}

double AdapterConfig::Rules::number(const std::string& module, double otherwise) const {
  const auto found = patterns.find(module);
  return found ? numbers[*found] : otherwise;
}

// Takes the first key that matches, as peft does. If the keys are sorted, counts modules that match
// several alphas for doubts(), because peft sorts the keys when it saves, so training may have used
// a different alpha. Unsorted keys are in the order used in training.
double AdapterConfig::alpha_for(const std::string& module) const {
  if (!alphas_.are_sorted) return alphas_.number(module, alpha_);
  const std::vector<std::size_t> matches = alphas_.patterns.find_all(module);
  if (matches.empty()) return alpha_;
  const double first = alphas_.numbers[matches.front()];
  const auto other = std::ranges::find_if(
      matches, [&](std::size_t each) { return alphas_.numbers[each] != first; });
  if (other != matches.end() && modules_with_two_alphas_++ == 0) {
    two_alphas_ = fmt::format("'{}': {} by '{}', {} by '{}'", printable(module), first,
                              printable(alphas_.keys[matches.front()]), alphas_.numbers[*other],
                              printable(alphas_.keys[*other]));
  }
  return first;
}

std::vector<std::string> AdapterConfig::doubts() const {
  std::vector<std::string> found;
  if (!unknown_.empty()) {
    found.push_back(fmt::format(
        "sets {}, which this version of loadstone does not know and ignores", name_list(unknown_)));
  }
  if (modules_with_two_alphas_ > 0) {
    found.push_back(fmt::format(
        "gives {} two alphas in alpha_pattern ({}): loadstone uses the first, but peft sorts the "
        "keys when it saves an adapter, so the training may have used the other",
        counted(modules_with_two_alphas_, "module"), two_alphas_));
  }
  return found;
}

float AdapterConfig::scale(const std::string& module, std::uint64_t rank) const {
  const double planned = ranks_.number(module, rank_);
  if (planned != static_cast<double>(rank)) {
    throw Error(adapter_code,
                "the adapter's configuration declares a different rank for the module",
                {.tensor = module,
                 .field = "r",
                 .found = std::to_string(rank),
                 .expected = fmt::format("{}", planned)});
  }
  const double divisor = has_root_scale_ ? std::sqrt(planned) : planned;
  const double scale = alpha_for(module) / divisor;
  if (!(std::abs(scale) <= std::numeric_limits<float>::max())) {
    throw Error(adapter_code,
                "the scale of a module, computed from lora_alpha, is too large for F32",
                {.tensor = module, .field = "lora_alpha", .found = fmt::format("{}", scale)});
  }
  return static_cast<float>(scale);
}

namespace {

// Parses a configuration, and adds `path` to its errors.
AdapterConfig config_in(const std::string& path, std::string_view text, std::string_view prefix) {
  try {
    return AdapterConfig(text, prefix);
  } catch (const Error& error) {
    Where where = error.where();
    where.path = path;
    throw Error(error.code(), error.message(), std::move(where));
  }
}

// Reads adapter_config.json in the adapter's folder.
std::optional<AdapterConfig> config_beside(const Catalog& adapter) {
  const FileOpener opener{adapter.storage(), false};
  try {
    const auto file = opener.open(join_path(adapter.root(), adapter_config_name), adapter.root());
    return config_in(file->path(), text_of(*file), "");
  } catch (const Error& error) {
    if (error.code() != "io.not_found") throw;
    return std::nullopt;
  }
}

}  // namespace

std::vector<AdapterConfig> adapter_configs(const Catalog& adapter) {
  std::vector<AdapterConfig> configs;
  auto beside = config_beside(adapter);
  const auto found = adapter.metadata().find(adapter_metadata_key);
  if (found != adapter.metadata().end()) {
    const auto* const text = std::get_if<std::string>(&found->second.value);
    if (text == nullptr) refuse_adapter("the adapter's metadata is not text", adapter_metadata_key);
    dom::parser parser;
    const dom::object object = object_of(parser, *text, adapter_metadata_key);
    std::set<std::string> prefixes;  // "transformer."
    for (const auto item : object) {
      const std::string_view key = item.key;
      prefixes.emplace(key.substr(0, key.find('.') + 1));
    }
    if (beside && prefixes.contains("")) {
      refuse_adapter("the file's metadata and adapter_config.json both describe the same modules",
                     adapter_metadata_key, "two configurations", "one of the two");
    }
    for (const std::string& prefix : prefixes) {
      configs.push_back(config_in(adapter.root(), *text, prefix));
    }
  }
  if (beside) configs.push_back(*std::move(beside));
  return configs;
}

float adapter_number(const Catalog& adapter, const TensorInfo& tensor) {
  const auto of = [&](const char* field, std::string found, std::string expected) {
    return Where{.path = adapter.shards()[tensor.shard].path,
                 .tensor = tensor.name,
                 .field = field,
                 .found = std::move(found),
                 .expected = std::move(expected)};
  };
  if (tensor.shape.numel() != 1u) {
    throw Error(adapter_code, "alpha must be a single number",
                of("shape", tensor.shape.text(), "one element"));
  }
  const DtypeKind kind_of =
      tensor.encoding.is_dtype() ? kind(tensor.encoding.dtype()) : DtypeKind::complex;
  const bool is_number = kind_of == DtypeKind::floating || kind_of == DtypeKind::integer;
  const Cast cast = is_number ? cast_between(tensor.encoding.dtype(), Dtype::f32) : Cast();
  if (cast.run == nullptr) {
    throw Error(adapter_code, "alpha must be a float or an integer",
                of("dtype", std::string(tensor.encoding.name()), "a floating or integer dtype"));
  }
  std::array<std::byte, sizeof(double)> bytes{};
  const std::span<std::byte> used(bytes.data(), tensor.byte_count());
  open_shard(adapter.storage(), adapter, tensor.shard)->read(tensor.offset_begin, used);
  float number = 0;
  cast.run(bytes.data(), std::as_writable_bytes(std::span(&number, 1)).data(), 1);
  return number;
}

float stored_scale(const Catalog& adapter, const TensorInfo& alpha, std::uint64_t rank,
                   std::optional<float> configured) {
  const float scale = adapter_number(adapter, alpha) / static_cast<float>(rank);
  const Dtype dtype = alpha.encoding.dtype();
  const int digits = kind(dtype) == DtypeKind::floating ? dtype_info(dtype).format.digits : 24;
  const float rounding = std::ldexp(1.0F, 1 - std::min(digits, 23));
  if (!configured || std::abs(scale - *configured) <= rounding * std::abs(*configured)) {
    return scale;
  }
  throw Error(adapter_code,
              fmt::format("'{}' specifies the scale {}, but the adapter's configuration "
                          "(lora_alpha, r) specifies {}",
                          printable(alpha.name), scale, *configured),
              {.tensor = alpha.name,
               .found = fmt::format("{}", scale),
               .expected = fmt::format("{}", *configured)});
}

}  // namespace loadstone

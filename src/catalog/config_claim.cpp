#include "catalog/config_claim.h"

#include <fmt/format.h>
#include <simdjson.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <iterator>
#include <span>
#include <utility>

#include "base/digest.h"
#include "base/json_dom.h"
#include "base/python_json.h"
#include "base/text.h"
#include "base/words.h"
#include "catalog/config_file.h"
#include "catalog/config_sections.h"
#include "catalog/paths.h"
#include "catalog/transform_claim.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

using Block = std::array<std::uint64_t, 2>;

void add_block(QuantizationClaim& claim, const Block& block) {
  claim.block = !claim.block || *claim.block == block ? block : Block{0, 0};
}

// `value`: an array such as [128, 128], or a string such as "128x128".
void add_block(QuantizationClaim& claim, const dom::element& value) {
  if (value.is_null()) return;
  Block block = {0, 0};
  const auto extents = json_as<dom::array>(value);
  if (const auto text = json_as<std::string_view>(value)) {
    const auto cross = std::min(text->find('x'), text->size());
    std::from_chars(text->data(), text->data() + cross, block[0]);
    if (cross < text->size()) {
      std::from_chars(text->data() + cross + 1, text->data() + text->size(), block[1]);
    }
  } else if (extents && extents->size() == 2) {
    for (std::size_t i = 0; i < 2; ++i) {
      block[i] = json_as<std::uint64_t>(extents->at(i)).value_or(0);
    }
  }
  add_block(claim, block[0] == 0 || block[1] == 0 ? Block{0, 0} : block);
}

// Returns the groups of a compressed-tensors config.
std::vector<dom::element> groups_of(const dom::object& section) {
  std::vector<dom::element> groups;
  const auto found = json_as<dom::object>(section["config_groups"]);
  if (!found) return groups;
  for (const auto group : *found) groups.push_back(group.value);
  return groups;
}

// Adds the blocks of "fp8" and of compressed-tensors.
void add_blocks(QuantizationClaim& claim, const dom::object& section) {
  dom::element block;
  if (section["weight_block_size"].get(block) == simdjson::SUCCESS) {
    claim.has_whole_scales = claim.has_whole_scales || block.is_null();
    add_block(claim, block);
  }
  for (const dom::element group : groups_of(section)) {
    if (group.at_pointer("/weights/block_structure").get(block) == simdjson::SUCCESS) {
      add_block(claim, block);
    }
  }
}

// Adds text to the digest, which depends on the order of the calls.
void add_text(QuantizationClaim& claim, std::string_view text) {
  Digest digest;
  digest.update(std::as_bytes(std::span(claim.digest)));
  digest.update(std::as_bytes(std::span(text)));
  claim.digest = digest.hex();
}

template <typename Value>
std::optional<Value> member(const dom::object& section, std::initializer_list<const char*> keys) {
  for (const char* key : keys) {
    if (const auto value = json_as<Value>(section[key])) return value;
  }
  return std::nullopt;
}

// Returns UINT64_MAX for -1, which means a single group of any size.
std::optional<std::uint64_t> group_size_of(const dom::object& section) {
  const auto size = member<std::int64_t>(section, {"group_size", "q_group_size"});
  if (!size || *size < -1) return std::nullopt;
  return static_cast<std::uint64_t>(*size);
}

// Rejects two different formats. GPTQModel writes both fields, and the zero points of "gptq" and
// "gptq_v2" differ by 1.
void refuse_two_formats(const dom::object& section, const std::string& path) {
  const auto first = member<std::string_view>(section, {"checkpoint_format"});
  const auto second = member<std::string_view>(section, {"format"});
  if (!first || !second || *first == *second) return;
  throw Error("q.config", "two fields specify different formats of the checkpoint",
              {.path = path,
               .field = "checkpoint_format, format",
               .found = fmt::format("{} and {}", *first, *second),
               .expected = "one format"});
}

// Returns the packing that AutoRound before 0.5 declares in "backend", if it is AutoRound's own,
// whose zero points differ from those of GPTQ.
std::string_view own_backend(const dom::object& section) {
  const auto backend = member<std::string_view>(section, {"backend"}).value_or("");
  const auto has = [&](std::string_view word) { return backend.find(word) != backend.npos; };
  const bool is_own = backend.starts_with("auto_round:") || backend.starts_with("autoround:");
  return is_own && !has("gptq") && !has("awq") ? backend : std::string_view();
}

std::string method_of(const dom::object& section) {
  std::string method = lowered(member<std::string_view>(section, {"quant_method"}).value_or(""));
  return method == "compressed_tensors" ? "compressed-tensors" : method;
}

// Reads the fields of GPTQ and AWQ.
void add_words(QuantizationClaim& claim, const dom::object& section) {
  claim.method = method_of(section);
  claim.layout = member<std::string_view>(
                     section, {"checkpoint_format", "packing_format", "version", "format"})
                     .value_or(own_backend(section));
  claim.bits = member<std::uint64_t>(section, {"bits", "w_bit"});
  claim.group_size = group_size_of(section);
  claim.is_symmetric = member<bool>(section, {"sym"});
  claim.is_reordered = member<bool>(section, {"desc_act"});
  const auto has_entries = [&](std::string_view field) {
    const auto entries = json_as<dom::object>(section[field]);
    return entries && entries->size() > 0;
  };
  claim.has_exceptions = has_entries("dynamic") || has_entries("extra_config");
  claim.modules.clear();
  for (const auto field : section) {  // MLX: fields whose names are modules
    const auto entry = json_as<dom::object>(field.value);
    if (!entry || field.key.find('.') == std::string_view::npos) continue;
    claim.modules.push_back(
        {std::string(field.key), member<std::uint64_t>(*entry, {"bits"}), group_size_of(*entry)});
  }
}

// Visits the weights of compressed-tensors' groups.
template <typename Visit>
void for_each_group(const dom::object& section, const Visit& visit) {
  for (const dom::element group : groups_of(section)) {
    if (const auto weights = json_as<dom::object>(group.at_pointer("/weights"))) {
      visit(*weights);
    }
  }
}

// Keeps a field only if it is equal in all groups.
template <typename Value>
void join(Value& known, const Value& word, bool is_first) {
  if (is_first) known = word;
  if (known != word) known = {};
}

void add_groups(QuantizationClaim& claim, const dom::object& section) {
  claim.layout = member<std::string_view>(section, {"format"}).value_or("");
  bool is_first = true;
  for_each_group(section, [&](const dom::object& weights) {
    join(claim.bits, member<std::uint64_t>(weights, {"num_bits"}), is_first);
    join(claim.group_size, group_size_of(weights), is_first);
    join(claim.is_symmetric, member<bool>(weights, {"symmetric"}), is_first);
    const bool is_reordered = member<std::string_view>(weights, {"actorder"}) == "group";
    join(claim.is_reordered, std::optional<bool>(is_reordered), is_first);
    is_first = false;
  });
}

void add_claim(QuantizationClaim& claim, const dom::element& value, const std::string& path) {
  claim.is_made = true;
  add_text(claim, std::string(simdjson::minify(value)));
  const auto section = json_as<dom::object>(value);
  if (!section) return;
  refuse_two_formats(*section, path);
  add_blocks(claim, *section);
  add_transforms(claim, *section);
  if (claim.method.empty()) add_words(claim, *section);
  if (claim.method == "compressed-tensors") add_groups(claim, *section);
}

QuantizationClaim claim_in_file(const FileOpener& opener, const std::string& folder,
                                const char* name) {
  const auto text = find_config(opener, folder, name);
  if (!text) return {};
  // An unreadable file counts as a claim, because it may contain one.
  if (text->empty()) return {.is_made = true, .digest = "unread"};
  return quantization_claim(*text, join_path(folder, name));
}

// Returns an empty claim unless the file belongs to the method.
QuantizationClaim claim_in_own_file(const FileOpener& opener, const std::string& folder,
                                    const OwnConfig& own) {
  const auto text = find_config(opener, folder, own.name);
  if (!text || text->empty()) return {};
  dom::parser parser;
  const dom::object section = parsed_json(parser, python_json(*text).text).value();
  refuse_two_formats(section, join_path(folder, std::string(own.name)));
  QuantizationClaim claim;
  add_words(claim, section);
  add_text(claim, std::string(simdjson::minify(section)));
  if (claim.method.empty()) claim.method = own.method;
  return claim.bits && claim.method == own.method ? claim : QuantizationClaim();
}

// Keys for lists of modules that are not quantized.
constexpr std::array<std::string_view, 4> plain_list_keys = {
    "ignore", "exclude_modules", "llm_int8_skip_modules", "modules_to_not_convert"};
constexpr std::string_view targets_key = "targets";

bool are_alike(std::string_view first, std::string_view second) {  // "GEMM", "gemm"
  return lowered(first) == lowered(second);
}

// Adds a warning about two files that differ, because loaders disagree about which one they read.
void warn_of_two(std::vector<Finding>& findings, std::string_view first, std::string_view second,
                 std::string_view field, std::string found, std::string expected) {
  findings.push_back(
      {.severity = Severity::warning,
       .code = "q.config",
       .message =
           fmt::format("{} and {} specify different values of {}: {} and {}", printable(first, 400),
                       printable(second, 400), field, printable(expected), printable(found)),
       .suggestion = "correct the file that is wrong: programs differ in which of them they read",
       .found = std::move(found),
       .expected = std::move(expected)});
}

// Visits the fields that two files can declare differently, with their names in the files.
template <typename Visit>
void visit_words(const Visit& visit) {
  visit("bits", &QuantizationClaim::bits);
  visit("group_size", &QuantizationClaim::group_size);
  visit("sym", &QuantizationClaim::is_symmetric);
  visit("desc_act", &QuantizationClaim::is_reordered);
}

void warn_of_words(std::vector<Finding>& findings, const QuantizationClaim& claim,
                   const QuantizationClaim& other, const std::string& folder,
                   const std::string& path) {
  const auto text = [](auto value) {
    if constexpr (std::is_same_v<decltype(value), bool>) return fmt::format("{}", value);
    return fmt::format("{}", static_cast<std::int64_t>(value));  // -1 means one group
  };
  visit_words([&](const char* field, auto member) {
    const auto& first = claim.*member;
    const auto& second = other.*member;
    if (!first || !second || *first == *second) return;
    warn_of_two(findings, join_path(folder, "config.json"), path, field, text(*second),
                text(*first));
  });
}

// Returns false if the value is not a list of strings.
bool add_texts(std::vector<std::string>& texts, const dom::object& object, std::string_view key) {
  const auto items = json_as<dom::array>(object[key]);
  if (!items) return false;
  for (const dom::element item : *items) {
    const auto text = json_as<std::string_view>(item);
    if (!text) return false;
    texts.emplace_back(*text);
  }
  return true;
}

void add_lists(ConfigWords& words, const dom::object& section) {
  ConfigList list = {words.file, method_of(section), {}, {}};
  const auto push = [&](std::string_view key, std::vector<std::string> entries) {
    list.key = key;
    list.entries = std::move(entries);
    words.lists.push_back(list);
  };
  for (const std::string_view key : plain_list_keys) {
    std::vector<std::string> entries;
    if (add_texts(entries, section, key) && !entries.empty()) push(key, std::move(entries));
  }
  std::vector<std::string> targets;
  for (const dom::element group : groups_of(section)) {
    const auto members = json_as<dom::object>(group);
    if (!members || !add_texts(targets, *members, targets_key)) return;
  }
  if (!groups_of(section).empty()) push(targets_key, std::move(targets));
}

void add_section(ConfigWords& words, const dom::object& section) {
  const auto word = [](const dom::object& object, const char* key) {
    return std::string(member<std::string_view>(object, {key}).value_or(""));
  };
  if (words.algorithm.empty()) {
    words.algorithm = word(section, "quant_algo");
    words.group_size = group_size_of(section);
  }
  const auto sparsity = json_as<dom::object>(section["sparsity_config"]);
  if (sparsity && sparsity->at_pointer("/targets/0").error() == simdjson::SUCCESS) {
    words.sparsity = word(*sparsity, "format");
  }
  for_each_group(section, [&](const dom::object& weights) {
    join(words.code_type, word(weights, "type"), !words.has_groups);
    join(words.strategy, word(weights, "strategy"), !words.has_groups);
    words.has_groups = true;
  });
}

ConfigWords words_in_file(const FileOpener& opener, const std::string& folder, const char* name) {
  ConfigWords words;
  const auto text = find_config(opener, folder, name);
  if (!text || text->empty()) return words;
  dom::parser parser;
  std::size_t sections = 0;
  const PythonJson json = python_json(*text);
  const dom::element root = parsed_json(parser, json.text).value();
  for_each_section(root, [&](const dom::element& value) {
    words.file = join_path(folder, name);
    ++sections;
    const auto section = json_as<dom::object>(value);
    if (!section) return;
    add_section(words, *section);
    add_lists(words, *section);
  });
  if (sections > 1) words.lists.clear();  // a section names modules relative to its part
  const bool is_of_diffusers = root["_class_name"].error() == simdjson::SUCCESS;
  for (ConfigList& list : words.lists) {
    if (is_of_diffusers && list.method == "bitsandbytes") list.method = method_of_diffusers;
  }
  words.algorithm_file = words.file;
  return words;
}

// Adds the fields that config.json lacks.
void complete(QuantizationClaim& claim, const QuantizationClaim& other, const std::string& path) {
  if (other.method.empty()) return;
  const bool has_both = !claim.layout.empty() && !other.layout.empty();
  if (has_both && !are_alike(claim.layout, other.layout)) {
    throw Error("q.config", "two configs specify different formats of the checkpoint",
                {.path = path,
                 .field = "checkpoint_format",
                 .found = other.layout,
                 .expected = claim.layout + ", as in config.json"});
  }
  claim.method = other.method;
  if (claim.layout.empty()) claim.layout = other.layout;
  visit_words([&](const char*, auto member) {
    if (!(claim.*member)) claim.*member = other.*member;
  });
  claim.has_exceptions = claim.has_exceptions || other.has_exceptions;
}

}  // namespace

QuantizationClaim quantization_claim(std::string_view config, const std::string& path) {
  check_config(config, path);
  QuantizationClaim claim;
  dom::parser parser;
  for_each_section(parsed_json(parser, python_json(config).text).value(),
                   [&](const dom::element& section) { add_claim(claim, section, path); });
  return claim;
}

QuantizationClaim quantization_claim(const FileOpener& opener, const std::string& folder,
                                     std::vector<Finding>* findings) {
  std::vector<Finding> found;
  QuantizationClaim claim = claim_in_file(opener, folder, "config.json");
  QuantizationClaim other = claim_in_file(opener, folder, "hf_quant_config.json");
  claim.is_made = claim.is_made || other.is_made;
  claim.follows_links = opener.allow_links;
  add_text(claim, other.digest);
  if (claim.transforms.empty()) claim.transforms = std::move(other.transforms);
  if (other.block) add_block(claim, *other.block);
  for (const OwnConfig& own : own_configs) {
    if (!claim.method.empty() && claim.method != own.method) continue;
    const QuantizationClaim words = claim_in_own_file(opener, folder, own);
    const std::string path = join_path(folder, std::string(own.name));
    warn_of_words(found, claim, words, folder, path);
    complete(claim, words, path);
    add_text(claim, words.digest);
  }
  if (findings != nullptr) std::ranges::move(found, std::back_inserter(*findings));
  return claim;
}

void require_claim(const FileOpener& opener, const std::string& folder, std::string_view expected) {
  std::string digest = quantization_claim(opener, folder).digest;
  if (digest == expected) return;
  throw Error("io.changed",
              "the configs describe the quantization differently than when the plan was made; plan "
              "again",
              {.path = folder,
               .field = "config_digest",
               .found = std::move(digest),
               .expected = printable(expected)});
}

ConfigWords config_words(const FileOpener& opener, const std::string& folder,
                         std::vector<Finding>& findings) {
  ConfigWords words = words_in_file(opener, folder, "config.json");
  ConfigWords other = words_in_file(opener, folder, "hf_quant_config.json");
  for (ConfigList& list : other.lists) {
    list.method = "modelopt";
    words.lists.push_back(list);
  }
  if (words.file.empty()) return other;
  if (other.algorithm.empty()) return words;
  if (words.algorithm.empty()) {
    words.algorithm = std::move(other.algorithm);
    words.group_size = other.group_size;
    words.algorithm_file = std::move(other.file);
  } else if (!are_alike(words.algorithm, other.algorithm)) {
    warn_of_two(findings, words.file, other.file, "quant_algo", other.algorithm, words.algorithm);
  } else if (!words.group_size) {
    words.group_size = other.group_size;
    words.algorithm_file = std::move(other.file);
  } else if (other.group_size && *other.group_size != *words.group_size) {
    warn_of_two(findings, words.file, other.file, "group_size", std::to_string(*other.group_size),
                std::to_string(*words.group_size));
  }
  return words;
}

// Visits nested objects and lists too, because the configs of a model's parts are nested in them.
static void visit_below(simdjson::dom::element value,
                        const std::function<void(simdjson::dom::element)>& visit, unsigned depth) {
  if (depth > config_depth_max) return;
  if (value.is_array()) {
    for (const auto item : value.get_array()) visit_below(item, visit, depth + 1);
  }
  if (!value.is_object()) return;
  for (const std::string_view key : quantization_members) {
    simdjson::dom::element section;
    if (value[key].get(section) == simdjson::SUCCESS && !section.is_null()) visit(section);
  }
  for (const auto field : value.get_object()) visit_below(field.value, visit, depth + 1);
}

void for_each_section(simdjson::dom::element config,
                      const std::function<void(simdjson::dom::element)>& visit) {
  visit_below(config, visit, 0);
}

}  // namespace loadstone

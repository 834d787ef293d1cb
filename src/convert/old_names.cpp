#include "convert/old_names.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "base/json_dom.h"
#include "base/pattern.h"
#include "base/python_json.h"
#include "base/python_pattern.h"
#include "base/text.h"
#include "catalog/config_sections.h"
#include "convert/extras.h"
#include "convert/left_out.h"
#include "loadstone/error.h"
#include "plan/decodings.h"

namespace loadstone {

namespace {

using Element = simdjson::dom::element;

// Lists of names, and objects whose keys are names.
constexpr std::array<std::string_view, 11> list_keys = {"ignore",
                                                        "targets",
                                                        "exclude_modules",
                                                        "modules_to_not_convert",
                                                        "exclude",
                                                        "ignored_layers",
                                                        "ignored_modules",
                                                        "llm_int8_skip_modules",
                                                        "dynamic",
                                                        "quantized_layers",
                                                        "modules_in_block_to_quantize"};

// The entries that select the same modules for the same purpose, and their key.
struct List {
  std::string_view key;
  std::vector<std::string> entries;
};

// An entry as libraries look for it: an expression ("re:", "-:", "+:" or its characters), a pattern
// with "*", or a name and all that is inside it.
class Entry {
 public:
  explicit Entry(std::string_view text) : name_(text) {
    bool is_expression = name_.find_first_of("\\()[]^$|+") != std::string_view::npos;
    for (const std::string_view prefix : {"re:", "-:", "+:"}) {
      if (!name_.starts_with(prefix)) continue;
      name_.remove_prefix(prefix.size());
      is_expression = true;
    }
    if (!is_expression && name_.find('*') == std::string_view::npos) return;
    try {
      const std::string source =
          is_expression ? re2_of_python(name_, "plan.pattern", "config") : wildcard(name_);
      pattern_ =
          compile_pattern("^(?:" + source + ")", "plan.pattern", "config", pattern_memory(1));
    } catch (const Error&) {
      is_readable_ = false;
    }
  }

  // False for what a reader rejects too, or that needs more than RE2.
  [[nodiscard]] bool matches(std::string_view module) const {
    if (!is_readable_) return false;
    return pattern_ != nullptr ? is_in(*pattern_, module) : is_inside(module);
  }

 private:
  static std::string wildcard(std::string_view text) {
    std::string pattern;
    for (std::size_t i = 0; i < text.size(); ++i) {
      if (text[i] == '*') {
        pattern += ".*";
      } else if (text.substr(i, 2) != ".*") {  // else that of an expression
        pattern += re2::RE2::QuoteMeta(piece(text.substr(i, 1)));
      }
    }
    return pattern + "$";
  }

  [[nodiscard]] bool is_inside(std::string_view module) const {
    for (auto at = module.find(name_); at != module.npos; at = module.find(name_, at + 1)) {
      const std::size_t end = at + name_.size();
      const bool begins = at == 0 || module[at - 1] == '.';
      if (begins && (end == module.size() || module[end] == '.')) return true;
    }
    return false;
  }

  std::string_view name_;
  Pattern pattern_;
  bool is_readable_ = true;
};

void add_entries(std::vector<std::string>& entries, const Element& value) {
  std::string_view text;
  if (value.get(text) == simdjson::SUCCESS && !text.empty()) entries.emplace_back(text);
  if (!value.is_array()) return;
  for (const Element item : value.get_array()) add_entries(entries, item);
}

void add_lists(std::vector<List>& lists, const Element& value) {
  if (value.is_array()) {
    for (const Element item : value.get_array()) add_lists(lists, item);
  }
  if (!value.is_object()) return;
  for (const auto field : value.get_object()) {
    const auto* const key = std::ranges::find(list_keys, field.key);
    if (key == list_keys.end()) {
      add_lists(lists, field.value);
    } else if (field.value.is_object()) {  // each name has settings of its own
      for (const auto each : field.value.get_object()) {
        lists.push_back({*key, {std::string(each.key)}});
      }
    } else {
      add_entries(lists.emplace_back(List{*key, {}}).entries, field.value);
    }
  }
}

std::vector<List> lists_in(const ExtraFile& file) {
  std::vector<List> lists;
  simdjson::dom::parser parser;
  const PythonJson json = python_json(text_of(file));
  Element root;
  if (parsed_json(parser, json.text).get(root) != simdjson::SUCCESS) return lists;
  if (is_claim(file.name) && file.name != claim_name) add_lists(lists, root);
  for_each_section(root, [&](const Element& section) { add_lists(lists, section); });
  return lists;
}

std::string_view module_around(std::string_view tensor) {
  return tensor.substr(0, tensor.rfind('.'));
}

// A module of the source and what rules call it in the output.
using Renamed = std::set<std::pair<std::string_view, std::string_view>>;

Renamed renamed_modules(const Plan& plan) {
  Renamed renamed;
  for (const PlannedTarget& target : plan.targets) {
    const std::string_view after = module_around(target.name);
    for (const std::uint32_t source :
         sources_of(target.recipe.boxes, plan.decodings, target.recipe.merge)) {
      const std::string_view before = module_around(plan.catalog->tensors()[source].name);
      if (before != after) renamed.emplace(before, after);
    }
  }
  return renamed;
}

// The entries for which a list selects a module before it is renamed and not after it, or after it
// and not before.
std::set<std::string> old_entries(const List& list, const Renamed& renamed) {
  std::set<std::string> old;
  const std::vector<Entry> entries(list.entries.begin(), list.entries.end());
  for (const auto& [before, after] : renamed) {
    std::vector<std::string> only;  // match one of both
    bool matches_before = false;
    bool matches_after = false;
    for (std::size_t i = 0; i < entries.size(); ++i) {
      const bool is_before = entries[i].matches(before);
      const bool is_after = entries[i].matches(after);
      matches_before |= is_before;
      matches_after |= is_after;
      if (is_before != is_after) only.push_back(list.entries[i]);
    }
    if (matches_before != matches_after) old.insert(only.begin(), only.end());
  }
  return old;
}

}  // namespace

void tell_old_names(const Conversion& conversion, std::vector<Finding>& findings) {
  const Renamed renamed = renamed_modules(conversion.plan);
  for (const ExtraFile& file : conversion.extras) {
    if (renamed.empty() || (file.name != "config.json" && !is_claim(file.name))) continue;
    std::map<std::string_view, std::set<std::string>> old;
    for (const List& list : lists_in(file)) old[list.key].merge(old_entries(list, renamed));
    for (const auto& [key, entries] : old) {
      if (entries.empty()) continue;
      const std::vector<std::string> names(entries.begin(), entries.end());
      findings.push_back(
          {.severity = Severity::warning,
           .code = "convert.lists",
           .sources = names,
           .message = fmt::format("{}: '{}' lists modules by names that rules have changed: {}",
                                  printable(file.name), key, name_list(names)),
           .suggestion = "rename them there too: readers take modules for quantized or plain by "
                         "these names"});
    }
  }
}

}  // namespace loadstone

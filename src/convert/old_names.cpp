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

namespace loadstone {

namespace {

using Element = simdjson::dom::element;
using Modules = std::set<std::string_view>;

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

// Entries by list, each once.
using Lists = std::map<std::string, std::set<std::string>, std::less<>>;

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
      is_readable_ = false;  // a reader would reject it too, or needs more than RE2
    }
  }

  [[nodiscard]] bool is_readable() const { return is_readable_; }
  [[nodiscard]] bool matches_any(const Modules& modules) const {
    if (pattern_ == nullptr && modules.contains(name_)) return true;
    return std::ranges::any_of(modules, [&](std::string_view module) {
      return pattern_ != nullptr ? is_in(*pattern_, module) : is_inside(module);
    });
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

void add_entries(std::set<std::string>& entries, const Element& value) {
  std::string_view text;
  simdjson::dom::array array;
  simdjson::dom::object object;
  if (value.get(text) == simdjson::SUCCESS) {
    if (!text.empty()) entries.emplace(text);
  } else if (value.get(array) == simdjson::SUCCESS) {
    for (const Element item : array) add_entries(entries, item);
  } else if (value.get(object) == simdjson::SUCCESS) {
    for (const auto field : object) entries.emplace(field.key);
  }
}

void add_lists(Lists& lists, const Element& value) {
  if (value.is_array()) {
    for (const Element item : value.get_array()) add_lists(lists, item);
  }
  if (!value.is_object()) return;
  for (const auto field : value.get_object()) {
    if (std::ranges::count(list_keys, field.key) > 0) {
      add_entries(lists[std::string(field.key)], field.value);
    } else {
      add_lists(lists, field.value);
    }
  }
}

Lists lists_in(const ExtraFile& file) {
  Lists lists;
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

}  // namespace

void tell_old_names(const Conversion& conversion, std::vector<Finding>& findings) {
  Modules before;
  Modules after;
  for (const TensorInfo& tensor : conversion.plan.catalog->tensors()) {
    before.insert(module_around(tensor.name));
  }
  for (const PlannedTarget& target : conversion.plan.targets) {
    after.insert(module_around(target.name));
  }
  for (const ExtraFile& file : conversion.extras) {
    if (file.name != "config.json" && !is_claim(file.name)) continue;
    for (const auto& [list, entries] : lists_in(file)) {
      std::vector<std::string> old;
      for (const std::string& text : entries) {
        const Entry entry(text);
        if (!entry.is_readable() || entry.matches_any(after) || !entry.matches_any(before))
          continue;
        old.push_back(text);
      }
      if (old.empty()) continue;
      findings.push_back(
          {.severity = Severity::warning,
           .code = "convert.lists",
           .sources = old,
           .message = fmt::format("{}: '{}' lists modules by names that rules have changed: {}",
                                  printable(file.name), list, name_list(old)),
           .suggestion = "rename them there too: readers take modules for quantized or plain by "
                         "these names"});
    }
  }
}

}  // namespace loadstone

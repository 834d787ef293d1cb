// Lists of modules in configs that are copied while rules rename the modules.
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
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
#include "base/words.h"
#include "catalog/config_sections.h"
#include "convert/config_findings.h"
#include "convert/extras.h"
#include "convert/left_out.h"
#include "loadstone/error.h"
#include "plan/decodings.h"

namespace loadstone {

namespace {

// Lists of names, and objects whose keys are names.
constexpr std::string_view list_keys =
    "ignore targets exclude_modules modules_to_not_convert exclude ignored_layers ignored_modules "
    "llm_int8_skip_modules dynamic quantized_layers modules_in_block_to_quantize";

// The entries that select the same modules for the same purpose, and their key.
struct List {
  std::string key;
  std::vector<std::string> entries;
};

std::string wildcard(std::string_view text) {
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

using Place = std::pair<std::size_t, std::size_t>;  // a list, and an entry of it

// The entries of all lists, as any of the libraries looks for them: an expression ("re:", "-:",
// "+:" or its characters), a pattern with "*", or a name and all that is inside it. Any change of
// the selection counts, whichever library reads the list. catalog/plain_lists.h, which claims that
// a list is wrong, has the rule of each library, and leaves out lists of others.
class Entries {
 public:
  explicit Entries(const std::vector<List>& lists) {
    for (std::size_t i = 0; i < lists.size(); ++i) {
      for (std::size_t k = 0; k < lists[i].entries.size(); ++k) add(lists[i].entries[k], {i, k});
    }
  }

  // Returns the entries that match. A config may list as many modules as there are, so names are
  // looked up.
  [[nodiscard]] std::set<Place> find(std::string_view module) const {
    std::set<Place> found;
    for (std::size_t begin = 0; begin < module.size(); ++begin) {
      if (begin > 0 && module[begin - 1] != '.') continue;
      for (std::size_t end = begin; end < module.size();) {
        end = std::min(module.find('.', end + 1), module.size());
        const auto known = names_.find(module.substr(begin, end - begin));
        if (known != names_.end()) found.insert(known->second.begin(), known->second.end());
      }
    }
    for (const auto& [pattern, place] : patterns_) {
      if (is_in(*pattern, module)) found.insert(place);
    }
    return found;
  }

 private:
  // Leaves out what a reader rejects too, or what needs more than RE2.
  void add(std::string_view name, Place place) {
    bool is_expression = name.find_first_of("\\()[]^$|+") != name.npos;
    for (const std::string_view prefix : {"re:", "-:", "+:"}) {
      if (!name.starts_with(prefix)) continue;
      name.remove_prefix(prefix.size());
      is_expression = true;
    }
    if (!is_expression && name.find('*') == name.npos) {
      names_[name].push_back(place);
      return;
    }
    try {
      const std::string source =
          is_expression ? re2_of_python(name, "plan.pattern", "config") : wildcard(name);
      patterns_.emplace_back(
          compile_pattern("^(?:" + source + ")", "plan.pattern", "config", pattern_memory(1)),
          place);
    } catch (const Error&) {
      return;
    }
  }

  std::map<std::string_view, std::vector<Place>> names_;
  std::vector<std::pair<Pattern, Place>> patterns_;
};

void add_entries(std::vector<std::string>& entries, const dom::element& value) {
  std::string_view text;
  if (value.get(text) == simdjson::SUCCESS && !text.empty()) entries.emplace_back(text);
  if (!value.is_array()) return;
  for (const dom::element item : value.get_array()) add_entries(entries, item);
}

void add_lists(std::vector<List>& lists, const dom::element& value) {
  if (value.is_array()) {
    for (const dom::element item : value.get_array()) add_lists(lists, item);
  }
  if (!value.is_object()) return;
  for (const auto field : value.get_object()) {
    const std::string key(field.key);
    if (!is_word(key, list_keys)) {
      add_lists(lists, field.value);
    } else if (field.value.is_object()) {  // each name has settings of its own
      for (const auto each : field.value.get_object()) {
        lists.push_back({key, {std::string(each.key)}});
      }
    } else {
      add_entries(lists.emplace_back(List{key, {}}).entries, field.value);
    }
  }
}

std::vector<List> lists_in(const ExtraFile& file) {
  std::vector<List> lists;
  dom::parser parser;
  dom::element root;
  if (parsed_json(parser, python_json(text_of(file)).text).get(root) != simdjson::SUCCESS)
    return lists;
  if (is_claim(file.name) && file.name != claim_name) add_lists(lists, root);
  for_each_section(root, [&](const dom::element& section) { add_lists(lists, section); });
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
         sources_of(target.recipe.boxes, plan.decodings, target.recipe.merge.get())) {
      const std::string_view before = module_around(plan.catalog->tensors()[source].name);
      if (before != after) renamed.emplace(before, after);
    }
  }
  return renamed;
}

bool selects(const std::set<Place>& found, std::size_t list) {
  const auto first = found.lower_bound({list, 0});
  return first != found.end() && first->first == list;
}

// Returns, by the keys of lists, the entries for which a list selects a module before it is renamed
// and not after it, or after it and not before.
std::map<std::string_view, std::set<std::string>> old_entries(const std::vector<List>& lists,
                                                              const Renamed& renamed) {
  std::map<std::string_view, std::set<std::string>> old;
  const Entries entries(lists);
  for (const auto& [before, after] : renamed) {
    const std::set<Place> first = entries.find(before);
    const std::set<Place> second = entries.find(after);
    std::vector<Place> only;  // match one of both
    std::ranges::set_symmetric_difference(first, second, std::back_inserter(only));
    for (const auto& [list, entry] : only) {
      if (selects(first, list) == selects(second, list)) continue;
      old[lists[list].key].insert(lists[list].entries[entry]);
    }
  }
  return old;
}

}  // namespace

void tell_old_names(const Conversion& conversion, std::vector<Finding>& findings) {
  const Renamed renamed = renamed_modules(conversion.plan);
  for (const ExtraFile& file : conversion.extras) {
    if (renamed.empty() || (file.name != "config.json" && !is_claim(file.name))) continue;
    for (const auto& [key, entries] : old_entries(lists_in(file), renamed)) {
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

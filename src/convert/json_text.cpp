#include "convert/json_text.h"

#include <simdjson.h>

#include <algorithm>
#include <cstddef>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/json_dom.h"
#include "base/json_writer.h"
#include "base/python_json.h"

namespace loadstone {

namespace {

// Where a member stands: from the quote of its key to the end of its value. An array's items have
// no key.
struct Span {
  std::size_t begin = 0;
  std::size_t key_end = 0;
  std::size_t value = 0;
  std::size_t end = 0;
};

bool is_space(char character) {
  return character == ' ' || character == '\t' || character == '\n' || character == '\r';
}

// Goes through text that is known to be JSON.
class Scanner {
 public:
  explicit Scanner(std::string_view text) : text_(text) {}

  std::vector<Span> members() {
    std::vector<Span> members;
    skip_space();
    const bool is_array = at_ < text_.size() && text_[at_] == '[';
    ++at_;  // the brace or bracket
    for (;;) {
      skip_space();
      if (at_ >= text_.size() || text_[at_] == '}' || text_[at_] == ']') break;
      if (text_[at_] == ',') {
        ++at_;
        continue;
      }
      Span member;
      member.begin = at_;
      if (!is_array) skip_string();
      member.key_end = at_;
      if (!is_array) {
        skip_space();
        ++at_;  // the colon
        skip_space();
      }
      member.value = at_;
      skip_value();
      member.end = at_;
      members.push_back(member);
    }
    close_ = at_;
    return members;
  }

  // Of the closing brace or bracket, once members() was called.
  [[nodiscard]] std::size_t close() const noexcept { return close_; }

 private:
  void skip_space() {
    while (at_ < text_.size() && is_space(text_[at_])) ++at_;
  }
  void skip_string() {
    for (++at_; at_ < text_.size() && text_[at_] != '"'; ++at_) {
      if (text_[at_] == '\\') ++at_;
    }
    ++at_;
  }
  void skip_value() {
    std::size_t depth = 0;
    while (at_ < text_.size()) {
      const char character = text_[at_];
      if (character == '"') {
        skip_string();
      } else if (character == '{' || character == '[') {
        ++depth;
        ++at_;
      } else if (character == '}' || character == ']') {
        if (depth == 0) return;
        --depth;
        ++at_;
      } else if (depth == 0 && (character == ',' || is_space(character))) {
        return;
      } else {
        ++at_;
        continue;
      }
      if (depth == 0) return;
    }
  }

  std::string_view text_;
  std::size_t at_ = 0;
  std::size_t close_ = 0;
};

std::string quoted(std::string_view text) {
  JsonWriter json;
  json.value(text);
  return json.take();
}

template <typename Use>
bool use_member(std::string_view text, std::string_view key, Use&& use) {
  dom::parser parser;
  dom::element root;
  dom::element value;
  if (parsed_json(parser, python_json(text).text).get(root) != simdjson::SUCCESS) return false;
  if (!root.is_object() || root[key].get(value) != simdjson::SUCCESS) return false;
  use(value);
  return true;
}

// Keys may be written with escapes. Empty for an item of an array.
std::string key_of(std::string_view text, const Span& member) {
  if (member.key_end == member.begin) return {};
  const std::string_view quoted_key = text.substr(member.begin, member.key_end - member.begin);
  if (quoted_key.find('\\') == std::string_view::npos) {
    return std::string(quoted_key.substr(1, quoted_key.size() - 2));
  }
  dom::parser parser;
  std::string_view key;
  if (parsed_json(parser, quoted_key).get(key) != simdjson::SUCCESS) return {};
  return std::string(key);
}

std::string with_spans(std::string_view text, const std::vector<Span>& members, std::size_t close,
                       std::string_view key, std::string_view value) {
  for (const Span& member : members) {
    if (key_of(text, member) != key) continue;
    return std::string(text.substr(0, member.value)) + std::string(value) +
           std::string(text.substr(member.end));
  }
  if (members.empty()) {
    return std::string(text.substr(0, close)) + "\n  " + quoted(key) + ": " + std::string(value) +
           "\n" + std::string(text.substr(close));
  }
  // As far to the right as the last one.
  const Span& last = members.back();
  const std::size_t before =
      members.size() > 1 ? members[members.size() - 2].end + 1 : text.find('{') + 1;
  const std::string_view gap = text.substr(before, last.begin - before);
  return std::string(text.substr(0, last.end)) + "," + std::string(gap) + quoted(key) + ": " +
         std::string(value) + std::string(text.substr(last.end));
}

std::string without_members_of_level(std::string_view text,
                                     const std::function<bool(std::string_view, unsigned)>& drops,
                                     unsigned level, unsigned levels) {
  const auto members = Scanner(text).members();
  if (members.empty()) return std::string(text);
  std::string kept(text.substr(0, members.front().begin));
  bool is_first = true;
  for (std::size_t i = 0; i < members.size(); ++i) {
    const Span& member = members[i];
    if (drops(key_of(text, member), level)) continue;
    // With the comma before it.
    if (!is_first) kept += text.substr(members[i - 1].end, member.begin - members[i - 1].end);
    is_first = false;
    kept += text.substr(member.begin, member.value - member.begin);
    const std::string_view value = text.substr(member.value, member.end - member.value);
    if (level < levels && (value.starts_with('{') || value.starts_with('['))) {
      kept += without_members_of_level(value, drops, level + 1, levels);
    } else {
      kept += value;
    }
  }
  return kept + std::string(text.substr(members.back().end));
}

}  // namespace

static std::set<std::string> differing(dom::object left, dom::object right);

static bool same_value(dom::element left, dom::element right) {
  if (left.type() != right.type()) return false;
  if (left.is_array()) {
    return std::ranges::equal(left.get_array().value(), right.get_array().value(), same_value);
  }
  if (left.is_object()) return differing(left.get_object(), right.get_object()).empty();
  return std::string(simdjson::minify(left)) == std::string(simdjson::minify(right));
}

static std::set<std::string> differing(dom::object left, dom::object right) {
  std::set<std::string> keys;
  for (const auto& [members, others] : {std::pair(left, right), std::pair(right, left)}) {
    for (const auto& member : members) {
      dom::element other;
      const bool is_there = others.at_key(member.key).get(other) == simdjson::SUCCESS;
      if (!is_there || !same_value(member.value, other)) keys.emplace(member.key);
    }
  }
  return keys;
}

std::vector<std::string> different_members(std::string_view left, std::string_view right) {
  dom::parser parsers[2];
  const std::set<std::string> keys =
      differing(parsed_json(parsers[0], python_json(left).text).get_object(),
                parsed_json(parsers[1], python_json(right).text).get_object());
  return {keys.begin(), keys.end()};
}

bool is_json_object(std::string_view text) {
  dom::parser parser;
  dom::element root;
  const auto result = parsed_json(parser, python_json(text).text);
  return result.get(root) == simdjson::SUCCESS && root.is_object();
}

std::string string_member(std::string_view text, std::string_view key) {
  std::string found;
  use_member(text, key, [&](dom::element value) {
    std::string_view string;
    if (value.get(string) == simdjson::SUCCESS) found = string;
  });
  return found;
}

std::optional<std::uint64_t> number_member(std::string_view text, std::string_view key) {
  std::optional<std::uint64_t> found;
  use_member(text, key, [&](dom::element value) {
    std::uint64_t number = 0;
    if (value.get(number) == simdjson::SUCCESS) found = number;
  });
  return found;
}

std::optional<bool> bool_member(std::string_view text, std::string_view key) {
  std::optional<bool> found;
  use_member(text, key, [&](dom::element value) {
    bool is_set = false;
    if (value.get(is_set) == simdjson::SUCCESS) found = is_set;
  });
  return found;
}

std::string_view object_member(std::string_view text, std::string_view key) {
  for (const Span& member : Scanner(text).members()) {
    const std::string_view value = text.substr(member.value, member.end - member.value);
    if (value.starts_with('{') && key_of(text, member) == key) return value;
  }
  return {};
}

std::string first_of_member(std::string_view text, std::string_view key) {
  std::string found;
  use_member(text, key, [&](dom::element value) {
    std::string_view first;
    if (value.is_array() && value.at(0).get(first) == simdjson::SUCCESS) found = first;
  });
  return found;
}

bool has_member(std::string_view text, std::string_view key) {
  return use_member(text, key, [](dom::element) {});
}

std::string with_member(std::string_view text, std::string_view key, std::string_view value) {
  Scanner scanner(text);
  const auto members = scanner.members();
  return with_spans(text, members, scanner.close(), key, value);
}

std::string with_changes(
    std::string_view text,
    const std::function<std::optional<std::string>(std::string_view, std::string_view)>& change) {
  std::string changed;
  std::size_t done = 0;
  for (const Span& member : Scanner(text).members()) {
    const std::string_view old = text.substr(member.value, member.end - member.value);
    changed += text.substr(done, member.value - done);
    if (const auto value = change(key_of(text, member), old)) {
      changed += *value;
    } else {
      changed += old.starts_with('{') ? with_changes(old, change) : std::string(old);
    }
    done = member.end;
  }
  return changed + std::string(text.substr(done));
}

std::string without_members(std::string_view text,
                            const std::function<bool(std::string_view, unsigned)>& drops,
                            unsigned levels) {
  return without_members_of_level(text, drops, 0, levels);
}

}  // namespace loadstone

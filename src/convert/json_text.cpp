#include "convert/json_text.h"

#include <simdjson.h>

#include <algorithm>
#include <cstddef>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/json_dom.h"
#include "base/json_writer.h"
#include "base/python_json.h"

namespace loadstone {

namespace {

// Offsets of a member: from the quote of its key to the end of its value. Items of an array have no
// key.
struct Span {
  std::size_t begin = 0;
  std::size_t key_end = 0;
  std::size_t value = 0;
  std::size_t end = 0;
};

bool is_space(char character) {
  return character == ' ' || character == '\t' || character == '\n' || character == '\r';
}

// Scans text that is known to be JSON.
class Scanner {
 public:
  explicit Scanner(std::string_view text) : text_(text) {}

  std::vector<Span> members() {
    std::vector<Span> members;
    skip_space();
    const bool is_array = at_ < text_.size() && text_[at_] == '[';
    ++at_;  // skip the brace or bracket
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
        ++at_;  // skip the colon
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

  // Returns the offset of the closing brace or bracket; call members() first.
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

// Returns a member's key with its escapes decoded; empty for an item of an array.
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
    // Keep the comma and the space before the member.
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

template <typename Value>
std::optional<Value> value_at(std::string_view text, const std::string& pointer) {
  dom::parser parser;
  const auto root = parsed_json(parser, python_json(text).text);
  std::conditional_t<std::is_same_v<Value, std::string>, std::string_view, Value> value{};
  if (root.at_pointer(pointer).get(value) != simdjson::SUCCESS) return std::nullopt;
  return Value(value);
}
template std::optional<std::string> value_at(std::string_view text, const std::string& pointer);
template std::optional<std::uint64_t> value_at(std::string_view text, const std::string& pointer);
template std::optional<bool> value_at(std::string_view text, const std::string& pointer);

std::string string_member(std::string_view text, std::string_view key) {
  return value_at<std::string>(text, "/" + std::string(key)).value_or("");
}

bool is_config_of_diffusers(std::string_view text) {
  return !string_member(text, "_class_name").empty();
}

bool has_member(std::string_view text, std::string_view key) {
  return value_at<dom::element>(text, "/" + std::string(key)).has_value();
}

std::string_view object_member(std::string_view text, std::string_view key) {
  for (const Span& member : Scanner(text).members()) {
    const std::string_view value = text.substr(member.value, member.end - member.value);
    if (value.starts_with('{') && key_of(text, member) == key) return value;
  }
  return {};
}

std::string with_member(std::string_view text, std::string_view key, std::string_view value) {
  Scanner scanner(text);
  const auto members = scanner.members();
  const auto replaced = [&](std::size_t begin, std::size_t end, std::string_view middle) {
    return std::string(text.substr(0, begin)).append(middle).append(text.substr(end));
  };
  for (const Span& member : members) {
    if (key_of(text, member) == key) return replaced(member.value, member.end, value);
  }
  const std::string added = quoted(key) + ": " + std::string(value);
  if (members.empty()) return replaced(scanner.close(), scanner.close(), "\n  " + added + "\n");
  // The new member is indented like the last one.
  const Span& last = members.back();
  const std::size_t before =
      members.size() > 1 ? members[members.size() - 2].end + 1 : text.find('{') + 1;
  const std::string gap(text.substr(before, last.begin - before));
  return replaced(last.end, last.end, "," + gap + added);
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

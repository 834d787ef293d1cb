#include "convert/json_text.h"

#include <simdjson.h>

#include <cstddef>
#include <vector>

#include "base/json_writer.h"

namespace loadstone {

namespace {

// Where a member stands: from the quote of its key to the end of its value.
struct Span {
  std::size_t begin = 0;
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
    ++at_;  // the brace
    for (;;) {
      skip_space();
      if (at_ >= text_.size() || text_[at_] == '}') break;
      if (text_[at_] == ',') {
        ++at_;
        continue;
      }
      Span member;
      member.begin = at_;
      skip_string();
      skip_space();
      ++at_;  // the colon
      skip_space();
      member.value = at_;
      skip_value();
      member.end = at_;
      members.push_back(member);
    }
    close_ = at_;
    return members;
  }

  // Of the closing brace, once members() was called.
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
  simdjson::dom::parser parser;
  simdjson::dom::element root;
  simdjson::dom::element value;
  const simdjson::padded_string padded(text);
  if (parser.parse(padded).get(root) != simdjson::SUCCESS) return false;
  if (!root.is_object() || root[key].get(value) != simdjson::SUCCESS) return false;
  use(value);
  return true;
}

std::string with_spans(std::string_view text, const std::vector<Span>& members, std::size_t close,
                       std::string_view key, std::string_view value) {
  const std::string name = quoted(key);
  for (const Span& member : members) {
    if (!text.substr(member.begin).starts_with(name)) continue;
    return std::string(text.substr(0, member.value)) + std::string(value) +
           std::string(text.substr(member.end));
  }
  if (members.empty()) {
    return std::string(text.substr(0, close)) + "\n  " + name + ": " + std::string(value) + "\n" +
           std::string(text.substr(close));
  }
  // As far to the right as the last one.
  const Span& last = members.back();
  const std::size_t before =
      members.size() > 1 ? members[members.size() - 2].end + 1 : text.find('{') + 1;
  const std::string_view gap = text.substr(before, last.begin - before);
  return std::string(text.substr(0, last.end)) + "," + std::string(gap) + name + ": " +
         std::string(value) + std::string(text.substr(last.end));
}

}  // namespace

bool is_json_object(std::string_view text) {
  simdjson::dom::parser parser;
  simdjson::dom::element root;
  const simdjson::padded_string padded(text);
  return parser.parse(padded).get(root) == simdjson::SUCCESS && root.is_object();
}

std::string string_member(std::string_view text, std::string_view key) {
  std::string found;
  use_member(text, key, [&](simdjson::dom::element value) {
    std::string_view string;
    if (value.get(string) == simdjson::SUCCESS) found = string;
  });
  return found;
}

std::optional<std::uint64_t> number_member(std::string_view text, std::string_view key) {
  std::optional<std::uint64_t> found;
  use_member(text, key, [&](simdjson::dom::element value) {
    std::uint64_t number = 0;
    if (value.get(number) == simdjson::SUCCESS) found = number;
  });
  return found;
}

bool has_member(std::string_view text, std::string_view key) {
  return use_member(text, key, [](simdjson::dom::element) {});
}

std::string with_member(std::string_view text, std::string_view key, std::string_view value) {
  Scanner scanner(text);
  const auto members = scanner.members();
  return with_spans(text, members, scanner.close(), key, value);
}

std::string without_member(std::string_view text, std::string_view key) {
  Scanner scanner(text);
  const auto members = scanner.members();
  const std::string name = quoted(key);
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (!text.substr(members[i].begin).starts_with(name)) continue;
    // With the comma before it, or the one behind the first.
    const std::size_t begin = i > 0 ? members[i - 1].end : members[i].begin;
    const std::size_t end = i == 0 && members.size() > 1 ? members[1].begin : members[i].end;
    return std::string(text.substr(0, begin)) + std::string(text.substr(end));
  }
  return std::string(text);
}

}  // namespace loadstone

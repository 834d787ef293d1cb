#include "fuzz/mutate.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <vector>

namespace loadstone::fuzz {

namespace {

// Range of a number, a word, a string or a flat list in a JSON text.
struct Token {
  std::size_t begin = 0;
  std::size_t end = 0;
  char kind = '0';  // '0' number, '"' string, '[' flat list, 'w' true, false or null
};

std::size_t string_end(const std::string& text, std::size_t begin) {
  std::size_t at = begin + 1;
  while (at < text.size() && text[at] != '"') at += text[at] == '\\' ? 2 : 1;
  return std::min(at + 1, text.size());
}

std::vector<Token> tokens_of(const std::string& text) {
  std::vector<Token> tokens;
  for (std::size_t at = 0; at < text.size();) {
    const char first = text[at];
    std::size_t end = at + 1;
    if (first == '"') {
      end = string_end(text, at);
      tokens.push_back({at, end, '"'});
    } else if (first == '-' || std::isdigit(static_cast<unsigned char>(first)) != 0) {
      end = std::min(text.find_first_not_of("-+.eE0123456789", at), text.size());
      tokens.push_back({at, end, '0'});
    } else if (std::isalpha(static_cast<unsigned char>(first)) != 0) {
      end = std::min(text.find_first_not_of("abcdefghijklmnopqrstuvwxyz", at), text.size());
      end = std::max(end, at + 1);
      tokens.push_back({at, end, 'w'});
    } else if (first == '[') {
      const auto close = text.find_first_of("[]{}\"", at + 1);
      if (close != std::string::npos && text[close] == ']') tokens.push_back({at, close + 1, '['});
    }
    at = end;
  }
  return tokens;
}

std::string other_value(const std::string& text, const std::vector<Token>& tokens,
                        const Token& token, Input& input) {
  const auto of = [&](const Token& each) { return text.substr(each.begin, each.end - each.begin); };
  switch (input.below(7)) {
    case 0:
      return std::to_string(input.large_number());
    case 1:
      return std::to_string(input.byte());
    case 2:
      return token.kind == '[' ? of(token).substr(0, token.end - token.begin - 1) + ",1]"
                               : std::to_string(static_cast<std::int8_t>(input.byte()));
    case 3:
      return token.kind == '[' ? "[]" : "\"\"";
    default: {  // copies a different token of the same kind
      for (std::size_t i = 0, at = input.below(std::min<std::uint64_t>(tokens.size(), 65536));
           i < tokens.size(); ++i) {
        const Token& other = tokens[(at + i) % tokens.size()];
        if (other.kind == token.kind && of(other) != of(token)) return of(other);
      }
      return "null";
    }
  }
}

}  // namespace

std::string mutated_bytes(std::string bytes, Input& input, unsigned changes_max) {
  for (std::uint64_t changes = input.below(changes_max + 1); changes > 0 && !bytes.empty();
       --changes) {
    const std::uint64_t at = input.below(bytes.size());
    switch (input.below(4)) {
      case 0:
        bytes[at] = static_cast<char>(input.byte());
        break;
      case 1: {
        const std::uint64_t number = input.large_number();
        const auto count = std::min<std::size_t>(sizeof number, bytes.size() - at);
        std::memcpy(bytes.data() + at, &number, count);
        break;
      }
      case 2:
        bytes.resize(at);
        break;
      default:
        bytes.insert(at, input.text(1 + input.below(8)));
    }
  }
  return bytes;
}

std::string mutated_json(std::string text, Input& input, unsigned changes_max) {
  for (std::uint64_t changes = input.below(changes_max + 1); changes > 0; --changes) {
    const std::vector<Token> tokens = tokens_of(text);
    if (tokens.empty()) return text;
    const Token& token = tokens[input.below(tokens.size())];
    const std::size_t bytes = token.end - token.begin;
    switch (input.below(10)) {
      case 0:  // deletes the token and the comma after it
        text.erase(token.begin,
                   bytes + (token.end < text.size() && text[token.end] == ',' ? 1 : 0));
        break;
      case 1: {  // duplicated
        const std::string again = text.substr(token.begin, bytes) + ",";
        text.insert(token.begin, again);
        break;
      }
      case 2:
        text = mutated_bytes(std::move(text), input, 1);
        break;
      default:
        text.replace(token.begin, bytes, other_value(text, tokens, token, input));
    }
  }
  return text;
}

}  // namespace loadstone::fuzz

#include "base/python_pattern.h"

#include <fmt/format.h>

#include <algorithm>
#include <bitset>
#include <cstdint>
#include <optional>
#include <set>

#include "base/text.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

constexpr char32_t ascii_end = 128;
constexpr std::size_t group_depth_max = 100;
constexpr unsigned repeats_max = 1000;  // RE2's
constexpr std::size_t look_aheads_max = 8;

// The ASCII characters that one element of a pattern matches.
using Characters = std::bitset<ascii_end>;

struct Flags {
  bool ignores_case = false;
};

Characters range(char32_t first, char32_t last) {
  Characters found;
  for (char32_t each = first; each <= last && each < ascii_end; ++each) found.set(each);
  return found;
}

bool is_letter(char32_t each) {
  return (each >= 'a' && each <= 'z') || (each >= 'A' && each <= 'Z');
}

// Returns the characters of \d, \s, \w and their complements; nullopt for other letters.
std::optional<Characters> category(char32_t letter) {
  const Characters digits = range('0', '9');
  const Characters spaces = range('\t', '\r') | range(0x1c, ' ');
  const Characters words = digits | range('a', 'z') | range('A', 'Z') | range('_', '_');
  switch (letter) {
    case 'd':
      return digits;
    case 'D':
      return ~digits;
    case 's':
      return spaces;
    case 'S':
      return ~spaces;
    case 'w':
      return words;
    case 'W':
      return ~words;
    default:
      return std::nullopt;
  }
}

Characters folded(Characters all) {
  for (char32_t each = 'a'; each <= 'z'; ++each) {
    const char32_t upper = each - U'a' + U'A';
    if (all[each] || all[upper]) all.set(each).set(upper);
  }
  return all;
}

// Returns the character of \n and similar escapes; nullopt for other letters.
std::optional<char32_t> control(char32_t letter) {
  constexpr std::u32string_view letters = U"afnrtv";
  constexpr std::u32string_view meanings = U"\a\f\n\r\t\v";
  const std::size_t at = letters.find(letter);
  if (at == letters.npos) return std::nullopt;
  return meanings[at];
}

// A recursive-descent parser of the grammar of CPython's re._parser. It writes RE2's syntax while
// it parses. Not thread-safe.
class Translator {
 public:
  Translator(std::string_view pattern, const char* code, const std::string& field)
      : shown_(pattern), code_(code), field_(field) {
    while (!pattern.empty()) {
      const Character next = first_character(pattern);
      if (next.bytes == 0) refuse("the pattern is not UTF-8");
      text_.push_back(next.code);
      pattern.remove_prefix(next.bytes);
    }
  }

  std::string run(Flags flags = {}) {
    out_ = "\\A(?:";
    alternatives(flags, 0);
    if (at_ < text_.size()) reject("unbalanced parenthesis");
    return out_ + ")";
  }

  Re2Match run_match() {
    Re2Match found;
    const Flags flags = global_flags();
    for (;;) {
      if (take('^')) continue;
      const bool is_needed = text_.compare(at_, 3, U"(?=") == 0;
      if (!is_needed && text_.compare(at_, 3, U"(?!") != 0) break;
      if (++look_aheads_ > look_aheads_max) {
        refuse(fmt::format("more than {} look-aheads", look_aheads_max));
      }
      (is_needed ? found.needed : found.excluded).push_back(look_ahead(flags));
    }
    leaves_out_ = true;
    found.text = run(flags);
    found.is_wider = has_left_out_;
    return found;
  }

 private:
  // The kind of element before a quantifier.
  enum class Last : std::uint8_t { nothing, position, item, repeat };

  [[noreturn]] void refuse(const std::string& why) const {
    throw Error(code_, fmt::format("loadstone does not support this pattern: {}", why),
                {.field = field_, .found = printable(shown_)});
  }
  [[noreturn]] void reject(const std::string& why) const {
    throw Error(code_,
                fmt::format("the pattern is not a valid regular expression of Python: {}", why),
                {.field = field_, .found = printable(shown_)});
  }

  [[nodiscard]] bool is_next(char32_t wanted) const {
    return at_ < text_.size() && text_[at_] == wanted;
  }
  bool take(char32_t wanted) {
    if (!is_next(wanted)) return false;
    ++at_;
    return true;
  }
  char32_t take_any(const char* missing) {
    if (at_ == text_.size()) reject(missing);
    return text_[at_++];
  }

  // Reads flags such as "(?i)" at the beginning. Flags for lines and for ASCII have no effect on
  // plain names.
  Flags global_flags() {
    const std::size_t end = text_.find_first_not_of(U"aimsu", 2);
    if (text_.compare(0, 2, U"(?") != 0 || end == 2 || end >= text_.size() || text_[end] != ')') {
      return {};
    }
    const std::u32string_view given = std::u32string_view(text_).substr(2, end - 2);
    if (given.find('a') != given.npos && given.find('u') != given.npos) {
      reject("incompatible flags");
    }
    at_ = end + 1;
    return {.ignores_case = given.find('i') != given.npos};
  }

  // Called at "(?=" or "(?!".
  std::string look_ahead(Flags flags) {
    at_ += 3;
    out_ = "\\A(?:";
    alternatives(flags, 1);
    if (!take(')')) reject("missing ), unterminated subpattern");
    if (is_next('*') || is_next('+') || is_next('?') || is_next('{')) {
      refuse("repeated look-ahead");
    }
    return out_ + ")";
  }

  void alternatives(Flags flags, std::size_t depth) {
    if (depth > group_depth_max) refuse("groups nested too deep");
    sequence(flags, depth);
    while (take('|')) {
      if (depth == 0 && look_aheads_ > 0) refuse("a look-ahead in one of several alternatives");
      out_ += '|';
      sequence(flags, depth);
    }
  }

  void sequence(Flags flags, std::size_t depth) {
    Last last = Last::nothing;
    while (at_ < text_.size() && !is_next('|') && !is_next(')')) {
      const char32_t each = text_[at_++];
      if (each == '*' || each == '+' || each == '?') {
        repeat(last, each == '+' ? 1 : 0, each == '?' ? std::optional(1U) : std::nullopt);
      } else if (each == '{' && counted_repeat(last)) {
        continue;
      } else if (each == '^') {
        write_position("\\A", last);
      } else if (each == '$') {
        write_position("\\z", last);
      } else if (each == '(') {
        group(flags, depth, last);
      } else if (each == '\\') {
        escape(flags, last);
      } else {
        write(each == '.' ? ~Characters() : each == '[' ? set(flags) : literal(each, flags), flags);
        last = Last::item;
      }
    }
  }

  // Called after "{". Returns false if the "{" is a literal character.
  bool counted_repeat(Last& last) {
    const std::size_t begin = at_;
    if (is_next('}')) return false;
    const auto number = [&]() -> std::optional<unsigned> {
      std::optional<unsigned> value;
      for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
        value = std::min(value.value_or(0) * 10 + (text_[at_] - U'0'), repeats_max + 1);
      }
      return value;
    };
    const auto least = number();
    const auto most = take(',') ? number() : least;
    if (!take('}')) {
      at_ = begin;
      return false;
    }
    if (std::max(least.value_or(0), most.value_or(0)) > repeats_max) {
      refuse(fmt::format("more than {} repeats", repeats_max));
    }
    if (most && *most < least.value_or(0))
      reject("the maximum number of repeats is smaller than the minimum");
    repeat(last, least.value_or(0), most);
    return true;
  }

  void repeat(Last& last, unsigned least, std::optional<unsigned> most) {
    if (last == Last::nothing || last == Last::position) reject("nothing to repeat");
    if (last == Last::repeat) reject("multiple repeat");
    if (is_next('+')) refuse("possessive quantifiers");
    take('?');  // a lazy quantifier matches the same names
    out_.insert(item_begin_, "(?:");
    out_ += most ? fmt::format("){{{},{}}}", least, *most) : fmt::format("){{{},}}", least);
    last = Last::repeat;
  }

  void write_position(std::string_view text, Last& last) {
    out_ += text;
    last = Last::position;
  }

  void write(const Characters& characters, Flags flags) {
    item_begin_ = out_.size();
    const Characters all = flags.ignores_case ? folded(characters) : characters;
    if (all.all()) {
      out_ += '.';
      return;
    }
    if (all.none()) {
      out_ += "[^\\x00-\\x{10FFFF}]";
      return;
    }
    const bool is_word = all.count() == 1 && (all & *category('w')).any();
    if (!is_word) out_ += '[';
    for (std::size_t first = 0; first < ascii_end; ++first) {
      if (!all[first]) continue;
      std::size_t last = first;
      while (last + 1 < ascii_end && all[last + 1]) ++last;
      out_ += is_word ? std::string(1, static_cast<char>(first))
                      : fmt::format("\\x{:02x}-\\x{:02x}", first, last);
      first = last;
    }
    if (!is_word) out_ += ']';
  }

  [[nodiscard]] Characters literal(char32_t each, Flags flags) const {
    if (each >= ascii_end && flags.ignores_case)
      refuse("ignoring the case of characters that are not ASCII");
    return range(each, each);
  }

  // Reads the beginning of a look-around after "(". Returns false for any other text.
  bool take_look_around() {
    for (const std::u32string_view kind : {U"?=", U"?!", U"?<=", U"?<!"}) {
      if (text_.compare(at_, kind.size(), kind) != 0) continue;
      at_ += kind.size();
      return true;
    }
    return false;
  }

  void group(Flags flags, std::size_t depth, Last& last) {
    const bool is_left_out = leaves_out_ && take_look_around();
    if (!is_left_out && take('?') && !group_kind(flags)) return;  // a comment
    const std::size_t begin = out_.size();
    out_ += "(?:";
    alternatives(flags, depth + 1);
    if (!take(')')) reject("missing ), unterminated subpattern");
    out_ += ')';
    item_begin_ = begin;
    last = Last::item;
    if (!is_left_out) return;
    out_.resize(begin);
    last = Last::position;
    has_left_out_ = true;
  }

  // Called after "(?"; returns false for a comment.
  bool group_kind(Flags& flags) {
    const char32_t kind = take_any("unexpected end of pattern");
    switch (kind) {
      case ':':
        return true;
      case '#':
        while (take_any("missing ), unterminated comment") != ')') {
        }
        return false;
      case 'P':
        named_group();
        return true;
      case '=':
      case '!':
        refuse("look-ahead");
      case '<':
        refuse("look-behind");
      case '(':
        refuse("conditions");
      case '>':
        refuse("atomic groups");
      default:
        --at_;
        scoped_flags(flags);
        return true;
    }
  }

  void named_group() {
    if (take('=')) refuse("back-references");
    if (!take('<')) reject("unknown extension ?P");
    std::u32string name;
    for (char32_t each = take_any("missing >"); each != '>'; each = take_any("missing >")) {
      const bool is_digit = each >= '0' && each <= '9';
      if (!is_letter(each) && each != '_' && !(is_digit && !name.empty())) {
        refuse("names of groups with characters other than ASCII letters, digits and _");
      }
      name.push_back(each);
    }
    if (name.empty()) reject("missing group name");
    if (!groups_.insert(name).second) reject("two groups have the same name");
  }

  // Reads "i-s:" of "(?i-s:...)". Flags for lines have no effect on names without newlines.
  void scoped_flags(Flags& flags) {
    std::u32string on;
    std::u32string off;
    std::u32string* given = &on;
    for (;;) {
      const char32_t each = take_any("missing -, : or )");
      if (each == ':') break;
      if (each == ')') reject("global flags not at the start of the expression");
      if (each == '-' && given == &on) {
        given = &off;
        continue;
      }
      if (each == 'x') refuse("verbose syntax, (?x:...)");
      const bool is_known = each == 'i' || each == 'm' || each == 's' ||
                            ((each == 'a' || each == 'u') && given == &on);
      if (!is_known) reject("unknown extension or flag");
      given->push_back(each);
    }
    if (given == &off && off.empty()) reject("missing flag");
    if (on.find('a') != on.npos && on.find('u') != on.npos) reject("incompatible flags");
    if (on.find_first_of(off) != on.npos) reject("the same flag is switched on and off");
    if (on.find('i') != on.npos) flags.ignores_case = true;
    if (off.find('i') != off.npos) flags.ignores_case = false;
  }

  // Called after a backslash, outside of a set.
  void escape(Flags flags, Last& last) {
    const char32_t letter = take_any("bad escape (end of pattern)");
    if (letter == 'A') return write_position("\\A", last);
    if (letter == 'Z') return write_position("\\z", last);
    if (letter == 'b') return write_position("\\b", last);
    if (letter == 'B' || letter == 'z') {
      refuse(letter == 'B' ? "\\B, whose meaning depends on the version of Python"
                           : "\\z, whose meaning depends on the version of Python");
    }
    const auto found = category(letter);
    write(found ? *found : literal(escaped(letter), flags), flags);
    last = Last::item;
  }

  // Returns the character that an escape represents.
  char32_t escaped(char32_t letter) {
    if (const auto meaning = control(letter)) return *meaning;
    if (letter == 'x') return hexadecimal(2);
    if (letter == 'u') return hexadecimal(4);
    if (letter == 'U') return hexadecimal(8);
    if (letter == 'N') refuse("\\N{...}");
    if (letter >= '0' && letter <= '9') refuse("numeric escapes and back-references");
    if (is_letter(letter)) reject(fmt::format("bad escape \\{}", static_cast<char>(letter)));
    return letter;
  }

  char32_t hexadecimal(int digits) {
    std::uint32_t value = 0;
    for (int i = 0; i < digits; ++i) {
      const char32_t each = take_any("incomplete escape");
      const std::uint32_t digit = each >= '0' && each <= '9'   ? each - U'0'
                                  : each >= 'a' && each <= 'f' ? each - U'a' + 10
                                  : each >= 'A' && each <= 'F' ? each - U'A' + 10
                                                               : 16;
      if (digit == 16) reject("incomplete escape");
      value = value << 4 | digit;
    }
    if (value > 0x10ffff) reject("bad escape");
    return value;
  }

  // An element of a set: a character, or a category, which cannot be the end of a range.
  struct SetItem {
    std::optional<char32_t> character;
    Characters characters;
  };

  SetItem set_item(char32_t each, Flags flags) {
    if (each == '\\') {
      const char32_t letter = take_any("bad escape (end of pattern)");
      if (const auto found = category(letter)) return {{}, *found};
      each = letter == 'b' ? U'\b' : escaped(letter);
    }
    return {each, literal(each, flags)};
  }

  // Called after "[". A leading "]" is a literal character, and so is any "[".
  Characters set(Flags flags) {
    constexpr const char* unterminated = "unterminated character set";
    Characters found;
    const bool is_negated = take('^');
    for (bool is_first = true;; is_first = false) {
      const char32_t each = take_any(unterminated);
      if (each == ']' && !is_first) break;
      const SetItem first = set_item(each, flags);
      found |= first.characters;
      if (!take('-')) continue;
      const char32_t next = take_any(unterminated);
      if (next == ']') {
        found.set('-');
        break;
      }
      const SetItem last = set_item(next, flags);
      if (!first.character || !last.character || *last.character < *first.character) {
        reject("bad character range");
      }
      found |= range(*first.character, *last.character);
    }
    if (!is_negated) return found;
    // A negated set must exclude both cases of its characters if case is ignored.
    if (flags.ignores_case) found = folded(found);
    return ~found;
  }

  std::string_view shown_;
  const char* code_;
  const std::string& field_;
  std::u32string text_;
  std::size_t at_ = 0;
  std::size_t look_aheads_ = 0;
  bool leaves_out_ = false;  // look-around
  bool has_left_out_ = false;
  std::string out_;
  std::size_t item_begin_ = 0;  // offset in `out_` of the element that a quantifier repeats
  std::set<std::u32string> groups_;
};

}  // namespace

std::string re2_of_python(std::string_view pattern, const char* code, const std::string& field) {
  return Translator(pattern, code, field).run();
}

Re2Match re2_match_of_python(std::string_view pattern, const char* code, const std::string& field) {
  return Translator(pattern, code, field).run_match();
}

bool is_plain_name(std::string_view name) noexcept {
  return std::ranges::all_of(
      name, [](char each) { return static_cast<unsigned char>(each) < ascii_end && each != '\n'; });
}

}  // namespace loadstone

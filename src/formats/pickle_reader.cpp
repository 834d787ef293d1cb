#include <fmt/format.h>

#include <map>
#include <utility>

#include "base/text.h"
#include "formats/pickle_input.h"
#include "formats/torch_pickle.h"

namespace loadstone {

namespace {

constexpr std::size_t nodes_max = std::size_t{8} << 20;
constexpr unsigned protocol_max = 5;

// Not thread-safe; used once.
class PickleReader {
 public:
  PickleReader(ByteSource& source, std::uint64_t begin, std::uint64_t end, Warnings& warnings,
               const PickleRules& rules)
      : path_(source.path()), in_(source, begin, end), warnings_(warnings), rules_(rules) {}

  Pickle read() {
    pickle_.lists.emplace_back();  // of all that are empty
    do {
      op_ = in_.next_opcode();
    } while (step());
    pickle_.root = pop();
    if (!stack_.empty() || !marks_.empty()) {
      warnings_.add("pt.stack", "data.pkl", "STOP", "values are left on the stack",
                    std::to_string(stack_.size()), "none");
    }
    pickle_.offset_end = in_.position();
    pickle_.bytes = in_.consumed();
    return std::move(pickle_);
  }

 private:
  // ---- errors

  [[noreturn]] void refuse(const char* code, std::string message, std::string found,
                           std::string expected) const {
    in_.refuse(code, std::move(message), std::move(found), std::move(expected));
  }
  [[noreturn]] void refuse_stack(std::string found, std::string expected) const {
    refuse("pt.stack", "the opcode does not fit the stack", std::move(found), std::move(expected));
  }
  [[noreturn]] void refuse_target(std::uint32_t node, std::string expected) const {
    refuse("pt.opcode", "the opcode changes what it may not change", pickle_.describe(node),
           std::move(expected));
  }

  // ---- nodes and the stack

  std::uint32_t add(PickleNode node) {
    if (pickle_.nodes.size() >= nodes_max) {
      refuse("pt.budget", "the pickle holds too many values", "more than 8 million", "fewer");
    }
    pickle_.nodes.push_back(node);
    return static_cast<std::uint32_t>(pickle_.nodes.size() - 1);
  }

  void push(std::uint32_t node) { stack_.push_back(node); }
  void push(PickleNode node) { push(add(node)); }
  void push_number(PickleKind kind, std::int64_t value) { push({.kind = kind, .number = value}); }

  std::uint32_t add_text(PickleKind kind, std::string_view text) {
    const auto begin = static_cast<std::int64_t>(pickle_.texts.size());
    pickle_.texts += text;
    return add(
        {.kind = kind, .text_bytes = static_cast<std::uint32_t>(text.size()), .number = begin});
  }

  void push_text(PickleKind kind, std::uint64_t length) {
    const auto bytes = in_.take(length);  // below pickle_bytes_max, so 32 bits hold its length
    push(add_text(kind, as_text(bytes)));
  }

  // Empty containers share one list until something is added: an opcode makes one of each byte.
  std::uint32_t add_list(PickleKind kind, std::vector<std::uint32_t> items,
                         std::int64_t value = 0) {
    if (items.empty()) return add({.kind = kind, .number = value});
    pickle_.lists.push_back(std::move(items));
    return add({.kind = kind,
                .items = static_cast<std::uint32_t>(pickle_.lists.size() - 1),
                .number = value});
  }

  [[nodiscard]] std::size_t floor() const noexcept { return marks_.empty() ? 0 : marks_.back(); }

  [[nodiscard]] std::uint32_t top() const {
    if (stack_.size() <= floor()) refuse_stack("nothing", "a value");
    return stack_.back();
  }
  std::uint32_t pop() {
    const std::uint32_t node = top();
    stack_.pop_back();
    return node;
  }
  std::vector<std::uint32_t> pop_count(std::size_t count) {
    if (stack_.size() - floor() < count) {
      refuse_stack(fmt::format("{} values", stack_.size() - floor()), fmt::format("{}", count));
    }
    std::vector<std::uint32_t> items(stack_.end() - static_cast<std::ptrdiff_t>(count),
                                     stack_.end());
    stack_.resize(stack_.size() - count);
    return items;
  }
  std::vector<std::uint32_t> pop_to_mark() {
    if (marks_.empty()) refuse_stack("no MARK", "a MARK");
    auto items = pop_count(stack_.size() - floor());
    marks_.pop_back();
    return items;
  }

  // To add to.
  std::vector<std::uint32_t>& items_of(std::uint32_t node) {
    std::uint32_t& list = pickle_.nodes[node].items;
    if (list == 0) {
      pickle_.lists.emplace_back();
      list = static_cast<std::uint32_t>(pickle_.lists.size() - 1);
    }
    return pickle_.lists[list];
  }

  // ---- opcodes; each group says whether the opcode was one of its own

  // False at STOP.
  bool step() {
    if (op_ == '.') return false;
    if (do_number() || do_text() || do_stack() || do_container() || do_memo() || do_global()) {
      return true;
    }
    refuse_opcode();
  }

  bool do_number() {
    switch (op_) {
      case 0x80: {
        const auto protocol = in_.number<unsigned char>();
        if (protocol > protocol_max) {
          refuse("pt.protocol", "a protocol that does not exist", std::to_string(protocol),
                 "at most 5");
        }
        return true;
      }
      case 0x95: {
        const auto length = in_.number<std::uint64_t>();
        if (length > in_.remaining()) {
          warnings_.add("pt.truncated", "data.pkl", "FRAME", "a frame is longer than the file",
                        bytes_text(length), bytes_text(in_.remaining()));
        }
        return true;
      }
      case 'N':
        push_number(PickleKind::none, 0);
        return true;
      case 0x88:
      case 0x89:
        push_number(PickleKind::boolean, op_ == 0x88 ? 1 : 0);
        return true;
      case 'J':
        push_number(PickleKind::integer, in_.number<std::int32_t>());
        return true;
      case 'K':
        push_number(PickleKind::integer, in_.number<std::uint8_t>());
        return true;
      case 'M':
        push_number(PickleKind::integer, in_.number<std::uint16_t>());
        return true;
      case 'G':
        static_cast<void>(in_.take(8));  // no number with a point counts for a tensor
        push_number(PickleKind::real, 0);
        return true;
      case 0x8a:
        push_long(in_.number<std::uint8_t>());
        return true;
      default:
        return false;
    }
  }

  void push_long(std::uint8_t length) {
    const auto bytes = in_.take(length);
    const auto value = long_number(bytes);
    if (value) return push_number(PickleKind::integer, *value);
    push(add_text(PickleKind::big_integer, as_text(bytes)));
  }

  bool do_text() {
    const bool is_bytes = op_ == 'C' || op_ == 'B' || op_ == 0x8e;
    const PickleKind kind = is_bytes ? PickleKind::bytes : PickleKind::text;
    switch (op_) {
      case 0x8c:
      case 'U':
      case 'C':
        push_text(kind, in_.number<std::uint8_t>());
        return true;
      case 'X':
      case 'T':
      case 'B':
        push_text(kind, in_.number<std::uint32_t>());
        return true;
      case 0x8d:
      case 0x8e:
        push_text(kind, in_.number<std::uint64_t>());
        return true;
      default:
        return false;
    }
  }

  bool do_stack() {
    switch (op_) {
      case '(':
        marks_.push_back(stack_.size());
        return true;
      case '0':
        static_cast<void>(pop());
        return true;
      case '1':
        static_cast<void>(pop_to_mark());
        return true;
      case '2':
        push(top());
        return true;
      case ')':
        push(add_list(PickleKind::tuple, {}));
        return true;
      case 0x85:
      case 0x86:
      case 0x87:
        push(add_list(PickleKind::tuple, pop_count(op_ - 0x84u)));
        return true;
      case 't':
        push(add_list(PickleKind::tuple, pop_to_mark()));
        return true;
      case ']':
        push(add_list(PickleKind::list, {}));
        return true;
      case '}':
        push(add_list(PickleKind::dict, {}));
        return true;
      case 0x8f:
        push(add_list(PickleKind::set, {}));
        return true;
      case 0x91:
        push(add_list(PickleKind::set, pop_to_mark()));
        return true;
      default:
        return false;
    }
  }

  bool do_container() {
    switch (op_) {
      case 'a':
      case 'e':
        extend(PickleKind::list, op_ == 'a' ? pop_count(1) : pop_to_mark());
        return true;
      case 's':
      case 'u':
        extend(PickleKind::dict, op_ == 's' ? pop_count(2) : pop_to_mark());
        return true;
      case 0x90:
        extend(PickleKind::set, pop_to_mark());
        return true;
      default:
        return false;
    }
  }

  // A tensor, a number or a function that is "extended" is the way of known attacks on readers that
  // call Python.
  void extend(PickleKind kind, const std::vector<std::uint32_t>& added) {
    const std::uint32_t node = top();
    if (kind == PickleKind::dict && added.size() % 2 != 0) {
      refuse_stack(fmt::format("{} keys and values", added.size()), "pairs");
    }
    const PickleKind found = pickle_.kind(node);
    if (found != kind && !pickle_.is_foreign(node)) refuse_target(node, "a container of its kind");
    // What an unknown class does with it is not known, so it is dropped.
    if (found != kind || added.empty()) return;
    auto& items = items_of(node);
    items.insert(items.end(), added.begin(), added.end());
  }

  // ---- the memo

  bool do_memo() {
    switch (op_) {
      case 'q':
        remember(in_.number<std::uint8_t>());
        return true;
      case 'r':
        remember(in_.number<std::uint32_t>());
        return true;
      case 0x94:
        remember(static_cast<std::uint32_t>(memo_.size()));
        return true;
      case 'h':
        recall(in_.number<std::uint8_t>());
        return true;
      case 'j':
        recall(in_.number<std::uint32_t>());
        return true;
      default:
        return false;
    }
  }

  // Whoever counts up needs a byte for each number, so a larger one is out of line, and is kept
  // where it costs no more than one entry.
  void remember(std::uint32_t index) {
    const std::uint32_t node = top();
    if (index > in_.consumed()) {
      warnings_.add("pt.memo", "data.pkl", opcode_name(op_),
                    "an index of the memo that nobody counts up to", std::to_string(index),
                    "small numbers");
      far_memo_[index] = node;
      return;
    }
    if (index >= memo_.size()) memo_.resize(std::size_t{index} + 1, no_node);
    memo_[index] = node;
  }

  void recall(std::uint32_t index) {
    std::uint32_t node = index < memo_.size() ? memo_[index] : no_node;
    if (const auto far = far_memo_.find(index); far != far_memo_.end()) node = far->second;
    if (node == no_node) {
      refuse("pt.memo", "the memo holds nothing there", std::to_string(index),
             "an index that was stored");
    }
    push(node);
  }

  // ---- names of Python, and what is said to be made with them

  bool do_global() {
    switch (op_) {
      case 'c': {
        std::string dotted(in_.line());
        dotted += '.';
        dotted += in_.line();
        require_allowed(dotted);
        push(add_text(PickleKind::global, dotted));
        return true;
      }
      case 0x93: {
        const auto names = pop_count(2);
        const bool are_texts = pickle_.kind(names[0]) == PickleKind::text &&
                               pickle_.kind(names[1]) == PickleKind::text;
        if (!are_texts) refuse_stack("something else", "two strings");
        const std::string_view module = pickle_.text(names[0]);
        const std::string_view last = pickle_.text(names[1]);
        budget_.take(path_, module.size() + last.size(), in_.consumed());
        const std::string dotted = fmt::format("{}.{}", module, last);
        require_allowed(dotted);
        const std::uint32_t node = add_text(PickleKind::global, dotted);
        pickle_.nodes[node].from_stack = true;
        push(node);
        return true;
      }
      case 'R':
      case 0x81: {
        const auto parts = pop_count(2);
        push(made(parts[0], parts[1]));
        return true;
      }
      case 'b': {
        const std::uint32_t state = pop();  // attributes, such as a state dict's _metadata
        if (pickle_.kind(top()) != PickleKind::dict && !pickle_.is_foreign(top())) {
          refuse_target(top(), "an object or a dict");
        }
        if (rules_.keeps_state && pickle_.kind(top()) != PickleKind::dict) keep_state(state);
        return true;
      }
      case 'Q':
        push(add_storage(pop()));
        return true;
      default:
        return false;
    }
  }

  void require_allowed(std::string_view global) const {
    if (rules_.is_allowed == nullptr || rules_.is_allowed(global)) return;
    refuse("pt.global_refused", "a name that has no place in such a pickle", printable(global, 200),
           "names that torch writes (nothing of a file is ever called)");
  }

  // Of what is on top of the stack.
  void keep_state(std::uint32_t state) {
    auto& items = items_of(top());
    if (items.size() != 2) refuse_target(top(), "an object whose state is given once");
    items.push_back(state);
  }

  std::uint32_t made(std::uint32_t callee, std::uint32_t arguments) {
    if (pickle_.kind(callee) != PickleKind::global) {
      refuse("pt.opcode", "something is called that is no global", pickle_.describe(callee),
             "a global");
    }
    if (pickle_.kind(arguments) != PickleKind::tuple) {
      refuse("pt.opcode", "the arguments are no tuple", pickle_.describe(arguments), "a tuple");
    }
    const std::string_view name = pickle_.text(callee);
    if (name == "collections.OrderedDict") return ordered_dict(arguments);
    const auto& items = pickle_.items(arguments);
    if (name == "torch.Size" && items.size() == 1 &&
        (pickle_.kind(items[0]) == PickleKind::tuple ||
         pickle_.kind(items[0]) == PickleKind::list)) {
      return items[0];
    }
    return add_list(op_ == 'R' ? PickleKind::call : PickleKind::object, {callee, arguments});
  }

  // Empty, or as Python 2 wrote it: a list of pairs.
  std::uint32_t ordered_dict(std::uint32_t arguments) {
    std::vector<std::uint32_t> members;
    const auto& items = pickle_.items(arguments);
    bool fits = items.size() <= 1;
    const bool is_filled = fits && !items.empty();
    if (is_filled) fits = pickle_.kind(items[0]) == PickleKind::list;
    if (is_filled && fits) {
      budget_.take(path_, 8 * pickle_.items(items[0]).size(), in_.consumed());
      for (const std::uint32_t pair : pickle_.items(items[0])) {
        const PickleKind kind = pickle_.kind(pair);
        fits = (kind == PickleKind::list || kind == PickleKind::tuple) &&
               pickle_.items(pair).size() == 2;
        if (!fits) break;
        members.insert(members.end(), pickle_.items(pair).begin(), pickle_.items(pair).end());
      }
    }
    if (!fits) {
      refuse("pt.opcode", "an OrderedDict of something else", pickle_.describe(arguments),
             "nothing, or a list of pairs");
    }
    return add_list(PickleKind::dict, std::move(members));
  }

  std::uint32_t add_storage(std::uint32_t id) {
    if (const auto found = problem_of_storage_id(pickle_, id)) {
      refuse("pt.persistent_id", "a persistent id that names no storage", *found,
             "('storage', class, key, device, numel)");
    }
    const std::vector<std::uint32_t>& parts = pickle_.items(id);
    const std::int64_t numel = pickle_.node(parts[4]).number;
    if (numel < 0) {
      refuse("pt.storage_size",
             fmt::format("storage '{}' has a negative numel", printable(pickle_.text(parts[2]))),
             std::to_string(numel), "0 or more");
    }
    return add_list(PickleKind::storage, {parts[1], parts[2]}, numel);
  }

  // Opcodes that call by themselves, take names from elsewhere, or that torch has never written.
  [[noreturn]] void refuse_opcode() {
    std::string found = opcode_name(op_);
    if (op_ == 'i') {
      found += " of " + std::string(in_.line());
      found += "." + std::string(in_.line());
    }
    if (op_ == 'o' && !marks_.empty() && stack_.size() > floor()) {
      found += " of " + pickle_.describe(stack_[floor()]);
    }
    refuse("pt.opcode", "an opcode that torch.save does not write", printable(found),
           "one of the opcodes of a state dict");
  }

  static constexpr std::uint32_t no_node = UINT32_MAX;

  std::string path_;
  PickleInput in_;
  Warnings& warnings_;
  PickleRules rules_;
  unsigned char op_ = '.';
  Pickle pickle_;
  CopyBudget budget_;
  std::vector<std::uint32_t> stack_;
  std::vector<std::size_t> marks_;
  std::vector<std::uint32_t> memo_;
  std::map<std::uint32_t, std::uint32_t> far_memo_;
};

}  // namespace

Pickle read_pickle(ByteSource& source, std::uint64_t begin, std::uint64_t end, Warnings& warnings,
                   const PickleRules& rules) {
  return PickleReader(source, begin, end, warnings, rules).read();
}

}  // namespace loadstone

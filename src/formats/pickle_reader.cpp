#include <fmt/format.h>

#include <array>
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
    pickle_.lists.emplace_back();  // shared by all empty containers
    do {
      op_ = in_.next_opcode();
    } while (step());
    pickle_.root = pop();
    if (!stack_.empty() || !marks_.empty()) {
      warnings_.add("pt.stack", "data.pkl", "STOP", "the pickle ends with values left on its stack",
                    std::to_string(stack_.size()), "none");
    }
    pickle_.offset_end = in_.position();
    pickle_.bytes = in_.consumed();
    return std::move(pickle_);
  }

  // ---- opcodes: see the table below

  void protocol() {
    const auto protocol = in_.number<unsigned char>();
    if (protocol <= protocol_max) return;
    refuse("pt.protocol", "this pickle protocol does not exist", std::to_string(protocol),
           "at most 5");
  }
  void frame() {
    const auto length = in_.number<std::uint64_t>();
    if (length <= in_.remaining()) return;
    warnings_.add("pt.truncated", "data.pkl", "FRAME", "a frame is longer than the file",
                  bytes_text(length), bytes_text(in_.remaining()));
  }

  template <PickleKind kind, std::int64_t value = 0>
  void constant() {
    push({.kind = kind, .number = value});
  }
  template <typename Number>
  void integer() {
    push({.kind = PickleKind::integer, .number = in_.number<Number>()});
  }
  void long_integer() {
    const auto bytes = in_.take(in_.number<std::uint8_t>());
    const auto value = long_number(bytes);
    if (value) return push({.kind = PickleKind::integer, .number = *value});
    push(add_text(PickleKind::big_integer, as_text(bytes)));
  }
  void real() {
    static_cast<void>(in_.take(8));  // no tensor depends on the value of a float
    constant<PickleKind::real>();
  }
  template <PickleKind kind, typename Length>
  void text() {
    const auto bytes = in_.take(in_.number<Length>());
    push(add_text(kind, as_text(bytes)));  // shorter than pickle_bytes_max, so 32 bits suffice
  }

  void mark() { marks_.push_back(stack_.size()); }
  void drop() { static_cast<void>(pop()); }
  void drop_to_mark() { static_cast<void>(pop_to_mark()); }
  void duplicate() { push(top()); }

  template <PickleKind kind>
  void empty() {
    push(add_list(kind, {}));
  }
  template <std::size_t count>
  void tuple_of() {
    push(add_list(PickleKind::tuple, pop_count(count)));
  }
  template <PickleKind kind>
  void collect() {
    push(add_list(kind, pop_to_mark()));
  }
  template <PickleKind kind, std::size_t count>
  void extend_by() {
    extend(kind, pop_count(count));
  }
  template <PickleKind kind>
  void extend_to_mark() {
    extend(kind, pop_to_mark());
  }

  template <typename Index>
  void put() {
    remember(in_.number<Index>());
  }
  template <typename Index>
  void get() {
    recall(in_.number<Index>());
  }
  void memoize() { remember(static_cast<std::uint32_t>(memo_.size())); }

  void global() {
    std::string dotted(in_.line());
    dotted += '.';
    dotted += in_.line();
    require_allowed(dotted);
    push(add_text(PickleKind::global, dotted));
  }
  void stack_global() {
    const auto names = pop_count(2);
    const bool are_texts =
        pickle_.kind(names[0]) == PickleKind::text && pickle_.kind(names[1]) == PickleKind::text;
    if (!are_texts) refuse_stack("other values", "two strings");
    const std::string_view module = pickle_.text(names[0]);
    const std::string_view last = pickle_.text(names[1]);
    budget_.take(path_, module.size() + last.size(), in_.consumed());
    const std::string dotted = fmt::format("{}.{}", module, last);
    require_allowed(dotted);
    push(add_text(PickleKind::global, dotted));
    pickle_.nodes[stack_.back()].from_stack = true;
  }
  void make() {
    const auto parts = pop_count(2);
    push(made(parts[0], parts[1]));
  }
  void build() {
    const std::uint32_t state = pop();  // attributes, for example a state dict's _metadata
    if (pickle_.kind(top()) != PickleKind::dict && !pickle_.is_foreign(top())) {
      refuse_target(top(), "an object or a dict");
    }
    if (rules_.keeps_state && pickle_.kind(top()) != PickleKind::dict) keep_state(state);
  }
  void persistent_id() { push(add_storage(pop())); }

 private:
  // ---- errors

  [[noreturn]] void refuse(const char* code, std::string message, std::string found,
                           std::string expected) const {
    in_.refuse(code, std::move(message), std::move(found), std::move(expected));
  }
  [[noreturn]] void refuse_stack(std::string found, std::string expected) const {
    refuse("pt.stack", "the values on the stack do not fit the opcode", std::move(found),
           std::move(expected));
  }
  [[noreturn]] void refuse_target(std::uint32_t node, std::string expected) const {
    refuse("pt.opcode", "the opcode changes a value of the wrong type", pickle_.describe(node),
           std::move(expected));
  }

  // ---- nodes and the stack

  std::uint32_t add(PickleNode node) {
    if (pickle_.nodes.size() >= nodes_max) {
      refuse("pt.budget", "the pickle contains too many values", "more than 8 million", "fewer");
    }
    pickle_.nodes.push_back(node);
    return static_cast<std::uint32_t>(pickle_.nodes.size() - 1);
  }

  void push(std::uint32_t node) { stack_.push_back(node); }
  void push(PickleNode node) { push(add(node)); }

  std::uint32_t add_text(PickleKind kind, std::string_view text) {
    const auto begin = static_cast<std::int64_t>(pickle_.texts.size());
    pickle_.texts += text;
    return add(
        {.kind = kind, .text_bytes = static_cast<std::uint32_t>(text.size()), .number = begin});
  }

  // Empty containers share one list until the pickle adds an item, because every byte of a pickle
  // may be an opcode that creates an empty container.
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
      refuse_stack(counted(stack_.size() - floor(), "value"), fmt::format("{}", count));
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

  // Returns the container's own list of items. Creates it if the container shares the empty list.
  std::vector<std::uint32_t>& items_of(std::uint32_t node) {
    std::uint32_t& list = pickle_.nodes[node].items;
    if (list == 0) {
      pickle_.lists.emplace_back();
      list = static_cast<std::uint32_t>(pickle_.lists.size() - 1);
    }
    return pickle_.lists[list];
  }

  // Executes the current opcode. Returns false at STOP.
  bool step();

  // Rejects adding items to a tensor, a number or a function, because attacks on readers that call
  // Python functions do this.
  void extend(PickleKind kind, const std::vector<std::uint32_t>& added) {
    const std::uint32_t node = top();
    if (kind == PickleKind::dict && added.size() % 2 != 0) {
      refuse_stack(fmt::format("{} keys and values", added.size()), "pairs");
    }
    const PickleKind found = pickle_.kind(node);
    if (found != kind && !pickle_.is_foreign(node)) refuse_target(node, "a container of its kind");
    // An unknown class may do anything with added items, so they are dropped.
    if (found != kind || added.empty()) return;
    auto& items = items_of(node);
    items.insert(items.end(), added.begin(), added.end());
  }

  // ---- the memo

  // Writers number the entries of the memo consecutively, and each entry takes at least a byte, so
  // a larger index is unusual. A map stores it, because the vector would become too large.
  void remember(std::uint32_t index) {
    const std::uint32_t node = top();
    if (index > in_.consumed()) {
      warnings_.add("pt.memo", "data.pkl", opcode_name(op_), "the index of the memo is too large",
                    std::to_string(index), "small numbers");
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
      refuse("pt.memo", "the memo has no value at this index", std::to_string(index),
             "an index that was stored");
    }
    push(node);
  }

  // ---- Python globals, and calls of them

  void require_allowed(std::string_view global) const {
    if (rules_.is_allowed == nullptr || rules_.is_allowed(global)) return;
    refuse("pt.global_refused", "the pickle of a checkpoint cannot contain this name",
           printable(global, 200),
           "names that torch writes (loadstone never calls code named in a file)");
  }

  // Adds the state to the object on top of the stack.
  void keep_state(std::uint32_t state) {
    auto& items = items_of(top());
    if (items.size() != 2) refuse_target(top(), "an object whose state is set once");
    items.push_back(state);
  }

  std::uint32_t made(std::uint32_t callee, std::uint32_t arguments) {
    if (pickle_.kind(callee) != PickleKind::global) {
      refuse("pt.opcode", "the called object is not a global", pickle_.describe(callee),
             "a global");
    }
    if (pickle_.kind(arguments) != PickleKind::tuple) {
      refuse("pt.opcode", "the arguments are not a tuple", pickle_.describe(arguments), "a tuple");
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

  // `arguments`: empty, or a list of pairs, as Python 2 wrote it.
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
      refuse("pt.opcode", "an OrderedDict is made from the wrong arguments",
             pickle_.describe(arguments), "no argument, or a list of pairs");
    }
    return add_list(PickleKind::dict, std::move(members));
  }

  std::uint32_t add_storage(std::uint32_t id) {
    if (const auto found = problem_of_storage_id(pickle_, id)) {
      refuse("pt.persistent_id", "a persistent id does not refer to a storage", *found,
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

  // Rejects opcodes that call a function directly or load a name by other means, and opcodes that
  // torch has never written.
  [[noreturn]] void refuse_opcode() {
    std::string found = opcode_name(op_);
    if (op_ == 'i') {
      found += " of " + std::string(in_.line());
      found += "." + std::string(in_.line());
    }
    if (op_ == 'o' && !marks_.empty() && stack_.size() > floor()) {
      found += " of " + pickle_.describe(stack_[floor()]);
    }
    refuse("pt.opcode", "torch.save does not write this opcode", printable(found),
           "an opcode that a state dict needs");
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

struct Opcode {
  unsigned char code;
  std::string_view name;
  void (PickleReader::*run)() = nullptr;  // null for STOP, and if torch.save does not write it
};

using R = PickleReader;
using K = PickleKind;
constexpr auto opcodes = std::to_array<Opcode>({
    {0x80, "PROTO", &R::protocol},
    {0x95, "FRAME", &R::frame},
    {'.', "STOP"},
    {'N', "NONE", &R::constant<K::none>},
    {0x88, "NEWTRUE", &R::constant<K::boolean, 1>},
    {0x89, "NEWFALSE", &R::constant<K::boolean>},
    {'J', "BININT", &R::integer<std::int32_t>},
    {'K', "BININT1", &R::integer<std::uint8_t>},
    {'M', "BININT2", &R::integer<std::uint16_t>},
    {0x8a, "LONG1", &R::long_integer},
    {'G', "BINFLOAT", &R::real},
    {'X', "BINUNICODE", &R::text<K::text, std::uint32_t>},
    {0x8c, "SHORT_BINUNICODE", &R::text<K::text, std::uint8_t>},
    {0x8d, "BINUNICODE8", &R::text<K::text, std::uint64_t>},
    {'U', "SHORT_BINSTRING", &R::text<K::text, std::uint8_t>},
    {'T', "BINSTRING", &R::text<K::text, std::uint32_t>},
    {'C', "SHORT_BINBYTES", &R::text<K::bytes, std::uint8_t>},
    {'B', "BINBYTES", &R::text<K::bytes, std::uint32_t>},
    {0x8e, "BINBYTES8", &R::text<K::bytes, std::uint64_t>},
    {'(', "MARK", &R::mark},
    {'0', "POP", &R::drop},
    {'1', "POP_MARK", &R::drop_to_mark},
    {'2', "DUP", &R::duplicate},
    {')', "EMPTY_TUPLE", &R::empty<K::tuple>},
    {0x85, "TUPLE1", &R::tuple_of<1>},
    {0x86, "TUPLE2", &R::tuple_of<2>},
    {0x87, "TUPLE3", &R::tuple_of<3>},
    {'t', "TUPLE", &R::collect<K::tuple>},
    {']', "EMPTY_LIST", &R::empty<K::list>},
    {'}', "EMPTY_DICT", &R::empty<K::dict>},
    {0x8f, "EMPTY_SET", &R::empty<K::set>},
    {'a', "APPEND", &R::extend_by<K::list, 1>},
    {'e', "APPENDS", &R::extend_to_mark<K::list>},
    {'s', "SETITEM", &R::extend_by<K::dict, 2>},
    {'u', "SETITEMS", &R::extend_to_mark<K::dict>},
    {0x90, "ADDITEMS", &R::extend_to_mark<K::set>},
    {0x91, "FROZENSET", &R::collect<K::set>},
    {'q', "BINPUT", &R::put<std::uint8_t>},
    {'r', "LONG_BINPUT", &R::put<std::uint32_t>},
    {0x94, "MEMOIZE", &R::memoize},
    {'h', "BINGET", &R::get<std::uint8_t>},
    {'j', "LONG_BINGET", &R::get<std::uint32_t>},
    {'c', "GLOBAL", &R::global},
    {0x93, "STACK_GLOBAL", &R::stack_global},
    {'R', "REDUCE", &R::make},
    {0x81, "NEWOBJ", &R::make},
    {'b', "BUILD", &R::build},
    {'Q', "BINPERSID", &R::persistent_id},
    {'i', "INST"},
    {'o', "OBJ"},
    {0x82, "EXT1"},
    {0x83, "EXT2"},
    {0x84, "EXT4"},
    {0x92, "NEWOBJ_EX"},
    {'P', "PERSID"},
    {'I', "INT"},
    {'L', "LONG"},
    {0x8b, "LONG4"},
    {'F', "FLOAT"},
    {'S', "STRING"},
    {'V', "UNICODE"},
    {'d', "DICT"},
    {'l', "LIST"},
    {'g', "GET"},
    {'p', "PUT"},
    {0x96, "BYTEARRAY8"},
    {0x97, "NEXT_BUFFER"},
    {0x98, "READONLY_BUFFER"},
});

constexpr auto rows_of_codes = [] {
  std::array<const Opcode*, 256> rows = {};
  for (const Opcode& each : opcodes) rows[each.code] = &each;
  return rows;
}();

bool PickleReader::step() {
  if (op_ == '.') return false;
  const Opcode* const opcode = rows_of_codes[op_];
  if (opcode == nullptr || opcode->run == nullptr) refuse_opcode();
  (this->*opcode->run)();
  return true;
}

}  // namespace

std::string opcode_name(unsigned char code) {
  const Opcode* const opcode = rows_of_codes[code];
  return opcode == nullptr ? fmt::format("0x{:02x}", code) : std::string(opcode->name);
}

Pickle read_pickle(ByteSource& source, std::uint64_t begin, std::uint64_t end, Warnings& warnings,
                   const PickleRules& rules) {
  return PickleReader(source, begin, end, warnings, rules).read();
}

}  // namespace loadstone

// A pickle read as data: a tree of values, of which nothing is looked up, called or made.
// Opcodes that torch.save writes are taken, all others are refused. Rules and codes:
// docs/formats/torch.md.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "formats/file_header.h"
#include "loadstone/storage.h"

namespace loadstone {

enum class PickleKind : std::uint8_t {
  none,
  boolean,
  integer,
  big_integer,  // beyond 64 bits: its bytes, lowest first
  real,
  text,
  bytes,
  global,  // the dotted name of something in Python
  list,
  tuple,
  set,
  dict,     // keys and values in turn; OrderedDict too
  storage,  // a persistent id: class, key, count of elements
  call,     // what a global would return: the global, its arguments
  object,   // an instance of a class: the global, its arguments; a state where it is kept
};

struct PickleNode {
  PickleKind kind = PickleKind::none;
  bool from_stack = false;       // global: its name was put together on the stack
  std::uint32_t text_bytes = 0;  // text, bytes, big_integer, global
  std::uint32_t items = 0;       // list, tuple, set, dict, storage, call, object: index
  std::int64_t number = 0;       // boolean, integer, storage; where the text begins
};

// Bytes that a reader copies where a pickle names the same text, list or tuple again and again:
// parts of names, shapes, pairs. A pickle that torch wrote spells nearly all of them out, so the
// sum stays below its own size; one that refers to them in two bytes could ask for any amount.
// Value type.
class CopyBudget {
 public:
  static constexpr std::uint64_t bytes_per_pickle_byte = 16;
  static constexpr std::uint64_t bytes_least = 64u << 10;

  // Of a pickle of so many bytes. Throws Error "pt.budget".
  void take(const std::string& path, std::uint64_t bytes, std::uint64_t pickle_bytes);

 private:
  std::uint64_t spent_ = 0;
};

// Nodes are named by their index. Containers may hold themselves. Value type.
class Pickle {
 public:
  std::uint32_t root = 0;
  std::uint64_t offset_end = 0;  // behind STOP, in the file
  std::uint64_t bytes = 0;       // of the pickle

  [[nodiscard]] const PickleNode& node(std::uint32_t index) const { return nodes[index]; }
  [[nodiscard]] PickleKind kind(std::uint32_t index) const { return nodes[index].kind; }
  [[nodiscard]] std::string_view text(std::uint32_t index) const;
  [[nodiscard]] const std::vector<std::uint32_t>& items(std::uint32_t index) const {
    return lists[nodes[index].items];
  }
  // Of a call or an object: the dotted name; "" for anything else.
  [[nodiscard]] std::string_view callee(std::uint32_t index) const;
  // Whether it is made by something in Python that makes no tensors.
  [[nodiscard]] bool is_foreign(std::uint32_t index) const;
  // "a list", "a call of builtins.eval" ... for messages.
  [[nodiscard]] std::string describe(std::uint32_t index) const;

  std::vector<PickleNode> nodes;
  std::vector<std::vector<std::uint32_t>> lists;
  std::string texts;
};

// Of ("storage", class, key, device, count of elements), and in old files a view of it or None.
// Nothing: it is such an id.
[[nodiscard]] std::optional<std::string> problem_of_storage_id(const Pickle& pickle,
                                                               std::uint32_t id);

// Globals that make tensors, all of them: torch's _rebuild_ functions.
[[nodiscard]] bool is_tensor_maker(std::string_view global) noexcept;

// The objects that a pickle other than a state dict may hold.
struct PickleRules {
  // Globals that may be named, all others are "pt.global_refused"; null: any may be named.
  bool (*is_allowed)(std::string_view global) noexcept = nullptr;
  // A call or an object gets what BUILD gives it as its third item. Otherwise that is dropped.
  bool keeps_state = false;
};

// Reads one pickle from [begin, end) of the file. Throws Error "pt.opcode", "pt.stack", "pt.memo",
// "pt.truncated", "pt.protocol", "pt.persistent_id", "pt.storage_size", "pt.budget",
// "pt.global_refused", "io.*".
[[nodiscard]] Pickle read_pickle(ByteSource& source, std::uint64_t begin, std::uint64_t end,
                                 Warnings& warnings, const PickleRules& rules = {});

// Larger ones are refused: 100,000 tensors take 20 MB.
inline constexpr std::uint64_t pickle_bytes_max = 48u << 20;

}  // namespace loadstone

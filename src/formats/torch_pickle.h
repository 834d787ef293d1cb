// A pickle as data: a tree of values. Nothing is imported, called or constructed. Accepts the
// opcodes that torch.save writes and rejects all others. Rules and codes: docs/formats/torch.md.
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
  dict,     // keys and values alternate; OrderedDict too
  storage,  // a persistent id: class, key, count of elements
  call,     // what a global would return: the global, its arguments
  object,   // an instance of a class: the global, its arguments; a state where it is kept
};

struct PickleNode {
  PickleKind kind = PickleKind::none;
  bool from_stack = false;       // global: its name was put together on the stack
  std::uint32_t text_bytes = 0;  // text, bytes, big_integer, global
  std::uint32_t items = 0;       // list, tuple, set, dict, storage, call, object: index
  std::int64_t number = 0;       // boolean, integer, storage; start of a text
};

// Limits the bytes copied when a pickle refers to the same text, list or tuple repeatedly: parts of
// names, shapes, pairs. torch's pickles spell nearly all of them out, so the sum stays below the
// pickle's size; two-byte references could ask for any amount. Value type.
class CopyBudget {
 public:
  static constexpr std::uint64_t bytes_per_pickle_byte = 16;
  static constexpr std::uint64_t bytes_least = 64u << 10;

  // `pickle_bytes`: size of the pickle. Throws Error "pt.budget".
  void take(const std::string& path, std::uint64_t bytes, std::uint64_t pickle_bytes);

 private:
  std::uint64_t spent_ = 0;
};

// Nodes are named by their index. Containers may hold themselves. Value type.
class Pickle {
 public:
  std::uint32_t root = 0;
  std::uint64_t offset_end = 0;  // after STOP, in the file
  std::uint64_t bytes = 0;       // of the pickle

  [[nodiscard]] const PickleNode& node(std::uint32_t index) const { return nodes[index]; }
  [[nodiscard]] PickleKind kind(std::uint32_t index) const { return nodes[index].kind; }
  [[nodiscard]] std::string_view text(std::uint32_t index) const;
  [[nodiscard]] const std::vector<std::uint32_t>& items(std::uint32_t index) const {
    return lists[nodes[index].items];
  }
  // Returns the dotted name of a call or an object; "" for other nodes.
  [[nodiscard]] std::string_view callee(std::uint32_t index) const;
  // Returns true for results of Python code that does not make tensors.
  [[nodiscard]] bool is_foreign(std::uint32_t index) const;
  // "a list", "a call of builtins.eval" ... for messages.
  [[nodiscard]] std::string describe(std::uint32_t index) const;

  std::vector<PickleNode> nodes;
  std::vector<std::vector<std::uint32_t>> lists;
  std::string texts;
};

// Checks ("storage", class, key, device, element count), with a view or None in old files. nullopt:
// valid.
[[nodiscard]] std::optional<std::string> problem_of_storage_id(const Pickle& pickle,
                                                               std::uint32_t id);

// Globals that make tensors, all of them: torch's _rebuild_ functions.
[[nodiscard]] bool is_tensor_maker(std::string_view global) noexcept;

// The objects that a pickle may contain, unless it is a state dict.
struct PickleRules {
  // Globals that may be named, all others are "pt.global_refused"; null: any may be named.
  bool (*is_allowed)(std::string_view global) noexcept = nullptr;
  // Store the argument of BUILD as the third item of a call or object; otherwise drop it.
  bool keeps_state = false;
};

// Reads one pickle from [begin, end) of the file. Throws Error "pt.opcode", "pt.stack", "pt.memo",
// "pt.truncated", "pt.protocol", "pt.persistent_id", "pt.storage_size", "pt.budget",
// "pt.global_refused", "io.*".
[[nodiscard]] Pickle read_pickle(ByteSource& source, std::uint64_t begin, std::uint64_t end,
                                 Warnings& warnings, const PickleRules& rules = {});

// Larger pickles are rejected: 100,000 tensors take 20 MB.
inline constexpr std::uint64_t pickle_bytes_max = 48u << 20;

}  // namespace loadstone

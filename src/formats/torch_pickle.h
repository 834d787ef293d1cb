// Reads a pickle as a tree of values, without importing, calling or constructing anything. Accepts
// the opcodes that torch.save writes and rejects all others. Rules and error codes:
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
  big_integer,  // an integer beyond 64 bits, as little-endian bytes
  real,
  text,
  bytes,
  global,  // the dotted name of a Python function or class
  list,
  tuple,
  set,
  dict,     // also an OrderedDict; items: alternating keys and values
  storage,  // a persistent id; items: class and key; number: count of elements
  call,     // the value that a global would return; items: the global, its arguments
  object,   // an instance of a class; items: the global, its arguments, and a kept state
};

struct PickleNode {
  PickleKind kind = PickleKind::none;
  bool from_stack = false;       // for a global: STACK_GLOBAL joined its name
  std::uint32_t text_bytes = 0;  // length of a text, bytes, big_integer or global
  std::uint32_t items = 0;       // index in Pickle::lists, for all kinds with items
  std::int64_t number = 0;       // value of a boolean or integer; offset of a text in Pickle::texts
};

// Limits the bytes copied for strings, lists and tuples that a pickle refers to repeatedly, such as
// parts of names and shapes. Each reference takes only two bytes, so a malicious pickle could ask
// for any amount. For torch's pickles, the copies are smaller than the pickle. Value type.
class CopyBudget {
 public:
  static constexpr std::uint64_t bytes_per_pickle_byte = 16;
  static constexpr std::uint64_t bytes_least = 64u << 10;

  // `pickle_bytes`: size of the pickle. Throws Error "pt.budget".
  void take(const std::string& path, std::uint64_t bytes, std::uint64_t pickle_bytes);

 private:
  std::uint64_t spent_ = 0;
};

// Nodes are identified by their index. Containers may contain themselves. Value type.
class Pickle {
 public:
  std::uint32_t root = 0;
  std::uint64_t offset_end = 0;  // file offset after STOP
  std::uint64_t bytes = 0;       // size of the pickle

  [[nodiscard]] const PickleNode& node(std::uint32_t index) const { return nodes[index]; }
  [[nodiscard]] PickleKind kind(std::uint32_t index) const { return nodes[index].kind; }
  [[nodiscard]] std::string_view text(std::uint32_t index) const;
  [[nodiscard]] const std::vector<std::uint32_t>& items(std::uint32_t index) const {
    return lists[nodes[index].items];
  }
  // Returns the dotted name of a call or an object; "" for other nodes.
  [[nodiscard]] std::string_view callee(std::uint32_t index) const;
  // Returns true for calls and objects whose global does not make a tensor.
  [[nodiscard]] bool is_foreign(std::uint32_t index) const;
  // Returns a phrase for messages, such as "a list" or "a call of builtins.eval".
  [[nodiscard]] std::string describe(std::uint32_t index) const;

  std::vector<PickleNode> nodes;
  std::vector<std::vector<std::uint32_t>> lists;
  std::string texts;
};

// Checks a persistent id: ("storage", class, key, device, element count), followed by None in old
// files. Returns nullopt if it is valid.
[[nodiscard]] std::optional<std::string> problem_of_storage_id(const Pickle& pickle,
                                                               std::uint32_t id);

// Returns true for torch's _rebuild_ functions, the only globals that make tensors.
[[nodiscard]] bool is_tensor_maker(std::string_view global) noexcept;

// Rules for the objects in a pickle. The defaults fit state dicts.
struct PickleRules {
  // Returns true for globals that may occur; others throw "pt.global_refused". Null allows all.
  bool (*is_allowed)(std::string_view global) noexcept = nullptr;
  // If true, the argument of BUILD is kept as the third item of a call or object.
  bool keeps_state = false;
};

// Reads one pickle from [begin, end) of the file. Throws Error "pt.opcode", "pt.stack", "pt.memo",
// "pt.truncated", "pt.protocol", "pt.persistent_id", "pt.storage_size", "pt.budget",
// "pt.global_refused", "io.*".
[[nodiscard]] Pickle read_pickle(ByteSource& source, std::uint64_t begin, std::uint64_t end,
                                 Warnings& warnings, const PickleRules& rules = {});

// Larger pickles are rejected. For comparison, a pickle of 100,000 tensors takes 20 MB.
inline constexpr std::uint64_t pickle_bytes_max = 48u << 20;

}  // namespace loadstone

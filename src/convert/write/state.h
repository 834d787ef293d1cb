// Stores the identity of a conversion in a file and compares it, so that a run uses no shard of a
// different conversion.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/digest.h"
#include "loadstone/convert.h"

namespace loadstone {

inline constexpr std::size_t state_bytes_max = 64u << 20;

// Adds a string and its length, so that different lists of strings give different bytes.
void add_text(Digest& digest, std::string_view text) noexcept;

struct SourceState {
  std::string path;  // relative to the checkpoint's root
  std::uint64_t bytes = 0;
  std::int64_t modified_ns = 0;
  std::uint64_t inode = 0;   // 0 if the file system has none
  std::string version = {};  // version of a remote file
  std::string header_digest;

  friend bool operator==(const SourceState&, const SourceState&) = default;
};

struct WorkState {
  std::string program;
  std::uint32_t parts = 0;  // number of parts that the work is divided into; 0: undivided
  std::string stem;
  std::map<std::string, std::string> options{};  // Conversion::options
  std::vector<SourceState> sources;
  bool has_copies = false;  // a copy with another time, inode or version replaced a source
  // Digests of parts of the conversion.
  std::string metadata;
  std::string tensors;  // names, dtypes, shapes and encodings of the output's tensors
  std::string values;   // sources and operations of the tensors' values
  std::string files;    // the tensors of each file, and the headers
  std::string extras;
  std::vector<std::string> extra_names;
  std::string marks;  // 8 hex digits per tensor in the order of names: they show which one differs
  std::vector<std::string> tensor_names{};  // in the same order; not stored
  // Only in the record of a finished conversion:
  std::vector<SourceState> outputs{};  // files with tensors, and the index
  std::string receipt{};               // kind of digest; empty: the output has no receipt
};

struct WorkDifference {
  std::string message;  // completes "the conversion was started with ..."
  std::string found{};
  std::string expected{};
};

// Returns the state of a conversion. `storage` reads companion files.
[[nodiscard]] WorkState state_of(const Conversion& conversion, WritableStorage& storage);

[[nodiscard]] std::string to_json(const WorkState& state);
// Parses a state. Throws Error "convert.state" if the text is invalid.
[[nodiscard]] WorkState work_state_from_json(std::string_view text);
// Reads the state of a work folder; nullopt without one. Throws Error "convert.state".
[[nodiscard]] std::optional<WorkState> read_work_state(WritableStorage& storage,
                                                       const std::string& folder);

// Like read_work_state(), but returns an empty state if no state is stored, or if the work cannot
// be continued; its files are then set aside.
[[nodiscard]] WorkState known_work_state(WritableStorage& storage, const std::string& folder);
// Rejects work that is divided into parts: a run without `resume` never discards parts.
void require_undivided(const WorkState& state, const std::string& folder);

// Returns the first difference between a run's state and the state of earlier work. Ignores
// `parts`. Also ignores the time, inode and version of sources, which differ between copies.
[[nodiscard]] std::optional<WorkDifference> work_difference(const WorkState& state,
                                                            const WorkState& found);
// Compares a run's state with the state of the work to continue. Throws Error "convert.state" that
// names the difference. Sets `has_copies` if sources were replaced by copies, because the work does
// not record which copy a shard was made from.
void join_work(WorkState& state, const WorkState& found, const std::string& folder);

}  // namespace loadstone

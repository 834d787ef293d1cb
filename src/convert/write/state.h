// What a conversion will write and of what, as something that can be kept in a file and compared:
// so that no shard of another conversion is taken for one of this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/digest.h"
#include "loadstone/convert.h"

namespace loadstone {

inline constexpr std::size_t state_bytes_max = 64u << 20;

// With its length, so that no two lists of texts give the same bytes.
void add_text(Digest& digest, std::string_view text) noexcept;

struct SourceState {
  std::string path;  // relative to the checkpoint's root
  std::uint64_t bytes = 0;
  std::int64_t modified_ns = 0;
  std::uint64_t inode = 0;   // 0 where the file system has none to tell
  std::string version = {};  // of a file on another machine
  std::string header_digest;

  friend bool operator==(const SourceState&, const SourceState&) = default;
};

struct WorkState {
  std::string program;
  std::uint32_t parts = 0;  // that the work is divided into; 0: it is not
  std::string stem;
  std::vector<SourceState> sources;
  bool has_copies = false;  // files of another time, inode or version have stood in for a source
  // Digests.
  std::string metadata;
  std::string tensors;  // names, shapes, dtypes and encodings
  std::string values;   // what they are made of, and how
  std::string files;    // which of them are in which file, and the headers
  std::string extras;
  std::vector<std::string> extra_names;
};

// `storage`: companion files are read from it.
[[nodiscard]] WorkState state_of(const Conversion& conversion, WritableStorage& storage);

[[nodiscard]] std::string to_json(const WorkState& state);
// Throws Error "convert.state" for text that is none.
[[nodiscard]] WorkState work_state_from_json(std::string_view text);

// Compares a run's state with that of the work it goes on with, except `parts` and, of sources,
// the time, inode and version, which differ between copies. Throws Error "convert.state" that
// names the difference. Sets `has_copies`: no record shows which copy a shard was made from.
void join_work(WorkState& state, const WorkState& found, const std::string& folder);

}  // namespace loadstone

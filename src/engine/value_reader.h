// Values read in parts, on demand: the pull side of the engine. What execute() pushes into whole
// destinations, this brings range by range into a buffer that is as small as the caller likes.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "boxes/value.h"
#include "engine/memory_count.h"
#include "engine/overflows.h"
#include "engine/reader.h"
#include "loadstone/catalog.h"
#include "loadstone/recipe.h"
#include "loadstone/storage.h"

namespace loadstone {

// Reads any range of a value's elements, all numbered row by row. Takes no memory but its staging,
// whatever the value's size: what lies across the order of the file (a transposed value) is read
// again for each range that needs it, so larger ranges are cheaper there. Contiguous bytes go
// straight to the caller's buffer. Not thread-safe: one for each thread; shards can be shared.
class ValueReader {
 public:
  // `catalog` must live as long. `shards`: one for each of its shards, null where nothing is read
  // from. `stop`: read() then
  // returns early, and what it has written means nothing. `memory`: where staging is counted; null:
  // nowhere else than here. `populates`: whether the memory that is read into is fresh.
  ValueReader(const Catalog& catalog, std::span<const std::shared_ptr<ByteSource>> shards,
              std::uint64_t staging_bytes_max, std::atomic<bool>& stop,
              MemoryCount* memory = nullptr, bool populates = true);
  ValueReader(const ValueReader&) = delete;
  ValueReader& operator=(const ValueReader&) = delete;

  // Makes read() read this value, whose boxes may copy from these decodings. Throws
  // Error "plan.box" where boxes or decodings do not fit.
  void open(const Value& value, std::span<const Decoding> decodings);

  // Writes the elements [begin, end) to `to`, which has as many bytes as they take. Elements that
  // no box writes stay as they are. Throws Error that names file, tensor and offset; "plan.box"
  // where the range leaves the value, or cuts a byte.
  void read(std::uint64_t begin, std::uint64_t end, std::span<std::byte> to);

  // Finite numbers read since the last call that the value's dtype cannot hold.
  [[nodiscard]] Overflow take_overflow() { return context_.overflows.take(); }

  [[nodiscard]] std::uint64_t bytes_read() const noexcept { return context_.bytes_read; }
  [[nodiscard]] std::uint64_t staging_bytes_peak() const noexcept {
    return own_count_.bytes_peak();
  }

 private:
  // A box of the open value, its dimensions by target stride, and which elements it writes.
  struct Part {
    Box box;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
  };

  void open_decodings(std::span<const Decoding> decodings);

  // A set of one value: the range to read.
  ValueSet values_;
  Shape range_;
  std::vector<Box> boxes_;
  std::vector<Decoding> decodings_;
  std::vector<PreparedDecoder> forms_;
  std::array<std::byte*, 1> place_ = {};
  MemoryCount own_count_;
  ReadContext context_;
  Reader reader_;
  Job job_;
  std::string name_;
  Shape shape_;
  std::vector<Part> parts_;  // by their first element
  std::uint64_t elements_ = 0;
};

}  // namespace loadstone

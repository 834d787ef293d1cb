// Reads ranges of a value on demand into a buffer of the caller, which may be small. execute()
// instead writes whole values to their destinations.
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

// Reads any range of a value's elements, in row-major order. Uses only its staging memory, for any
// size of the value. If the order of elements differs from the file's (a transposed value), data is
// read again for each range that needs it, so larger ranges are cheaper. Contiguous bytes are read
// directly into the caller's buffer. Not thread-safe: use one per thread; shards can be shared.
class ValueReader {
 public:
  // `catalog` must outlive this object. `shards` has an entry per shard, which is null if the shard
  // is not read. If `stop` is set, read() returns early with undefined contents. `memory` counts
  // the staging; null: a separate counter is used. `populates`: the destination is newly mapped
  // memory.
  ValueReader(const Catalog& catalog, std::span<const std::shared_ptr<ByteSource>> shards,
              std::uint64_t staging_bytes_max, std::atomic<bool>& stop,
              MemoryCount* memory = nullptr, bool populates = true);
  ValueReader(const ValueReader&) = delete;
  ValueReader& operator=(const ValueReader&) = delete;

  // Selects the value to read. Its boxes may refer to `decodings`. Throws Error "plan.box" if boxes
  // or decodings do not fit.
  void open(const Value& value, std::span<const Decoding> decodings);

  // Writes the elements [begin, end) to `to`, which must have exactly their size. Elements that no
  // box covers are unchanged. Throws Error with the file, tensor and offset, and "plan.box" if the
  // range exceeds the value or splits a byte.
  void read(std::uint64_t begin, std::uint64_t end, std::span<std::byte> to);

  // Returns the count of finite values since the last call that overflow the value's dtype.
  [[nodiscard]] Overflow take_overflow() { return context_.overflows.take(); }

  [[nodiscard]] std::uint64_t bytes_read() const noexcept { return context_.bytes_read; }
  [[nodiscard]] std::uint64_t staging_bytes_peak() const noexcept {
    return own_count_.bytes_peak();
  }

 private:
  // A box of the open value with its dimensions sorted by target stride, and the elements that it
  // writes.
  struct Part {
    Box box;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
  };

  void open_decodings(std::span<const Decoding> decodings);

  // A set with one value, which is the range to read.
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
  std::vector<Part> parts_;  // sorted by first element
  std::uint64_t elements_ = 0;
};

}  // namespace loadstone

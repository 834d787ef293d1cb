// Reads the pieces of one job after another into their destinations. Each thread has one reader.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "boxes/value.h"
#include "codec/decode.h"
#include "engine/memory_count.h"
#include "engine/overflows.h"
#include "engine/value_sink.h"
#include "engine/walk.h"
#include "loadstone/error.h"
#include "loadstone/storage.h"

namespace loadstone {

// State that all readers of a run share. Thread-safe only where a member's comment or an atomic
// type specifies it.
struct ReadContext {
  const ValueSet& values;
  std::span<std::byte* const> places;  // by value; null if the value is not in this run
  std::span<const std::shared_ptr<ByteSource>> shards;  // null if not read
  std::span<const PreparedDecoder> forms;               // one per decoding of the plan
  std::uint64_t chunk_bytes;                            // of one read
  std::uint64_t slot_bytes;                             // of each reader
  MemoryCount& memory;
  std::atomic<bool>& stop;
  std::atomic<std::uint64_t> bytes_done = 0;  // source bytes that have reached their destinations
  std::atomic<std::uint64_t> bytes_read = 0;
  std::vector<std::atomic<std::uint64_t>> written;  // bytes, by value
  Overflows overflows{};
  // Readers populate memory before they write to it. Unnecessary if the memory is reused.
  bool populates = true;
  ValueSink* sink = nullptr;  // null: no observer
};

// Not thread-safe.
class Reader {
 public:
  explicit Reader(ReadContext& context) : context_(context) {}

  // Throws Error that names the file, tensor and offset. Returns early if `stop` is set.
  void run(Job& job);

 private:
  void mark_overlaps(Job& job);
  void read_pieces(const Job& job);
  std::byte* staged(std::uint64_t begin, std::uint64_t end);
  void read_direct(const Job& job, const Piece& piece);
  void read_staged(const Job& job, const Piece& piece);
  void decode_pieces(const Job& job);
  void decode_range(const Job& job, std::uint64_t begin, std::uint64_t end);
  void count_overflow(const Job& job, PreparedDecoder::Range range,
                      std::span<const std::byte* const> parts, const std::byte* numbers);
  void count_delivered(const Job& job, PreparedDecoder::Range range, std::span<const float> values,
                       const std::byte* codes);
  void read_part(std::uint32_t source, PreparedDecoder::Range bytes, std::byte* to);
  void skip_to(const Job& job, std::uint64_t offset);
  void append(const Job& job, std::byte* to, std::uint64_t bytes);
  void flush(const Job& job);
  void deliver(const Job& job, const Piece& piece);
  [[nodiscard]] std::byte* place(const Piece& piece) const;
  void populate_parts() const noexcept;
  void populate_fresh(std::byte* data, std::uint64_t bytes) const noexcept;
  [[nodiscard]] std::string_view tensor_at(const Job& job, std::uint64_t offset) const;

  ReadContext& context_;
  std::optional<CountedMemory> slot_;
  std::optional<CountedMemory> parts_of_numbers_;  // decoded values in the slot
  std::vector<std::span<std::byte>> parts_;        // buffers of the read that is being prepared
  std::uint64_t read_begin_ = 0;
  std::uint64_t read_end_ = 0;
  bool ends_staged_ = false;  // the last buffer is in the slot
  // Buffer for the holes of the current read. Each reader has its own, because observers of the
  // source receive these bytes too.
  std::unique_ptr<std::byte[]> skipped_;
  std::size_t skipped_end_ = 0;  // end of the bytes that the current read uses
};

}  // namespace loadstone

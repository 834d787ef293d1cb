// Cuts a box into pieces in the order of its file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "boxes/value.h"
#include "engine/limits.h"

namespace loadstone {

// A part of a box. The bytes [file_begin, file_end) of the shard contain all its elements. If the
// box copies from a decoding, they are bytes of the decoded tensor.
struct Piece {
  std::uint64_t file_begin = 0;
  std::uint64_t file_end = 0;
  std::uint64_t target_begin = 0;  // from the target's first byte to the piece's first element
  std::uint64_t elements = 0;
  std::uint32_t value = 0;       // index into ValueSet::list
  std::uint32_t source = 0;      // index into Job::dims
  std::uint32_t dims_begin = 0;  // in Job::dims
  std::uint32_t dims_count = 0;
  bool direct = false;  // the file's bytes are the target's bytes
};

// A unit of a thread's work: read a window of a shard, or decode a window of a decoding, and copy
// its pieces to their destinations.
struct Job {
  std::uint32_t shard = 0;
  std::uint32_t decoding = no_decoding;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::vector<Piece> pieces;
  std::vector<BoxDim> dims;

  void clear() noexcept {
    pieces.clear();
    dims.clear();
  }
};

// Not thread-safe.
class Walk {
 public:
  // The box must fit its source and target: see check_box().
  Walk(const ValueSet& values, std::uint32_t value, const Box& box);

  [[nodiscard]] bool done() const noexcept { return done_; }
  // Returns the bytes of all elements.
  [[nodiscard]] std::uint64_t source_bytes() const noexcept;
  // Returns the offset of the next element in the shard.
  [[nodiscard]] std::uint64_t file_begin() const noexcept { return file_at_; }
  [[nodiscard]] std::uint64_t window_bytes(const WindowLimits& limits) const noexcept;
  // Appends the next piece inside the window, as large as possible. Returns false if the next
  // element is not in the window.
  bool take(std::uint64_t window_begin, std::uint64_t window_end, Job& job);

 private:
  struct Dim {
    BoxDim box;
    std::uint64_t source_step = 0;  // bytes
    std::uint64_t target_step = 0;  // bytes
    std::uint64_t step_bytes = 0;   // file bytes from the first to the last byte of one step
    std::uint64_t index = 0;
  };

  void emit(std::size_t level, std::uint64_t steps, std::uint64_t file_end, Job& job);
  void advance(std::size_t level, std::uint64_t steps) noexcept;

  std::vector<Dim> dims_;  // in the order of the file, outermost first
  std::uint64_t file_at_ = 0;
  std::uint64_t target_at_ = 0;
  std::uint64_t element_bytes_ = 0;
  std::uint32_t target_ = 0;
  std::uint32_t source_ = 0;
  std::size_t kept_from_ = 0;  // index of the outermost dimension inside a piece
  bool decoded_ = false;
  bool direct_ = false;
  bool is_transposed_ = false;
  bool done_ = false;
};

}  // namespace loadstone

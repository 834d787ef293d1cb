// Moves codes to the layout of another encoding, if both encodings have the same codes. The codes
// are not decoded, which is as fast as a copy.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "boxes/value.h"
#include "codec/decode.h"
#include "kernels/moved_codes.h"
#include "kernels/quantize.h"
#include "loadstone/storage.h"

namespace loadstone {

// The codes of a value that can be moved. Immutable.
struct MovableCodes {
  struct Part {
    Box box;  // with normalised dimensions
    std::vector<std::uint32_t> sources;
    PreparedDecoder form;
    std::uint64_t columns = 1;
    bool divides_scales = false;  // see BlockGrid
  };
  std::vector<Part> parts;
  std::uint64_t per_scale = 1;  // adjacent values per scale of the target
};

// Returns null if the encodings have different codes, if a box splits or transposes blocks, or if
// the encoder does not search for exact scales.
[[nodiscard]] std::shared_ptr<const MovableCodes> movable_codes(const ValueSet& values,
                                                                const Value& value,
                                                                const QuantizedLayout& form);

// Not thread-safe.
class CodeMover {
 public:
  // All arguments must outlive the object.
  CodeMover(const ValueSet& values, std::span<const std::shared_ptr<ByteSource>> shards)
      : values_(values), shards_(shards) {}

  // A window of a value to move.
  struct Window {
    const MovableCodes& codes;
    const QuantizedLayout& form;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    std::span<const float> matrix_scales;  // of the target; empty unless form.needs_amax
    std::span<std::byte* const> parts;     // see quantize_window()
    std::span<std::byte> room;             // for the source's bytes
  };
  struct Result {
    bool is_whole = true;         // all blocks were moved
    std::uint64_t first_bad = 0;  // the first element that is NaN, or the window's end
  };
  // Writes the blocks whose scales fit. Throws Error that names the file, tensor and offset.
  Result move(const Window& window);

  // Returns the scale of each matrix that all its blocks share; an empty vector if they differ.
  [[nodiscard]] std::vector<float> matrix_scales(const MovableCodes& codes,
                                                 const QuantizedLayout& form);

  [[nodiscard]] std::uint64_t bytes_read() const noexcept { return bytes_read_; }

 private:
  using Part = MovableCodes::Part;

  void move_box(const Window& window, const Part& part, std::span<const BoxDim> dims,
                std::uint64_t source, std::uint64_t target);
  void move_runs(const Window& window, const Part& part, std::span<const BoxDim> dims,
                 std::uint64_t source, std::uint64_t target);
  void move_run(const Window& window, const Part& part, MovedRun run, std::uint64_t source);
  void read(const Part& part, ByteRange elements, std::span<std::byte> room);
  [[nodiscard]] float take(const Part& part, const CodeRun& run);
  [[nodiscard]] bool join_matrix_scale(const MovableCodes& codes, const QuantizedLayout& form,
                                       std::uint64_t matrix, float& scale);

  const ValueSet& values_;
  const std::span<const std::shared_ptr<ByteSource>> shards_;
  std::uint64_t bytes_read_ = 0;
  Result result_;
  std::vector<Box> boxes_;
  ByteRange range_;  // the elements whose bytes were read last
  std::array<const std::byte*, Decoder::parts_max> parts_ = {};
  std::vector<std::byte> spare_;  // for bytes that exceed the room
  std::array<std::byte, moved_values_max> codes_;
  std::array<float, moved_scales_max> scales_;
  float last_divisor_ = 0;
  float last_factor_ = 0;
};

}  // namespace loadstone

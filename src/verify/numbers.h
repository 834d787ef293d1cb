// Reads the values of a plain or quantized tensor, with a bound on their distance from the values
// before quantization.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "boxes/decodings.h"
#include "catalog/open_shards.h"
#include "codec/error_bound.h"
#include "engine/value_reader.h"
#include "loadstone/catalog.h"
#include "loadstone/quantized_tensor.h"

namespace loadstone {

// Not thread-safe. The shards must outlive the object.
class Numbers {
 public:
  Numbers(const OpenShards& shards, std::atomic<bool>& stop);
  Numbers(const Numbers&) = delete;
  Numbers& operator=(const Numbers&) = delete;

  // Opens a value. `value` must stay valid while it is read. Block formats, and values of several
  // encodings, have no known bound.
  void open(const std::string& name, const TensorRecipe& value);

  // Returns values as F32. The result is valid until the next call.
  const std::vector<float>& read(std::uint64_t begin, std::uint64_t end);

  // Returns true if the values are exact, or if their distance from the original values has a known
  // bound: relative() times the original magnitude, plus tolerance().
  [[nodiscard]] bool is_bounded() const noexcept { return is_exact_ || bound_ != nullptr; }
  [[nodiscard]] bool is_exact() const noexcept { return is_exact_; }
  // For values without a known bound: the largest relative error of all values together that is
  // plausible. A wrong scale or order causes errors of 1 and more.
  [[nodiscard]] double error_max() const noexcept { return error_max_; }
  [[nodiscard]] double relative() const noexcept { return is_exact_ ? 0 : bound_->relative; }
  // Returns the tolerance of each value in [begin, end). Reads only scales.
  std::vector<double> tolerance(std::uint64_t begin, std::uint64_t end);
  // Returns an upper limit on the tolerance, if the scales were chosen for values of these
  // magnitudes.
  [[nodiscard]] double tolerance_max(double of_group, double of_tensor) const noexcept;

  [[nodiscard]] std::uint64_t bytes_read() const noexcept { return reader_.bytes_read(); }

  // A tensor whose bytes are all read as this byte.
  struct Filled {
    std::uint32_t shard;
    std::uint64_t offset_begin;
    std::uint64_t offset_end;
    std::byte byte;
  };

 private:
  void fill(std::uint32_t tensor, std::byte byte);

  const Catalog& catalog_;
  std::vector<Filled> filled_;  // the filled tensors; sources_ refer to them
  std::vector<std::shared_ptr<ByteSource>> sources_;
  ValueReader reader_;
  const TensorRecipe* value_ = nullptr;
  bool is_exact_ = true;
  const ErrorBound* bound_ = nullptr;
  double error_max_ = 0;
  std::vector<float> values_;
};

}  // namespace loadstone

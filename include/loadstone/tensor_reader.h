// Reads one tensor of a checkpoint, or a range of it, as decoded values, without a model or plan.
//
//   loadstone::TensorReader embedding(catalog, "model.embed_tokens.weight", Dtype::f32);
//   std::vector<float> row(embedding.shape().extents().at(1));  // at(): a file may have any rank
//   embedding.read(token * row.size(), (token + 1) * row.size(),
//                  std::as_writable_bytes(std::span(row)));
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/dtype.h"
#include "loadstone/export.h"
#include "loadstone/shape.h"
#include "loadstone/storage.h"

namespace loadstone {

// Decodes quantized tensors and block formats, then casts to the requested dtype. Opens the shards
// that it needs and keeps them open. Not thread-safe; readers may share a catalog.
class LOADSTONE_API TensorReader {
 public:
  // Memory per reader for bytes in flight.
  static constexpr std::uint64_t staging_bytes_max = std::uint64_t{4} << 20;

  // `name`: a tensor of the file, or a quantized tensor, see Catalog::quantized(). `dtype`: dtype
  // of the values; nullopt: the file's dtype, or F32 for decoded values. `storage` reads the
  // shards; null: the catalog's storage. Throws Error "plan.missing" for an unknown name,
  // "plan.dtype" for an unsupported cast, the error (q.*) in QuantizedTensor::defect for a
  // quantized tensor that cannot be decoded, and "io.changed".
  TensorReader(std::shared_ptr<const Catalog> catalog, std::string_view name,
               std::optional<Dtype> dtype = std::nullopt, Storage* storage = nullptr);
  TensorReader(TensorReader&&) noexcept;
  TensorReader& operator=(TensorReader&&) noexcept;
  ~TensorReader();

  // Returns the shape of the decoded tensor.
  [[nodiscard]] const Shape& shape() const noexcept;
  [[nodiscard]] Dtype dtype() const noexcept;
  [[nodiscard]] std::uint64_t elements() const noexcept;

  // Writes the elements [begin, end), in row-major order, to `to`, whose size must match exactly.
  // Throws Error "plan.box" if the range exceeds the tensor or begins or ends within a byte;
  // "io.read" with file, tensor and offset.
  void read(std::uint64_t begin, std::uint64_t end, std::span<std::byte> to);
  // Returns all elements.
  [[nodiscard]] std::vector<std::byte> read();

 private:
  struct LOADSTONE_PRIVATE Impl;
  std::unique_ptr<Impl> impl_;
};

// Returns all values of a tensor, see TensorReader. Booleans and integers keep their values: throws
// Error "plan.dtype" for an integer beyond 2^24, which a float may not represent.
[[nodiscard]] LOADSTONE_API std::vector<float> read_numbers(std::shared_ptr<const Catalog> catalog,
                                                            std::string_view name);

}  // namespace loadstone

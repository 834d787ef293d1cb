// One tensor of a checkpoint as numbers, or any range of it: without a model and a plan.
//
//   loadstone::TensorReader embedding(catalog, "model.embed_tokens.weight", Dtype::f32);
//   std::vector<float> row(embedding.shape()[1]);
//   embedding.read(token * row.size(), (token + 1) * row.size(),
//   std::as_writable_bytes(span(row)));
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

// Decodes tensors that are quantized or in blocks, then casts to the wanted dtype. Opens
// the shards that it needs and keeps them open. Not thread-safe; readers may share a catalog.
class LOADSTONE_API TensorReader {
 public:
  // Memory for bytes under way.
  static constexpr std::uint64_t staging_bytes_max = std::uint64_t{4} << 20;

  // `name`: of a tensor of the file, or of a quantized one, see Catalog::quantized(). `dtype`: of
  // the numbers; none: the file's, and F32 of what is decoded. `storage`: null: the catalog's.
  // Throws Error "plan.missing" where there is no such tensor, "plan.dtype" where there is no cast,
  // the defect's (q.*) where a quantized tensor cannot be decoded, and "io.changed".
  TensorReader(std::shared_ptr<const Catalog> catalog, std::string_view name,
               std::optional<Dtype> dtype = std::nullopt, Storage* storage = nullptr);
  TensorReader(TensorReader&&) noexcept;
  TensorReader& operator=(TensorReader&&) noexcept;
  ~TensorReader();

  // Of the numbers, whatever the codes' shape is.
  [[nodiscard]] const Shape& shape() const noexcept;
  [[nodiscard]] Dtype dtype() const noexcept;
  [[nodiscard]] std::uint64_t elements() const noexcept;

  // Writes the elements [begin, end), counted row by row, to `to`, which has as many bytes as they
  // take. Throws Error "plan.box" where the range leaves the tensor, or cuts a byte; "io.read" that
  // names file, tensor and offset.
  void read(std::uint64_t begin, std::uint64_t end, std::span<std::byte> to);
  // All of them.
  [[nodiscard]] std::vector<std::byte> read();

 private:
  struct LOADSTONE_PRIVATE Impl;
  std::unique_ptr<Impl> impl_;
};

// All numbers of a tensor, see TensorReader.
[[nodiscard]] LOADSTONE_API std::vector<float> read_numbers(std::shared_ptr<const Catalog> catalog,
                                                            std::string_view name);

}  // namespace loadstone

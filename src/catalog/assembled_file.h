// Tensors stored in pieces in several files, read as if they were contiguous in one.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/storage.h"

namespace loadstone {

// A box of a tensor, contiguous in a file: runs of bytes, each with a place in the tensor.
struct AssembledChunk {
  struct Dim {
    std::uint64_t extent;
    std::uint64_t stride;  // bytes from a run to the next, in the tensor
  };

  std::uint32_t file = 0;        // index into Assembly::files
  std::uint64_t file_begin = 0;  // of the first run
  std::uint64_t first = 0;       // offset of the first run in the tensor
  std::uint64_t run_bytes = 0;
  std::vector<Dim> dims;  // outermost first; empty: one run

  [[nodiscard]] std::uint64_t runs() const noexcept;
  // Returns the offset of run `index` in the tensor; ascending.
  [[nodiscard]] std::uint64_t run_begin(std::uint64_t index) const noexcept;
  // The first run that ends after byte `place` of the tensor.
  [[nodiscard]] std::uint64_t run_at(std::uint64_t place) const noexcept;
  // Returns the number of the chunk's bytes before that offset.
  [[nodiscard]] std::uint64_t bytes_before(std::uint64_t place) const noexcept;
};

struct AssembledTensor {
  std::uint64_t begin = 0;  // in the assembled file
  std::uint64_t end = 0;
  std::uint32_t chunk_begin = 0;  // indices into Assembly::chunks
  std::uint32_t chunk_end = 0;
};

// Plain data. Thread-safe: it never changes.
struct Assembly {
  struct File {
    std::string path;
    FileIdentity identity;
  };

  std::vector<File> files;
  std::vector<AssembledChunk> chunks;
  std::vector<AssembledTensor> tensors;  // contiguous, without empty tensors
};

// Returns the identity of the shard's file, with the latest of all times.
[[nodiscard]] FileIdentity assembled_identity(FileIdentity shard, const Assembly& assembly);

// Returns the size of the shard as a file, assembled or not.
[[nodiscard]] std::uint64_t shard_bytes(const Catalog& catalog, std::uint32_t shard) noexcept;

// The shard as a file: the file at its path, or an assembled one. All code that reads shards opens
// them here. Errors of the source name the failing file; identity() throws Error "io.changed" if a
// file of the pieces was replaced.
[[nodiscard]] std::shared_ptr<ByteSource> open_shard(Storage& storage, const Catalog& catalog,
                                                     std::uint32_t shard);

}  // namespace loadstone

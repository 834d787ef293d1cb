// Reads tensors whose chunks are in several files as if they were contiguous in one file.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/storage.h"

namespace loadstone {

// A rectangular part of a tensor, which is contiguous in a file. It consists of runs of bytes that
// are also contiguous in the tensor.
struct AssembledChunk {
  struct Dim {
    std::uint64_t extent;
    std::uint64_t stride;  // bytes from one run to the next in the tensor
  };

  std::uint32_t file = 0;        // index into Assembly::files
  std::uint64_t file_begin = 0;  // offset of the first run in the file
  std::uint64_t first = 0;       // offset of the first run in the tensor
  std::uint64_t run_bytes = 0;
  std::vector<Dim> dims;  // outermost first; empty: one run

  [[nodiscard]] std::uint64_t runs() const noexcept;
  // Returns the offset of run `index` in the tensor. The offsets are ascending.
  [[nodiscard]] std::uint64_t run_begin(std::uint64_t index) const noexcept;
  // Returns the index of the first run that ends after byte `place` of the tensor.
  [[nodiscard]] std::uint64_t run_at(std::uint64_t place) const noexcept;
  // Returns the number of the chunk's bytes before byte `place` of the tensor.
  [[nodiscard]] std::uint64_t bytes_before(std::uint64_t place) const noexcept;
};

struct AssembledTensor {
  std::uint64_t begin = 0;  // in the assembled file
  std::uint64_t end = 0;
  std::uint32_t chunk_begin = 0;  // indices into Assembly::chunks
  std::uint32_t chunk_end = 0;
};

// The chunks of all tensors of a shard. Thread-safe, because it never changes.
struct Assembly {
  struct File {
    std::string path;
    FileIdentity identity;
  };

  std::vector<File> files;
  std::vector<AssembledChunk> chunks;
  std::vector<AssembledTensor> tensors;  // contiguous, without empty tensors
};

// Returns the identity of the shard, with the latest times of all its files.
[[nodiscard]] FileIdentity assembled_identity(FileIdentity shard, const Assembly& assembly);

// Returns the size of the shard as a file, assembled or not.
[[nodiscard]] std::uint64_t shard_bytes(const Catalog& catalog, std::uint32_t shard) noexcept;

// Opens a shard: the file at its path, or an assembled file. All code that reads shards opens them
// with this function. Errors of the source name the file that failed. identity() throws Error
// "io.changed" if a file of an assembly was replaced.
[[nodiscard]] std::shared_ptr<ByteSource> open_shard(Storage& storage, const Catalog& catalog,
                                                     std::uint32_t shard);

}  // namespace loadstone

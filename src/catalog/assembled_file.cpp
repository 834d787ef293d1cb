#include "catalog/assembled_file.h"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "loadstone/error.h"
#include "storage/forwarding.h"

namespace loadstone {

namespace {

// Thread-safe, because it is immutable and its files are thread-safe.
class AssembledFile final : public ByteSource {
 public:
  AssembledFile(Storage& storage, const Shard& shard, std::shared_ptr<const Assembly> assembly)
      : assembly_(std::move(assembly)),
        head_bytes_(shard.data_begin),
        head_(storage.open(shard.path)) {
    files_.reserve(assembly_->files.size());
    for (const Assembly::File& file : assembly_->files) files_.push_back(storage.open(file.path));
  }

  [[nodiscard]] const std::string& path() const noexcept override { return head_->path(); }

  [[nodiscard]] FileIdentity identity() const override {
    for (std::size_t i = 0; i < files_.size(); ++i) {
      if (files_[i]->identity() == assembly_->files[i].identity) continue;
      throw Error("io.changed", "the file differs from the one that the plan was made for",
                  {.path = files_[i]->path()});
    }
    return assembled_identity(head_->identity(), *assembly_);
  }

  [[nodiscard]] unsigned reads_at_once() const noexcept override { return head_->reads_at_once(); }

  std::uint64_t prefetch(std::uint64_t offset, std::uint64_t bytes) noexcept override {
    std::uint64_t asked = 0;
    for_each_range(offset, bytes, [&](ByteSource& file, std::uint64_t at, std::uint64_t count) {
      asked += file.prefetch(at, count);
    });
    return asked;
  }

  void release(std::uint64_t offset, std::uint64_t bytes) noexcept override {
    for_each_range(offset, bytes, [](ByteSource& file, std::uint64_t at, std::uint64_t count) {
      file.release(at, count);
    });
  }

  using ByteSource::read;
  void read(std::uint64_t offset, std::span<const std::span<std::byte>> pieces) override {
    read_by_pieces(offset, pieces, [&](auto at, auto piece) { read_piece(at, piece); });
  }

 private:
  static constexpr std::size_t runs_at_once = 256;

  [[nodiscard]] std::vector<AssembledTensor>::const_iterator tensor_at(
      std::uint64_t offset) const noexcept {
    const auto& tensors = assembly_->tensors;
    const auto after = std::ranges::upper_bound(tensors, offset, {}, &AssembledTensor::begin);
    return after == tensors.begin() ? after : after - 1;
  }

  // Visits the byte ranges of the files that contain these bytes of the assembled file, one range
  // per chunk.
  template <typename Visit>
  void for_each_range(std::uint64_t offset, std::uint64_t bytes, const Visit& visit) noexcept {
    const std::uint64_t end = offset + bytes;
    for (auto tensor = tensor_at(offset); tensor != assembly_->tensors.end(); ++tensor) {
      if (tensor->begin >= end) return;
      if (tensor->end <= offset) continue;
      const std::uint64_t from = std::max(offset, tensor->begin) - tensor->begin;
      const std::uint64_t to = std::min(end, tensor->end) - tensor->begin;
      for (std::uint32_t c = tensor->chunk_begin; c < tensor->chunk_end; ++c) {
        const AssembledChunk& chunk = assembly_->chunks[c];
        const std::uint64_t first = chunk.bytes_before(from);
        const std::uint64_t last = chunk.bytes_before(to);
        if (first < last) visit(*files_[chunk.file], chunk.file_begin + first, last - first);
      }
    }
  }

  void read_piece(std::uint64_t offset, std::span<std::byte> into) const {
    if (offset < head_bytes_ && !into.empty()) {
      const auto count = std::min<std::uint64_t>(into.size(), head_bytes_ - offset);
      head_->read(offset, into.first(count));
      offset += count;
      into = into.subspan(count);
    }
    for (auto tensor = tensor_at(offset); !into.empty(); ++tensor) {
      if (tensor == assembly_->tensors.end() || offset >= tensor->end) {
        throw Error("io.short_read", "the data ends before the tensors do",
                    {.path = path(), .byte_offset = offset});
      }
      const auto count = std::min<std::uint64_t>(into.size(), tensor->end - offset);
      for (std::uint32_t c = tensor->chunk_begin; c < tensor->chunk_end; ++c) {
        read_chunk(assembly_->chunks[c], offset - tensor->begin, into.first(count));
      }
      offset += count;
      into = into.subspan(count);
    }
  }

  // Reads the chunk's bytes between `begin` and the end of `into`, which are offsets in the tensor.
  // Reads many runs of the chunk at once.
  void read_chunk(const AssembledChunk& chunk, std::uint64_t begin,
                  std::span<std::byte> into) const {
    const std::uint64_t end = begin + into.size();
    const std::uint64_t runs = chunk.runs();
    std::uint64_t run = chunk.run_at(begin);
    std::array<std::span<std::byte>, runs_at_once> pieces;
    std::size_t count = 0;
    std::uint64_t at = 0;  // file offset of the first piece
    const auto flush = [&] {
      if (count > 0) files_[chunk.file]->read(at, std::span(pieces).first(count));
      count = 0;
    };
    for (; run < runs; ++run) {
      const std::uint64_t run_begin = chunk.run_begin(run);
      if (run_begin >= end) break;
      const std::uint64_t from = std::max(begin, run_begin);
      const std::uint64_t to = std::min(end, run_begin + chunk.run_bytes);
      if (count == 0) at = chunk.file_begin + run * chunk.run_bytes + (from - run_begin);
      pieces[count++] = into.subspan(from - begin, to - from);
      if (count == pieces.size()) flush();
    }
    flush();
  }

  std::shared_ptr<const Assembly> assembly_;
  std::uint64_t head_bytes_;
  std::shared_ptr<ByteSource> head_;
  std::vector<std::shared_ptr<ByteSource>> files_;
};

}  // namespace

std::uint64_t AssembledChunk::runs() const noexcept {
  std::uint64_t count = 1;
  for (const Dim& dim : dims) count *= dim.extent;
  return count;
}

std::uint64_t AssembledChunk::run_begin(std::uint64_t index) const noexcept {
  std::uint64_t at = first;
  for (std::size_t d = dims.size(); d-- > 0;) {
    at += index % dims[d].extent * dims[d].stride;
    index /= dims[d].extent;
  }
  return at;
}

std::uint64_t AssembledChunk::run_at(std::uint64_t place) const noexcept {
  std::uint64_t low = 0;
  std::uint64_t high = runs();
  while (low < high) {
    const std::uint64_t middle = low + (high - low) / 2;
    if (run_begin(middle) + run_bytes <= place) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

std::uint64_t AssembledChunk::bytes_before(std::uint64_t place) const noexcept {
  const std::uint64_t run = run_at(place);
  const std::uint64_t whole = run * run_bytes;
  if (run == runs()) return whole;
  const std::uint64_t begin = run_begin(run);
  return whole + (place > begin ? place - begin : 0);
}

FileIdentity assembled_identity(FileIdentity shard, const Assembly& assembly) {
  for (const Assembly::File& file : assembly.files) {
    shard.modified_ns = std::max(shard.modified_ns, file.identity.modified_ns);
    shard.changed_ns = std::max(shard.changed_ns, file.identity.changed_ns);
  }
  return shard;
}

std::uint64_t shard_bytes(const Catalog& catalog, std::uint32_t shard) noexcept {
  const auto& assembly = catalog.assembly(shard);
  const bool has_pieces = assembly != nullptr && !assembly->tensors.empty();
  return has_pieces ? assembly->tensors.back().end : catalog.shards()[shard].identity.bytes;
}

std::shared_ptr<ByteSource> open_shard(Storage& storage, const Catalog& catalog,
                                       std::uint32_t shard) {
  const Shard& opened = catalog.shards()[shard];
  const auto& assembly = catalog.assembly(shard);
  if (assembly == nullptr) return storage.open(opened.path);
  return std::make_shared<AssembledFile>(storage, opened, assembly);
}

}  // namespace loadstone

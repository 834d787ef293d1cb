// Base classes for decorators of files and file systems. They forward each call, so that a
// decorator overrides only the functions that it changes.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "loadstone/storage.h"

namespace loadstone {

// Thread-safe if the inner source is thread-safe.
class ForwardingSource : public ByteSource {
 public:
  explicit ForwardingSource(std::shared_ptr<ByteSource> inner) : inner_(std::move(inner)) {}

  [[nodiscard]] const std::string& path() const noexcept override { return inner_->path(); }
  [[nodiscard]] FileIdentity identity() const override { return inner_->identity(); }
  [[nodiscard]] unsigned reads_at_once() const noexcept override { return inner_->reads_at_once(); }
  [[nodiscard]] bool is_on_network() const override { return inner_->is_on_network(); }
  using ByteSource::read;
  void read(std::uint64_t offset, std::span<const std::span<std::byte>> pieces) override {
    inner_->read(offset, pieces);
  }
  std::uint64_t prefetch(std::uint64_t offset, std::uint64_t bytes) noexcept override {
    return inner_->prefetch(offset, bytes);
  }
  [[nodiscard]] std::optional<double> cached_share() const override {
    return inner_->cached_share();
  }
  void release(std::uint64_t offset, std::uint64_t bytes) noexcept override {
    inner_->release(offset, bytes);
  }

 private:
  const std::shared_ptr<ByteSource> inner_;
};

// `inner` must outlive this object. Thread-safe if `inner` is thread-safe.
class ForwardingStorage : public Storage {
 public:
  explicit ForwardingStorage(Storage& inner) : inner_(inner) {}

  [[nodiscard]] std::shared_ptr<ByteSource> open(const std::string& path) override {
    return inner_.open(path);
  }
  [[nodiscard]] std::shared_ptr<ByteSource> open_anew(const std::string& path) override {
    return inner_.open_anew(path);
  }
  [[nodiscard]] EntryKind kind(const std::string& path) override { return inner_.kind(path); }
  [[nodiscard]] std::vector<std::string> list(const std::string& folder) override {
    return inner_.list(folder);
  }
  [[nodiscard]] std::string resolve(const std::string& path) override {
    return inner_.resolve(path);
  }
  void require_wanted() override { inner_.require_wanted(); }
  [[nodiscard]] WritableStorage& writable() override { return inner_.writable(); }

 private:
  Storage& inner_;
};

// Calls read_piece(offset, piece) for each piece, for sources that cannot read all pieces at once.
template <typename ReadPiece>
void read_by_pieces(std::uint64_t offset, std::span<const std::span<std::byte>> pieces,
                    const ReadPiece& read_piece) {
  for (const std::span<std::byte> piece : pieces) {
    read_piece(offset, piece);
    offset += piece.size();
  }
}

}  // namespace loadstone

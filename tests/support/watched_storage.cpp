#include "support/watched_storage.h"

#include <atomic>
#include <utility>

#include "loadstone/error.h"

namespace loadstone::test {

namespace {

class WatchedSource final : public ForwardingSource {
 public:
  WatchedSource(std::shared_ptr<ByteSource> inner, std::shared_ptr<Watch> watch)
      : ForwardingSource(std::move(inner)), watch_(std::move(watch)) {}

  using ByteSource::read;
  void read(std::uint64_t offset, std::span<const std::span<std::byte>> pieces) override {
    std::uint64_t bytes = 0;
    for (const auto piece : pieces) bytes += piece.size();
    watch_->note(path(), offset, bytes);
    if (watch_->before_read) watch_->before_read({path(), offset, bytes});
    ForwardingSource::read(offset, pieces);
  }

 private:
  std::shared_ptr<Watch> watch_;
};

}  // namespace

void Watch::note(const std::string& path, std::uint64_t offset, std::uint64_t bytes) {
  const std::scoped_lock lock(mutex_);
  accesses_.push_back({path, offset, bytes});
}

std::vector<Access> Watch::accesses() const {
  const std::scoped_lock lock(mutex_);
  return accesses_;
}

void Watch::clear() {
  const std::scoped_lock lock(mutex_);
  accesses_.clear();
}

std::shared_ptr<ByteSource> LoggingStorage::open(const std::string& path) {
  {
    const std::scoped_lock lock(mutex_);
    opened_.push_back(path);
  }
  return std::make_shared<WatchedSource>(ForwardingStorage::open(path), watch_);
}

std::vector<std::string> LoggingStorage::opened() const {
  const std::scoped_lock lock(mutex_);
  return opened_;
}

FaultyStorage::FaultyStorage(Storage& inner, Fault fault) : LoggingStorage(inner) {
  auto seen = std::make_shared<std::atomic<unsigned>>(0);
  watch().before_read = [fault = std::move(fault), seen](const Access& access) {
    const bool touches = access.path.ends_with(fault.path_end) &&
                         access.offset < fault.offset_end &&
                         access.offset + access.bytes > fault.offset_begin;
    if (!touches || seen->fetch_add(1) < fault.skip) return;
    Where where;
    where.path = access.path;
    where.byte_offset = access.offset;
    where.system_error = fault.system_error;
    throw Error(fault.code, "injected by the test", where);
  };
}

}  // namespace loadstone::test

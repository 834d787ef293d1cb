// Caches bytes of remote files for small reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "storage/remote_memory.h"

namespace loadstone {

struct Block {
  std::uint64_t begin = 0;
  std::vector<std::byte> bytes;

  [[nodiscard]] bool holds(std::uint64_t first, std::uint64_t last) const noexcept {
    return begin <= first && last <= begin + bytes.size();
  }
};

// Caches the most recently read block of each file. Contains at most `count_max` blocks in total,
// however many files are open. Thread-safe.
class Blocks {
 public:
  static constexpr std::size_t count_max = remote_blocks_max;

  // Returns null if the file's block was evicted.
  [[nodiscard]] std::shared_ptr<const Block> find(const void* file) {
    const std::lock_guard lock(mutex_);
    for (auto each = kept_.begin(); each != kept_.end(); ++each) {
      if (each->first != file) continue;
      kept_.splice(kept_.begin(), kept_, each);
      return kept_.front().second;
    }
    return nullptr;
  }

  // Adds a block, and drops an earlier block of the same file.
  void keep(const void* file, std::shared_ptr<const Block> block) {
    const std::lock_guard lock(mutex_);
    std::erase_if(kept_, [&](const auto& each) { return each.first == file; });
    kept_.emplace_front(file, std::move(block));
    if (kept_.size() > count_max) kept_.pop_back();
  }

  void forget(const void* file) noexcept {
    const std::lock_guard lock(mutex_);
    std::erase_if(kept_, [&](const auto& each) { return each.first == file; });
  }

 private:
  std::mutex mutex_;
  std::list<std::pair<const void*, std::shared_ptr<const Block>>> kept_;  // guarded by mutex_
};

}  // namespace loadstone

#include "catalog/reading_threads.h"

#include <algorithm>

#include "base/thread_count.h"
#include "catalog/assembled_file.h"
#include "loadstone/defaults.h"
#include "storage/remote_memory.h"

namespace loadstone {

namespace {

std::size_t files_of(const Catalog& catalog, bool only_remote) noexcept {
  std::size_t files = 0;
  for (std::uint32_t i = 0; i < catalog.shards().size(); ++i) {
    if (only_remote && catalog.shards()[i].reads_at_once == 0) continue;
    const auto& assembly = catalog.assembly(i);
    files += assembly == nullptr ? 1 : assembly->files.size();
  }
  return files;
}

}  // namespace

unsigned reads_at_once(const Catalog& catalog) noexcept {
  unsigned at_once = 0;
  for (const Shard& shard : catalog.shards()) at_once = std::max(at_once, shard.reads_at_once);
  return at_once;
}

unsigned reading_threads(const Catalog& catalog, unsigned wanted, unsigned most) noexcept {
  const unsigned at_once = reads_at_once(catalog);
  if (wanted == 0 && at_once != 0) return std::min(at_once, defaults::threads_most);
  return thread_count(wanted, most);
}

unsigned first_readers(const Catalog& catalog, unsigned threads) noexcept {
  if (reads_at_once(catalog) != 0) return threads;
  return std::min(threads, thread_count(0, defaults::first_readers_max));
}

std::uint64_t reading_bytes(const Catalog& catalog, unsigned threads) noexcept {
  return remote_bytes(threads, files_of(catalog, true));
}

std::uint64_t reading_bytes_if_remote(const Catalog& catalog, unsigned threads) noexcept {
  return remote_bytes(threads, files_of(catalog, false));
}

}  // namespace loadstone

#include "convert/source_watch.h"

#include "convert/files.h"
#include "execute/shard_files.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

std::optional<struct stat> named(const Shard& shard) noexcept {
  struct stat status {};
  if (::stat(shard.path.c_str(), &status) != 0) return std::nullopt;
  return status;
}

}  // namespace

SourceWatch::SourceWatch(const Catalog& catalog,
                         const std::vector<std::shared_ptr<ByteSource>>& sources)
    : catalog_(catalog), sources_(sources), named_(sources.size()) {
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    if (sources_[i]) named_[i] = named(catalog_.shards()[i]);
  }
}

void SourceWatch::check() const {
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    if (!sources_[i]) continue;
    const Shard& shard = catalog_.shards()[i];
    check_identity(shard, *sources_[i]);
    if (!named_[i]) continue;
    const auto now = named(shard);
    if (now && same_file(*now, *named_[i])) continue;
    throw Error("io.changed",
                now ? "another file has been put in the place of this one"
                    : "the file has been removed meanwhile",
                {.path = shard.path});
  }
}

}  // namespace loadstone

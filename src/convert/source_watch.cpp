#include "convert/source_watch.h"

#include "convert/files.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

std::optional<struct stat> named(const Shard& shard) noexcept {
  struct stat status {};
  if (::stat(shard.path.c_str(), &status) != 0) return std::nullopt;
  return status;
}

}  // namespace

SourceWatch::SourceWatch(const OpenShards& shards)
    : shards_(shards), named_(shards.sources().size()) {
  for (std::size_t i = 0; i < named_.size(); ++i) {
    if (shards.sources()[i]) named_[i] = named(shards.catalog().shards()[i]);
  }
}

void SourceWatch::check() const {
  shards_.require_unchanged();
  for (std::size_t i = 0; i < named_.size(); ++i) {
    if (!named_[i]) continue;
    const Shard& shard = shards_.catalog().shards()[i];
    const auto now = named(shard);
    if (now && same_file(*now, *named_[i])) continue;
    throw Error("io.changed",
                now ? "another file has been put in the place of this one"
                    : "the file has been removed meanwhile",
                {.path = shard.path});
  }
}

}  // namespace loadstone

#include "convert/source_watch.h"

#include "convert/files.h"
#include "loadstone/error.h"
#include "loadstone/remote.h"

namespace loadstone {

SourceWatch::SourceWatch(const OpenShards& shards, WritableStorage& storage)
    : shards_(shards), storage_(storage), named_(shards.sources().size()) {
  for (std::size_t i = 0; i < named_.size(); ++i) {
    const std::string& path = shards.catalog().shards()[i].path;
    if (shards.sources()[i] && !is_remote(path)) named_[i] = storage.status(path, true);
  }
}

void SourceWatch::check() const {
  shards_.require_unchanged();
  for (std::size_t i = 0; i < named_.size(); ++i) {
    if (!named_[i]) continue;
    const Shard& shard = shards_.catalog().shards()[i];
    const auto now = storage_.status(shard.path, true);
    if (now && same_file(*now, *named_[i])) continue;
    throw Error("io.changed",
                now ? "another file has been put in the place of this one"
                    : "the file has been removed meanwhile",
                {.path = shard.path});
  }
}

}  // namespace loadstone

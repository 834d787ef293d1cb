#include "convert/cache_release.h"

#include <unistd.h>

#include <string>

#include "base/named.h"
#include "base/refuse_option.h"
#include "engine/box_read.h"

namespace loadstone {

namespace {

// A source of which so much is there is somebody's: of others a header or what was read ahead is.
constexpr double cached_share_max = 0.05;

std::uint64_t machine_memory_bytes() {
  const long pages = ::sysconf(_SC_PHYS_PAGES);
  const long page_bytes = ::sysconf(_SC_PAGESIZE);
  if (pages <= 0 || page_bytes <= 0) return UINT64_MAX;
  return static_cast<std::uint64_t>(pages) * static_cast<std::uint64_t>(page_bytes);
}

bool releases_cache(const Conversion& conversion, PageCache choice) {
  if (choice != PageCache::automatic) return choice == PageCache::release;
  return conversion.bytes_to_read + conversion.bytes_to_write > machine_memory_bytes() / 2;
}

}  // namespace

std::string_view name(PageCache choice) noexcept {
  switch (choice) {
    case PageCache::automatic:
      return "auto";
    case PageCache::keep:
      return "keep";
    case PageCache::release:
      return "release";
  }
  return {};
}

PageCache page_cache_from_user(std::string_view text) {
  if (const auto choice = from_name<PageCache>(text)) return *choice;
  refuse_option("page_cache", "no such choice for the page cache", std::string(text),
                "auto, keep or release");
}

CacheRelease::CacheRelease(const Conversion& conversion, const ValueSet& values,
                           const OpenShards& shards, PageCache wanted)
    : values_(values),
      shards_(shards),
      is_on_(releases_cache(conversion, wanted)),
      is_released_(shards.sources().size(), false) {
  for (std::size_t i = 0; is_on_ && i < is_released_.size(); ++i) {
    const auto& source = shards.sources()[i];
    const auto cached = source ? source->cached_share() : std::nullopt;
    is_released_[i] = cached && *cached <= cached_share_max;
  }
}

void CacheRelease::made(std::uint32_t target) const {
  if (!is_on_) return;
  for (const SourceExtent& extent : source_extents(values_, values_[target])) {
    const std::uint32_t shard = values_.tensors()[extent.source].shard;
    if (!is_released_[shard]) continue;
    shards_.sources()[shard]->release(extent.begin, extent.end - extent.begin);
  }
}

}  // namespace loadstone

#include "catalog/open_shards.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <set>
#include <string>

#include "base/text.h"
#include "base/version_text.h"
#include "catalog/assembled_file.h"
#include "catalog/config_claim.h"
#include "catalog/for_each_file.h"
#include "catalog/reading_threads.h"
#include "formats/file_header.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

[[noreturn]] void refuse_changed(const Shard& shard, std::string found, std::string expected) {
  throw Error("io.changed", "the file differs from the one that the plan was made for",
              {.path = shard.path, .found = std::move(found), .expected = std::move(expected)});
}

// Describes the first property in which the two identities differ.
std::string identity_text(const FileIdentity& identity, const FileIdentity& other) {
  if (identity.bytes != other.bytes) return counted(identity.bytes, "byte");
  if (identity.version != other.version) return "version " + version_text(identity.version);
  if (identity.modified_ns != other.modified_ns) {
    return fmt::format("modified at {} ns", identity.modified_ns);
  }
  if (identity.inode != other.inode || identity.device != other.device) {
    return fmt::format("inode {} of device {}", identity.inode, identity.device);
  }
  return fmt::format("status changed at {} ns", identity.changed_ns);
}

// Detects a file that was replaced by one of the same size and time. Hashes a header only once per
// catalog, because 16 MB take milliseconds. Skips files with a version, because the storage
// compares the version at every read.
void check_header(const Shard& shard, ByteSource& source) {
  if (shard.header_digest.empty() || !shard.identity.version.empty()) return;
  const std::string found = header_digest(source, shard);
  if (found != shard.header_digest) {
    refuse_changed(shard, "header digest " + found, shard.header_digest);
  }
}

}  // namespace

void check_identity(const Shard& shard, const FileIdentity& now) {
  if (now != shard.identity) {
    refuse_changed(shard, identity_text(now, shard.identity), identity_text(shard.identity, now));
  }
}

void check_claims(const Catalog& catalog, Storage& storage) {
  for (const auto& checkpoint : catalog.checkpoints()) check_claims(*checkpoint, storage);
  const QuantizationClaim& claim = catalog.quantization_claim();
  if (!catalog.checkpoints().empty() || claim.digest.empty()) return;
  const FileOpener opener{storage, claim.follows_links};
  require_claim(opener, catalog.root(), claim.digest);
}

OpenShards::OpenShards(const Catalog& catalog, Storage* storage)
    : catalog_(catalog), sources_(catalog.shards().size()) {
  Storage& files = catalog.storage(storage);
  for_each_file(files, sources_.size(), reads_at_once(catalog),
                [&](std::size_t i) { open(static_cast<std::uint32_t>(i), files); });
}

OpenShards::OpenShards(const Catalog& catalog, Storage* storage,
                       std::span<const std::uint32_t> tensors)
    : catalog_(catalog), sources_(catalog.shards().size()) {
  std::set<std::uint32_t> needed;
  for (const std::uint32_t tensor : tensors) needed.insert(catalog.tensors().at(tensor).shard);
  const std::vector<std::uint32_t> shards(needed.begin(), needed.end());
  Storage& files = catalog.storage(storage);
  for_each_file(files, shards.size(), reads_at_once(catalog),
                [&](std::size_t i) { open(shards[i], files); });
}

void OpenShards::open(std::uint32_t shard, Storage& storage) {
  std::shared_ptr<ByteSource>& source = sources_[shard];
  source = open_shard(storage, catalog_, shard);
  check_identity(catalog_.shards()[shard], source->identity());
  std::atomic<bool>& is_checked = catalog_.header_checked(shard);
  if (is_checked.load(std::memory_order_relaxed)) return;
  check_header(catalog_.shards()[shard], *source);
  is_checked.store(true, std::memory_order_relaxed);
}

void OpenShards::require_unchanged() const {
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    if (sources_[i]) check_identity(catalog_.shards()[i], sources_[i]->identity());
  }
}

}  // namespace loadstone

#include "receipt/block_hash.h"

#define XXH_INLINE_ALL
#include <fmt/format.h>
#include <xxhash.h>

#include <cstring>

#include "base/digest.h"
#include "base/named.h"
#include "base/only_errors.h"
#include "base/refuse_option.h"
#include "base/text.h"

namespace loadstone {

namespace {

BlockDigest bytes_of(const XXH128_hash_t& hash) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, hash);
  BlockDigest digest = {};
  std::memcpy(digest.data(), canonical.digest, sizeof canonical.digest);
  return digest;
}

class Xxh3 final : public BlockHash {
 public:
  Xxh3() { XXH3_128bits_reset(&state_); }
  void update(std::span<const std::byte> bytes) override {
    if (!bytes.empty()) XXH3_128bits_update(&state_, bytes.data(), bytes.size());
  }
  [[nodiscard]] BlockDigest finish() override { return bytes_of(XXH3_128bits_digest(&state_)); }

 private:
  XXH3_state_t state_;  // must be aligned to 64 bytes, which C++20's new does
};

}  // namespace

std::string_view name(DigestKind kind) noexcept {
  return name_among({"xxh3-128", "sha256-tree"}, kind);
}

DigestKind digest_kind(std::string_view text) {
  return only_errors([&] {
    if (const auto kind = from_name<DigestKind>(text)) return *kind;
    refuse_option("receipt", "no digest has this name", printable(text),
                  either(names_of<DigestKind>()));
  });
}

bool can_digest(DigestKind kind) noexcept {
  return kind != DigestKind::sha256_tree || has_sha256();
}

std::unique_ptr<BlockHash> make_hash(DigestKind kind, HashOf what) {
  if (kind == DigestKind::sha256_tree) return make_sha256(what);
  return std::make_unique<Xxh3>();
}

BlockDigest hash_block(DigestKind kind, std::span<const std::byte> bytes) {
  if (kind == DigestKind::xxh3_128) return bytes_of(XXH3_128bits(bytes.data(), bytes.size()));
  const auto hash = make_hash(kind, HashOf::block);
  hash->update(bytes);
  return hash->finish();
}

std::string tree_digest(DigestKind kind, std::span<const ByteRange> ranges,
                        std::span<const BlockDigest> blocks) {
  const auto hash = make_hash(kind, HashOf::tree);
  const std::string tag = fmt::format("loadstone {} 1\n", name(kind));
  hash->update(std::as_bytes(std::span(tag)));
  add_number(*hash, receipt_block_bytes);
  add_number(*hash, ranges.size());
  for (const ByteRange& range : ranges) {
    add_number(*hash, range.begin);
    add_number(*hash, range.end);
  }
  const std::size_t size = kind == DigestKind::sha256_tree ? 32 : 16;
  for (const BlockDigest& block : blocks) hash->update(std::span(block).first(size));
  const BlockDigest digest = hash->finish();
  return hexadecimal(std::span(digest).first(size));
}

std::string hexadecimal(std::span<const std::byte> digest) {
  std::string text;
  for (const std::byte each : digest) {
    text += fmt::format("{:02x}", std::to_integer<unsigned>(each));
  }
  return text;
}

}  // namespace loadstone

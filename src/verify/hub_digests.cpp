// Files of a hub's cache against the digests that are their names there.
#include <algorithm>
#include <atomic>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/only_errors.h"
#include "base/thread_count.h"
#include "execute/team.h"
#include "loadstone/defaults.h"
#include "loadstone/verify.h"
#include "receipt/block_hash.h"

namespace loadstone {

namespace {

// MODEL/blobs/<64 hexadecimal digits>: the SHA-256 of a file of Git LFS, which the hub keeps it by.
// Small files have 40 digits, git's SHA-1 of another text.
std::string published_digest(const std::string& real_path) {
  const std::filesystem::path path = real_path;
  const std::string name = path.filename().string();
  const bool is_digest = name.size() == 64 &&
                         name.find_first_not_of("0123456789abcdef") == std::string::npos &&
                         path.parent_path().filename() == "blobs";
  return is_digest ? name : std::string();
}

struct HubFile {
  const Shard& shard;
  std::string expected;
  std::string found{};
};

Finding without_digest(const Shard& shard) {
  return {.severity = Severity::warning,
          .code = "verify.no_digest",
          .sources = {shard.relative_path},
          .message = "'" + shard.relative_path + "' is no file of a hub's cache with a SHA-256",
          .suggestion = "A receipt has digests of any checkpoint: loadstone load --receipt"};
}

std::string sha256_of(ByteSource& file, std::atomic<std::uint64_t>& done,
                      const std::atomic<bool>& stop) {
  const auto hash = make_hash(DigestKind::sha256_tree, HashOf::file);
  const std::uint64_t end = file.identity().bytes;
  std::vector<std::byte> buffer;
  for (std::uint64_t at = 0; at < end && !stop; at += buffer.size()) {
    buffer.resize(std::min(receipt_block_bytes, end - at));
    file.read(at, buffer);
    hash->update(buffer);
    done += buffer.size();
  }
  return digest_text(DigestKind::sha256_tree, hash->finish());
}

}  // namespace

VerifyReport verify_digests(const Catalog& catalog, const VerifyOptions& options) {
  return only_errors([&] {
    Storage& storage = catalog.storage(options.storage);
    VerifyReport report;
    std::vector<HubFile> files;
    std::uint64_t total = 0;
    for (const Shard& shard : catalog.shards()) {
      std::string expected = published_digest(storage.resolve(shard.path));
      if (expected.empty()) {
        report.findings.push_back(without_digest(shard));
      } else {
        files.push_back({shard, std::move(expected)});
        total += shard.identity.bytes;
      }
    }
    std::atomic<std::size_t> next = 0;
    std::atomic<std::uint64_t> done = 0;
    std::atomic<bool> stop = false;
    const std::size_t threads = thread_count(options.threads, defaults::verify_threads_max);
    run_team(
        static_cast<unsigned>(std::clamp<std::size_t>(files.size(), 1, threads)), stop,
        options.observer,
        [&] {
          return Progress{done, total};
        },
        [&] {
          for (std::size_t i = next++; i < files.size() && !stop; i = next++) {
            files[i].found = sha256_of(*storage.open(files[i].shard.path), done, stop);
          }
        });
    report.bytes_read = done;
    for (HubFile& file : files) {
      if (file.found == file.expected) continue;
      report.differences.push_back({file.shard.relative_path, DifferenceKind::bytes,
                                    std::move(file.found), std::move(file.expected)});
    }
    return report;
  });
}

}  // namespace loadstone

// Compares files in a Hugging Face cache with the digests in their names.
#include <algorithm>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "base/only_errors.h"
#include "catalog/paths.h"
#include "engine/jobs.h"
#include "loadstone/verify.h"
#include "receipt/block_hash.h"

namespace loadstone {

namespace {

constexpr std::size_t sha256_digits = 64;
constexpr std::size_t git_digits = 40;
constexpr int folders_max = 16;  // nested

// Returns the digest in MODEL/blobs/DIGEST. It is the SHA-256 of a file in Git LFS, or the SHA-1
// that git computes for other files.
std::string published_digest(const std::string& real_path) {
  const std::filesystem::path path = real_path;
  const std::string name = path.filename().string();
  const bool is_digest = (name.size() == sha256_digits || name.size() == git_digits) &&
                         name.find_first_not_of("0123456789abcdef") == std::string::npos &&
                         path.parent_path().filename() == "blobs";
  return is_digest ? name : std::string();
}

struct HubFile {
  std::string name;  // path in the model's folder
  std::string path;
  std::string expected{};
  std::string found{};
};

Finding without_digest(const std::string& name) {
  return {
      .severity = Severity::warning,
      .code = "verify.no_digest",
      .sources = {name},
      .message = "'" + name + "' is not a file in a Hugging Face cache that is named by its digest",
      .suggestion = "For other files, write a receipt with digests: loadstone load --receipt"};
}

std::string digest_of(const HubFile& file, ByteSource& source, Jobs& jobs,
                      std::vector<std::byte>& buffer) {
  const std::uint64_t end = source.identity().bytes;
  const bool is_git = file.expected.size() == git_digits;
  const auto hash = is_git ? make_git_hash(end) : make_hash(DigestKind::sha256_tree, HashOf::file);
  for (std::uint64_t at = 0; at < end; at += buffer.size()) {
    buffer.resize(std::min(receipt_block_bytes, end - at));
    source.read(at, buffer);
    hash->update(buffer);
    if (!jobs.goes_on(buffer.size())) break;
  }
  const BlockDigest digest = hash->finish();
  return hexadecimal(std::span(digest).first(file.expected.size() / 2));
}

// Adds all files of a folder, because the meaning of tensors depends on the other files.
void add_files(Storage& storage, const std::string& root, const std::string& folder, int depth,
               std::vector<HubFile>& files) {
  for (const std::string& entry : storage.list(join_path(root, folder))) {
    const std::string name = folder.empty() ? entry : folder + "/" + entry;
    const std::string path = join_path(root, name);
    if (storage.kind(path) != EntryKind::folder) {
      files.push_back({.name = name, .path = path});
    } else if (depth < folders_max) {
      add_files(storage, root, name, depth + 1, files);
    }
  }
}

std::vector<HubFile> files_of(const Catalog& catalog, Storage& storage, bool is_folder) {
  std::vector<HubFile> files;
  if (is_folder) add_files(storage, catalog.root(), "", 0, files);
  for (const Shard& shard : catalog.shards()) {
    const auto is_it = [&](const HubFile& file) { return file.name == shard.relative_path; };
    if (std::ranges::any_of(files, is_it)) continue;
    files.push_back({.name = shard.relative_path, .path = shard.path});
  }
  return files;
}

}  // namespace

VerifyReport verify_digests(const Catalog& catalog, const VerifyOptions& options) {
  return only_errors([&] {
    Storage& storage = catalog.storage(options.storage);
    VerifyReport report;
    std::vector<HubFile> files = files_of(catalog, storage, options.is_folder);
    report.files = files.size();
    std::uint64_t total = 0;
    std::erase_if(files, [&](HubFile& file) {
      file.expected = published_digest(storage.resolve(file.path));
      if (file.expected.empty()) report.findings.push_back(without_digest(file.name));
      return file.expected.empty();
    });
    for (const HubFile& file : files) total += storage.open(file.path)->identity().bytes;
    Jobs jobs(options.threads, options.observer, total);
    jobs.run(files.size(), [&](std::size_t i, std::vector<std::byte>& buffer) {
      files[i].found = digest_of(files[i], *storage.open(files[i].path), jobs, buffer);
    });
    report.bytes_read = jobs.bytes_done();
    for (HubFile& file : files) {
      if (file.found == file.expected) continue;
      report.differences.push_back({std::move(file.name), DifferenceKind::bytes,
                                    std::move(file.found), std::move(file.expected)});
    }
    report.files_equal = files.size() - report.differences.size();
    return report;
  });
}

}  // namespace loadstone

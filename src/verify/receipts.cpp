// Files compared with a receipt: every byte by its digest, and the headers of outputs by what they
// list.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <functional>
#include <set>
#include <utility>

#include "base/only_errors.h"
#include "base/text.h"
#include "base/thread_count.h"
#include "catalog/assembled_file.h"
#include "catalog/locate_remote.h"
#include "catalog/paths.h"
#include "convert/extras.h"
#include "engine/team.h"
#include "formats/dcp_metadata.h"
#include "loadstone/catalog.h"
#include "loadstone/defaults.h"
#include "loadstone/error.h"
#include "loadstone/remote.h"
#include "loadstone/verify.h"
#include "receipt/file_digest.h"
#include "receipt/receipt_file.h"
#include "verify/receipt_header.h"

namespace loadstone {

namespace {

namespace fs = std::filesystem;

// A digest that is to be computed again.
struct Check {
  std::shared_ptr<ByteSource> file;
  std::string name;  // of the difference
  std::string path;  // as the receipt has it
  std::uint64_t begin = 0;
  std::vector<ByteRange> ranges;
  std::string digest;
  bool is_header = false;
};

struct Listed {
  const ReceiptFile* file;
  std::string path;
  bool is_output;
};

class ReceiptCheck {
 public:
  ReceiptCheck(const Receipt& receipt, const VerifyOptions& options)
      : receipt_(receipt),
        options_(options),
        storage_(options.storage != nullptr ? *options.storage : local_storage()),
        headers_(storage_) {}

  void add_files(const std::vector<ReceiptFile>& files, const std::string& given,
                 std::uint32_t checkpoint, bool is_output) {
    // A branch of a hub is one commit for all files.
    std::string root = is_remote(given) ? storage_.resolve(given) : given;
    bool is_folder = storage_.kind(root) == EntryKind::folder;
    const bool is_set = !is_folder && is_output && is_split_part(files, root);
    if (is_set) {
      root = parent_path(root);
      is_folder = true;
    }
    std::size_t count = 0;
    for (const ReceiptFile& file : files) {
      if (!is_output && file.checkpoint != checkpoint) continue;
      ++count;
      const std::string path = is_folder ? join_path(root, file.path) : root;
      // The tensors of a training checkpoint are assembled from other files.
      if (!is_output && fs::path(path).filename() == dcp_metadata_name) {
        const auto catalog = open_checkpoint(path, {.storage = &storage_});
        add_file(file, open_shard(storage_, *catalog, 0), shard_bytes(*catalog, 0));
      } else if (const auto source = opened(file, path)) {
        add_file(file, source, source->identity().bytes);
        files_.push_back({&file, path, is_output});
      }
    }
    if (count == 0) {
      throw Error("usage",
                  is_output ? "the receipt is of a load, which wrote no file: name what it read"
                            : "the receipt is of fewer checkpoints",
                  {.path = root});
    }
    if (!is_folder && count > 1) {
      throw Error("usage", "the receipt is of several files: name their folder",
                  {.path = root, .found = fmt::format("{} files", count)});
    }
    if (is_output && is_folder && !is_set) add_unexpected(files, root);
  }

  VerifyReport run() {
    std::vector<std::string> found(checks_.size());
    std::atomic<std::size_t> next = 0;
    std::atomic<std::uint64_t> done = 0;
    std::atomic<bool> stop = false;
    std::uint64_t total = 0;
    for (const Check& check : checks_) {
      for (const ByteRange& range : check.ranges) total += range.size();
    }
    const auto goes_on = [&](std::uint64_t bytes) {
      done += bytes;
      return !stop;
    };
    const std::size_t threads = thread_count(options_.threads, defaults::verify_threads_max);
    run_team(
        static_cast<unsigned>(std::clamp<std::size_t>(checks_.size(), 1, threads)), stop,
        options_.observer,
        [&] {
          return Progress{done, total};
        },
        [&] {
          for (std::size_t i = next++; i < checks_.size() && !stop; i = next++) {
            const Check& check = checks_[i];
            found[i] = file_digest(receipt_.kind, *check.file, check.begin, check.ranges, goes_on);
          }
        });
    VerifyReport report;
    report.bytes_read = done;
    report.differences = std::move(differences_);
    for (std::size_t i = 0; i < checks_.size(); ++i) {
      const Check& check = checks_[i];
      if (found[i] == check.digest) continue;
      files_hold_ = files_hold_ && !check.is_header;
      report.differences.push_back({check.name, DifferenceKind::bytes,
                                    fmt::format("{} in '{}'", found[i], printable(check.path)),
                                    check.digest});
    }
    // A header with other bytes is named already.
    if (!files_hold_) return report;
    for (const Listed& each : files_) {
      headers_.compare(*each.file, each.path, each.is_output, report.differences);
    }
    return report;
  }

 private:
  // Returns true for a part of a split GGUF, which means all parts and no other file of its folder.
  static bool is_split_part(const std::vector<ReceiptFile>& files, const std::string& path) {
    const std::string_view name = file_name(path);
    return files.size() > 1 && name.ends_with(".gguf") &&
           std::ranges::count(files, name, &ReceiptFile::path) > 0;
  }

  // Null where it is not there, which is a difference.
  std::shared_ptr<ByteSource> opened(const ReceiptFile& file, const std::string& path) {
    try {
      return storage_.open(path);
    } catch (const Error& error) {
      if (error.code() != "io.not_found") throw;
      files_hold_ = false;
      differences_.push_back({file.path, DifferenceKind::missing, "nothing",
                              fmt::format("a file of {} bytes", file.bytes)});
      return nullptr;
    }
  }

  void add_file(const ReceiptFile& file, const std::shared_ptr<ByteSource>& source,
                std::uint64_t bytes) {
    if (bytes != file.bytes) {
      files_hold_ = false;
      differences_.push_back({file.path, DifferenceKind::bytes, fmt::format("{} bytes", bytes),
                              fmt::format("{} bytes", file.bytes)});
    }
    const auto add = [&](std::string name, std::uint64_t begin, std::vector<ByteRange> ranges,
                         const std::string& digest, bool is_header) {
      if (!ranges.empty() && begin + ranges.back().end > bytes) {
        differences_.push_back({std::move(name), DifferenceKind::missing, "an end of the file",
                                fmt::format("bytes up to {}", begin + ranges.back().end)});
        return;
      }
      checks_.push_back(
          {source, std::move(name), file.path, begin, std::move(ranges), digest, is_header});
    };
    const bool is_all = file.tensors.empty();
    add(is_all ? file.path : file.path + " (header)", 0, file.header_ranges, file.header_digest,
        true);
    for (const ReceiptTensor& tensor : file.tensors) {
      add(tensor.name, tensor.begin, ranges_of(tensor), tensor.digest, false);
    }
  }

  // The receipt itself has any name: what is told of it is that it is one.
  void add_unexpected(const std::vector<ReceiptFile>& files, const std::string& root) {
    std::set<std::string> known;
    std::set<std::string> folders;
    for (const ReceiptFile& file : files) {
      known.insert(file.path);
      for_each_folder(file.path, [&](std::string folder) { folders.insert(std::move(folder)); });
    }
    const auto add_in = [&](const auto& self, const std::string& below) -> void {
      for (const std::string& name : names_in(below.empty() ? root : join_path(root, below))) {
        const std::string path = join_path(below, name);
        if (known.contains(path) || (below.empty() && name.ends_with(receipt_file_name))) continue;
        if (folders.contains(path) && storage_.kind(join_path(root, path)) == EntryKind::folder) {
          self(self, path);
        } else {
          differences_.push_back({path, DifferenceKind::unexpected, "a file", "nothing"});
        }
      }
    };
    add_in(add_in, {});
  }

  // None where another machine does not list them.
  std::vector<std::string> names_in(const std::string& root) {
    if (!is_remote(root)) return storage_.list(root);
    return list_remote(storage_, root).value_or(std::vector<std::string>());
  }

  const Receipt& receipt_;
  const VerifyOptions& options_;
  Storage& storage_;
  ReceiptHeaders headers_;
  std::vector<Check> checks_;
  std::vector<Listed> files_;  // those that are there
  bool files_hold_ = true;     // sizes and headers are those of the receipt
  std::vector<Difference> differences_;
};

}  // namespace

VerifyReport verify_receipt(const Receipt& receipt, const std::string& output,
                            const std::vector<std::string>& sources, const VerifyOptions& options) {
  return only_errors([&] {
    ReceiptCheck check(receipt, options);
    if (!output.empty()) check.add_files(receipt.outputs, output, 0, true);
    for (std::uint32_t i = 0; i < sources.size(); ++i) {
      check.add_files(receipt.sources, sources[i], i, false);
    }
    return check.run();
  });
}

}  // namespace loadstone

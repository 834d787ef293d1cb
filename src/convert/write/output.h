// Writes the files of a conversion, under temporary names until all files are complete.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "convert/write/receipts.h"
#include "loadstone/convert.h"
#include "loadstone/storage.h"

namespace loadstone {

class WorkFolder;
struct TargetPlace;

// Returns the file name of an output's receipt. The receipt of a single file is in the same folder
// as the file.
[[nodiscard]] std::string receipt_name(const Conversion& conversion, const std::string& target);

// Returns the paths of all files of the target, the index last.
[[nodiscard]] std::vector<std::string> output_paths(const Conversion& conversion,
                                                    const std::string& target);

// Measures the time during which at least one thread syncs. Thread-safe.
class SyncClock {
 public:
  template <typename Sync>
  void timed(const Sync& sync) {
    count(1);
    try {
      sync();
    } catch (...) {
      count(-1);
      throw;
    }
    count(-1);
  }
  void sync_folder(WritableStorage& storage, const std::string& path) {
    timed([&] { storage.sync_folder(path); });
  }
  // Call only when no thread syncs.
  [[nodiscard]] double seconds() const noexcept {
    return std::chrono::duration<double>(sum_).count();
  }

 private:
  using Clock = std::chrono::steady_clock;

  void count(int change) {
    const std::lock_guard lock(mutex_);
    if (syncs_ == 0) begin_ = Clock::now();
    syncs_ += change;
    if (syncs_ == 0) sum_ += Clock::now() - begin_;
  }

  std::mutex mutex_;
  int syncs_ = 0;  // number of syncs in progress; mutex_ guards it and the next two members
  Clock::time_point begin_;
  Clock::duration sum_{};
};

// Receives the bytes of files. Thread-safe.
class OutputFiles {
 public:
  OutputFiles() = default;
  OutputFiles(const OutputFiles&) = delete;
  OutputFiles& operator=(const OutputFiles&) = delete;
  virtual ~OutputFiles() = default;

  virtual void write(std::uint32_t file, std::uint64_t offset,
                     std::span<const std::byte> bytes) = 0;
  // Call after all bytes of the file are written.
  virtual void finish(std::uint32_t file) = 0;
};

// Files of a conversion that writes to disk. write() and finish() are thread-safe. Call commit()
// after all of them. The destructor removes unfinished files.
class Output final : public OutputFiles {
 public:
  // `check_sources`: throws if a source has changed. Must be thread-safe.
  Output(const Conversion& conversion, WorkFolder& work, Storage& storage,
         std::function<void()> check_sources);
  ~Output() override;

  // Throws if the file system cannot keep the target's other files when folders are exchanged.
  void check_links(const TargetPlace& place) const;

  // Writes bytes of a file. The first call for a file creates it and writes its header.
  void write(std::uint32_t file, std::uint64_t offset, std::span<const std::byte> bytes) override;
  // Makes written bytes leave the system's page cache.
  void release_cache() noexcept { releases_cache_ = true; }
  // Syncs the file to disk. A shard then gets its name in the work folder.
  void finish(std::uint32_t file) override;

  // Sets the object that makes the receipt of each finished file; null: no receipts.
  void record(FileReceipts* recorder) noexcept { recorder_ = recorder; }
  // Sets the receipt of a file that an earlier run finished.
  void keep(std::uint32_t file, Receipt receipt) { receipts_[file] = std::move(receipt); }

  // Gives all finished files their names in the target, the index last, and returns their paths.
  // Also writes the run's receipt for all files, and the record of the output. Throws Error
  // "convert.target" if the target has a model that must not be replaced.
  std::vector<std::string> commit(const std::string& target, const ConvertRun& run);

  [[nodiscard]] std::uint64_t bytes_written() const noexcept { return bytes_written_; }
  // Time during which at least one thread synced.
  [[nodiscard]] double sync_seconds() const noexcept { return syncs_.seconds(); }

 private:
  struct File {
    std::string part_path;           // path until the file is complete
    std::unique_ptr<FileSink> sink;  // open until the file is finished
    std::uint64_t bytes_since_release = 0;
    bool is_made = false;
    bool is_whole = false;
  };

  [[nodiscard]] FileSink& sink_of(std::uint32_t file);
  void make(std::uint32_t file);
  void write_beside(std::optional<DigestKind> receipt);
  [[nodiscard]] Receipt whole_receipt(DigestKind kind);
  std::string commit_file(const TargetPlace& place, std::optional<DigestKind> receipt);
  void note_receipt(std::uint32_t file);

  const Conversion& conversion_;
  WorkFolder& work_;
  Storage& reading_;
  WritableStorage& storage_;
  FileReceipts* recorder_ = nullptr;
  bool releases_cache_ = false;
  // By file. Until all files are finished, only the thread that finishes a file uses its receipt.
  std::vector<Receipt> receipts_;
  const std::function<void()> check_sources_;
  std::mutex mutex_;
  std::vector<File> files_;          // guarded by mutex_ until all are finished
  std::uint64_t bytes_written_ = 0;  // guarded by mutex_
  SyncClock syncs_;
};

// Throws Error "convert.state" for foreign files in the folder `files` of a work folder, because
// they would become part of the target.
void require_own_files(WritableStorage& storage, const Conversion& conversion,
                       const TargetPlace& place, const std::string& files);

}  // namespace loadstone

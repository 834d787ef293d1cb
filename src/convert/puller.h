// One thread of a conversion: it pulls windows of the output's tensors and writes them to their
// places.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "convert/output.h"
#include "convert/windows.h"
#include "execute/shard_files.h"
#include "execute/value_reader.h"
#include "loadstone/convert.h"
#include "loadstone/storage.h"

namespace loadstone {

// What all threads share.
struct Work {
  const Conversion& conversion;
  const OpenShards& shards;
  Output& output;
  WindowQueue& queue;
  std::atomic<bool>& stop;
  std::atomic<std::uint64_t> bytes_done = 0;
  std::atomic<std::uint64_t> bytes_read = 0;
  std::atomic<std::uint64_t> staging_bytes = 0;
  std::mutex mutex{};
  std::vector<Finding> findings{};  // guarded by mutex: of numbers that are not finite
};

// One thread's part: window after window. Not thread-safe.
class Puller {
 public:
  explicit Puller(Work& work);

  void run();

 private:
  void open(std::uint32_t target);
  void copy(const Window& window);
  // The numbers of the window, at the beginning of the buffer or behind what is there.
  std::span<std::byte> read(const Window& window, std::uint64_t offset = 0);
  void measure(const Window& window, const std::byte* numbers, std::span<float> amax);
  void make_whole(Window& window);
  // Returns how many bytes were written.
  std::uint64_t encode(const Window& window, const std::byte* numbers);
  std::uint64_t encode_piece(const Window& window, std::uint64_t begin, std::uint64_t end,
                             const std::byte* numbers);
  std::uint64_t finish_member(GroupMember& member, std::span<const float> amax, std::uint32_t file);
  std::uint64_t write(const OutputTensor& tensor, std::uint32_t file, std::uint64_t offset,
                      std::span<std::byte> bytes);
  void tell_not_finite(std::uint32_t target, std::uint64_t element);

  static constexpr std::uint32_t none = UINT32_MAX;

  Work& work_;
  ValueReader reader_;
  AnonymousMemory buffer_;
  AnonymousMemory encoded_;
  std::vector<PartRange> ranges_;
  std::vector<std::byte*> parts_;
  std::vector<float> amax_;
  std::uint32_t open_ = none;
  std::uint64_t window_bytes_peak_ = 0;
};

}  // namespace loadstone

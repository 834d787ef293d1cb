// Declares the measurements of 'loadstone bench' and the conclusions from them.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/text_style.h"

namespace loadstone::cli {

// Repeated measurements of one task over a number of bytes. Empty if the task could not be
// measured.
struct Series {
  std::uint64_t bytes = 0;
  std::vector<double> seconds;

  // Rates in bytes per second.
  [[nodiscard]] double lowest() const;
  [[nodiscard]] double median() const;
  [[nodiscard]] double highest() const;
};

struct LoadSeries {
  Series series;
  std::vector<double> processor_shares;  // shares of the readers' time spent on a processor, 0 to 1
  unsigned readers = 0;                  // the most readers of a load

  [[nodiscard]] double processor_share() const;  // the median
};

struct BenchFigures {
  std::string checkpoint;
  std::uint64_t total_bytes = 0;   // bytes of the checkpoint
  std::uint64_t sample_bytes = 0;  // bytes that were read
  std::uint64_t sample_targets = 0;
  std::uint64_t total_targets = 0;
  unsigned threads = 0;  // for the limits, except `disk`
  unsigned cores = 0;
  unsigned disk_readers = 0;
  Series new_memory;
  Series memory_copy;
  Series page_cache;
  Series page_cache_to_new_memory;
  Series disk;
  Series write;
  std::map<std::string, Series> encode;  // by encoding, in bytes of BF16
  LoadSeries load_from_page_cache;
  LoadSeries load_from_disk;
  std::string no_disk;       // reason why `disk` is empty
  std::string no_write;      // reason why `write` is empty
  std::string no_disk_load;  // reason why `load_from_disk` is empty
};

enum class Bound { page_cache_to_new_memory, disk, processor, waiting };

// Returns the name that JSON output uses.
[[nodiscard]] std::string_view name(Bound bound) noexcept;

struct LoadVerdict {
  double of_limit = 0;  // rate of the load divided by the limit
  Bound bound = Bound::waiting;
};

[[nodiscard]] LoadVerdict page_cache_verdict(const BenchFigures& figures);
// Returns the verdict on loads from disk; nullopt if the disk, or a load from it, was not measured.
[[nodiscard]] std::optional<LoadVerdict> disk_verdict(const BenchFigures& figures);

[[nodiscard]] std::string to_text(const BenchFigures& figures, const TextStyle& style);
[[nodiscard]] std::string to_json(const BenchFigures& figures);

}  // namespace loadstone::cli

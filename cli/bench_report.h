// The figures of 'loadstone bench', and conclusions from them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/text_style.h"

namespace loadstone::cli {

// Runs of one task over a number of bytes. No runs: it could not be measured.
struct Series {
  std::uint64_t bytes = 0;
  std::vector<double> seconds;

  // Bytes a second.
  [[nodiscard]] double lowest() const;
  [[nodiscard]] double median() const;
  [[nodiscard]] double highest() const;
};

struct LoadSeries {
  Series series;
  std::vector<double> processor_shares;  // of its threads, 0 to 1

  [[nodiscard]] double processor_share() const;  // the median
};

struct BenchFigures {
  std::string checkpoint;
  std::uint64_t total_bytes = 0;   // of the checkpoint
  std::uint64_t sample_bytes = 0;  // that were read
  std::uint64_t sample_targets = 0;
  std::uint64_t total_targets = 0;
  unsigned threads = 0;
  unsigned disk_readers = 0;
  Series new_memory;
  Series memory_copy;
  Series page_cache;
  Series page_cache_to_new_memory;
  Series disk;
  LoadSeries load_from_page_cache;
  LoadSeries load_from_disk;
  std::string no_disk;       // why `disk` has no runs
  std::string no_disk_load;  // reason why `load_from_disk` is empty
};

enum class Bound { page_cache_to_new_memory, disk, processor, waiting };

// The name in JSON.
[[nodiscard]] std::string_view name(Bound bound) noexcept;

struct LoadVerdict {
  double of_limit = 0;  // the load's rate divided by the machine's
  Bound bound = Bound::waiting;
};

[[nodiscard]] LoadVerdict page_cache_verdict(const BenchFigures& figures);
// nullopt if the disk, or the load from it, was not measured.
[[nodiscard]] std::optional<LoadVerdict> disk_verdict(const BenchFigures& figures);

[[nodiscard]] std::string to_text(const BenchFigures& figures, const TextStyle& style);
[[nodiscard]] std::string to_json(const BenchFigures& figures);

}  // namespace loadstone::cli

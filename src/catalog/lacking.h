// The one sentence for tensors that numbered series lack, such as the experts of a layer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "loadstone/finding.h"

namespace loadstone {

inline constexpr std::size_t gap_names_max = 64;  // in each list of SeriesGaps

// Tensors that a target lacks, and those whose number is outside its series.
struct SeriesGaps {
  std::vector<std::string> absent{};  // the first ones, by the names that they should have
  std::uint64_t absent_count = 0;     // all of them
  std::vector<std::string> stray{};

  [[nodiscard]] bool ok() const noexcept { return absent_count == 0 && stray.empty(); }
  // "plan.missing", or "plan.series" if no tensor is missing.
  [[nodiscard]] const char* code() const noexcept;
};

// Collects gaps and makes one finding for each layer: a missing expert is one error, however many
// targets need it. Not thread-safe.
class LackingSeries {
 public:
  // `target`: the tensor, or the folder of names, that is incomplete.
  void add(std::string_view target, const SeriesGaps& gaps);
  // Errors in the order of add().
  [[nodiscard]] std::vector<Finding> findings() const;

 private:
  struct Layer {
    std::string prefix;
    std::string target;
    SeriesGaps gaps;
  };
  std::map<std::string, std::size_t, std::less<>> index_;  // by the part before the number
  std::vector<Layer> layers_;
};

}  // namespace loadstone

// Reports tensors that are missing in numbered series, such as the experts of a layer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "loadstone/finding.h"

namespace loadstone {

inline constexpr std::size_t gap_names_max = 64;  // limit of each list of SeriesGaps

// Tensors that a target lacks, and tensors whose number is outside the target's series.
struct SeriesGaps {
  std::vector<std::string> absent{};  // expected names of the first missing tensors
  std::uint64_t absent_count = 0;     // number of all missing tensors
  std::vector<std::string> stray{};

  [[nodiscard]] bool ok() const noexcept { return absent_count == 0 && stray.empty(); }
  // Returns "plan.missing", or "plan.series" if no tensor is missing.
  [[nodiscard]] const char* code() const noexcept;
};

// Collects gaps and makes one finding for each layer, so that a missing expert is one error even if
// many targets need it. Not thread-safe.
class LackingSeries {
 public:
  // `target`: the incomplete tensor, or the prefix of the incomplete series.
  void add(std::string_view target, const SeriesGaps& gaps);
  // Returns the errors in the order of add().
  [[nodiscard]] std::vector<Finding> findings() const;

 private:
  struct Layer {
    std::string prefix;
    std::string target;
    SeriesGaps gaps;
  };
  std::map<std::string, std::size_t, std::less<>> index_;  // by the name's part before the number
  std::vector<Layer> layers_;
};

}  // namespace loadstone

// Stores statistics of whole values that a merge needs before it can compute any element.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "boxes/value.h"

namespace loadstone {

// The first thread that needs a statistic computes it while others wait. Thread-safe.
class MergeStatistics {
 public:
  using Numbers = std::vector<float>;
  struct Measured {
    Numbers terms;    // factors of an arc, or the smallest magnitude of each difference to keep
    Numbers columns;  // factors of columns, for each product with magnitudes of columns
  };
  // Returns nullopt if the run was stopped before the end.
  using Measure = std::function<std::optional<Measured>()>;

  [[nodiscard]] std::optional<Measured> of(const Value& value, const Measure& measure) {
    const std::shared_ptr<Entry> entry = entry_of(value);
    const std::lock_guard lock(entry->mutex);
    if (!entry->measured) entry->measured = measure();
    return entry->measured;
  }

 private:
  struct Entry {
    std::mutex mutex;
    std::optional<Measured> measured;
  };

  std::shared_ptr<Entry> entry_of(const Value& value) {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<Entry>& entry = entries_[&value];
    if (entry == nullptr) entry = std::make_shared<Entry>();
    return entry;
  }

  std::mutex mutex_;
  std::map<const Value*, std::shared_ptr<Entry>> entries_;
};

}  // namespace loadstone

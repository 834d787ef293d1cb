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
  // Returns nullopt if the run was stopped before the end.
  using Measure = std::function<std::optional<Numbers>()>;

  [[nodiscard]] std::optional<Numbers> of(const Value& value, const Measure& measure) {
    const std::shared_ptr<Entry> entry = entry_of(value);
    const std::lock_guard lock(entry->mutex);
    if (!entry->numbers) entry->numbers = measure();
    return entry->numbers;
  }

 private:
  struct Entry {
    std::mutex mutex;
    std::optional<Numbers> numbers;
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

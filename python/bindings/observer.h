// Lets Python follow and interrupt long work.
#pragma once

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <utility>

#include "bindings.h"
#include "loadstone/catalog.h"
#include "loadstone/remote.h"

namespace loadstone::python {

// Calls Python 20 times a second, to check for Ctrl-C and to report progress if requested.
class PythonObserver final : public Observer {
 public:
  explicit PythonObserver(nb::object callback) : callback_(std::move(callback)) {}

  bool on_progress(const Progress& progress) override {
    const nb::gil_scoped_acquire acquire;
    try {
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
      if (!callback_.is_none()) callback_(progress.bytes_done, progress.bytes_total);
    } catch (...) {
      raised_ = std::current_exception();
      *is_stopped_ = true;
      return false;
    }
    return true;
  }

  // Returns a storage whose remote reads stop waiting when the work is stopped. Returns null if no
  // shard is remote; the caller then uses the catalog's storage.
  [[nodiscard]] std::unique_ptr<Storage> storage_for(const Catalog& catalog) {
    const auto is_far = [](const Shard& shard) { return is_remote(shard.path); };
    if (std::ranges::none_of(catalog.shards(), is_far)) return nullptr;
    return make_stoppable(catalog.storage(), [stop = is_stopped_] { return stop->load(); });
  }

  // Runs `work` without the GIL. An exception from Python (KeyboardInterrupt, or the callback's)
  // takes precedence over "cancelled".
  template <typename Work>
  auto watch(const Work& work) const {
    try {
      const nb::gil_scoped_release release;
      return work();
    } catch (const Error&) {
      if (raised_) std::rethrow_exception(raised_);
      throw;
    }
  }

 private:
  nb::object callback_;
  std::exception_ptr raised_;
  std::shared_ptr<std::atomic<bool>> is_stopped_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace loadstone::python

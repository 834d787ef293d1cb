// Watching long work from Python.
#pragma once

#include <exception>
#include <utility>

#include "bindings.h"

namespace loadstone::python {

// Python is asked 20 times a second: for Ctrl-C, and with the progress if it wants to know.
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
      return false;
    }
    return true;
  }

  // What Python raised (KeyboardInterrupt, or an error of the callback) goes before "cancelled".
  void rethrow() const {
    if (raised_) std::rethrow_exception(raised_);
  }

 private:
  nb::object callback_;
  std::exception_ptr raised_;
};

}  // namespace loadstone::python

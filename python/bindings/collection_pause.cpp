// Binds pauses of Python's automatic garbage collection. A pause ends with its object, so an
// interrupt cannot leave collection disabled. The GIL guards the counters.
#include "bindings.h"

namespace loadstone::python {
namespace {

int pauses = 0;            // pauses in progress in all threads, because collection is per process
int process = 0;           // incremented in a forked process, which does not inherit pauses
bool was_enabled = false;  // whether collection was enabled before the first pause

class CollectionPause {
 public:
  CollectionPause() = default;
  CollectionPause(const CollectionPause&) = delete;
  CollectionPause& operator=(const CollectionPause&) = delete;
  ~CollectionPause() { end(); }

  void begin() {
    if (is_begun_) return;
    if (pauses++ == 0) was_enabled = PyGC_Disable() != 0;
    is_begun_ = true;
    process_ = process;
  }

  void end() {
    if (!is_begun_) return;
    is_begun_ = false;
    if (process_ == process && --pauses == 0 && was_enabled) PyGC_Enable();
  }

 private:
  bool is_begun_ = false;
  int process_ = 0;
};

void end_pauses_of_parent() {
  if (pauses > 0 && was_enabled) PyGC_Enable();
  pauses = 0;
  process += 1;
}

}  // namespace

void bind_collection_pause(nb::module_& module) {
  nb::class_<CollectionPause>(module, "CollectionPause")
      .def(nb::init<>())
      .def("__enter__", &CollectionPause::begin)
      .def(
          "__exit__",
          [](CollectionPause& pause, nb::handle, nb::handle, nb::handle) { pause.end(); },
          nb::arg("kind").none(), nb::arg("error").none(), nb::arg("traceback").none());
  module.def("end_pauses_of_parent", &end_pauses_of_parent);
}

}  // namespace loadstone::python

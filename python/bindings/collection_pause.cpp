// Pauses of Python's automatic garbage collection, which end with their objects: no interrupt can
// leave one behind. The interpreter's lock guards the counts.
#include "bindings.h"

namespace loadstone::python {
namespace {

int pauses = 0;            // in progress, over all threads: collection is per process
int process = 0;           // a forked process does not inherit pauses
bool was_enabled = false;  // before the first pause

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

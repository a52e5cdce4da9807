// How a process ends; tierload/ending.h says what happens.
#include "tierload/ending.h"

#include "bind/bind.h"

namespace tierload {

void bind_ending(nb::module_& module) {
  module.def("watch_termination", &watch_termination, nb::arg("grace_seconds"));
  module.def("terminating", &terminating);
  module.def("save_begins", &save_begins, nb::arg("id"), nb::arg("what"));
  module.def("save_ends", &save_ends, nb::arg("id"));
  module.def("fail_exit", &fail_exit);
  module.def("forgive_exit", &forgive_exit);
}

}  // namespace tierload

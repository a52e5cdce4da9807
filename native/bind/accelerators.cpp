// Accelerators, as far as Python asks about them; tests get one that there is not.
#include "bind/arrays.h"
#include "bind/bind.h"
#include "tierload/accelerator.h"

namespace tierload {

void bind_accelerators(nb::module_& module) {
  nb::class_<Accelerator>(module, "Accelerator", "See tierload/accelerator.h.")
      .def_prop_ro("name", &Accelerator::name)
      .def_prop_ro("bytes_to_host", &Accelerator::bytes_to_host, "Moved so far.")
      .def_prop_ro("bytes_to_device", &Accelerator::bytes_to_device);
  nb::class_<FakeAccelerator, Accelerator>(module, "FakeAccelerator",
                                           "For tests: memory of the processor's, in disguise.")
      .def_prop_ro("number", &FakeAccelerator::number)
      .def(
          "allocate",
          [](FakeAccelerator& self, uint64_t bytes) {
            const MutableBytes memory = self.allocate(bytes);
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(memory.data(), {memory.size()}, nb::none());
          },
          nb::arg("nbytes"), "Memory of its own, which is there until the process ends.")
      .def("delay", &FakeAccelerator::delay, nb::arg("seconds"), "Before each piece of work of a lane's.")
      .def("fail_after", &FakeAccelerator::fail_after, nb::arg("count"), "So many more pieces of work; -1: never.");
  module.def("fake_accelerator", &fake_accelerator, nb::rv_policy::reference);
  module.def(
      "accelerator", [](uint8_t number) { return &accelerator(number); }, nb::arg("number"), nb::rv_policy::reference,
      "Raises AcceleratorError where it cannot be used.");
  module.def("accelerator_refusal", &accelerator_refusal, nb::arg("number"),
             "Why an accelerator cannot be used (CUDA's device d has the number d + 1); \"\" where it can.");
  module.def("fake_at", &fake_at, nb::arg("address"), "The number of the fake accelerator of an address; 0: none.");
  module.def(
      "pinned_use",
      [] {
        const PinnedUse use = pinned_use();
        return nb::make_tuple(use.bytes, use.most);
      },
      nb::sig("def pinned_use() -> tuple[int, int]"), "Bytes of pinned memory that are held, and most at a time.");
  module.def("trim_pinned", &trim_pinned, "Gives pinned memory that is idle back to the system.");
}

}  // namespace tierload

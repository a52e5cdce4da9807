#include <nanobind/stl/vector.h>

#include "bind/arrays.h"
#include "bind/bind.h"
#include "bind/guarded.h"
#include "bind/modules.h"
#include "bind/optimizers.h"
#include "bind/parameter_names.h"
#include "bind/staging.h"
#include "bind/state_writer.h"
#include "bind/store.h"
#include "bind/tensor_table.h"
#include "tierload/digest.h"

namespace tierload {
namespace {

Fault::Kind kind_of(const std::string& name) {
  if (name == "fail") return Fault::Kind::fail;
  if (name == "fail_after") return Fault::Kind::fail_after;
  if (name == "partial") return Fault::Kind::partial;
  if (name == "lie") return Fault::Kind::lie;
  throw UsageError("no fault is called " + name);
}

}  // namespace

void bind_faults(nb::module_& module) {
  nb::class_<Faults>(module, "Faults", "Makes chosen storage calls of a store fail; for tests.")
      .def(nb::init<>())
      .def(
          "arm",
          [](Faults& self, uint64_t at, const std::string& kind, int code, uint64_t times, const std::string& op) {
            self.arm({at, kind_of(kind), code, times, op});
          },
          nb::arg("at"), nb::arg("kind") = "fail", nb::arg("code") = 5, nb::arg("times") = 1, nb::arg("op") = "")
      .def("disarm", &Faults::disarm)
      .def_prop_ro("calls", &Faults::calls)
      .def_prop_ro("hit", &Faults::hit);
}

NB_MODULE(_native, module) {
  module.doc() = "The native core of tierload; docs/ARCHITECTURE.md says what belongs here.";
  nb::set_leak_warnings(false);  // what the core asks torch lives as long as the process
  bind_errors();
  bind_accelerators(module);
  bind_device(module);
  bind_arrivals(module);
  bind_ending(module);
  bind_locking(module);
  bind_faults(module);
  bind_manifest(module);
  bind_store(module);
  bind_staging(module);
  bind_save(module);
  bind_torch(module);
  bind_guarded(module);
  bind_modules(module);
  bind_parameter_names(module);
  bind_optimizers(module);
  bind_state_writer(module);
  bind_tensor_table(module);
  bind_codec(module);
  module.def(
      "tree_digest",
      [](const nb::bytes& data) {
        const Digest digest = tree_digest(bytes_of(data), page_leaf);
        return nb::make_tuple(digest.low, digest.high);
      },
      nb::sig("def tree_digest(data: bytes) -> tuple[int, int]"));
  module.def(
      "key_hashes",
      [](const nb::bytes& keys, const Array<int64_t>& lengths) {
        Bytes left = bytes_of(keys);
        std::vector<uint64_t> hashes;
        for (const int64_t length : span_of(lengths)) {
          if (length < 0 || static_cast<uint64_t>(length) > left.size()) throw UsageError("keys are cut short");
          hashes.push_back(xxh3(left.first(static_cast<size_t>(length))));
          left = left.subspan(static_cast<size_t>(length));
        }
        return array_of(std::move(hashes));
      },
      nb::arg("keys"), nb::arg("lengths"), "XXH3 of keys that stand back to back.");
}

}  // namespace tierload

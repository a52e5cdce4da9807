// Memory that stays; tierload/locking.h says what that takes.
#include "tierload/locking.h"

#include <vector>

#include "bind/bind.h"

namespace tierload {
namespace {

std::vector<Region> regions_of(const Array<uint64_t>& addresses, const Array<uint64_t>& lengths) {
  if (addresses.size() != lengths.size()) {
    throw UsageError(std::to_string(addresses.size()) + " addresses have " + std::to_string(lengths.size()) +
                     " lengths; give one for each");
  }
  std::vector<Region> regions(addresses.size());
  for (size_t at = 0; at < regions.size(); ++at) regions[at] = {addresses.data()[at], lengths.data()[at]};
  return regions;
}

}  // namespace

void bind_locking(nb::module_& module) {
  nb::class_<LockReport>(module, "LockReport")
      .def_ro("locked", &LockReport::locked)
      .def_ro("refused", &LockReport::refused)
      .def_ro("reason", &LockReport::reason)
      .def_ro("method", &LockReport::method)
      .def_ro("placing", &LockReport::placing);
  module.def(
      "lock_memory",
      [](const Array<uint64_t>& addresses, const Array<uint64_t>& lengths, std::optional<uint32_t> node) {
        const std::vector<Region> regions = regions_of(addresses, lengths);
        const nb::gil_scoped_release unlocked;
        return lock_memory(regions, node);
      },
      nb::arg("addresses"), nb::arg("lengths"), nb::arg("node").none());
  module.def(
      "unlock_memory",
      [](const Array<uint64_t>& addresses, const Array<uint64_t>& lengths) {
        const std::vector<Region> regions = regions_of(addresses, lengths);
        const nb::gil_scoped_release unlocked;
        return unlock_memory(regions);
      },
      nb::arg("addresses"), nb::arg("lengths"));
}

}  // namespace tierload

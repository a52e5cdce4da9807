// What lies under a directory: measured for the choice of a way, and for people.
#include "tierload/device.h"

#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.h"

namespace tierload {
namespace {

RecordWay::Flush flush_of(const std::string& name) {
  if (name == "none") return RecordWay::Flush::none;
  if (name == "after") return RecordWay::Flush::after;
  if (name == "with") return RecordWay::Flush::with;
  throw UsageError("no flush is called " + name);
}

}  // namespace

void bind_device(nb::module_& module) {
  nb::class_<DeviceRate>(module, "DeviceRate",
                         "Bytes a second of one way to move data; see calibrate in tierload/device.h.")
      .def_ro("direct", &DeviceRate::direct)
      .def_ro("block_bytes", &DeviceRate::block_bytes)
      .def_ro("depth", &DeviceRate::depth)
      .def_ro("write", &DeviceRate::write)
      .def_ro("read", &DeviceRate::read);
  module.def(
      "calibrate",
      [](const std::string& directory, double seconds) {
        const nb::gil_scoped_release release;
        return calibrate(directory, seconds);
      },
      nb::arg("directory"), nb::arg("seconds"));
  nb::class_<RecordWriter>(module, "RecordWriter", "Makes small records durable, one at a time; see tierload/device.h.")
      .def(
          "write",
          [](RecordWriter& self, uint64_t count) {
            std::vector<uint64_t> times;
            {
              const nb::gil_scoped_release release;
              times = self.write(count);
            }
            return times;
          },
          nb::arg("count"), "Nanoseconds of each of the next records.");
  module.def(
      "record_writer",
      [](const std::string& path, const std::string& flush, bool grows, bool direct, bool ring, uint64_t record_bytes,
         uint64_t records) {
        return record_writer(path, {flush_of(flush), grows, direct, ring}, record_bytes, records);
      },
      nb::arg("path"), nb::kw_only(), nb::arg("flush"), nb::arg("grows"), nb::arg("direct"), nb::arg("ring"),
      nb::arg("record_bytes"), nb::arg("records"));
  module.def("in_memory", &in_memory, nb::arg("directory"));
  module.def("io_uring_refusal", &io_uring_refusal);
}

}  // namespace tierload

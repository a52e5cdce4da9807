// Arrivals on the edge to Python: its threads work and wait without the GIL.
#include "tierload/arrivals.h"

#include <algorithm>
#include <numeric>

#include "bind/arrays.h"
#include "bind/bind.h"

namespace tierload {
namespace {

std::chrono::nanoseconds of_seconds(double seconds) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds));
}

// Keeps the manifests, in whose mapped files the rows stand.
struct ArrivingPages {
  std::vector<nb::object> manifests;
  std::unique_ptr<Arrivals> arrivals;
};

void begin(ArrivingPages* self, const nb::list& manifests, const Array<uint32_t>& manifest_of_part,
           const Array<uint32_t>& pages, const Array<uint32_t>& offsets, const Array<uint64_t>& pointers,
           const Array<uint64_t>& lengths, const Array<uint32_t>& units, const Array<uint32_t>& ranks, unsigned threads,
           const std::optional<Array<uint8_t>>& devices, const StreamPairs& streams) {
  const size_t count = pages.size();
  if (manifest_of_part.size() != count || offsets.size() != count || pointers.size() != count ||
      lengths.size() != count || units.size() != count || (devices && devices->size() != count)) {
    throw UsageError("the arrays of parts differ in length");
  }
  std::shared_ptr<Storage> storage;
  std::vector<ArrivingParts> sources(manifests.size());
  std::vector<nb::object> kept;
  for (size_t i = 0; i < sources.size(); ++i) {
    const ManifestView& view = nb::cast<ManifestView&>(manifests[i]);
    storage = view.storage;
    sources[i].manifest = view.manifest.get();
    kept.emplace_back(manifests[i]);
  }
  std::vector<size_t> by_page(count);
  std::iota(by_page.begin(), by_page.end(), size_t{0});
  std::stable_sort(by_page.begin(), by_page.end(),
                   [&](size_t a, size_t b) { return pages.data()[a] < pages.data()[b]; });
  for (const size_t i : by_page) {
    if (manifest_of_part.data()[i] >= sources.size()) throw UsageError("a part is of no manifest");
    ArrivingParts& source = sources[manifest_of_part.data()[i]];
    source.parts.push_back({pages.data()[i],
                            offsets.data()[i],
                            {reinterpret_cast<std::byte*>(pointers.data()[i]), lengths.data()[i]},
                            devices ? devices->data()[i] : uint8_t{0}});
    source.units.push_back(units.data()[i]);
  }
  const auto numbers = span_of(ranks);
  new (self)
      ArrivingPages{std::move(kept), std::make_unique<Arrivals>(std::move(storage), std::move(sources),
                                                                std::vector<uint32_t>(numbers.begin(), numbers.end()),
                                                                threads, moments_now(streams))};
}

template <typename Call>
auto without_gil(const Call& call) {
  const nb::gil_scoped_release release;
  return call();
}

uint32_t checked(const ArrivingPages& self, uint32_t unit) {
  if (unit >= self.arrivals->units()) throw UsageError("there is no unit " + std::to_string(unit));
  return unit;
}

nb::list failures(ArrivingPages& self) {
  nb::list out;
  for (const auto& [unit, failure] : self.arrivals->failures()) {
    out.append(nb::make_tuple(unit, failure.page, failure.path, failure.offset, failure.what));
  }
  return out;
}

}  // namespace

void bind_arrivals(nb::module_& module) {
  nb::class_<ArrivingPages>(module, "Arrivals",
                            "Units of bytes that arrive in the background, by urgency; see tierload/arrivals.h.")
      .def("__init__", &begin, nb::arg("manifests"), nb::arg("manifest_of_part"), nb::arg("pages"), nb::arg("offsets"),
           nb::arg("pointers"), nb::arg("lengths"), nb::arg("units"), nb::arg("ranks"), nb::arg("threads"),
           nb::arg("devices").none() = nb::none(), nb::arg("streams") = StreamPairs())
      .def(
          "work", [](ArrivingPages& self) { without_gil([&] { self.arrivals->work(); }); },
          "Works until everything has arrived; threads call it, as many as were announced.")
      .def("stop", [](ArrivingPages& self) { self.arrivals->stop(); })
      .def(
          "release",
          [](ArrivingPages& self) {
            without_gil([&] { self.arrivals->release(); });
            self.manifests.clear();
          },
          "Lets go of files and buffers, when everything has arrived and every work() has returned.")
      .def(
          "order",
          [](ArrivingPages& self, const Array<uint32_t>& units, const Array<uint32_t>& ranks) {
            self.arrivals->order(span_of(units), span_of(ranks));
          },
          nb::arg("units"), nb::arg("ranks"))
      .def(
          "demand", [](ArrivingPages& self, uint32_t unit) { self.arrivals->demand(checked(self, unit)); },
          nb::arg("unit"))
      .def(
          "wait",
          [](ArrivingPages& self, uint32_t unit, double seconds) {
            checked(self, unit);
            return without_gil([&] { return self.arrivals->wait(unit, of_seconds(seconds)); });
          },
          nb::arg("unit"), nb::arg("seconds"), "Whether a unit has arrived within the time; raises CorruptPage.")
      .def(
          "arrived", [](ArrivingPages& self, uint32_t unit) { return self.arrivals->arrived(checked(self, unit)); },
          nb::arg("unit"))
      .def(
          "next",
          [](ArrivingPages& self, double seconds) {
            return array_of(without_gil([&] { return self.arrivals->next(of_seconds(seconds)); }));
          },
          nb::arg("seconds"), "Units that have arrived or failed since it was last asked; waits for one.")
      .def("failures", &failures, nb::sig("def failures(self) -> list[tuple[int, int, str, int, str]]"),
           "Unit, page, path, offset and what is wrong, of each unit that is damaged.")
      .def_prop_ro("over", [](ArrivingPages& self) { return self.arrivals->over(); })
      .def_prop_ro("bytes", [](ArrivingPages& self) { return self.arrivals->bytes(); })
      .def_prop_ro("total_bytes", [](ArrivingPages& self) { return self.arrivals->total_bytes(); })
      .def_prop_ro("queued", [](ArrivingPages& self) { return self.arrivals->queued(); });
}

}  // namespace tierload

#include "bind/staging.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>

#include <chrono>
#include <tuple>

#include "tierload/clone.h"

namespace tierload {
namespace {

// Each view: item size, number of dimensions, counts, strides in bytes.
std::vector<StridedView> views_of(std::span<const int64_t> numbers) {
  std::vector<StridedView> views;
  while (!numbers.empty()) {
    if (numbers.size() < 2 || numbers[0] < 1 || numbers[1] < 0 ||
        numbers.size() / 2 - 1 < static_cast<uint64_t>(numbers[1])) {
      throw UsageError("the views are cut short");
    }
    const auto ndim = static_cast<size_t>(numbers[1]);
    const std::vector<uint64_t> counts(numbers.begin() + 2, numbers.begin() + 2 + static_cast<ptrdiff_t>(ndim));
    views.emplace_back(static_cast<uint64_t>(numbers[0]), counts, numbers.subspan(2 + ndim, ndim));
    numbers = numbers.subspan(2 + 2 * ndim);
  }
  return views;
}

// What is said of each page, as said of each source.
std::vector<uint8_t> in_order(const PageSet& set, std::span<const uint8_t> by_page) {
  if (set.order.empty()) return {by_page.begin(), by_page.end()};
  std::vector<uint8_t> by_source;
  for (const uint32_t page : set.order) by_source.push_back(by_page[page]);
  return by_source;
}

// Sources come in `order` from now on, and the first `hot` of them are hot.
void put_in_order(PageSet& set, std::span<const uint32_t> order, size_t hot) {
  std::vector<bool> placed(set.sources.size());
  std::vector<PageSource> sources;
  for (const uint32_t page : order) {
    if (page >= placed.size() || placed[page]) throw UsageError("an order has every page once");
    placed[page] = true;
    sources.push_back(set.sources[page]);
    sources.back().hot = sources.size() <= hot;
  }
  if (sources.size() != placed.size()) throw UsageError("an order has every page once");
  set.sources = std::move(sources);
  set.order.assign(order.begin(), order.end());
}

std::shared_ptr<PageSet> page_set(const Array<uint64_t>& pointers, const Array<uint64_t>& lengths,
                                  const Array<uint32_t>& part_views, const Array<uint64_t>& part_offsets,
                                  const Array<int64_t>& views, const Array<uint32_t>& parts_of_page,
                                  const Array<uint8_t>& item_sizes, const Array<uint8_t>& floating,
                                  const Array<uint8_t>& packed, const std::optional<Array<uint32_t>>& order,
                                  uint32_t hot, const std::optional<Array<uint8_t>>& devices) {
  const size_t pages = parts_of_page.size();
  if (lengths.size() != pointers.size() || part_views.size() != pointers.size() ||
      part_offsets.size() != pointers.size() || (devices && devices->size() != pointers.size()) ||
      item_sizes.size() != pages || floating.size() != pages || packed.size() != pages) {
    throw UsageError("the arrays of pages differ in length");
  }
  auto set = std::make_shared<PageSet>();
  set->views = views_of(span_of(views));
  set->parts.resize(pointers.size());
  for (size_t i = 0; i < set->parts.size(); ++i) {
    SourcePart& part = set->parts[i];
    part = {reinterpret_cast<const std::byte*>(pointers.data()[i]), lengths.data()[i], nullptr, 0,
            devices ? devices->data()[i] : uint8_t{0}};
    const uint32_t view = part_views.data()[i];
    if (view == 0) continue;
    if (part.device != 0) throw UsageError("what an accelerator has lies together");
    if (view > set->views.size()) throw UsageError("a part names a view that there is not");
    part.view = &set->views[view - 1];
    part.from = part_offsets.data()[i];
    const uint64_t bytes = part.view->bytes();
    if (part.from > bytes || part.length > bytes - part.from) throw UsageError("a part goes beyond its view");
  }
  set->sources.resize(pages);
  size_t part = 0;
  for (size_t i = 0; i < pages; ++i) {
    const size_t count = parts_of_page.data()[i];
    if (count > set->parts.size() - part) throw UsageError("a page has more parts than there are");
    set->sources[i] = {std::span(set->parts).subspan(part, count), item_sizes.data()[i], floating.data()[i] != 0,
                       packed.data()[i] != 0};
    part += count;
  }
  if (order) put_in_order(*set, span_of(*order), hot);
  return set;
}

using Room = std::tuple<uint8_t, uint64_t, uint64_t, uint64_t>;

std::vector<CloneRoom> rooms_of(const std::vector<Room>& rooms) {
  std::vector<CloneRoom> given;
  for (const auto& [device, at, bytes, stream] : rooms) given.push_back({device, at, bytes, stream});
  return given;
}

// Without a number there is no end.
std::chrono::nanoseconds of_seconds(std::optional<double> seconds) {
  using Nanoseconds = std::chrono::nanoseconds;
  return seconds ? std::chrono::duration_cast<Nanoseconds>(std::chrono::duration<double>(*seconds)) : Nanoseconds(-1);
}

}  // namespace

void bind_staging(nb::module_& module) {
  nb::class_<PageSet>(module, "PageSet", "Pages to be saved; see tierload.layout.PagePlan.")
      .def_static("of", &page_set, nb::arg("pointers"), nb::arg("lengths"), nb::arg("part_views"),
                  nb::arg("part_offsets"), nb::arg("views"), nb::arg("parts_of_page"), nb::arg("item_sizes"),
                  nb::arg("floating"), nb::arg("packed"), nb::arg("order") = nb::none(), nb::arg("hot") = 0,
                  nb::arg("devices").none() = nb::none(),
                  "`order`: which page is placed first, and so on; the first `hot` of them are hot.")
      .def_prop_ro(
          "staging_bytes", [](const PageSet& self) { return Staging::bytes_of(self); },
          "What an arena needs to hold all of them.")
      .def_prop_ro(
          "host_bytes", [](const PageSet& self) { return Staging::bytes_of(self, true); },
          "The same for those of which no accelerator has a byte.")
      .def_prop_ro(
          "clone_bytes",
          [](const PageSet& self) {
            std::vector<std::pair<uint8_t, uint64_t>> needed;
            for (const CloneRoom& room : Clone::room_of(self)) needed.emplace_back(room.device, room.bytes);
            return needed;
          },
          "What a clone needs of each accelerator, by its number.");

  nb::class_<Clone>(module, "Clone", "A copy of pages where they are, in accelerators' memory; see tierload/clone.h.")
      .def(
          "__init__",
          [](Clone* self, std::shared_ptr<PageSet> pages, const std::vector<Room>& rooms) {
            new (self) Clone(std::move(pages), rooms_of(rooms));
          },
          nb::arg("pages"), nb::arg("rooms"), "`rooms`: number, address, bytes and stream, of each accelerator.")
      .def(
          "__init__",
          [](Clone* self, const Clone& earlier, const std::vector<Room>& rooms) {
            new (self) Clone(earlier, rooms_of(rooms));
          },
          nb::arg("earlier"), nb::arg("rooms"), "The same pages again, into the same rooms.")
      .def(
          "wait_done",
          [](Clone& self, std::optional<double> seconds) {
            const nb::gil_scoped_release release;
            return self.wait_done(of_seconds(seconds));
          },
          nb::arg("seconds").none(), "Whether it is made.");

  nb::class_<Arena>(module, "Arena", nb::is_weak_referenceable(),
                    "Memory that states are copied into; see tierload/staging.h.")
      .def(
          "__init__", [](Arena* self, uint64_t bytes) { new (self) Arena(bytes); }, nb::arg("nbytes"))
      .def_prop_ro("nbytes", [](const Arena& self) { return self.memory().size(); })
      .def("prefault", &Arena::prefault, nb::arg("threads"), nb::call_guard<nb::gil_scoped_release>());

  nb::class_<Staging>(module, "Staging", "A copy of pages as they were at one moment; see tierload/staging.h.")
      .def(
          "__init__",
          [](Staging* self, std::shared_ptr<PageSet> pages, const Array<uint8_t>& late, std::shared_ptr<Arena> arena,
             std::shared_ptr<Clone> clone, const StreamPairs& streams) {
            if (late.size() != pages->sources.size()) throw UsageError("`late` has to say something of each page");
            const std::vector<uint8_t> placed = in_order(*pages, span_of(late));
            new (self) Staging(std::move(pages), placed, std::move(arena), std::move(clone), moments_now(streams));
          },
          nb::arg("pages"), nb::arg("late"), nb::arg("arena"), nb::arg("clone").none() = nb::none(),
          nb::arg("streams") = StreamPairs())
      .def("copy_now", &Staging::copy_now, nb::arg("threads"), nb::call_guard<nb::gil_scoped_release>())
      .def("start", &Staging::start)
      .def("help", &Staging::help, nb::arg("threads"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "wait_done",
          [](Staging& self, std::optional<double> seconds) {
            const nb::gil_scoped_release release;
            return self.wait_done(of_seconds(seconds));
          },
          nb::arg("seconds").none(), "Whether nobody reads from the state any more.")
      .def("abandon", &Staging::abandon, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("complete", &Staging::complete)
      .def_prop_ro("keeps_all", &Staging::keeps_all, "Whether every page is still here after it was written.")
      .def(
          "places",
          [](const Staging& self) {
            if (!self.keeps_all()) throw UsageError("a copy in waves has no places for all pages");
            if (!self.pages().order.empty()) throw UsageError("in an order of their own, a chunk's pages lie apart");
            auto places = std::make_unique<std::vector<uint64_t>>();
            for (const PageSource& source : self.sources()) {
              places->push_back(reinterpret_cast<uint64_t>(source.parts[0].base));
            }
            const nb::capsule owner(places.get(),
                                    [](void* at) noexcept { delete static_cast<std::vector<uint64_t>*>(at); });
            std::vector<uint64_t>& kept = *places.release();
            return nb::ndarray<nb::numpy, uint64_t, nb::ndim<1>>(kept.data(), {kept.size()}, owner);
          },
          "The address of each page's copy; those of a chunk by itself lie together.")
      .def_prop_ro("raw_bytes", &Staging::raw_bytes)
      .def_prop_ro("copied_bytes", &Staging::copied_bytes);
}

}  // namespace tierload

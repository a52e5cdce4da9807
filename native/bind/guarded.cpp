#include "bind/guarded.h"

#include <algorithm>

#include "bind/arrays.h"

namespace tierload {

GuardedMemory::GuardedMemory(const Torch& torch, const nb::list& tensors, uint64_t least_bytes) : torch_(torch) {
  for (const nb::handle given : tensors) {
    // What is spread over ranks counts changes in the tensor that its owner has, not in the one that has the memory.
    const bool spread = nb::isinstance<nb::tuple>(given);
    const nb::object item = spread ? nb::object(given[1]) : nb::borrow(given);
    const nb::object counter = spread ? nb::object(given[0]) : nb::none();
    if (!torch.is_tensor(item.ptr())) continue;
    const auto range = torch.range(item.ptr());
    if (!range || range->end - range->start < std::max<uint64_t>(least_bytes, 1)) continue;
    // Other processes change what is shared with them when they like. Of an accelerator's memory torch always says that
    // it is, since it may be.
    if (range->device == 0 && nb::cast<bool>(item.attr("untyped_storage")().attr("is_shared")())) continue;
    // Not of the other one: that of inference mode would count.
    const int64_t version = version_of(item) + (spread ? version_of(counter) : 0);
    tensors_.push_back({item.attr("detach")(), counter, {range->start, range->end}, version});
    ranges_.push_back({range->start, range->end});
  }
  std::sort(ranges_.begin(), ranges_.end(),
            [](const MemoryRange& a, const MemoryRange& b) { return a.start < b.start; });
  size_t last = 0;
  for (const MemoryRange& range : ranges_) {
    if (range.start > ranges_[last].end) ranges_[++last] = range;
    ranges_[last].end = std::max(ranges_[last].end, range.end);
  }
  if (!ranges_.empty()) ranges_.resize(last + 1);
}

int64_t GuardedMemory::version_of(const nb::object& tensor) const {
  static PyObject* const name = PyUnicode_InternFromString("_version");
  const nb::object version = nb::steal(PyObject_GetAttr(tensor.ptr(), name));
  if (!version.is_valid()) throw nb::python_error();
  return nb::cast<int64_t>(version);
}

std::vector<uint8_t> GuardedMemory::holds(std::span<const uint64_t> starts, std::span<const int64_t> lengths) const {
  std::vector<uint8_t> held(starts.size(), 0);
  for (size_t i = 0; i < starts.size(); ++i) {
    const auto after = std::upper_bound(ranges_.begin(), ranges_.end(), starts[i],
                                        [](uint64_t start, const MemoryRange& range) { return start < range.start; });
    if (after == ranges_.begin()) continue;
    held[i] = starts[i] + static_cast<uint64_t>(lengths[i]) <= std::prev(after)->end;
  }
  return held;
}

std::vector<uint64_t> GuardedMemory::changed() const {
  std::vector<uint64_t> bounds;
  for (const Guarded& guarded : tensors_) {
    const bool moved =
        torch_.address(guarded.tensor.ptr()) != guarded.range.start;  // its storage, to be shared or freed
    const int64_t more = guarded.counter.is_none() ? 0 : version_of(guarded.counter);
    if (!moved && version_of(guarded.tensor) + more == guarded.version) continue;
    bounds.push_back(guarded.range.start);
    bounds.push_back(guarded.range.end);
  }
  return bounds;
}

void bind_guarded(nb::module_& module) {
  nb::class_<GuardedMemory>(module, "GuardedMemory", "See native/bind/guarded.h.")
      .def(nb::init<const Torch&, const nb::list&, uint64_t>(), nb::arg("torch"), nb::arg("tensors"),
           nb::arg("least_bytes"), nb::keep_alive<1, 2>(),
           nb::sig("def __init__(self, torch: Torch, tensors: list, least_bytes: int) -> None"))
      .def(
          "holds",
          [](const GuardedMemory& self, const Array<uint64_t>& starts, const Array<int64_t>& lengths) {
            if (starts.size() != lengths.size()) throw UsageError("starts and lengths differ in number");
            return array_of(self.holds(span_of(starts), span_of(lengths)));
          },
          nb::arg("starts"), nb::arg("lengths"))
      .def(
          "changed", [](const GuardedMemory& self) { return array_of(self.changed()); },
          "Start and end in memory of each tensor that was changed in place, or moved, since this was made.");
}

}  // namespace tierload

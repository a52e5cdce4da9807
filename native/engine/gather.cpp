#include "engine/gather.h"

#include <algorithm>
#include <cstring>

#include "tierload/error.h"

namespace tierload {
namespace {

// Items of a size that is known when compiling are copied with one load and one store.
template <uint64_t size>
void copy_items(const std::byte* from, int64_t stride, uint64_t items, std::byte* to) {
  for (uint64_t i = 0; i < items; ++i) {
    std::memcpy(to, from, size);
    from += stride;
    to += size;
  }
}

void copy_row(const std::byte* from, int64_t stride, uint64_t items, uint64_t item_bytes, std::byte* to) {
  switch (item_bytes) {
    case 1:
      return copy_items<1>(from, stride, items, to);
    case 2:
      return copy_items<2>(from, stride, items, to);
    case 4:
      return copy_items<4>(from, stride, items, to);
    case 8:
      return copy_items<8>(from, stride, items, to);
    default:
      for (uint64_t i = 0; i < items; ++i) {
        std::memcpy(to, from, item_bytes);
        from += stride;
        to += item_bytes;
      }
  }
}

}  // namespace

StridedView::StridedView(uint64_t item_size, std::span<const uint64_t> counts, std::span<const int64_t> strides)
    : item_bytes(item_size) {
  if (item_size == 0 || counts.size() != strides.size()) throw UsageError("a strided view needs a stride a dimension");
  // From the innermost out: what lies back to back becomes one long item, and dimensions that continue each other one.
  for (size_t i = counts.size(); i-- > 0;) {
    if (counts[i] == 0) throw UsageError("a strided view without elements");
    if (counts[i] == 1) continue;
    if (dims.empty() && strides[i] == static_cast<int64_t>(item_bytes)) {
      item_bytes *= counts[i];
    } else if (!dims.empty() && strides[i] == dims.back().stride * static_cast<int64_t>(dims.back().count)) {
      dims.back().count *= counts[i];
    } else {
      dims.push_back({counts[i], strides[i]});
    }
  }
  if (dims.empty()) dims.push_back({1, 0});
}

uint64_t StridedView::bytes() const {
  uint64_t total = item_bytes;
  for (const Dim& dim : dims) total *= dim.count;
  return total;
}

void gather(const StridedView& view, const std::byte* base, uint64_t from, MutableBytes into) {
  const uint64_t item = view.item_bytes;
  const StridedView::Dim inner = view.dims.front();
  for (uint64_t done = 0; done < into.size();) {
    const uint64_t at = (from + done) / item;
    const uint64_t within = (from + done) % item;
    uint64_t rest = at;
    const std::byte* row = base;  // of the item, in the end
    for (const StridedView::Dim& dim : view.dims) {
      row += static_cast<int64_t>(rest % dim.count) * dim.stride;
      rest /= dim.count;
    }
    const uint64_t left = into.size() - done;
    if (within != 0 || left < item) {  // the range begins or ends within an item
      const uint64_t part = std::min(item - within, left);
      std::memcpy(into.data() + done, row + within, part);
      done += part;
      continue;
    }
    const uint64_t items = std::min(inner.count - at % inner.count, left / item);
    copy_row(row, inner.stride, items, item, into.data() + done);
    done += items * item;
  }
}

Bytes raw_bytes(const PageSource& source, std::vector<std::byte>& gathered) {
  if (source.parts.size() == 1 && !source.parts[0].view) return {source.parts[0].base, source.parts[0].length};
  uint64_t total = 0;
  for (const SourcePart& part : source.parts) total += part.length;
  gathered.resize(total);
  MutableBytes left = gathered;
  for (const SourcePart& part : source.parts) {
    if (part.view) {
      gather(*part.view, part.base, part.from, left.first(part.length));
    } else {
      std::memcpy(left.data(), part.base, part.length);
    }
    left = left.subspan(part.length);
  }
  return gathered;
}

}  // namespace tierload

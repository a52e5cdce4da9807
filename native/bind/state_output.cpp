// What a walk over a state leaves: its document, what keeps its memory, and room for the next walk.

#include "bind/state_writer.h"
#include "bind/texts.h"

namespace tierload {
namespace {

constexpr size_t spare_bytes_max = 8 << 20;  // of memory that is kept between two saves, and as much for their leaves

}  // namespace

// The memory of the last writer, for the next one: to ask the system for it at every save takes longer than the walk.
struct StateWriter::Spare {
  Buffers buffers;
  Leaves leaves;
};

StateWriter::Spare& StateWriter::spare() {
  static Spare* const spare = new Spare;  // lives as long as the process; the GIL guards it
  return *spare;
}

void StateWriter::Buffers::clear() {
  text.clear();
  document.clear();
  holes.clear();
  tensors.clear();
  leaf_holes.clear();
  kept.clear();
  seen.clear();
}

size_t StateWriter::Buffers::capacity_bytes() const {
  return text.capacity() + document.capacity() + seen.capacity_bytes() + leaf_holes.capacity() * sizeof(uint32_t) +
         (holes.capacity() + tensors.capacity() + kept.capacity()) * sizeof(size_t);
}

StateWriter::StateWriter(const Torch& torch) : torch_(torch) {
  std::swap(buffers_, spare().buffers);
  std::swap(leaves_, spare().leaves);
}

StateWriter::~StateWriter() {
  leaves_.clear();
  if (leaves_.capacity_bytes() <= spare_bytes_max) std::swap(leaves_, spare().leaves);
}

nb::tuple StateWriter::leaf(uint32_t number) const {
  const nb::object& tensor = buffers_.tensors.at(number);
  const bool detached = (leaves_[number].marks & mark_detached) != 0;
  return nb::make_tuple(detached ? tensor.attr("detach")() : tensor, text_of(leaves_.key(number)),
                        buffers_.leaf_holes[number]);
}

nb::list StateWriter::release() {
  const nb::list out = nb::steal<nb::list>(PyList_New(static_cast<Py_ssize_t>(buffers_.tensors.size())));
  if (!out.is_valid()) throw nb::python_error();
  for (size_t number = 0; number < buffers_.tensors.size(); ++number) {
    // Its memory is kept alive, not the graph that it came out of. The parameters of a module have none.
    nb::object& tensor = buffers_.tensors[number];
    const uint8_t marks = leaves_[number].marks;
    const bool differentiable =
        (marks & mark_detached) != 0 ? !torch_.is_parameter(tensor.ptr()) : (marks & mark_grad) != 0;
    if (differentiable && torch_.has_graph(tensor.ptr())) {
      tensor = tensor.attr("detach")();
    }
    PyList_SET_ITEM(out.ptr(), static_cast<Py_ssize_t>(number), tensor.release().ptr());
  }
  buffers_.clear();
  if (buffers_.capacity_bytes() <= spare_bytes_max) std::swap(buffers_, spare().buffers);
  buffers_ = {};
  return out;
}

std::string_view StateWriter::document(const ChunkOrder& order,
                                       const std::vector<std::pair<uint32_t, nb::str>>& texts) {
  constexpr uint32_t none = 0xFFFFFFFF;
  std::vector<uint32_t> chunk_of(buffers_.holes.size(), none);
  std::vector<const nb::str*> text_of(buffers_.holes.size(), nullptr);
  for (uint32_t chunk = 0; chunk < order.chunks().size(); ++chunk) {
    const uint32_t leaf = order.chunks()[chunk];
    if (leaf < leaves_.count()) chunk_of[buffers_.leaf_holes[leaf]] = chunk;
  }
  for (const auto& [hole, text] : texts) text_of.at(hole) = &text;
  std::string& out = buffers_.document;
  out.clear();
  out.reserve(text_.size() + 40 * buffers_.holes.size());
  size_t from = 0;
  for (size_t hole = 0; hole < buffers_.holes.size(); ++hole) {
    out.append(text_, from, buffers_.holes[hole] - from);
    from = buffers_.holes[hole];
    if (text_of[hole] != nullptr) {
      out += text_of[hole]->c_str();
    } else if (chunk_of[hole] != none) {
      leaves_.describe(order.chunks()[chunk_of[hole]], chunk_of[hole], out);
    } else {
      throw UsageError("nothing was given for a hole in the document");
    }
  }
  return out.append(text_, from);
}

}  // namespace tierload

#include "bind/state_writer.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cmath>

#include "bind/texts.h"

namespace tierload {
namespace {

constexpr int64_t depth_max = 500;  // DEPTH_MAX of tierload/state/keys.py, which refuses what is deeper

nb::object ordered_dict() { return nb::module_::import_("collections").attr("OrderedDict"); }

// Whether all keys of a dict can be written here: plain text, or integers too; says whether all are text.
bool plain_keys(PyObject* dict, bool& all_text) {
  Py_ssize_t at = 0;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  all_text = true;
  while (PyDict_Next(dict, &at, &key, &value)) {
    if (!is_plain_key(key)) return false;
    all_text = all_text && PyUnicode_CheckExact(key);
  }
  return true;
}

}  // namespace

void StateWriter::write(nb::handle state, nb::handle root, nb::handle encode) {
  encode_ = encode;
  value(state, {root, {}, 0});
  for (size_t steps = 0; !frames_.empty(); ++steps) {
    if (steps % 1024 == 0 && PyErr_CheckSignals() != 0) throw nb::python_error();
    step();
  }
}

int64_t StateWriter::met(nb::handle value) {
  const auto [found, fresh] = seen_.try_emplace(value.ptr(), count_);
  if (!fresh) return found->second;
  ++count_;
  kept_.push_back(nb::borrow(value));
  return -1;
}

void StateWriter::append(const nb::str& text) { text_ += text.c_str(); }

uint32_t StateWriter::hole() {
  holes_.push_back(text_.size());
  return static_cast<uint32_t>(holes_.size() - 1);
}

nb::tuple StateWriter::leaf(uint32_t number) const {
  const std::string_view key = leaves_.key(number);
  PyObject* text = PyUnicode_DecodeUTF8(key.data(), static_cast<Py_ssize_t>(key.size()), "surrogatepass");
  return nb::make_tuple(tensors_.at(number), nb::steal(text), leaf_holes_.at(number));
}

nb::list StateWriter::tensors() const {
  nb::list out;
  for (size_t number = 0; number < tensors_.size(); ++number) {
    // Its memory is kept alive, not the graph that it came out of.
    const nb::object& tensor = tensors_[number];
    const bool has_graph = (leaves_[number].marks & mark_grad) != 0 && !tensor.attr("grad_fn").is_none();
    out.append(has_graph ? tensor.attr("detach")() : tensor);
  }
  return out;
}

void StateWriter::release() {
  tensors_.clear();
  kept_.clear();
  seen_.clear();
  text_ = {};
  holes_ = {};
}

std::string StateWriter::document(const ChunkOrder& order,
                                  const std::vector<std::pair<uint32_t, nb::str>>& texts) const {
  constexpr uint32_t none = 0xFFFFFFFF;
  std::vector<uint32_t> chunk_of(holes_.size(), none);
  std::vector<const nb::str*> text_of(holes_.size(), nullptr);
  for (uint32_t chunk = 0; chunk < order.chunks().size(); ++chunk) {
    const uint32_t leaf = order.chunks()[chunk];
    if (leaf < leaves_.count()) chunk_of[leaf_holes_[leaf]] = chunk;
  }
  for (const auto& [hole, text] : texts) text_of.at(hole) = &text;
  std::string out;
  out.reserve(text_.size() + 40 * holes_.size());
  size_t from = 0;
  for (size_t hole = 0; hole < holes_.size(); ++hole) {
    out.append(text_, from, holes_[hole] - from);
    from = holes_[hole];
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

// The next member of the topmost container.
void StateWriter::step() {
  Frame& frame = frames_.back();
  PyObject* key = nullptr;
  PyObject* item = nullptr;
  if (frame.kind == Kind::mapping) {
    if (!PyDict_Next(frame.holder.ptr(), &frame.at, &key, &item)) item = nullptr;
    // The user's code may have changed it since it was opened, and even put other keys in the place of some.
    const bool same = PyDict_GET_SIZE(frame.holder.ptr()) == frame.size &&
                      (item != nullptr) == (frame.written < frame.size) &&
                      (item == nullptr || (PyUnicode_CheckExact(key) && is_plain_text(key)));
    if (!same) throw nb::value_error("a dict changed while it was saved");
  } else if (frame.at < PyList_GET_SIZE(frame.holder.ptr())) {
    item = PyList_GET_ITEM(frame.holder.ptr(), frame.at++);
  }
  if (frame.kind == Kind::pairs && frame.written != 0) text_ += ']';
  if (item == nullptr) {
    text_ += frame.end;
    frames_.pop_back();
    return;
  }
  if (frame.kind == Kind::parts) {
    if (PyUnicode_Check(item)) {
      append(nb::borrow<nb::str>(item));
    } else {
      const nb::object part = nb::borrow(item);
      value(PyTuple_GET_ITEM(item, 0), {PyTuple_GET_ITEM(item, 1), {}, 0});
    }
    return;
  }
  if (frame.written++ != 0) text_ += ',';
  // User code may run below, and throw the member out of its container.
  const nb::object kept_key = nb::borrow(key);
  const nb::object kept_item = nb::borrow(item);
  switch (frame.kind) {
    case Kind::mapping:
      put_quoted(text_, key);
      text_ += ':';
      value(item, {{}, key, 0});
      break;
    case Kind::pairs:
      // An OrderedDict may have been given `items` of its own.
      if (!PyTuple_CheckExact(item) || PyTuple_GET_SIZE(item) != 2 || !is_plain_key(PyTuple_GET_ITEM(item, 0))) {
        throw nb::type_error("the items of a dict are no pairs of its keys and values");
      }
      text_ += '[';
      key = PyTuple_GET_ITEM(item, 0);
      put_key(text_, key);
      text_ += ',';
      value(PyTuple_GET_ITEM(item, 1), {{}, key, 0});
      break;
    default:
      value(item, {{}, {}, frame.at - 1});
  }
}

void StateWriter::value(nb::handle value, const Place& place) {
  if (!scalar(value.ptr()) && !tensor(value, place) && !container(value, place)) other(value, place);
}

bool StateWriter::scalar(PyObject* value) {
  if (value == Py_None) {
    text_ += "null";
  } else if (value == Py_True) {
    text_ += "true";
  } else if (value == Py_False) {
    text_ += "false";
  } else if (PyFloat_CheckExact(value) && std::isfinite(PyFloat_AS_DOUBLE(value))) {
    char* digits = PyOS_double_to_string(PyFloat_AS_DOUBLE(value), 'r', 0, Py_DTSF_ADD_DOT_0, nullptr);
    if (digits == nullptr) throw nb::python_error();
    text_ += digits;
    PyMem_Free(digits);
  } else if (const auto number = small_integer(value)) {
    text_ += std::to_string(*number);
  } else if (PyUnicode_CheckExact(value) && is_plain_text(value)) {
    put_quoted(text_, value);
  } else {
    return false;
  }
  return true;
}

bool StateWriter::tensor(nb::handle value, const Place& place) {
  if (!torch_.is_tensor(value.ptr()) || depth_of(place) > depth_max) return false;
  const auto plain = torch_.plain(value.ptr());
  if (!plain) return false;
  Leaf leaf{};
  leaf.start = reinterpret_cast<uint64_t>(plain->data);
  leaf.bytes = plain->bytes;
  leaf.dtype = plain->dtype->code;
  leaf.marks = plain->marks;
  leaves_.add(leaf, plain->shape, key_of(place));
  tensors_.push_back(nb::borrow(value));
  text_ += "{\"t\":";
  leaf_holes_.push_back(hole());
  text_ += '}';
  return true;
}

// A reference, when the container has been met before.
bool StateWriter::refer(nb::handle value) {
  const int64_t number = met(value);
  if (number >= 0) text_ += "{\"ref\":" + std::to_string(number) + '}';
  return number >= 0;
}

bool StateWriter::container(nb::handle value, const Place& place) {
  if (depth_of(place) > depth_max) return false;
  if (PyList_CheckExact(value.ptr())) {
    if (refer(value)) return true;
    text_ += '[';
    push(Kind::sequence, nb::borrow(value), "]", place);
    return true;
  }
  if (PyTuple_CheckExact(value.ptr())) {
    text_ += "{\"tuple\":[";
    push(Kind::sequence, nb::steal(PySequence_List(value.ptr())), "]}", place);
    return true;
  }
  static PyObject* const ordered = ordered_dict().release().ptr();
  const bool is_ordered = Py_TYPE(value.ptr()) == reinterpret_cast<PyTypeObject*>(ordered);
  bool all_text = false;
  if ((!PyDict_CheckExact(value.ptr()) && !is_ordered) || !plain_keys(value.ptr(), all_text)) return false;
  if (refer(value)) return true;
  if (all_text && !is_ordered) {
    text_ += "{\"d\":{";
    push(Kind::mapping, nb::borrow(value), "}}", place);
    return true;
  }
  const nb::object items = nb::steal(PyMapping_Items(value.ptr()));
  if (!items.is_valid()) throw nb::python_error();
  const nb::object metadata = is_ordered ? nb::getattr(value, "_metadata", nb::none()) : nb::none();
  if (metadata.is_none()) {
    text_ += is_ordered ? "{\"odict\":[" : "{\"map\":[";
    push(Kind::pairs, items, "]}", place);
    return true;
  }
  nb::list after;
  after.append("],\"metadata\":");
  after.append(nb::make_tuple(metadata, path_of(place).attr("inner")()));
  after.append("}}");
  text_ += "{\"statedict\":{\"items\":[";
  push(Kind::parts, after, "", place);
  // The same place as the frame below it, which stands for what follows.
  const nb::object path = path_of(frames_.size() - 1);
  push(Kind::pairs, items, "", {path, {}, 0});
  return true;
}

void StateWriter::other(nb::handle value, const Place& place) {
  const nb::object path = path_of(place);
  const nb::object parts = encode_(value, path);
  if (!nb::isinstance<nb::list>(parts)) throw UsageError("an encoder gave no list");
  if (PyList_GET_SIZE(parts.ptr()) == 1 && PyUnicode_Check(PyList_GET_ITEM(parts.ptr(), 0))) {
    append(nb::borrow<nb::str>(PyList_GET_ITEM(parts.ptr(), 0)));
  } else {
    push(Kind::parts, parts, "", {path, {}, 0});
  }
}

void StateWriter::push(Kind kind, nb::object holder, const char* end, const Place& place) {
  if (!holder.is_valid()) throw nb::python_error();
  Frame frame{kind, std::move(holder), end, {}, {}, {}, 0};
  if (kind != Kind::parts) frame.key = key_of(place);  // parts say where they stand
  if (kind == Kind::mapping) frame.size = PyDict_GET_SIZE(frame.holder.ptr());
  frame.depth = depth_of(place);
  if (place.path.is_valid()) {
    frame.path = nb::borrow(place.path);
  } else {
    frame.element = place.key.is_valid() ? nb::borrow(place.key) : nb::object(nb::int_(place.index));
  }
  frames_.push_back(std::move(frame));
}

int64_t StateWriter::depth_of(const Place& place) const {
  return place.path.is_valid() ? nb::cast<int64_t>(place.path.attr("depth")) : frames_.back().depth + 1;
}

std::string StateWriter::key_of(const Place& place) const {
  if (place.path.is_valid()) return utf8_of(place.path.attr("text")());
  std::string key = frames_.back().key;
  if (!key.empty()) key += '/';
  put_element(key, place.key.ptr(), place.index);
  return key;
}

nb::object StateWriter::path_of(const Place& place) {
  if (place.path.is_valid()) return nb::borrow(place.path);
  const nb::object above = path_of(frames_.size() - 1);
  return place.key.is_valid() ? above.attr("child")(place.key) : above.attr("child")(place.index);
}

// Makes the paths that are missing from the last one that there is up to `frame`; the first frame has one.
nb::object StateWriter::path_of(size_t frame) {
  size_t first = frame;
  while (!frames_[first].path.is_valid()) --first;
  for (size_t i = first + 1; i <= frame; ++i) frames_[i].path = frames_[i - 1].path.attr("child")(frames_[i].element);
  return frames_[frame].path;
}

}  // namespace tierload

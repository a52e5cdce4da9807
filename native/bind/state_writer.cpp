#include "bind/state_writer.h"

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
  const auto [number, fresh] = buffers_.seen.add(value.ptr(), count_);
  if (!fresh) return number;
  ++count_;
  buffers_.kept.push_back(nb::borrow(value));
  return -1;
}

void StateWriter::append(const nb::str& text) { text_ += text.c_str(); }

uint32_t StateWriter::hole() {
  buffers_.holes.push_back(text_.size());
  return static_cast<uint32_t>(buffers_.holes.size() - 1);
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
  } else if (frame.kind == Kind::module) {
    return member_of_module(frame);
  } else if (frame.kind == Kind::optimizer) {
    return state_of_optimizer(frame);
  } else if (frame.at < PyList_GET_SIZE(frame.holder.ptr())) {
    item = PyList_GET_ITEM(frame.holder.ptr(), frame.at++);
  }
  if (frame.kind == Kind::pairs && frame.written != 0) text_ += ']';
  if (item == nullptr) {
    pop();
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

// The next pair of a module's state, as of an OrderedDict that state_dict() made.
void StateWriter::member_of_module(Frame& frame) {
  const auto& state = *nb::inst_ptr<ModuleState>(frame.holder);
  if (frame.written != 0) text_ += ']';
  if (static_cast<size_t>(frame.at) == state.members().size()) {
    text_ += "],\"metadata\":{\"odict\":[";
    text_ += state.metadata();
    count_ += 1 + static_cast<uint32_t>(state.modules());
    return pop();
  }
  const ModuleState::Member& member = state.members()[static_cast<size_t>(frame.at++)];
  const std::string_view name = state.name(member);
  text_ += frame.written++ == 0 ? "[\"" : ",[\"";
  text_ += name;
  text_ += "\",";
  const Place place{{}, {}, 0, &name};
  if (!tensor(member.tensor, place, true)) value(member.tensor.attr("detach")(), place);
}

// The next pair of the states of an optimizer.
void StateWriter::state_of_optimizer(Frame& frame) {
  const auto& state = *nb::inst_ptr<OptimizerState>(frame.holder);
  if (frame.written != 0) text_ += ']';
  if (static_cast<size_t>(frame.at) == state.rows().size()) return pop();
  const OptimizerState::Row& row = state.rows()[static_cast<size_t>(frame.at++)];
  const std::string_view name = state.name(row.position);
  text_ += frame.written++ == 0 ? "[" : ",[";
  text_ += std::to_string(row.position);
  text_ += ',';
  value(row.value, {{}, {}, 0, &name});
}

void StateWriter::pop() {
  text_ += frames_.back().end;
  keys_.resize(frames_.back().key_at);
  frames_.pop_back();
}

void StateWriter::value(nb::handle value, const Place& place) {
  if (!tensor(value, place) && !scalar(value.ptr()) && !container(value, place)) other(value, place);
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

// A plain tensor; `detached`: what detach() gives of it.
bool StateWriter::tensor(nb::handle value, const Place& place, bool detached) {
  if (!torch_.is_tensor(value.ptr()) || depth_of(place) > depth_max) return false;
  const auto plain = torch_.plain(value.ptr(), detached);
  if (!plain) return false;
  Leaf leaf{};
  leaf.start = reinterpret_cast<uint64_t>(plain->data);
  leaf.bytes = plain->bytes;
  leaf.dtype = plain->dtype->code;
  leaf.marks = plain->marks;
  leaf.device = plain->device;
  put_key_of(place, leaves_.next_key());
  leaves_.add(leaf, plain->shape);
  buffers_.tensors.push_back(nb::borrow(value));
  text_ += "{\"t\":";
  buffers_.leaf_holes.push_back(hole());
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
  if (nb::isinstance<ModuleState>(value)) {
    ++count_;
    text_ += "{\"statedict\":{\"items\":[";
    return push(Kind::module, nb::borrow(value), "]}}}", place);
  }
  if (nb::isinstance<OptimizerState>(value)) return push(Kind::optimizer, nb::borrow(value), "", place);
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
  Frame frame{kind, std::move(holder), end, keys_.size(), 0, {}, {}, {}, depth_of(place)};
  if (kind != Kind::parts) {  // parts say where they stand
    put_key_of(place, keys_);
    frame.key_bytes = keys_.size() - frame.key_at;
  }
  if (kind == Kind::mapping) frame.size = PyDict_GET_SIZE(frame.holder.ptr());
  if (place.path.is_valid()) {
    frame.path = nb::borrow(place.path);
  } else if (place.name != nullptr) {
    frame.name = *place.name;
  } else {
    frame.element = element_of(place);
  }
  frames_.push_back(std::move(frame));
}

int64_t StateWriter::depth_of(const Place& place) const {
  return place.path.is_valid() ? nb::cast<int64_t>(place.path.attr("depth")) : frames_.back().depth + 1;
}

void StateWriter::put_key_of(const Place& place, std::string& out) const {
  if (place.path.is_valid()) {
    out += utf8_of(place.path.attr("text")());
    return;
  }
  const Frame& above = frames_.back();
  out.append(keys_, above.key_at, above.key_bytes);
  if (above.key_bytes != 0) out += '/';
  if (place.name != nullptr) {
    put_element(out, *place.name);
  } else {
    put_element(out, place.key.ptr(), place.index);
  }
}

nb::object StateWriter::element_of(const Place& place) const {
  if (place.key.is_valid()) return nb::borrow(place.key);
  return place.name == nullptr ? nb::object(nb::int_(place.index)) : nb::object(text_of(*place.name));
}

nb::object StateWriter::path_of(const Place& place) {
  if (place.path.is_valid()) return nb::borrow(place.path);
  return path_of(frames_.size() - 1).attr("child")(element_of(place));
}

// Makes the paths that are missing from the last one that there is up to `frame`; the first frame has one.
nb::object StateWriter::path_of(size_t frame) {
  size_t first = frame;
  while (!frames_[first].path.is_valid()) --first;
  for (size_t i = first + 1; i <= frame; ++i) {
    const nb::object element =
        frames_[i].element.is_valid() ? frames_[i].element : nb::object(text_of(frames_[i].name));
    frames_[i].path = frames_[i - 1].path.attr("child")(element);
  }
  return frames_[frame].path;
}

}  // namespace tierload

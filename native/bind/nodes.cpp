#include "bind/nodes.h"

#include <cstring>
#include <unordered_map>
#include <vector>

#include "state/json.h"

namespace tierload {
namespace {

class NodeBuilder : public JsonHandler {
 public:
  void null() override { put(nb::none()); }
  void boolean(bool value) override { put(nb::bool_(value)); }
  void integer(int64_t value) override { put(made(PyLong_FromLongLong(value))); }
  void real(double value) override { put(made(PyFloat_FromDouble(value))); }
  void string(std::string_view value, bool ascii) override { put(text(value, ascii)); }

  void name(std::string_view value, bool ascii) override {
    // The few names that every document has, again and again, are made once.
    if (value.size() > sizeof(uint64_t)) {
      open_.back().name = text(value, ascii);
      return;
    }
    uint64_t packed = 0;
    std::memcpy(&packed, value.data(), value.size());
    nb::object& known = names_[value.size()][packed];
    if (!known.is_valid()) known = text(value, ascii);
    open_.back().name = known;
  }

  void open(bool object) override { open_.push_back({made(object ? PyDict_New() : PyList_New(0)), {}, 0}); }

  void close() override {
    const Open done = std::move(open_.back());
    open_.pop_back();
    if (PyDict_CheckExact(done.container.ptr()) && PyDict_GET_SIZE(done.container.ptr()) != done.members) {
      throw CorruptError("the state document names a member of an object twice");
    }
    put(done.container);
  }

  nb::object root() { return std::move(root_); }

 private:
  struct Open {
    nb::object container;
    nb::object name;
    Py_ssize_t members;
  };

  static nb::object made(PyObject* object) {
    if (object == nullptr) throw nb::python_error();
    return nb::steal(object);
  }

  static nb::object text(std::string_view value, bool ascii) {
    const auto length = static_cast<Py_ssize_t>(value.size());
    return made(ascii ? PyUnicode_DecodeASCII(value.data(), length, nullptr)
                      : PyUnicode_DecodeUTF8(value.data(), length, "surrogatepass"));
  }

  void put(const nb::object& value) {
    if (open_.empty()) {
      root_ = value;
      return;
    }
    Open& into = open_.back();
    ++into.members;
    const int failed = PyList_CheckExact(into.container.ptr())
                           ? PyList_Append(into.container.ptr(), value.ptr())
                           : PyDict_SetItem(into.container.ptr(), into.name.ptr(), value.ptr());
    if (failed != 0) throw nb::python_error();
  }

  std::vector<Open> open_;
  std::unordered_map<uint64_t, nb::object> names_[sizeof(uint64_t) + 1];
  nb::object root_;
};

}  // namespace

bool is_scalar(PyObject* node) {
  return node == Py_None || PyBool_Check(node) || PyUnicode_CheckExact(node) || PyLong_CheckExact(node) ||
         PyFloat_CheckExact(node);
}

namespace {

bool holds_others(PyObject* node) {
  if (is_scalar(node)) return false;
  if (!PyDict_CheckExact(node) || PyDict_GET_SIZE(node) != 1) return true;
  static PyObject* const t = PyUnicode_InternFromString("t");  // never destroyed
  return PyDict_Contains(node, t) != 1;
}

}  // namespace

nb::list inner_nodes(const nb::object& container) {
  nb::list inner;
  if (PyDict_CheckExact(container.ptr())) {
    Py_ssize_t at = 0;
    PyObject* key = nullptr;
    PyObject* node = nullptr;
    while (PyDict_Next(container.ptr(), &at, &key, &node)) {
      if (holds_others(node)) inner.append(nb::make_tuple(nb::handle(key), nb::handle(node)));
    }
    return inner;
  }
  const auto nodes = nb::cast<nb::list>(container);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(nodes.ptr()); ++i) {
    PyObject* node = PyList_GET_ITEM(nodes.ptr(), i);
    if (holds_others(node)) inner.append(nb::make_tuple(i, nb::handle(node)));
  }
  return inner;
}

nb::object parse_nodes(std::string_view document) {
  NodeBuilder builder;
  JsonReader(document, builder).read();
  return builder.root();
}

}  // namespace tierload

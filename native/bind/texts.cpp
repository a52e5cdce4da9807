#include "bind/texts.h"

#include <algorithm>
#include <climits>
#include <string_view>

namespace tierload {
namespace {

std::string_view ascii_of(PyObject* text) {
  return {reinterpret_cast<const char*>(PyUnicode_1BYTE_DATA(text)), static_cast<size_t>(PyUnicode_GET_LENGTH(text))};
}

}  // namespace

bool is_plain_text(PyObject* text) {
  if (!PyUnicode_IS_ASCII(text)) return false;
  return std::ranges::all_of(ascii_of(text), [](char c) { return c >= ' ' && c <= '~' && c != '"' && c != '\\'; });
}

std::optional<int64_t> small_integer(PyObject* value) {
  if (!PyLong_CheckExact(value)) return std::nullopt;
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
  if (overflow != 0 || number == LLONG_MIN) return std::nullopt;
  return number;
}

bool is_plain_key(PyObject* key) {
  return PyUnicode_CheckExact(key) ? is_plain_text(key) : small_integer(key).has_value();
}

void put_quoted(std::string& out, PyObject* text) {
  out += '"';
  out += ascii_of(text);
  out += '"';
}

void put_key(std::string& out, PyObject* key) {
  if (PyUnicode_Check(key)) {
    put_quoted(out, key);
  } else {
    out += std::to_string(*small_integer(key));
  }
}

void put_element(std::string& out, PyObject* key, Py_ssize_t index) {
  if (key == nullptr || !PyUnicode_Check(key)) {
    out += '#';
    out += std::to_string(key == nullptr ? index : *small_integer(key));
    return;
  }
  const std::string_view text = ascii_of(key);
  if (text.empty()) {
    out += "~3";
    return;
  }
  size_t from = 0;
  if (text[0] == '#') {
    out += "~2";
    from = 1;
  }
  for (const char c : text.substr(from)) {
    if (c == '~') {
      out += "~0";
    } else if (c == '/') {
      out += "~1";
    } else {
      out += c;
    }
  }
}

std::string utf8_of(nb::handle text) {
  const nb::object encoded = nb::steal(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "surrogatepass"));
  if (!encoded.is_valid()) throw nb::python_error();
  return {PyBytes_AS_STRING(encoded.ptr()), static_cast<size_t>(PyBytes_GET_SIZE(encoded.ptr()))};
}

}  // namespace tierload

#include "bind/texts.h"

#include <climits>
#include <cstring>
#include <string_view>

namespace tierload {
namespace {

// Characters are looked at eight at a time. The highest bit of each byte of an answer says whether it is a hit.
constexpr uint64_t ones = 0x0101010101010101;
constexpr uint64_t high = 0x80 * ones;

// Hits for a character among bytes below 128; there may be false ones, but only above a true one.
constexpr uint64_t equal(uint64_t bytes, char character) {
  const uint64_t zeros = bytes ^ (static_cast<unsigned char>(character) * ones);
  return (zeros - ones) & ~zeros & high;
}

template <typename Hits>
bool none_of_eight(std::string_view text, Hits hits) {
  uint64_t bytes = 'a' * ones;
  if (text.size() < sizeof bytes) {
    for (const char c : text) bytes = bytes << 8 | static_cast<unsigned char>(c);
    return hits(bytes) == 0;
  }
  for (size_t at = 0; at + sizeof bytes < text.size(); at += sizeof bytes) {
    std::memcpy(&bytes, text.data() + at, sizeof bytes);
    if (hits(bytes) != 0) return false;
  }
  std::memcpy(&bytes, text.data() + text.size() - sizeof bytes, sizeof bytes);
  return hits(bytes) == 0;
}

}  // namespace

std::string_view ascii_of(PyObject* text) {
  return {reinterpret_cast<const char*>(PyUnicode_1BYTE_DATA(text)), static_cast<size_t>(PyUnicode_GET_LENGTH(text))};
}

bool is_plain_text(std::string_view text) {
  return none_of_eight(text, [](uint64_t bytes) {
    const uint64_t low = bytes & ~high;
    const uint64_t control = ~(low + 0x60 * ones) & high;  // below ' '
    const uint64_t above = (low + ones) & high;            // 127
    return (bytes & high) | control | above | equal(low, '"') | equal(low, '\\');
  });
}

bool is_plain_text(PyObject* text) { return PyUnicode_IS_ASCII(text) && is_plain_text(ascii_of(text)); }

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
  } else {
    put_element(out, ascii_of(key));
  }
}

void put_element(std::string& out, std::string_view text) {
  if (text.empty()) {
    out += "~3";
    return;
  }
  if (none_of_eight(text, [](uint64_t bytes) { return equal(bytes, '#') | equal(bytes, '~') | equal(bytes, '/'); })) {
    out += text;
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

nb::str text_of(std::string_view utf8) {
  PyObject* text = PyUnicode_DecodeUTF8(utf8.data(), static_cast<Py_ssize_t>(utf8.size()), "surrogatepass");
  if (text == nullptr) throw nb::python_error();
  return nb::steal<nb::str>(text);
}

}  // namespace tierload

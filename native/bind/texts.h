// Text of the state document and of keys, for values that need no escaping; all others are written by Python
// (tierload/state/texts.py and keys.py), by the same rules.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "bind/bind.h"

namespace tierload {

// Whether a text is printable ASCII without quotes and backslashes: it stands in JSON as it is.
bool is_plain_text(std::string_view text);
bool is_plain_text(PyObject* text);
// The characters of a str that is ASCII.
std::string_view ascii_of(PyObject* text);
// The value of an int with fewer than 64 bits (which excludes -2⁶³); a bool is none.
std::optional<int64_t> small_integer(PyObject* value);
// Whether a key of a dict is written as it is: plain text, or a small integer.
bool is_plain_key(PyObject* key);
// A plain text with quotes around it.
void put_quoted(std::string& out, PyObject* text);
// A plain key.
void put_key(std::string& out, PyObject* key);
// One element of a key text: a name, a key of a dict, or without one an index.
void put_element(std::string& out, std::string_view name);
void put_element(std::string& out, PyObject* key, Py_ssize_t index);
// A str in UTF-8, where a lone surrogate has three bytes.
std::string utf8_of(nb::handle text);
// The same back.
nb::str text_of(std::string_view utf8);

}  // namespace tierload

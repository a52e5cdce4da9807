// A state → the text of its document and the rows of its plain tensors (docs/FORMAT.md section 8).
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "bind/torch.h"
#include "state/leaves.h"

namespace tierload {

// Walks containers of the ordinary types without Python's interpreter. Every value of another type goes to `encode`,
// which gives back text of the document and, between it, values with their places (tierload/state/keys.py, Path).
//
// Text that depends on the numbers of chunks is left out: a hole is kept for it.
class StateWriter {
 public:
  explicit StateWriter(const Torch& torch) : torch_(torch) {}

  void write(nb::handle state, nb::handle root, nb::handle encode);

  // The number that references call a container by, when it has been met before, else -1 and it gets the next one.
  int64_t met(nb::handle value);
  // A value that nothing refers to, but that is counted.
  void count() { ++count_; }
  void append(const nb::str& text);
  // Keeps a place for text that comes later; its number.
  uint32_t hole();

  const Leaves& leaves() const { return leaves_; }
  // Tensor, key and hole of a leaf.
  nb::tuple leaf(uint32_t number) const;
  // What keeps the memory of all leaves alive.
  nb::list tensors() const;
  // Forgets the values of the state, which then live no longer than they would; keys, dtypes and shapes stay.
  void release();
  // The document, with each chunk's text in the hole of its leaf, and `texts` in the holes of others.
  std::string document(const ChunkOrder& order, const std::vector<std::pair<uint32_t, nb::str>>& texts) const;

 private:
  enum class Kind : uint8_t { mapping, sequence, pairs, parts };

  // A container that is being written. Its place is known by its key, and to Python by a Path that is made when asked.
  struct Frame {
    Kind kind;
    nb::object holder;
    const char* end;  // what is written after the last member
    std::string key;
    nb::object path;
    nb::object element;  // its key or index in the frame below
    int64_t depth;
    Py_ssize_t at = 0;
    Py_ssize_t written = 0;
    Py_ssize_t size = 0;  // of a mapping when it was opened
  };

  // Where a value stands: at a Path of Python's, or at a key or (without one) an index of the topmost frame.
  struct Place {
    nb::handle path;
    nb::handle key;
    Py_ssize_t index;
  };

  void step();
  void value(nb::handle value, const Place& place);
  bool scalar(PyObject* value);
  bool tensor(nb::handle value, const Place& place);
  bool container(nb::handle value, const Place& place);
  void other(nb::handle value, const Place& place);
  bool refer(nb::handle value);
  void push(Kind kind, nb::object holder, const char* end, const Place& place);
  int64_t depth_of(const Place& place) const;
  std::string key_of(const Place& place) const;
  nb::object path_of(const Place& place);
  nb::object path_of(size_t frame);

  const Torch& torch_;
  nb::handle encode_;
  std::string text_;
  std::vector<size_t> holes_;  // positions in text_
  Leaves leaves_;
  std::vector<nb::object> tensors_;   // of each leaf
  std::vector<uint32_t> leaf_holes_;  // of each leaf
  std::vector<Frame> frames_;
  std::unordered_map<PyObject*, int64_t> seen_;
  std::vector<nb::object> kept_;  // what has an identity in seen_ must not be freed before the end
  int64_t count_ = 0;
};

void bind_state_writer(nb::module_& module);

}  // namespace tierload

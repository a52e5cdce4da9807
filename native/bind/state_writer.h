// A state → the text of its document and the rows of its plain tensors (docs/FORMAT.md section 8).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "bind/identities.h"
#include "bind/modules.h"
#include "bind/optimizers.h"
#include "bind/torch.h"
#include "state/leaves.h"

namespace tierload {

// Walks containers of the ordinary types without Python's interpreter. Every value of another type goes to `encode`,
// which gives back text of the document and, between it, values with their places (tierload/state/keys.py, Path).
//
// Text that depends on the numbers of chunks is left out: a hole is kept for it.
class StateWriter {
 public:
  explicit StateWriter(const Torch& torch);
  ~StateWriter();
  StateWriter(const StateWriter&) = delete;
  StateWriter& operator=(const StateWriter&) = delete;

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
  // Forgets the values of the state, which then live no longer than they would; keys, dtypes and shapes stay. What it
  // gives keeps the memory of all leaves alive.
  nb::list release();
  // The document, with each chunk's text in the hole of its leaf, and `texts` in the holes of others; valid until
  // release().
  std::string_view document(const ChunkOrder& order, const std::vector<std::pair<uint32_t, nb::str>>& texts);

 private:
  enum class Kind : uint8_t { mapping, sequence, pairs, parts, module, optimizer };

  // A container that is being written. Its place is known by its key, and to Python by a Path that is made when asked.
  struct Frame {
    Kind kind;
    nb::object holder;
    const char* end;  // what is written after the last member
    size_t key_at;    // where its key begins in keys_
    size_t key_bytes;
    nb::object path;
    nb::object element;  // its key or index in the frame below, unless it has a name there
    std::string_view name;
    int64_t depth;
    Py_ssize_t at = 0;
    Py_ssize_t written = 0;
    Py_ssize_t size = 0;  // of a mapping when it was opened
  };

  // Where a value stands: at a Path of Python's, or at a key, a name (plain text) or an index of the topmost frame.
  struct Place {
    nb::handle path;
    nb::handle key;
    Py_ssize_t index;
    const std::string_view* name = nullptr;
  };

  void step();
  void member_of_module(Frame& frame);
  void state_of_optimizer(Frame& frame);
  void pop();
  void value(nb::handle value, const Place& place);
  bool scalar(PyObject* value);
  bool tensor(nb::handle value, const Place& place, bool detached = false);
  bool container(nb::handle value, const Place& place);
  void other(nb::handle value, const Place& place);
  bool refer(nb::handle value);
  void push(Kind kind, nb::object holder, const char* end, const Place& place);
  int64_t depth_of(const Place& place) const;
  void put_key_of(const Place& place, std::string& out) const;
  nb::object element_of(const Place& place) const;
  nb::object path_of(const Place& place);
  nb::object path_of(size_t frame);

  // What grows with the state, but for its leaves, and is needed only while it is written.
  struct Buffers {
    std::string text;
    std::string document;
    std::vector<size_t> holes;         // positions in the text
    std::vector<nb::object> tensors;   // of each leaf
    std::vector<uint32_t> leaf_holes;  // of each leaf
    std::vector<nb::object> kept;      // what has an identity in `seen` must not be freed before the end
    Identities seen;

    void clear();
    size_t capacity_bytes() const;
  };
  struct Spare;
  static Spare& spare();

  const Torch& torch_;
  nb::handle encode_;
  Buffers buffers_;
  std::string& text_ = buffers_.text;
  Leaves leaves_;
  std::vector<Frame> frames_;
  std::string keys_;  // of the frames
  uint32_t count_ = 0;
};

void bind_state_writer(nb::module_& module);

}  // namespace tierload

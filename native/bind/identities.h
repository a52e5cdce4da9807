// Numbers of Python objects by identity, or of texts by hash.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <utility>
#include <vector>

#include "bind/bind.h"

namespace tierload {

// Keys are addresses of objects, which the caller keeps alive, or hashes; not 0. A table with open addressing: a state
// has thousands of objects, and a node of its own for each costs more than all else that is done with them.
class Identities {
 public:
  // Makes room for so many more.
  void reserve(size_t more) {
    if (2 * (count_ + more) > slots_.size()) resize(std::max<size_t>(64, std::bit_ceil(2 * (count_ + more))));
  }
  // The number of an object, and whether it is new and has got this one.
  std::pair<uint32_t, bool> add(PyObject* object, uint32_t number) { return add(key_of(object), number); }
  std::pair<uint32_t, bool> add(uint64_t key, uint32_t number) {
    reserve(1);
    Slot& slot = slots_[find(key)];
    if (slot.key != 0) return {slot.number, false};
    slot = {key, number};
    ++count_;
    return {number, true};
  }
  // The number of an object; null when it has none.
  const uint32_t* number_of(PyObject* object) const {
    if (slots_.empty()) return nullptr;
    const Slot& slot = slots_[find(key_of(object))];
    return slot.key == 0 ? nullptr : &slot.number;
  }
  // Gives an object another number than it has.
  void renumber(PyObject* object, uint32_t number) { slots_[find(key_of(object))].number = number; }
  // Forgets all, but keeps the memory for others.
  void clear() {
    slots_.assign(slots_.size(), {});
    count_ = 0;
  }
  size_t capacity_bytes() const { return slots_.capacity() * sizeof(Slot); }

 private:
  struct Slot {
    uint64_t key = 0;
    uint32_t number = 0;
  };

  static uint64_t key_of(PyObject* object) { return reinterpret_cast<uint64_t>(object); }
  size_t find(uint64_t key) const {
    const uint64_t hash = key * 0x9E3779B97F4A7C15;
    size_t at = (hash >> 32) & (slots_.size() - 1);
    while (slots_[at].key != 0 && slots_[at].key != key) at = (at + 1) & (slots_.size() - 1);
    return at;
  }
  void resize(size_t size) {
    std::vector<Slot> old(size);
    old.swap(slots_);
    for (const Slot& slot : old) {
      if (slot.key != 0) slots_[find(slot.key)] = slot;
    }
  }

  std::vector<Slot> slots_;  // a power of two of them, or none
  size_t count_ = 0;
};

}  // namespace tierload

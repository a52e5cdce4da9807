// The plain tensors of a state that is being saved, those with elements that lie together in memory of the processor or
// of an accelerator: rows of numbers, one a tensor, and what follows from all of them.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tierload {

// Bits of Leaf::marks: what the document says of a tensor beside its geometry; the last one is not for the document,
// but says that the tensor itself has not been detached as its leaf has.
enum Mark : uint8_t { mark_conj = 1, mark_neg = 2, mark_parameter = 4, mark_grad = 8, mark_detached = 16 };

struct Leaf {
  uint64_t start;  // address of the first element
  uint64_t bytes;  // of its elements
  uint64_t shape;  // where its sizes begin in Leaves::sizes
  uint64_t key;    // where its key begins in Leaves::keys
  uint32_t key_bytes;
  uint8_t ndim;
  uint8_t dtype;  // docs/FORMAT.md section 6
  uint8_t marks;
  uint8_t device;  // tierload/accelerator.h; 0: the processor
};

// A range of memory, in addresses, which no two devices have in common.
struct MemoryRange {
  uint64_t start;
  uint64_t end;
};

// Which of `ranges` meet another one in memory, or one of `others`; ascending.
std::vector<uint32_t> meeting(std::span<const MemoryRange> ranges, std::span<const MemoryRange> others);

class Leaves {
 public:
  void add(Leaf leaf, std::span<const int64_t> shape, std::string_view key);
  // The same, with the key that has been appended to `next_key()`.
  void add(Leaf leaf, std::span<const int64_t> shape);
  std::string& next_key() { return keys_; }

  // Forgets all, but keeps the memory for others.
  void clear();
  // Of the memory that is held.
  size_t capacity_bytes() const;

  size_t count() const { return rows_.size(); }
  const Leaf& operator[](size_t number) const { return rows_[number]; }
  std::string_view key(size_t number) const { return {keys_.data() + rows_[number].key, rows_[number].key_bytes}; }
  std::span<const int64_t> sizes(size_t number) const {
    return std::span(sizes_).subspan(rows_[number].shape, rows_[number].ndim);
  }

  // Leaves that are no chunk by themselves, since another leaf or one of `others` uses their memory too. Ascending.
  std::vector<uint32_t> shared(std::span<const MemoryRange> others) const;

  // Whether these leaves have the same keys, dtypes and shapes, wherever their memory is.
  bool alike(const Leaves& other) const;

  // The content of a leaf's `t` in the document, for a leaf that is chunk `chunk` by itself.
  void describe(size_t number, uint64_t chunk, std::string& out) const;

 private:
  std::vector<Leaf> rows_;
  std::vector<int64_t> sizes_;
  std::string keys_;
};

// The chunks of a state in the order of their keys: leaves that are one by themselves, and `more`, which are
// numbered from the count of leaves on.
class ChunkOrder {
 public:
  ChunkOrder(const Leaves& leaves, std::span<const uint32_t> shared, std::span<const std::string> more);

  // Leaf or other chunk, by number of chunk.
  const std::vector<uint32_t>& chunks() const { return chunks_; }
  // The number of chunk of each of `more`.
  const std::vector<uint32_t>& more() const { return more_; }
  // A key that two chunks have.
  const std::optional<std::string>& twice() const { return twice_; }

 private:
  std::vector<uint32_t> chunks_;
  std::vector<uint32_t> more_;
  std::optional<std::string> twice_;
};

}  // namespace tierload

// The chunks of a stored state, and the tensors that a load makes for them or fills.
#pragma once

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "bind/torch.h"
#include "state/leaves.h"

namespace tierload {

// Most tensors of a state are chunks by themselves, and the document says no more of them than chunk and shape. Those
// are made, and those of a target found, without Python's interpreter; whatever is not as simple is left to Python.
class TensorTable {
 public:
  // Columns of tierload.types.ChunkTable. `make` gives a new tensor: make(code of the dtype, sizes).
  TensorTable(const Torch& torch, const nb::object& empty_like, const Array<uint8_t>& dtypes,
              const Array<uint8_t>& ndims, const Array<int64_t>& dims_at, const Array<int64_t>& dims,
              const Array<int64_t>& nbytes);

  // Puts the members of a container's node into a new dict or list: scalars, and new tensors for plain nodes. Gives key
  // or index, and node, of those that are something else, whose places hold None until they are decoded.
  nb::list fill_dict(const nb::dict& nodes, const nb::dict& into, const nb::callable& make);
  nb::list fill_list(const nb::list& nodes, const nb::list& into, const nb::callable& make);
  // The same for pairs of key and node, into any mapping; nothing where a key is no scalar.
  std::optional<nb::list> fill_pairs(const nb::list& pairs, const nb::object& into, const nb::callable& make);

  // Binds tensors of a target whose nodes are plain and fit them: each chunk is read right into one. Gives the keys of
  // `live`, a mapping, that are something else. A chunk that is asked for in another way later is unbound.
  nb::list bind(const nb::object& live, const nb::dict& nodes);
  // Unbinds these chunks, and all whose tensors meet each other or one of `others` in memory: what becomes of those is
  // for Python to find out. Gives chunk and tensor of all that have been unbound.
  nb::list unbind(const std::vector<uint64_t>& chunks, std::span<const MemoryRange> others);

  // The tensor of a whole chunk, made once; nothing when the chunk is another's or is not whole.
  nb::object whole(uint64_t chunk, const nb::callable& make);
  // The tensor that owns a chunk's memory, or None.
  nb::object get(uint64_t chunk);
  // `tensor` owns a chunk's memory; None says that something other than a tensor does.
  void put(uint64_t chunk, const nb::object& tensor);

  // Chunk, address, device and owner of all memory: of the tensors that were made, or bound.
  nb::tuple made() const;
  nb::tuple bound() const;

 private:
  enum class State : uint8_t { free, whole, bound, other };

  std::optional<uint64_t> plain_node(PyObject* node) const;
  bool is_whole(uint64_t chunk) const;
  void unbind(uint64_t chunk);
  bool member(PyObject* node, nb::object& value, const nb::callable& make);
  nb::tuple owners(bool of_target) const;
  std::span<const int64_t> sizes(uint64_t chunk) const;

  const Torch& torch_;
  nb::object empty_like_;
  std::vector<uint8_t> dtypes_, ndims_;
  std::vector<int64_t> dims_at_, dims_, nbytes_;
  std::vector<State> states_;
  std::vector<nb::object> tensors_;
  std::vector<uint8_t> devices_;  // of those that are bound; what is made here is the processor's
  nb::list unbound_;
  std::unordered_map<std::string, nb::object> prototypes_;  // by dtype and sizes
};

void bind_tensor_table(nb::module_& module);

}  // namespace tierload

// The codec on one page in memory, for benchmarks and tests. Stores go through bind/save.cpp and bind/store.cpp.
#include "tierload/codec.h"

#include "bind/bind.h"

namespace tierload {
namespace {

using Page = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

CodecScratch& scratch() {
  thread_local CodecScratch of_this_thread;
  return of_this_thread;
}

nb::tuple encode(const Array<uint8_t>& raw, uint8_t item_size, bool floating) {
  const Encoded encoded = [&] {
    const nb::gil_scoped_release release;
    return encode_page(std::as_bytes(span_of(raw)), item_size, floating, Compression::fast, scratch());
  }();
  return nb::make_tuple(static_cast<int>(encoded.codec), nb::bytes(encoded.bytes.data(), encoded.bytes.size()));
}

void decode(const nb::bytes& stored, uint8_t codec, uint8_t item_size, const Page& into) {
  const Bytes bytes = bytes_of(stored);
  const MutableBytes raw = std::as_writable_bytes(std::span(into.data(), into.size()));
  const nb::gil_scoped_release release;
  decode_page(bytes, static_cast<Codec>(codec), item_size, raw, scratch());
}

}  // namespace

void bind_codec(nb::module_& module) {
  module.def("encode_page", &encode, nb::arg("raw"), nb::arg("item_size"), nb::arg("floating"),
             "The codec's number and the stored bytes, as compression=\"fast\" has them.");
  module.def("decode_page", &decode, nb::arg("stored"), nb::arg("codec"), nb::arg("item_size"), nb::arg("into"));
}

}  // namespace tierload

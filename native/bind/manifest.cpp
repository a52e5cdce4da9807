// Manifests: sections as arrays over the mapped file, and reading the pages that they list.
#include "bind/bind.h"
#include "tierload/bytes.h"

namespace tierload {
namespace {

const Manifest& manifest_of(nb::handle self) { return *nb::cast<ManifestView&>(self).manifest; }

// A view that keeps the manifest alive.
ByteArray view(nb::handle owner, Bytes bytes) { return ByteArray(bytes.data(), {bytes.size()}, owner); }

void read(ManifestView& self, const Array<uint32_t>& pages, const Array<uint32_t>& offsets,
          const Array<uint64_t>& pointers, const Array<uint64_t>& lengths, unsigned threads,
          nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> touched, Progress* progress,
          const std::optional<Array<uint8_t>>& devices, const StreamPairs& streams,
          const std::optional<Array<uint8_t>>& landed) {
  if (offsets.size() != pages.size() || pointers.size() != pages.size() || lengths.size() != pages.size() ||
      (devices && devices->size() != pages.size())) {
    throw UsageError("the arrays of parts differ in length");
  }
  std::vector<PagePart> parts(pages.size());
  for (size_t i = 0; i < parts.size(); ++i) {
    parts[i] = {pages.data()[i],
                offsets.data()[i],
                {reinterpret_cast<std::byte*>(pointers.data()[i]), lengths.data()[i]},
                devices ? devices->data()[i] : uint8_t{0}};
  }
  const std::span<const uint8_t> there = landed ? span_of(*landed) : std::span<const uint8_t>();
  const nb::gil_scoped_release release;
  read_pages(*self.storage, *self.manifest, parts, threads, std::span(touched.data(), touched.size()), progress,
             moments_now(streams), there);
}

void copy(const Array<uint64_t>& sources, const Array<uint64_t>& targets, const Array<uint64_t>& lengths,
          unsigned threads) {
  if (targets.size() != sources.size() || lengths.size() != sources.size()) {
    throw UsageError("the arrays of runs differ in length");
  }
  std::vector<CopyRun> runs(sources.size());
  for (size_t i = 0; i < runs.size(); ++i) {
    runs[i] = {reinterpret_cast<const std::byte*>(sources.data()[i]), reinterpret_cast<std::byte*>(targets.data()[i]),
               lengths.data()[i]};
  }
  const nb::gil_scoped_release release;
  copy_runs(runs, threads);
}

nb::list check(ManifestView& self, const Array<uint32_t>& pages, unsigned threads, Progress* progress) {
  std::vector<PageFailure> failures;
  {
    const nb::gil_scoped_release release;
    failures = check_pages(*self.storage, *self.manifest, span_of(pages), threads, progress);
  }
  nb::list out;
  for (const PageFailure& failure : failures) {
    out.append(nb::make_tuple(failure.page, failure.path, failure.offset, failure.what));
  }
  return out;
}

}  // namespace

void bind_manifest(nb::module_& module) {
  nb::class_<Progress>(module, "Progress", "Raw bytes moved so far by the call that was given this object.")
      .def(nb::init<>())
      .def_prop_ro("bytes", [](const Progress& progress) { return progress.bytes.load(); });

  module.def("copy_runs", &copy, nb::arg("sources"), nb::arg("targets"), nb::arg("lengths"), nb::arg("threads"),
             "Copies runs of bytes from addresses to addresses; see copy_runs in tierload/engine.h.");

  nb::class_<ManifestView>(module, "Manifest", "An open, verified manifest shard; rows are views of the mapped file.")
      .def_prop_ro("path", [](nb::handle self) { return manifest_of(self).path(); })
      .def_prop_ro("page_bytes", [](nb::handle self) { return manifest_of(self).page_bytes(); })
      .def_prop_ro("segments", [](nb::handle self) { return view(self, std::as_bytes(manifest_of(self).segments())); })
      .def_prop_ro("pages", [](nb::handle self) { return view(self, std::as_bytes(manifest_of(self).pages())); })
      .def_prop_ro("chunks", [](nb::handle self) { return view(self, std::as_bytes(manifest_of(self).chunks())); })
      .def_prop_ro("dims", [](nb::handle self) { return view(self, std::as_bytes(manifest_of(self).dims())); })
      .def_prop_ro("keys", [](nb::handle self) { return view(self, manifest_of(self).keys()); })
      .def_prop_ro("state", [](nb::handle self) { return view(self, manifest_of(self).state()); })
      .def("segment_path",
           [](nb::handle self, uint32_t number) {
             const auto segments = manifest_of(self).segments();
             if (number >= segments.size()) throw UsageError("there is no segment " + std::to_string(number));
             return segments[number].path();
           })
      .def(
          "find", [](nb::handle self, const nb::bytes& key) { return manifest_of(self).find(as_text(bytes_of(key))); },
          nb::arg("key"), "The number of the chunk with a key, as UTF-8, or None.")
      .def(
          "key_of_page", [](nb::handle self, uint64_t page) { return to_bytes(manifest_of(self).key_of_page(page)); },
          "The key, as UTF-8, of the first chunk that a page belongs to.")
      .def("read", &read, nb::arg("pages"), nb::arg("offsets"), nb::arg("pointers"), nb::arg("lengths"),
           nb::arg("threads"), nb::arg("touched"), nb::arg("progress").none(), nb::arg("devices").none() = nb::none(),
           nb::arg("streams") = StreamPairs(), nb::arg("landed").none() = nb::none(),
           "Reads and verifies parts of pages into memory; see read_pages in tierload/engine.h.")
      .def("check", &check, nb::arg("pages"), nb::arg("threads"), nb::arg("progress").none(),
           nb::sig("def check(self, pages: numpy.typing.ArrayLike, threads: int, progress: Progress | None) -> "
                   "list[tuple[int, str, int, str]]"),
           "Verifies pages to the last byte; returns (page, path, offset, what) for each failure.");
}

}  // namespace tierload

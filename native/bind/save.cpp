// Saving: one transaction with its pages and its manifest.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "bind/staging.h"
#include "bind/store.h"
#include "tierload/bytes.h"

namespace tierload {
namespace {

// Python's word to a save on another thread.
class Cancel {
 public:
  void set() { set_ = true; }
  bool is_set() const { return set_; }
  const std::atomic<bool>* flag() const { return &set_; }

 private:
  std::atomic<bool> set_{false};
};

// A transaction and what was written into it. write, write_manifest and flush need no lock of the store's; making one,
// commit and abort do.
class Save {
 public:
  explicit Save(Store& store) : catalog_(store.shared()), transaction_(catalog_->begin()) {}

  // Of `staging`, the copies of `pages`, where there is one.
  void write(const PageSet& pages, Staging* staging, const ManifestView* parent, const std::string& compression,
             double device_rate, unsigned threads, uint64_t segment_bytes, uint64_t flush_interval_ms,
             TokenBucket* bucket, bool background, Cancel* cancel, Progress* progress) {
    WriteOptions options;
    options.threads = threads;
    options.segment_bytes = segment_bytes;
    options.flush_interval = std::chrono::milliseconds(flush_interval_ms);
    options.bucket = bucket;
    options.background = background;
    options.cancelled = cancel ? cancel->flag() : nullptr;
    if (compression == "auto") options.device_rate = device_rate;
    if (compression == "off") options.compression = Compression::off;
    if (compression == "small") options.compression = Compression::small;
    options.gate = staging;
    const std::span<const PageSource> sources = staging ? staging->sources() : std::span(pages.sources);
    const nb::gil_scoped_release release;
    written_ = write_pages(open(), sources, parent ? parent->manifest.get() : nullptr, options, progress);
  }

  void write_manifest(uint32_t page_bytes, const Array<uint8_t>& chunks, const Array<uint8_t>& dims,
                      const nb::bytes& keys, const nb::bytes& state) {
    const auto chunk_rows = rows_of<ChunkRow>(chunks);
    const auto dim_rows = rows_of<int64_t>(dims);
    ManifestParts parts;
    parts.page_bytes = page_bytes;
    parts.segments = written_.segments;
    parts.pages = written_.pages;
    parts.chunks = chunk_rows;
    parts.dims = dim_rows;
    parts.keys = bytes_of(keys);
    parts.state = bytes_of(state);
    const nb::gil_scoped_release release;
    root_ = {open().write_manifest(parts)};
  }

  void flush() {
    const nb::gil_scoped_release release;
    open().flush();
  }

  CommitPtr commit(std::optional<int64_t> step, const nb::bytes& meta, const std::vector<std::string>& tags) {
    if (root_.empty()) throw UsageError("this save has no manifest yet");
    Commit draft;
    draft.step = step;
    draft.meta = std::string(as_text(bytes_of(meta)));
    draft.raw_bytes = written_.raw_bytes;
    draft.written_bytes = written_.written_bytes;
    draft.root = root_;
    const nb::gil_scoped_release release;
    const CommitPtr done = open().commit(std::move(draft), tags);
    transaction_ = nullptr;
    return done;
  }

  void abort() {
    const nb::gil_scoped_release release;
    transaction_ = nullptr;
  }

  const WriteResult& written() const { return written_; }
  const char* compression() const {
    return written_.compression == Compression::off     ? "off"
           : written_.compression == Compression::small ? "small"
                                                        : "fast";
  }

 private:
  Transaction& open() {
    if (!transaction_) throw UsageError("this save is over");
    return *transaction_;
  }
  std::shared_ptr<Catalog> catalog_;  // outlives the transaction, even when the store is closed meanwhile
  std::unique_ptr<Transaction> transaction_;
  WriteResult written_;
  std::vector<RootRow> root_;
};

}  // namespace

void bind_save(nb::module_& module) {
  nb::class_<TokenBucket>(module, "TokenBucket", "A cap on bytes a second, for saves one after the other.")
      .def(nb::init<double>(), nb::arg("bytes_per_second"));
  nb::class_<Cancel>(module, "Cancel", "Ends a save on another thread, which raises SaveCancelled.")
      .def(nb::init<>())
      .def("set", &Cancel::set)
      .def_prop_ro("is_set", &Cancel::is_set);
  nb::class_<Save>(module, "Save", "One attempt to commit; see Transaction in tierload/catalog.h.")
      .def(nb::init<Store&>(), nb::arg("store"))
      .def("write", &Save::write, nb::arg("pages"), nb::arg("staging").none(), nb::arg("parent").none(),
           nb::arg("compression"), nb::arg("device_rate"), nb::arg("threads"), nb::arg("segment_bytes"),
           nb::arg("flush_interval_ms"), nb::arg("bucket").none(), nb::arg("background"), nb::arg("cancel").none(),
           nb::arg("progress").none())
      .def("write_manifest", &Save::write_manifest, nb::arg("page_bytes"), nb::arg("chunks"), nb::arg("dims"),
           nb::arg("keys"), nb::arg("state"))
      .def("flush", &Save::flush, "Makes what was written durable, so that commit is short.")
      .def(
          "commit",
          [](Save& self, std::optional<int64_t> step, const nb::bytes& meta, const std::vector<nb::bytes>& tags) {
            std::vector<std::string> names;
            for (const nb::bytes& tag : tags) names.emplace_back(as_text(bytes_of(tag)));
            return shared(self.commit(step, meta, names));
          },
          nb::arg("step").none(), nb::arg("meta"), nb::arg("tags"))
      .def("abort", &Save::abort)
      .def_prop_ro("compression", &Save::compression, "What was chosen.")
      .def_prop_ro("pages", [](const Save& self) { return self.written().pages.size(); })
      .def_prop_ro("raw_bytes", [](const Save& self) { return self.written().raw_bytes; })
      .def_prop_ro("written_bytes", [](const Save& self) { return self.written().written_bytes; })
      .def_prop_ro("written_pages", [](const Save& self) { return self.written().written_pages; })
      .def_prop_ro(
          "segment_times",
          [](const Save& self) {
            nb::list out;
            for (const SegmentTime& time : self.written().times) out.append(nb::make_tuple(time.bytes, time.seconds));
            return out;
          },
          nb::sig("def segment_times(self) -> list[tuple[int, float]]"),
          "Of each new segment: bytes, and seconds from its first byte until it was durable.")
      .def_prop_ro("late_segments", [](const Save& self) { return self.written().late_segments; })
      .def_prop_ro("throttled_seconds", [](const Save& self) { return self.written().throttled_seconds; });
}

}  // namespace tierload

// Saving: one transaction with its pages and its manifest.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

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

// Python's way of writing pages of accelerators: a function of a path and of (offset, address, length) of each.
class DirectCall : public DirectWriter {
 public:
  explicit DirectCall(nb::object call) : call_(std::move(call)) {}
  void write(const std::string& path, std::span<const Extent> extents) override {
    const nb::gil_scoped_acquire acquire;
    nb::list out;
    for (const Extent& extent : extents) out.append(nb::make_tuple(extent.offset, extent.at, extent.length));
    call_(path, out);
  }

 private:
  const nb::object call_;
};

// What one rank does of an attempt to commit: rank 0 with its transaction, the others with what they write alone.
// write, write_manifest, refer and flush need no lock of the store's; making one, commit and abort do.
class Save {
 public:
  Save(Store& store, uint32_t ranks)
      : catalog_(store.shared()), transaction_(catalog_->begin(ranks)), attempt_(transaction_->attempt()) {}
  Save(Store& store, const Attempt& attempt, uint32_t rank)
      : catalog_(store.shared()),
        rank_(std::make_unique<RankWriter>(store.storage(), catalog_->store_id(), attempt, rank)),
        attempt_(attempt) {}

  // Of `staging`, the copies of `pages`, where there is one.
  void write(const PageSet& pages, Staging* staging, const std::vector<ManifestView*>& parents,
             const std::string& compression, double device_rate, double read_rate, unsigned threads,
             uint64_t segment_bytes, uint64_t flush_interval_ms, TokenBucket* bucket, bool background, Cancel* cancel,
             Progress* progress, const nb::object& direct) {
    WriteOptions options;
    std::optional<DirectCall> call;
    if (!direct.is_none()) options.direct = &call.emplace(direct);

    options.threads = threads;
    options.segment_bytes = segment_bytes;
    options.flush_interval = std::chrono::milliseconds(flush_interval_ms);
    options.bucket = bucket;
    options.background = background;
    options.cancelled = cancel ? cancel->flag() : nullptr;
    if (compression == "auto") {
      options.device_rate = device_rate;
      if (read_rate > 0) options.read_rate = read_rate;
    }
    // Ranks that save together try as many pages between them as one does, but never a single one.
    options.samples = std::max<size_t>(options.samples / attempt_.ranks, 2);
    if (compression == "off") options.compression = Compression::off;
    if (compression == "small") options.compression = Compression::small;
    options.gate = staging;
    const std::span<const PageSource> sources = staging ? staging->sources() : std::span(pages.sources);
    std::vector<const Manifest*> manifests;
    for (const ManifestView* parent : parents) manifests.push_back(parent->manifest.get());
    const nb::gil_scoped_release release;
    written_ = write_pages(shard(), sources, manifests, options, progress);
    written_.pages = pages.by_page(std::move(written_.pages));
  }

  void write_manifest(uint32_t page_bytes, const Array<uint8_t>& chunks, const Array<uint8_t>& dims,
                      const nb::bytes& keys, const nb::bytes& state, const std::optional<Array<uint16_t>>& heats) {
    if (heats && heats->size() != written_.pages.size()) throw UsageError("every page has one heat");
    // The row of a page that is referenced came with the heat that it had then.
    for (size_t page = 0; page < written_.pages.size(); ++page) {
      written_.pages[page].heat = heats ? heats->data()[page] : 0;
    }
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
    shard().write_manifest(parts);
  }

  void refer(const nb::bytes& row) {
    const std::vector<RootRow> rows = root_rows(row);
    if (rows.size() != 1) throw UsageError("a rank has one row");
    const nb::gil_scoped_release release;
    shard().refer(rows[0]);
  }

  bool has_pages_of(const ManifestView& manifest) const {
    const auto same = [](const PageRow& a, const PageRow& b) {
      return a.raw_digest == b.raw_digest && a.raw_length == b.raw_length && a.flags == b.flags;
    };
    return std::ranges::equal(written_.pages, manifest.manifest->pages(), same);
  }

  void flush() {
    const nb::gil_scoped_release release;
    if (rank_) {
      rank_->prepare();
    } else {
      shard().flush();
    }
  }

  nb::bytes row() {
    const RootRow& row = rank_ ? rank_->row() : shard().row();
    return nb::bytes(reinterpret_cast<const char*>(&row), sizeof row);
  }

  CommitPtr commit(std::optional<int64_t> step, const nb::bytes& meta, const std::vector<std::string>& tags,
                   const nb::bytes& rows, std::optional<uint64_t> raw_bytes, std::optional<uint64_t> written_bytes) {
    if (!transaction_) throw UsageError(rank_ ? "rank 0 commits" : "this save is over");
    std::vector<RootRow> root = root_rows(rows);
    if (root.empty() && attempt_.ranks == 1) root = {shard().row()};
    Commit draft;
    draft.step = step;
    draft.meta = std::string(as_text(bytes_of(meta)));
    draft.raw_bytes = raw_bytes.value_or(written_.raw_bytes);
    draft.written_bytes = written_bytes.value_or(written_.written_bytes);
    const nb::gil_scoped_release release;
    const CommitPtr done = transaction_->commit(std::move(draft), root, tags);
    transaction_ = nullptr;
    return done;
  }

  void done() {
    if (!rank_ || !rank_->prepared()) throw UsageError("what this rank wrote cannot have been committed");
    rank_ = nullptr;
  }

  void abort() {
    const nb::gil_scoped_release release;
    transaction_ = nullptr;
    rank_ = nullptr;
  }

  const Attempt& attempt() const { return attempt_; }
  const WriteResult& written() const { return written_; }
  const char* compression() const {
    return written_.compression == Compression::off     ? "off"
           : written_.compression == Compression::small ? "small"
                                                        : "fast";
  }

 private:
  static std::vector<RootRow> root_rows(const nb::bytes& bytes) {
    if (bytes.size() % sizeof(RootRow) != 0) throw UsageError("rows of a root have 64 bytes each");
    std::vector<RootRow> rows(bytes.size() / sizeof(RootRow));
    if (!rows.empty()) std::memcpy(rows.data(), bytes.data(), bytes.size());
    return rows;
  }
  ShardWriter& shard() {
    if (!transaction_ && !rank_) throw UsageError("this save is over");
    return rank_ ? rank_->shard() : transaction_->shard();
  }
  std::shared_ptr<Catalog> catalog_;          // outlives the transaction, even when the store is closed meanwhile
  std::unique_ptr<Transaction> transaction_;  // of rank 0, until the save is over
  std::unique_ptr<RankWriter> rank_;          // of another one, until it is over
  const Attempt attempt_;
  WriteResult written_;
};

}  // namespace

void bind_save(nb::module_& module) {
  module.def(
      "page_digests",
      [](const PageSet& pages, unsigned threads) {
        std::vector<Digest> digests;
        {
          const nb::gil_scoped_release release;
          digests = digest_pages(pages.sources, threads);
        }
        auto kept = std::make_unique<std::vector<Digest>>(std::move(digests));
        const nb::capsule owner(kept.get(), [](void* at) noexcept { delete static_cast<std::vector<Digest>*>(at); });
        std::vector<Digest>& rows = *kept.release();
        return nb::ndarray<nb::numpy, uint64_t, nb::ndim<2>>(rows.data(), {rows.size(), 2}, owner);
      },
      nb::arg("pages"), nb::arg("threads"),
      "The raw digest of each page: low and high half. `threads` work beside the caller.");
  nb::class_<TokenBucket>(module, "TokenBucket", "A cap on bytes a second, for saves one after the other.")
      .def(nb::init<double>(), nb::arg("bytes_per_second"));
  nb::class_<Cancel>(module, "Cancel", "Ends a save on another thread, which raises SaveCancelled.")
      .def(nb::init<>())
      .def("set", &Cancel::set)
      .def_prop_ro("is_set", &Cancel::is_set);
  nb::class_<Save>(module, "Save",
                   "One rank's part of an attempt to commit; see Transaction in tierload/catalog.h, and RankWriter in "
                   "tierload/shard.h for ranks other than 0.")
      .def(nb::init<Store&, uint32_t>(), nb::arg("store"), nb::arg("ranks") = 1)
      .def_static(
          "of_rank",
          [](Store& store, uint64_t epoch, uint64_t txid, uint32_t rank, uint32_t ranks) {
            return std::make_unique<Save>(store, Attempt{epoch, txid, ranks}, rank);
          },
          nb::arg("store"), nb::kw_only(), nb::arg("epoch"), nb::arg("txid"), nb::arg("rank"), nb::arg("ranks"),
          "The part of a rank other than 0 in an attempt that rank 0 has begun. `store` is open for reading.")
      .def_prop_ro("epoch", [](const Save& self) { return self.attempt().epoch; })
      .def_prop_ro("txid", [](const Save& self) { return self.attempt().txid; })
      .def("write", &Save::write, nb::arg("pages"), nb::arg("staging").none(), nb::arg("parents"),
           nb::arg("compression"), nb::arg("device_rate"), nb::arg("read_rate"), nb::arg("threads"),
           nb::arg("segment_bytes"), nb::arg("flush_interval_ms"), nb::arg("bucket").none(), nb::arg("background"),
           nb::arg("cancel").none(), nb::arg("progress").none(), nb::arg("direct").none() = nb::none(),
           "`direct` writes raw pages that accelerators have: a function of a segment's path and a list of offset in "
           "the "
           "file, address and length.")
      .def("write_manifest", &Save::write_manifest, nb::arg("page_bytes"), nb::arg("chunks"), nb::arg("dims"),
           nb::arg("keys"), nb::arg("state"), nb::arg("heats").none() = nb::none())
      .def("refer", &Save::refer, nb::arg("row"),
           "Instead of write_manifest: the shard is the one that an earlier commit's root has in this row.")
      .def("has_pages_of", &Save::has_pages_of, nb::arg("manifest"),
           "Whether the pages that were written or referenced are those of another manifest, in the same order.")
      .def("flush", &Save::flush,
           "Makes what was written durable, so that commit is short. A rank other than 0 writes nothing afterwards; "
           "raises StoreFenced there when another writer has the store.")
      .def_prop_ro("row", &Save::row,
                   "What the commit's root will say of this rank, 64 bytes; of a rank other than 0 after flush.")
      .def(
          "commit",
          [](Save& self, std::optional<int64_t> step, const nb::bytes& meta, const std::vector<nb::bytes>& tags,
             const nb::bytes& rows, std::optional<uint64_t> raw_bytes, std::optional<uint64_t> written_bytes) {
            std::vector<std::string> names;
            for (const nb::bytes& tag : tags) names.emplace_back(as_text(bytes_of(tag)));
            return shared(self.commit(step, meta, names, rows, raw_bytes, written_bytes));
          },
          nb::arg("step").none(), nb::arg("meta"), nb::arg("tags"), nb::arg("rows") = nb::bytes("", 0),
          nb::arg("raw_bytes").none() = nb::none(), nb::arg("written_bytes").none() = nb::none(),
          "Commits. With several ranks, `rows` are those of all of them in rank order, and the bytes are totals.")
      .def("done", &Save::done, "On a rank other than 0: the attempt was committed.")
      .def("abort", &Save::abort,
           "Gives the attempt up, unless it is over. A rank other than 0 that has flushed leaves its files, which rank "
           "0 "
           "removes: only rank 0 knows whether they were committed.")
      .def_prop_ro("compression", &Save::compression, "What was chosen.")
      .def_prop_ro("pages", [](const Save& self) { return self.written().pages.size(); })
      .def_prop_ro("raw_bytes", [](const Save& self) { return self.written().raw_bytes; })
      .def_prop_ro("written_bytes", [](const Save& self) { return self.written().written_bytes; })
      .def_prop_ro("written_pages", [](const Save& self) { return self.written().written_pages; })
      .def_prop_ro("direct_pages", [](const Save& self) { return self.written().direct_pages; })
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

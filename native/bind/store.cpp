// The store and its saves.
#include <nanobind/stl/map.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "bind/faults.h"
#include "tierload/bytes.h"

namespace tierload {
namespace {

std::string hex_of(const Digest& digest) {
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(digest.high),
                static_cast<unsigned long long>(digest.low));
  return text;
}

// What Python calls a store: the catalog, and the storage under it.
class Store {
 public:
  Store(const std::string& path, bool writable, const std::string& holder, bool take_over, Faults* faults,
        uint64_t journal_roll_bytes) {
    CatalogOptions options = default_catalog_options();
    options.holder = holder;
    options.take_over = take_over;
    if (journal_roll_bytes > 0) options.journal_roll_bytes = journal_roll_bytes;
    storage_ = posix_storage(path);
    if (faults != nullptr) storage_ = faults->over(storage_);
    const nb::gil_scoped_release release;
    catalog_ = writable ? Catalog::open_for_writing(storage_, std::move(options))
                        : Catalog::open_for_reading(storage_, std::move(options));
  }
  const std::shared_ptr<Catalog>& shared() const {
    if (!catalog_) throw UsageError("the store is closed");
    return catalog_;
  }
  Catalog& catalog() const { return *shared(); }
  std::shared_ptr<Storage> storage() const { return storage_; }
  void close() {
    const nb::gil_scoped_release release;
    const std::shared_ptr<Catalog> closing = std::move(catalog_);
    if (closing) closing->close();
  }

 private:
  std::shared_ptr<Storage> storage_;
  std::shared_ptr<Catalog> catalog_;
};

// A transaction and what was written into it.
class Save {
 public:
  explicit Save(const Store& store) : catalog_(store.shared()), transaction_(catalog_->begin()) {}

  void write(const Array<uint64_t>& pointers, const Array<uint64_t>& lengths, const Array<uint32_t>& parts_of_page,
             const Array<uint8_t>& item_sizes, const Array<uint8_t>& floating, const Array<uint8_t>& packed,
             const ManifestView* parent, const std::string& compression, unsigned threads, uint64_t segment_bytes,
             Progress* progress) {
    const size_t pages = parts_of_page.size();
    if (lengths.size() != pointers.size() || item_sizes.size() != pages || floating.size() != pages ||
        packed.size() != pages) {
      throw UsageError("the arrays of pages differ in length");
    }
    std::vector<Bytes> parts(pointers.size());
    for (size_t i = 0; i < parts.size(); ++i) {
      parts[i] = {reinterpret_cast<const std::byte*>(pointers.data()[i]), lengths.data()[i]};
    }
    std::vector<PageSource> sources(pages);
    size_t part = 0;
    for (size_t i = 0; i < pages; ++i) {
      const size_t count = parts_of_page.data()[i];
      if (count > parts.size() - part) throw UsageError("a page has more parts than there are");
      sources[i] = {std::span(parts).subspan(part, count), item_sizes.data()[i], floating.data()[i] != 0,
                    packed.data()[i] != 0};
      part += count;
    }
    WriteOptions options;
    options.threads = threads;
    options.segment_bytes = segment_bytes;
    options.compression = compression == "off"     ? Compression::off
                          : compression == "small" ? Compression::small
                                                   : Compression::fast;
    const nb::gil_scoped_release release;
    written_ = write_pages(open(), sources, parent ? parent->manifest.get() : nullptr, options, progress);
  }

  CommitPtr commit(std::optional<int64_t> step, const nb::bytes& meta, uint32_t page_bytes,
                   const Array<uint8_t>& chunks, const Array<uint8_t>& dims, const nb::bytes& keys,
                   const nb::bytes& state, const std::vector<std::string>& tags) {
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
    Commit draft;
    draft.step = step;
    draft.meta = std::string(as_text(bytes_of(meta)));
    draft.raw_bytes = written_.raw_bytes;
    draft.written_bytes = written_.written_bytes;
    const nb::gil_scoped_release release;
    draft.root = {open().write_manifest(parts)};
    const CommitPtr done = open().commit(std::move(draft), tags);
    transaction_ = nullptr;
    return done;
  }

  void abort() {
    const nb::gil_scoped_release release;
    transaction_ = nullptr;
  }

  const WriteResult& written() const { return written_; }

 private:
  Transaction& open() {
    if (!transaction_) throw UsageError("this save is over");
    return *transaction_;
  }
  std::shared_ptr<Catalog> catalog_;  // outlives the transaction, even when the store is closed meanwhile
  std::unique_ptr<Transaction> transaction_;
  WriteResult written_;
};

std::unique_ptr<ManifestView> open_manifest(Store& store, uint64_t txid) {
  const CommitPtr commit = store.catalog().state().find(txid);
  if (!commit) throw UsageError("there is no commit " + std::to_string(txid));
  if (commit->root.size() != 1) throw UnsupportedError("a commit by several ranks needs a newer tierload");
  auto view = std::make_unique<ManifestView>();
  view->storage = store.storage();
  const nb::gil_scoped_release release;
  view->manifest = Manifest::open(*view->storage, commit->root[0], nullptr);
  return view;
}

nb::dict values_of(const CatalogState& state) {
  nb::dict out;
  for (const auto& [key, value] : state.values()) out[to_bytes(key)] = to_bytes(value);
  return out;
}

nb::object optional_bytes(const std::optional<std::string>& text) {
  return text ? nb::object(to_bytes(*text)) : nb::none();
}

// (lsn, kind, time, key, before, after, txid) with bytes for texts, newest first.
nb::list history(Store& store, uint64_t after) {
  std::vector<Record> records;
  {
    const nb::gil_scoped_release release;
    records = store.catalog().records_after(after);
  }
  nb::list out;
  const auto add = [&](const Record& record, const char* kind, std::string_view key, nb::object before,
                       nb::object now) {
    out.append(nb::make_tuple(record.lsn, kind, record.time, to_bytes(key), before, now, record.txid));
  };
  for (const Record& record : records) {
    switch (record.type) {
      case RecordType::snapshot:
        add(record, "snapshot", "", nb::none(), nb::none());
        break;
      case RecordType::commit: {
        const CommitPtr commit = decode_commit(record.payload, record.lsn, record.time);
        add(record, commit->rollback ? "rollback" : "commit", "", nb::none(), nb::cast(hex_of(commit->id)));
        break;
      }
      case RecordType::change: {
        const Change change = decode_change(record.payload);
        add(record, "change", change.key, optional_bytes(change.before), optional_bytes(change.after));
        break;
      }
      case RecordType::tag: {
        const TagChange tag = decode_tag(record.payload);
        add(record, "tag", tag.name, nb::cast(tag.before), nb::cast(tag.after));
        break;
      }
      case RecordType::collect: {
        nb::list dropped;
        for (const CommitPtr& commit : decode_collect(record.payload)) dropped.append(hex_of(commit->id));
        add(record, "collect", "", dropped, nb::none());
        break;
      }
      default:
        add(record, "other", "", nb::none(), nb::none());
    }
  }
  return out;
}

nb::tuple check_manifests(Store& store, uint64_t txid) {
  const CommitPtr commit = store.catalog().state().find(txid);
  if (!commit) throw UsageError("there is no commit " + std::to_string(txid));
  const nb::gil_scoped_release release;
  std::string first = check_manifest_copy(*store.storage(), commit->root.at(0), false);
  std::string mirror = check_manifest_copy(*store.storage(), commit->root.at(0), true);
  const nb::gil_scoped_acquire acquire;
  return nb::make_tuple(first, mirror);
}

nb::object segment_size(Store& store, const std::string& path) {
  const auto size = store.storage()->size(path);
  return size ? nb::cast(*size) : nb::none();
}

}  // namespace

void bind_store(nb::module_& module) {
  nb::class_<Commit>(module, "CommitRecord", "A commit as the journal holds it.")
      .def_ro("txid", &Commit::txid)
      .def_ro("parent", &Commit::parent)
      .def_ro("source", &Commit::source)
      .def_ro("step", &Commit::step)
      .def_ro("rollback", &Commit::rollback)
      .def_ro("lsn", &Commit::lsn)
      .def_ro("time", &Commit::time)
      .def_ro("raw_bytes", &Commit::raw_bytes)
      .def_ro("written_bytes", &Commit::written_bytes)
      .def_prop_ro("id", [](const Commit& commit) { return hex_of(commit.id); })
      .def_prop_ro("meta", [](const Commit& commit) { return to_bytes(commit.meta); });

  nb::class_<CollectResult>(module, "CollectResult")
      .def_ro("removed_files", &CollectResult::removed_files)
      .def_ro("freed_bytes", &CollectResult::freed_bytes)
      .def_ro("pinned", &CollectResult::pinned);

  nb::class_<Store>(module, "Store", "An open store; see tierload/catalog.h. One call at a time.")
      .def(nb::init<const std::string&, bool, const std::string&, bool, Faults*, uint64_t>(), nb::arg("path"),
           nb::arg("writable"), nb::arg("holder"), nb::arg("take_over"), nb::arg("faults").none(),
           nb::arg("journal_roll_bytes"), nb::keep_alive<1, 6>())
      .def("close", &Store::close)
      .def_prop_ro("writable", [](Store& self) { return self.catalog().writable(); })
      .def_prop_ro("epoch", [](Store& self) { return self.catalog().epoch(); })
      .def_prop_ro("last_lsn", [](Store& self) { return self.catalog().last_lsn(); })
      .def_prop_ro("warnings", [](Store& self) { return self.catalog().warnings(); })
      .def_prop_ro("damage", [](Store& self) { return self.catalog().damage(); })
      .def_prop_ro("head_damage", [](Store& self) { return self.catalog().head_damage(); })
      .def(
          "check_commit",
          [](Store& self, uint64_t txid) {
            const nb::gil_scoped_release release;
            return self.catalog().check_commit(txid);
          },
          "What is wrong with a commit's manifest or segments, or ''.")
      .def_prop_ro("free_bytes", [](Store& self) { return self.storage()->free_bytes(); })
      .def_prop_ro("head",
                   [](Store& self) {
                     const CommitPtr head = self.catalog().state().head();
                     return head ? head->txid : 0;
                   })
      .def(
          "commits",
          [](Store& self) {
            nb::list out;
            for (const auto& [txid, commit] : self.catalog().state().commits()) out.append(Commit(*commit));
            return out;
          },
          nb::sig("def commits(self) -> list[CommitRecord]"))
      .def(
          "tags",
          [](Store& self) {
            nb::dict out;
            for (const auto& [name, txid] : self.catalog().state().tags()) out[to_bytes(name)] = txid;
            return out;
          },
          nb::sig("def tags(self) -> dict[bytes, int]"))
      .def(
          "values", [](Store& self) { return values_of(self.catalog().state()); },
          nb::sig("def values(self) -> dict[bytes, bytes]"))
      .def("begin", [](Store& self) { return std::make_unique<Save>(self); })
      .def(
          "change",
          [](Store& self, const nb::bytes& key, const std::optional<nb::bytes>& value, bool sync) {
            std::optional<std::string> text;
            if (value) text = std::string(as_text(bytes_of(*value)));
            const std::string name(as_text(bytes_of(key)));
            const nb::gil_scoped_release release;
            return self.catalog().change(name, std::move(text), sync);
          },
          nb::arg("key"), nb::arg("value").none(), nb::arg("sync"))
      .def("tag",
           [](Store& self, const nb::bytes& name, uint64_t txid) {
             const std::string text(as_text(bytes_of(name)));
             const nb::gil_scoped_release release;
             return self.catalog().tag(text, txid);
           })
      .def("rollback",
           [](Store& self, uint64_t lsn, const nb::bytes& meta) {
             const std::string text(as_text(bytes_of(meta)));
             const nb::gil_scoped_release release;
             return Commit(*self.catalog().rollback(lsn, text));
           })
      .def("collect",
           [](Store& self, const std::vector<uint64_t>& drop) {
             const nb::gil_scoped_release release;
             return self.catalog().collect(drop);
           })
      .def("history", &history, nb::arg("after"),
           nb::sig("def history(self, after: int) -> list[tuple[int, str, int, bytes, object, object, int]]"),
           "Records after an LSN, newest first: LSN, kind, time, key, before, after, txid.")
      .def(
          "history_warnings",
          [](Store& self) {
            std::vector<std::string> warnings;
            const nb::gil_scoped_release release;
            self.catalog().records_after(0, &warnings);
            return warnings;
          },
          "What is damaged in one copy of the older journals that are kept.")
      .def(
          "state_at",
          [](Store& self, uint64_t lsn) {
            const CatalogState state = self.catalog().state_at(lsn);
            return nb::make_tuple(state.head() ? state.head()->txid : 0, values_of(state),
                                  to_bytes(as_text(state.encode())));
          },
          nb::sig("def state_at(self, lsn: int) -> tuple[int, dict[bytes, bytes], bytes]"),
          "Head, values and the encoded catalog as they were at an LSN.")
      .def("manifest", &open_manifest, nb::arg("txid"))
      .def("manifest_path",
           [](Store& self, uint64_t txid) {
             const CommitPtr commit = self.catalog().state().find(txid);
             if (!commit) throw UsageError("there is no commit " + std::to_string(txid));
             const RootRow& row = commit->root.at(0);
             return manifest_path(row.epoch, row.txid, row.rank);
           })
      .def("check_manifests", &check_manifests, nb::sig("def check_manifests(self, txid: int) -> tuple[str, str]"),
           "What is wrong with the two copies of a commit's manifest, or ''.")
      .def("segment_size", &segment_size, nb::sig("def segment_size(self, path: str) -> int | None"));

  nb::class_<Save>(module, "Save", "One attempt to commit; see Transaction in tierload/catalog.h.")
      .def("write", &Save::write, nb::arg("pointers"), nb::arg("lengths"), nb::arg("parts_of_page"),
           nb::arg("item_sizes"), nb::arg("floating"), nb::arg("packed"), nb::arg("parent").none(),
           nb::arg("compression"), nb::arg("threads"), nb::arg("segment_bytes"), nb::arg("progress").none())
      .def(
          "commit",
          [](Save& self, std::optional<int64_t> step, const nb::bytes& meta, uint32_t page_bytes,
             const Array<uint8_t>& chunks, const Array<uint8_t>& dims, const nb::bytes& keys, const nb::bytes& state,
             const std::vector<nb::bytes>& tags) {
            std::vector<std::string> names;
            for (const nb::bytes& tag : tags) names.emplace_back(as_text(bytes_of(tag)));
            return Commit(*self.commit(step, meta, page_bytes, chunks, dims, keys, state, names));
          },
          nb::arg("step").none(), nb::arg("meta"), nb::arg("page_bytes"), nb::arg("chunks"), nb::arg("dims"),
          nb::arg("keys"), nb::arg("state"), nb::arg("tags"))
      .def("abort", &Save::abort)
      .def_prop_ro("pages", [](const Save& self) { return self.written().pages.size(); })
      .def_prop_ro("raw_bytes", [](const Save& self) { return self.written().raw_bytes; })
      .def_prop_ro("written_bytes", [](const Save& self) { return self.written().written_bytes; })
      .def_prop_ro("written_pages", [](const Save& self) { return self.written().written_pages; });
}

}  // namespace tierload

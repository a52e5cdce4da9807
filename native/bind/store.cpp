// The store: what there is, what was, and small changes.
#include "bind/store.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "tierload/bytes.h"
#include "tierload/root.h"

namespace tierload {
namespace {

std::unique_ptr<ManifestView> open_manifest(Store& store, uint64_t txid, uint32_t rank) {
  auto view = std::make_unique<ManifestView>();
  view->storage = store.storage();
  Catalog& catalog = store.catalog();
  const nb::gil_scoped_release release;
  view->manifest = catalog.open_manifest(txid, rank);
  return view;
}

std::unique_ptr<ManifestView> open_shard(Store& store, const nb::bytes& row, uint32_t ranks) {
  RootRow pin;
  if (row.size() != sizeof pin) throw UsageError("a row of a root has 64 bytes");
  std::memcpy(&pin, row.data(), sizeof pin);
  auto view = std::make_unique<ManifestView>();
  view->storage = store.storage();
  const nb::gil_scoped_release release;
  view->manifest = Manifest::open(*view->storage, pin, ranks, nullptr);
  return view;
}

nb::dict values_of(const CatalogState& state) {
  nb::dict out;
  for (const auto& [key, value] : state.values()) out[to_bytes(key)] = to_bytes(value);
  return out;
}

// Damage of both copies of the root hides the shards.
nb::list check_manifests(Store& store, uint64_t txid) {
  const CommitPtr commit = store.catalog().state().find(txid);
  if (!commit) throw UsageError("there is no commit " + std::to_string(txid));
  struct Pair {
    std::string path, first, mirror;
  };
  std::vector<Pair> damaged;
  {
    const nb::gil_scoped_release release;
    Storage& storage = *store.storage();
    const auto add = [&](const std::string& path, std::string first, std::string mirror) {
      if (!first.empty() || !mirror.empty()) damaged.push_back({path, std::move(first), std::move(mirror)});
      return damaged.empty() || damaged.back().first.empty() || damaged.back().mirror.empty();
    };
    const RootRow& pin = commit->root;
    const bool rooted = commit->ranks == 1 || add(root_path(pin.epoch, pin.txid), check_root_copy(storage, pin, false),
                                                  check_root_copy(storage, pin, true));
    if (rooted) {
      for (const RootRow& row : read_root(storage, pin, commit->ranks, nullptr)) {
        add(manifest_path(row.epoch, row.txid, row.rank), check_manifest_copy(storage, row, false),
            check_manifest_copy(storage, row, true));
      }
    }
  }
  nb::list out;
  for (const Pair& pair : damaged) out.append(nb::make_tuple(pair.path, pair.first, pair.mirror));
  return out;
}

nb::bytes root(Store& store, uint64_t txid) {
  std::vector<RootRow> rows;
  {
    const nb::gil_scoped_release release;
    rows = store.catalog().root(txid);
  }
  return to_bytes(as_text(std::as_bytes(std::span(rows))));
}

nb::object super_of(const std::string& path) {
  std::optional<StoreEpoch> now;
  {
    const nb::gil_scoped_release release;
    now = store_epoch(*posix_storage(path));
  }
  if (!now) return nb::none();
  return nb::make_tuple(to_bytes(as_text(now->store_id)), now->epoch);
}

nb::object segment_size(Store& store, const std::string& path) {
  const auto size = store.storage()->size(path);
  return size ? nb::cast(*size) : nb::none();
}

}  // namespace

void bind_store(nb::module_& module) {
  module.def("super_of", &super_of, nb::arg("path"), nb::sig("def super_of(path: str) -> tuple[bytes, int] | None"),
             "Id and newest epoch of the store in a directory, or None where there is none.");
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
      .def_ro("ranks", &Commit::ranks)
      .def_prop_ro("id", [](const Commit& commit) { return hex_of(commit.id); })
      .def_prop_ro("meta", [](const Commit& commit) { return to_bytes(commit.meta); });

  nb::class_<CatalogState>(module, "CatalogState", "Commits, tags and values as they were once.")
      .def_prop_ro("head", [](const CatalogState& state) { return state.head() ? state.head()->txid : 0; })
      .def_prop_ro("values", &values_of, nb::sig("def values(self) -> dict[bytes, bytes]"))
      .def("encode", [](const CatalogState& state) { return to_bytes(as_text(state.encode())); });

  nb::class_<CollectResult>(module, "CollectResult")
      .def_ro("removed_files", &CollectResult::removed_files)
      .def_ro("freed_bytes", &CollectResult::freed_bytes)
      .def_ro("pinned", &CollectResult::pinned);

  nb::class_<Store>(module, "Store", "An open store; see tierload/catalog.h, also for its threads.")
      .def(nb::init<const std::string&, bool, const std::string&, bool, Faults*, uint64_t, uint32_t, uint32_t>(),
           nb::arg("path"), nb::arg("writable"), nb::arg("holder"), nb::arg("take_over"), nb::arg("faults").none(),
           nb::arg("journal_roll_bytes"), nb::arg("block_bytes"), nb::arg("depth"), nb::keep_alive<1, 6>())
      .def("close", &Store::close)
      .def_prop_ro("writable", [](Store& self) { return self.catalog().writable(); })
      .def_prop_ro("stepped_down", &Store::stepped_down, "Why data goes through the page cache, or ''.")
      .def_prop_ro("direct_bytes", [](Store& self) { return self.storage()->direct_bytes(); })
      .def_prop_ro("id", [](Store& self) { return to_bytes(as_text(self.catalog().store_id())); })
      .def_prop_ro("epoch", [](Store& self) { return self.catalog().epoch(); })
      .def_prop_ro("poisoned", [](Store& self) { return self.catalog().poisoned(); })
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
            for (const auto& [txid, commit] : self.catalog().state().commits()) out.append(shared(commit));
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
           [](Store& self, const CatalogState& target, const nb::bytes& meta) {
             const std::string text(as_text(bytes_of(meta)));
             const nb::gil_scoped_release release;
             return shared(self.catalog().rollback(target, text));
           })
      .def("collect",
           [](Store& self, const std::vector<uint64_t>& drop) {
             const nb::gil_scoped_release release;
             return self.catalog().collect(drop);
           })
      .def(
          "history", [](Store& self, uint64_t after) { return history(self.catalog(), after); }, nb::arg("after"),
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
            const nb::gil_scoped_release release;
            return self.catalog().state_at(lsn);
          },
          nb::arg("lsn"), "The catalog as it was at an LSN.")
      .def("manifest", &open_manifest, nb::arg("txid"), nb::arg("rank") = 0)
      .def("shard", &open_shard, nb::arg("row"), nb::arg("ranks"), "The manifest that a row of a root pins.")
      .def("root", &root, nb::arg("txid"), "The rows of a commit's root, 64 bytes a rank, in rank order.")
      .def(
          "manifest_path",
          [](Store& self, uint64_t txid, uint32_t rank) {
            const auto rows = self.catalog().root(txid);
            if (rank >= rows.size()) throw UsageError("there is no rank " + std::to_string(rank));
            return manifest_path(rows[rank].epoch, rows[rank].txid, rank);
          },
          nb::arg("txid"), nb::arg("rank") = 0)
      .def("check_manifests", &check_manifests, nb::arg("txid"),
           nb::sig("def check_manifests(self, txid: int) -> list[tuple[str, str, str]]"),
           "What is damaged of a commit's root file and manifests: path, what is wrong with it, and with its mirror "
           "('': nothing).")
      .def("segment_size", &segment_size, nb::sig("def segment_size(self, path: str) -> int | None"));
}

}  // namespace tierload

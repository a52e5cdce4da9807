#include "tests/recovery.h"

namespace tierload {
namespace {

template <typename Body>
Found found(Body body) {
  Found result;
  try {
    result.model = body();
  } catch (const Error& error) {
    result.error = error.what();
  }
  return result;
}

// The commits that are kept can be gone back to. That needs every journal since, up to the record that the next one
// names, though no commit would be missed without them. The oldest needs all of them.
void check_history(const Catalog& catalog, bool every_commit) {
  for (const auto& [txid, commit] : catalog.state().commits()) {
    const CommitPtr head = catalog.state_at(commit->lsn).head();
    if (!head || head->id != commit->id) {
      throw CorruptError("history: commit " + std::to_string(txid) + " is not the head of its own LSN");
    }
    if (!every_commit) return;
  }
}

Model read(Catalog& catalog, bool thorough) {
  if (!catalog.damage().empty()) throw CorruptError("damage: " + catalog.damage());
  if (!catalog.head_damage().empty()) throw CorruptError("damaged head: " + catalog.head_damage());
  check_history(catalog, thorough);
  return read_model(catalog);
}

}  // namespace

Found recover(const std::shared_ptr<Storage>& disk, CatalogOptions options, bool thorough) {
  return found([&] {
    const auto catalog = Catalog::open_for_writing(disk, std::move(options));
    Model model = read(*catalog, thorough);
    if (thorough) {
      catalog->collect({});
      if (read(*catalog, thorough) != model)
        throw CorruptError("a collection that drops nothing changed what is there");
    }
    return model;
  });
}

Found look(const std::shared_ptr<Storage>& disk, CatalogOptions options) {
  return found([&] { return read(*Catalog::open_for_reading(disk, std::move(options)), false); });
}

}  // namespace tierload

// An open store on the edge to Python, shared by the files that bind it.
#pragma once

#include <string>

#include "bind/faults.h"

namespace tierload {

// What Python calls a store: the catalog, and the storage under it.
class Store {
 public:
  // Data is moved past the page cache with `block_bytes` and `depth` where that works; not at all with depth 0.
  Store(const std::string& path, bool writable, const std::string& holder, bool take_over, Faults* faults,
        uint64_t journal_roll_bytes, uint32_t block_bytes, uint32_t depth) {
    CatalogOptions options = default_catalog_options();
    options.holder = holder;
    options.take_over = take_over;
    if (journal_roll_bytes > 0) options.journal_roll_bytes = journal_roll_bytes;
    storage_ = posix_storage(path);
    if (writable) storage_->make_dir("");
    if (depth > 0) {
      try {
        storage_ = direct_storage(path, {block_bytes, depth});
        stepped_down_.clear();
      } catch (const UnsupportedError& error) {
        stepped_down_ = error.what();
      }
    }
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
  // Why data goes through the page cache; "" when it goes past it.
  const std::string& stepped_down() const { return stepped_down_; }
  void close() {
    const nb::gil_scoped_release release;
    const std::shared_ptr<Catalog> closing = std::move(catalog_);
    if (closing) closing->close();
  }

 private:
  std::shared_ptr<Storage> storage_;
  std::string stepped_down_ = "it was asked for";
  std::shared_ptr<Catalog> catalog_;
};

// Python holds commits as they are, without a copy; nothing that is bound changes them.
inline std::shared_ptr<Commit> shared(const CommitPtr& commit) { return std::const_pointer_cast<Commit>(commit); }

std::string hex_of(const Digest& digest);
nb::list history(Catalog& catalog, uint64_t after);
void bind_save(nb::module_& module);

}  // namespace tierload

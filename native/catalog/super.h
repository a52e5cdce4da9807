// SUPER: two slots that name the store, its newest epoch and its base journal (docs/FORMAT.md section 4).
#pragma once

#include <optional>

#include "tierload/journal.h"

namespace tierload {

struct Super {
  StoreId store_id{};
  uint64_t generation = 0;
  uint64_t epoch = 0;
  JournalName base;
  uint64_t features = 0;  // incompatible ones
  std::string needs;      // the oldest release that reads the store; "": what the features say
};

struct SuperScan {
  std::optional<Super> best;
  bool present = false;  // the file exists and is not empty
  std::string damage;    // what is wrong with a slot, if anything
};

// Throws UnsupportedError when the slot that counts needs a newer release.
SuperScan read_super(Storage& storage);

// Writes the slot of `super.generation` and makes it durable.
void write_super(Storage& storage, const Super& super);

// Creates SUPER with both slots, so that a single damaged one never makes a store unreadable.
void create_super(Storage& storage, Super super);

}  // namespace tierload

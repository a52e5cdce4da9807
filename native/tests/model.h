// What must be in a store: the model that a workload leads to, and the one that is read back.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "tierload/catalog.h"

namespace tierload {

// What a user knows of a store. Commits are named by a number that the workload gives them (in their meta).
struct Model {
  std::map<uint64_t, std::vector<uint64_t>> commits;  // number -> contents of its pages; see joined()
  uint64_t head = 0;
  std::map<std::string, uint64_t> tags;
  std::map<std::string, std::string> values;
  bool operator==(const Model&) const = default;
  std::string text() const;
};

// Reads everything back, verifying every page. Throws what the engine throws.
Model read_model(Catalog& catalog);

// The bytes of page `content`: its number, then bytes that follow from it; 1 to 3 sectors of 4 KiB.
std::vector<std::byte> page_bytes(uint64_t content);

// A commit's number, and the meta that gives it.
uint64_t number_of(const Commit& commit);
std::string meta_of(uint64_t number);

}  // namespace tierload

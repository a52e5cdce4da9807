// Sealed files: a body, and behind it the XXH3-64 of each of its 64 KiB leaves, so that a digest of 16 bytes pins every
// byte. Manifest shards and root files are sealed and mirrored (docs/FORMAT.md section 6).
#pragma once

#include <string>
#include <vector>

#include "tierload/error.h"
#include "tierload/manifest.h"

namespace tierload {

SealedFile seal(std::vector<std::byte> body);

// How long the file is whose body has the length that `row` declares. Throws CorruptError when no body has it;
// `header_length` is the least.
uint64_t sealed_length(const RootRow& row, uint64_t header_length, const std::string& path);

// How many threads look at a large file at once, the caller's among them.
unsigned checking_threads();

// Verifies a whole file against what pins it. Throws CorruptError.
void check_sealed(Bytes image, const RootRow& row, const std::string& path);

// What is wrong with one copy of a sealed file, or "".
std::string check_sealed_copy(Storage& storage, const std::string& path, const RootRow& row, uint64_t header_length);

// What `open` makes of the first copy that it does not refuse: `path`, or its mirror, which is added to `warnings`.
// Throws CorruptError when both are damaged or missing; `what` names the thing.
template <typename Open>
auto from_either_copy(const std::string& path, const std::string& what, std::vector<std::string>* warnings, Open open)
    -> decltype(open(path)) {
  std::string failures;
  for (const std::string& copy : {path, path + ".m"}) {
    try {
      auto opened = open(copy);
      if (!failures.empty() && warnings != nullptr) warnings->push_back(failures + "; its mirror is used");
      return opened;
    } catch (const CorruptError& error) {
      failures += (failures.empty() ? "" : "; ") + std::string(error.what());
    } catch (const IoError& error) {
      if (!error.unusable_file()) throw;
      failures += (failures.empty() ? "" : "; ") + std::string(error.what());
    }
  }
  throw CorruptError("both copies of " + what + " are damaged: " + failures);
}

}  // namespace tierload

// The simulated storage keeps the contract that the real one keeps.
#include "tests/simulated.h"

#include <doctest/doctest.h>

#include "tests/conformance.h"

namespace {

std::shared_ptr<tierload::Storage> fresh() {
  auto storage = std::make_shared<tierload::SimulatedStorage>();
  storage->make_dir("");
  return storage;
}

}  // namespace

TEST_CASE("simulated storage conforms") {
  storage_conformance(fresh);
  data_conformance(fresh);
}

// The simulated storage keeps the contract that the real one keeps.
#include "tests/simulated.h"

#include <doctest/doctest.h>

#include "tests/conformance.h"

TEST_CASE("simulated storage conforms") {
  storage_conformance([] {
    auto storage = std::make_shared<tierload::SimulatedStorage>();
    storage->make_dir("");
    return storage;
  });
}

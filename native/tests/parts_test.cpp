// Chunks that are parts of one tensor: their order in a manifest, and what is refused.
#include <doctest/doctest.h>

#include <array>
#include <vector>

#include "tests/simulated.h"
#include "tierload/bytes.h"
#include "tierload/manifest.h"

using namespace tierload;

namespace {

struct Part {
  std::string key;
  std::vector<int64_t> offsets;
  std::vector<int64_t> shape{4, 6};
  uint16_t dtype = 2;
};

// A shard with these chunks, none of which has bytes, as a commit by two ranks would open it.
std::unique_ptr<Manifest> open_with(const std::vector<Part>& parts) {
  std::vector<ChunkRow> chunks;
  std::vector<int64_t> dims;
  std::string keys;
  for (const Part& part : parts) {
    ChunkRow chunk{};
    chunk.key_hash = xxh3(as_bytes(part.key));
    chunk.key_offset = keys.size();
    chunk.key_length = static_cast<uint32_t>(part.key.size());
    chunk.dtype = part.dtype;
    chunk.ndim = static_cast<uint8_t>(part.shape.size());
    chunk.dims = dims.size();
    keys += part.key;
    dims.insert(dims.end(), part.shape.begin(), part.shape.end());
    dims.insert(dims.end(), part.offsets.begin(), part.offsets.end());
    dims.insert(dims.end(), part.shape.size(), 0);
    chunks.push_back(chunk);
  }
  ManifestParts manifest;
  manifest.rank = 1;
  manifest.world_size = 2;
  manifest.epoch = 1;
  manifest.txid = 1;
  manifest.chunks = chunks;
  manifest.dims = dims;
  manifest.keys = as_bytes(keys);
  const SealedFile sealed = encode_manifest(manifest);
  SimulatedStorage disk;
  for (const char* dir : {"", "man"}) disk.make_dir(dir);
  disk.open(manifest_path(1, 1, 1), OpenMode::create)->write(0, Bytes(sealed.file));
  return Manifest::open(disk, {1, 0, 1, 1, sealed.body_length, sealed.digest}, 2, nullptr);
}

}  // namespace

TEST_CASE("parts of a tensor stand in the order of their offsets, and its key finds the first") {
  const auto manifest = open_with({{"a", {0, 0}}, {"w", {0, 3}}, {"w", {0, 4}}, {"w", {2, 0}}, {"x", {0, 0}}});
  CHECK(manifest->find("w") == 1);
  CHECK(manifest->find("x") == 4);
  CHECK_FALSE(manifest->find("v"));
  CHECK(manifest->world_size() == 2);
}

TEST_CASE("parts out of order, twice, or of two different tensors are refused") {
  const std::vector<std::pair<std::string, std::vector<Part>>> wrong{
      {"twice", {{"w", {0, 3}}, {"w", {0, 3}}}},
      {"out of order", {{"w", {2, 0}}, {"w", {0, 3}}}},
      {"of negative offsets after others", {{"w", {0, 0}}, {"w", {-1, 0}}}},
      {"of two shapes", {{"w", {0, 0}}, {"w", {2, 0}, {4, 7}}}},
      {"of two numbers of dimensions", {{"w", {0, 0}}, {"w", {2}, {4}}}},
      {"of two dtypes", {{"w", {0, 0}}, {"w", {2, 0}, {4, 6}, 3}}},
      {"a scalar twice", {{"w", {}, {}}, {"w", {}, {}}}},
      {"keys out of order", {{"x", {0, 0}}, {"w", {0, 0}}}},
  };
  for (const auto& [what, parts] : wrong) {
    CAPTURE(what);
    CHECK_THROWS_WITH_AS(open_with(parts), doctest::Contains("order of chunk 1 is malformed"), CorruptError);
  }
}

// libFuzzer target: read_root() on a root file whose digest is right. The input is a mode byte, the number of ranks,
// and a body. With bit 0 of the mode the fields that name the file are made right (magic, version, ranks, epoch, txid,
// body length), so that rows are reached; with bit 1 the mirror has the last byte changed; with bit 2 the first copy is
// missing; with bit 3 row i is that of rank i.
#include "tierload/root.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "catalog/sealed.h"
#include "tests/simulated.h"

namespace {

using namespace tierload;

constexpr uint64_t epoch = 1;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "root fuzzer: %s\n", what);
  std::abort();
}

template <typename T>
void set(std::vector<std::byte>& body, size_t offset, T value) {
  std::memcpy(body.data() + offset, &value, sizeof value);
}

void name_root(std::vector<std::byte>& body, uint32_t ranks, uint64_t txid) {
  std::memcpy(body.data(), "TLROOT01", 8);
  set<uint32_t>(body, 8, 1);
  set<uint32_t>(body, 12, ranks);
  set<uint64_t>(body, 16, epoch);
  set<uint64_t>(body, 24, txid);
  set<uint64_t>(body, 32, body.size());
  set<uint64_t>(body, 48, 0);
}

void put(Storage& storage, const std::string& path, Bytes data) {
  storage.open(path, OpenMode::create)->write(0, data);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const uint8_t mode = data[0];
  const uint32_t ranks = 2 + data[1] % 6;
  constexpr uint64_t txid = 5;
  const Bytes input(reinterpret_cast<const std::byte*>(data) + 2, size - 2);
  std::vector<std::byte> body(input.begin(), input.end());
  if ((mode & 1U) != 0) {
    body.resize(root_body_length(ranks));
    name_root(body, ranks, txid);
  }
  if ((mode & 8U) != 0) {
    for (uint32_t rank = 0; root_body_length(rank + 1) <= body.size(); ++rank) {
      set<uint32_t>(body, root_body_length(rank), rank);
    }
  }
  SealedFile sealed = seal(body);
  const RootRow pin{0, 0, epoch, txid, sealed.body_length, sealed.digest};
  SimulatedStorage storage;
  for (const char* dir : {"", "man"}) storage.make_dir(dir);
  const std::string path = root_path(epoch, txid);
  if ((mode & 4U) == 0) put(storage, path, sealed.file);
  if ((mode & 2U) != 0 && !sealed.file.empty()) sealed.file.back() ^= std::byte{1};
  put(storage, path + ".m", sealed.file);
  for (const bool mirror : {false, true}) check_root_copy(storage, pin, mirror);
  try {
    const std::vector<RootRow> rows = read_root(storage, pin, ranks, nullptr);
    require(rows.size() == ranks, "a root has not a row for every rank");
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      const RootRow& row = rows[rank];
      require(row.rank == rank && row.txid > 0 && row.txid <= txid && row.epoch <= epoch, "a row is out of bounds");
      require(row.body_length <= sealed_body_max, "a row pins a body that no file has");
      require(manifest_path(row.epoch, row.txid, row.rank).size() == 31, "a row leaves the file names");
    }
    require(encode_root(rows, epoch, txid).body_length == body.size(), "a root has another length when written");
  } catch (const Error& error) {
    require(std::strlen(error.what()) != 0, "an error without a message");
  }
  return 0;
}

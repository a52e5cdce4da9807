// libFuzzer target: Manifest::open() on a shard whose digests are right, then everything that a load does with it.
// The input is a mode byte and a body. With bit 0 of the mode the fields that name the shard are made right (magic,
// version, rank, world size, epoch, txid, body length), so that rows are reached; with bit 1 the mirror has the last
// byte changed; with bit 2 the first copy is missing.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "tests/simulated.h"
#include "tierload/bytes.h"
#include "tierload/digest.h"
#include "tierload/engine.h"

namespace {

using namespace tierload;

constexpr uint64_t epoch = 1;
constexpr uint64_t txid = 2;
constexpr size_t header_length = 256;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "manifest fuzzer: %s\n", what);
  std::abort();
}

template <typename T>
void set(std::vector<std::byte>& body, size_t offset, T value) {
  std::memcpy(body.data() + offset, &value, sizeof value);
}

void name_shard(std::vector<std::byte>& body) {
  std::memcpy(body.data(), "TLMAN001", 8);
  set<uint32_t>(body, 8, 1);
  set<uint32_t>(body, 12, 0);
  set<uint32_t>(body, 16, 1);
  set<uint64_t>(body, 32, 0);
  set<uint64_t>(body, 40, epoch);
  set<uint64_t>(body, 48, txid);
  set<uint64_t>(body, 56, body.size());
}

void put(Storage& storage, const std::string& path, Bytes data) {
  storage.open(path, OpenMode::create)->write(0, data);
}

// The body with its leaf table, and the row that pins it.
std::pair<std::vector<std::byte>, RootRow> seal(const std::vector<std::byte>& body) {
  std::vector<uint64_t> leaves;
  for (size_t at = 0; at < body.size(); at += manifest_leaf) {
    leaves.push_back(xxh3(Bytes(body).subspan(at, std::min(manifest_leaf, body.size() - at))));
  }
  RootRow row;
  row.epoch = epoch;
  row.txid = txid;
  row.body_length = body.size();
  row.digest = tree_root(leaves, body.size());
  std::vector<std::byte> file = body;
  const Bytes table = std::as_bytes(std::span(leaves));
  file.insert(file.end(), table.begin(), table.end());
  return {std::move(file), row};
}

// Every row, through every accessor; each must stay inside the mapped file, which the sanitizer watches.
void walk(const Manifest& manifest) {
  size_t bytes = manifest.state().size() + manifest.dims().size() + manifest.rank() + manifest.page_bytes();
  for (const SegmentRow& segment : manifest.segments()) bytes += segment.path().size();
  for (const ChunkRow& chunk : manifest.chunks()) {
    bytes += manifest.key(chunk).size();
    for (size_t i = 0; i < size_t{3} * chunk.ndim; ++i) bytes += static_cast<size_t>(manifest.dims()[chunk.dims + i]);
    const auto pages = manifest.pages().subspan(chunk.first_page, chunk.pages);
    uint64_t held = 0;
    for (const PageRow& page : pages) held += page.raw_length;
    require(held >= chunk.bytes, "a chunk is longer than its pages");
  }
  for (const uint32_t number : manifest.index()) require(number < manifest.chunks().size(), "an index leads outside");
  for (size_t page = 0; page < manifest.pages().size(); ++page) bytes += manifest.key_of_page(page).size();
  require(bytes != 1, "(what was read is used)");
}

void read(Storage& storage, const Manifest& manifest) {
  constexpr size_t pages_max = 64;
  constexpr uint64_t raw_max = 1u << 20;
  std::vector<uint32_t> pages;
  std::vector<PagePart> parts;
  std::vector<std::vector<std::byte>> memory;
  uint64_t raw = 0;
  for (uint32_t page = 0; page < manifest.pages().size() && pages.size() < pages_max; ++page) {
    const PageRow& row = manifest.pages()[page];
    if (raw + row.raw_length > raw_max) continue;
    raw += row.raw_length;
    pages.push_back(page);
    memory.emplace_back(row.raw_length - row.raw_length / 3);
    parts.push_back({page, row.raw_length / 3, memory.back()});
  }
  require(check_pages(storage, manifest, pages, 0, nullptr).size() <= pages.size(), "more failures than pages");
  std::vector<uint8_t> touched(parts.size());
  read_pages(storage, manifest, parts, 0, touched, nullptr);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const uint8_t mode = data[0];
  const Bytes input(reinterpret_cast<const std::byte*>(data) + 1, size - 1);
  std::vector<std::byte> body(input.begin(), input.end());
  if ((mode & 1U) != 0) {
    body.resize(std::max(body.size(), header_length));
    name_shard(body);
  }
  auto [file, row] = seal(body);
  SimulatedStorage storage;
  for (const char* dir : {"", "man", "seg"}) storage.make_dir(dir);
  const std::string path = manifest_path(epoch, txid, 0);
  if ((mode & 4U) == 0) put(storage, path, file);
  if ((mode & 2U) != 0 && !file.empty()) file.back() ^= std::byte{1};
  put(storage, path + ".m", file);
  // The input once more as the pages' data.
  put(storage, SegmentRow{epoch, txid, 0, 0, 0}.path(), input);
  for (const bool mirror : {false, true}) check_manifest_copy(storage, row, mirror);
  try {
    const auto manifest = Manifest::open(storage, row, 1, nullptr);
    walk(*manifest);
    read(storage, *manifest);
  } catch (const Error& error) {
    require(std::strlen(error.what()) != 0, "an error without a message");
  }
  try {
    walk(*Manifest::open_unpinned(storage, epoch, txid, 0));
  } catch (const Error&) {
    // What a collector may find in man/ is not pinned by anything.
  }
  return 0;
}

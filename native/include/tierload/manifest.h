// Manifest shards: the page table of one rank for one commit (docs/FORMAT.md section 6).
// Rows are fixed-width and used in place, out of a mapped file.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tierload/state.h"
#include "tierload/storage.h"

namespace tierload {

struct SegmentRow {
  uint64_t epoch;
  uint64_t txid;
  uint32_t rank;
  uint32_t n;
  uint64_t size;
  std::string path() const;
  bool same_file(const SegmentRow& other) const {
    return epoch == other.epoch && txid == other.txid && rank == other.rank && n == other.n;
  }
};
static_assert(sizeof(SegmentRow) == 32);

constexpr uint32_t page_packed = 1;
constexpr uint64_t page_raw_max = 16u << 20;

struct PageRow {
  Digest raw_digest;
  Digest stored_digest;
  uint64_t offset;
  uint32_t segment;
  uint32_t stored_length;
  uint32_t raw_length;
  uint8_t codec;
  uint8_t item_size;
  uint16_t heat;
  uint32_t flags;
  uint32_t reserved;
};
static_assert(sizeof(PageRow) == 64);

constexpr uint8_t chunk_packed = 1;

struct ChunkRow {
  uint64_t key_hash;
  uint64_t key_offset;
  uint32_t key_length;
  uint16_t dtype;
  uint8_t ndim;
  uint8_t flags;
  uint64_t dims;
  uint64_t bytes;
  uint32_t first_page;
  uint32_t pages;
  uint32_t page_offset;
  uint32_t reserved;
  uint64_t reserved2;
};
static_assert(sizeof(ChunkRow) == 64);

// Everything that a manifest shard holds, as it is handed to the writer.
struct ManifestParts {
  uint32_t rank = 0;
  uint32_t world_size = 1;
  uint32_t page_bytes = 0;
  uint64_t epoch = 0;
  uint64_t txid = 0;
  std::span<const SegmentRow> segments;
  std::span<const PageRow> pages;
  std::span<const ChunkRow> chunks;  // sorted by key, then offsets
  std::span<const int64_t> dims;
  Bytes keys;
  Bytes state;
};

constexpr uint64_t sealed_body_max = uint64_t{1} << 40;  // of any file that a row pins: no sum of lengths overflows

struct SealedFile {
  std::vector<std::byte> file;  // body and leaf table
  uint64_t body_length = 0;
  Digest digest;
};
SealedFile encode_manifest(const ManifestParts& parts);
// How long the file is that `row` pins. Throws CorruptError when none is.
uint64_t manifest_file_length(const RootRow& row);

std::string manifest_path(uint64_t epoch, uint64_t txid, uint32_t rank);

// An open, verified manifest shard. While it lives it holds a shared lock, so that collection leaves its files alone.
class Manifest {
 public:
  // Opens the shard that `row` pins in a commit by so many ranks: the first copy, or the mirror when that one is
  // missing or damaged (which is added to `warnings`). Every byte is verified, and every row is checked against its
  // bounds: nothing that is read here later can point outside. Throws CorruptError when neither copy serves.
  static std::unique_ptr<Manifest> open(Storage& storage, const RootRow& row, uint32_t ranks,
                                        std::vector<std::string>* warnings);
  // Opens a shard that no commit pins any more, by what it says of itself. For collection only.
  static std::unique_ptr<Manifest> open_unpinned(Storage& storage, uint64_t epoch, uint64_t txid, uint32_t rank);

  // Lets collection have its files; it may be used again once `pin` says that they are still there.
  void unpin() { lock_.reset(); }
  bool pin();

  const std::string& path() const { return path_; }
  uint32_t rank() const;
  uint32_t world_size() const;
  uint32_t page_bytes() const;
  std::span<const SegmentRow> segments() const { return section<SegmentRow>(0); }
  std::span<const PageRow> pages() const { return section<PageRow>(1); }
  std::span<const ChunkRow> chunks() const { return section<ChunkRow>(2); }
  std::span<const uint32_t> index() const { return section<uint32_t>(3); }
  std::span<const int64_t> dims() const { return section<int64_t>(4); }
  Bytes keys() const { return section<std::byte>(5); }
  Bytes state() const { return section<std::byte>(6); }

  std::string_view key(const ChunkRow& chunk) const;
  // The number of the (first) chunk with this key.
  std::optional<uint64_t> find(std::string_view key) const;
  // The key of the (first) chunk that page `row` belongs to, for messages.
  std::string key_of_page(uint64_t row) const;

 private:
  Manifest(std::string path, std::unique_ptr<File> file, std::unique_ptr<Mapping> mapping, const RootRow& row,
           uint32_t ranks);
  template <typename T>
  std::span<const T> section(int number) const {
    const Bytes part = sections_[static_cast<size_t>(number)];
    return {reinterpret_cast<const T*>(part.data()), part.size() / sizeof(T)};
  }
  void check(const RootRow& row, uint32_t ranks);
  void check_rows() const;
  bool in_order(const ChunkRow& before, const ChunkRow& chunk) const;

  std::string path_;
  std::unique_ptr<File> file_;
  std::unique_ptr<Lock> lock_;
  std::unique_ptr<Mapping> mapping_;
  std::array<Bytes, 7> sections_;
};

// Whether one copy of a shard (letter-less name or ".m") is whole; a message when it is not.
std::string check_manifest_copy(Storage& storage, const RootRow& row, bool mirror);

}  // namespace tierload

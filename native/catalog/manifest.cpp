#include "tierload/manifest.h"

#include <algorithm>
#include <cerrno>
#include <future>
#include <numeric>
#include <optional>

#include "catalog/sealed.h"
#include "tierload/bytes.h"
#include "tierload/codec.h"
#include "tierload/root.h"

namespace tierload {
namespace {

constexpr std::string_view magic = "TLMAN001";
constexpr uint64_t header_length = 256;
constexpr size_t section_count = 7;
constexpr uint64_t section_unit = 64;
constexpr size_t rows_of_a_thread = 1 << 14;
constexpr std::array<uint64_t, section_count> row_size{
    sizeof(SegmentRow), sizeof(PageRow), sizeof(ChunkRow), 4, 8, 1, 1};

std::string transaction_name(const char* dir, uint64_t epoch, uint64_t txid) {
  char text[64];
  std::snprintf(text, sizeof text, "%s/%08llx-%012llx", dir, static_cast<unsigned long long>(epoch),
                static_cast<unsigned long long>(txid));
  return text;
}

std::string file_name(const char* dir, uint64_t epoch, uint64_t txid, uint32_t rank) {
  char text[16];
  std::snprintf(text, sizeof text, ".r%04x", rank);
  return transaction_name(dir, epoch, txid) + text;
}

struct ShardName {
  uint32_t rank;
  uint64_t epoch;
  uint64_t txid;
};

// What a file says that it is, when at least its first leaf is whole.
std::optional<ShardName> name_in(Storage& storage, const std::string& path) {
  try {
    const auto file = storage.open(path, OpenMode::read);
    std::vector<std::byte> leaf(manifest_leaf);
    leaf.resize(file->read(0, leaf));
    if (leaf.size() < header_length || as_text(Bytes(leaf).first(8)) != magic) return std::nullopt;
    ShardName name{};
    uint64_t body;
    uint64_t digest;
    std::memcpy(&name.rank, leaf.data() + 12, 4);
    std::memcpy(&name.epoch, leaf.data() + 40, 8);
    std::memcpy(&name.txid, leaf.data() + 48, 8);
    std::memcpy(&body, leaf.data() + 56, 8);
    if (body < header_length || body > sealed_body_max) return std::nullopt;
    leaf.resize(std::min<uint64_t>(leaf.size(), body));
    if (file->read(body, std::as_writable_bytes(std::span(&digest, 1))) != 8 || xxh3(leaf) != digest) {
      return std::nullopt;
    }
    return name;
  } catch (const IoError&) {
    return std::nullopt;  // what is wrong with the file is known already
  }
}

// A whole shard under another one's name is what a mixed-up copy of a store has: that is more than "damaged".
std::string mixed_up(Storage& storage, const std::string& path, const RootRow& row) {
  const auto name = name_in(storage, path);
  if (!name || (name->rank == row.rank && name->epoch == row.epoch && name->txid == row.txid)) return "";
  if (name->rank != row.rank) {
    return path + ": shard of rank " + std::to_string(name->rank) + ", the commit's root says " +
           std::to_string(row.rank);
  }
  return path + ": shard of rank " + std::to_string(row.rank) + " is of transaction " + std::to_string(name->txid) +
         " (epoch " + std::to_string(name->epoch) + "), the commit's root says " + std::to_string(row.txid) +
         " (epoch " + std::to_string(row.epoch) + ")";
}

std::string copy_path(const RootRow& row, bool mirror) {
  return manifest_path(row.epoch, row.txid, row.rank) + (mirror ? ".m" : "");
}

bool well_formed(const PageRow& page, std::span<const SegmentRow> segments) {
  return page.segment < segments.size() && page.offset % sector == 0 && page.raw_length != 0 &&
         page.raw_length <= page_raw_max && page.stored_length != 0 && page.stored_length <= page.raw_length &&
         page.offset <= segments[page.segment].size &&
         page.stored_length <= segments[page.segment].size - page.offset &&
         page.codec <= static_cast<uint8_t>(Codec::planes) &&
         (page.codec != static_cast<uint8_t>(Codec::raw) || page.stored_length == page.raw_length) &&
         (page.item_size == 1 || page.item_size == 2 || page.item_size == 4 || page.item_size == 8);
}

// The number of the first page that is not, or how many there are. A state of 100 GB has 100,000 rows.
size_t first_malformed(std::span<const PageRow> pages, std::span<const SegmentRow> segments) {
  const auto look = [&](size_t begin, size_t end) {
    while (begin < end && well_formed(pages[begin], segments)) ++begin;
    return begin;
  };
  const size_t parts = std::clamp<size_t>(pages.size() / rows_of_a_thread, 1, checking_threads());
  std::vector<std::future<size_t>> others;
  for (size_t part = 1; part < parts; ++part) {
    others.push_back(std::async(look, pages.size() * part / parts, pages.size() * (part + 1) / parts));
  }
  size_t found = look(0, pages.size() / parts);
  bool all = found == pages.size() / parts;
  for (size_t part = 1; part < parts; ++part) {
    const size_t end = others[part - 1].get();
    if (all) found = end;
    all = all && end == pages.size() * (part + 1) / parts;
  }
  return found;
}

}  // namespace

std::string SegmentRow::path() const {
  char text[16];
  std::snprintf(text, sizeof text, ".%04x", n);
  return file_name("seg", epoch, txid, rank) + text;
}

std::string manifest_path(uint64_t epoch, uint64_t txid, uint32_t rank) { return file_name("man", epoch, txid, rank); }

std::string root_path(uint64_t epoch, uint64_t txid) { return transaction_name("man", epoch, txid) + ".root"; }

uint64_t manifest_file_length(const RootRow& row) { return sealed_length(row, header_length, copy_path(row, false)); }

SealedFile encode_manifest(const ManifestParts& parts) {
  std::vector<uint32_t> index(parts.chunks.size());
  std::iota(index.begin(), index.end(), 0u);
  std::stable_sort(index.begin(), index.end(),
                   [&](uint32_t a, uint32_t b) { return parts.chunks[a].key_hash < parts.chunks[b].key_hash; });
  const std::array<Bytes, section_count> sections{std::as_bytes(parts.segments),
                                                  std::as_bytes(parts.pages),
                                                  std::as_bytes(parts.chunks),
                                                  std::as_bytes(std::span<const uint32_t>(index)),
                                                  std::as_bytes(parts.dims),
                                                  parts.keys,
                                                  parts.state};
  std::array<uint64_t, section_count> offsets;
  uint64_t at = header_length;
  for (size_t i = 0; i < section_count; ++i) {
    offsets[i] = at;
    at = round_up(at + sections[i].size(), section_unit);
  }
  ByteWriter out;
  out.put(magic);
  out.put(format_version);
  out.put(parts.rank);
  out.put(parts.world_size);
  out.put(parts.page_bytes);
  out.put(uint64_t{0});
  out.put(uint64_t{0});
  out.put(parts.epoch);
  out.put(parts.txid);
  out.put(at);
  for (size_t i = 0; i < section_count; ++i) {
    out.put(offsets[i]);
    out.put(uint64_t{sections[i].size()});
  }
  out.pad(header_length);
  for (const Bytes section : sections) {
    out.put(section);
    out.pad(section_unit);
  }
  return seal(out.take());
}

std::unique_ptr<Manifest> Manifest::open(Storage& storage, const RootRow& row, uint32_t ranks,
                                         std::vector<std::string>* warnings) {
  const uint64_t length = manifest_file_length(row);
  return from_either_copy(copy_path(row, false), "a manifest", warnings, [&](const std::string& path) {
    try {
      auto file = storage.open(path, OpenMode::read);
      auto mapping = file->map(length);
      return std::unique_ptr<Manifest>(new Manifest(path, std::move(file), std::move(mapping), row, ranks));
    } catch (const UnsupportedError&) {
      throw;
    } catch (const Error&) {
      if (const std::string other = mixed_up(storage, path, row); !other.empty()) throw CorruptError(other);
      throw;
    }
  });
}

std::unique_ptr<Manifest> Manifest::open_unpinned(Storage& storage, uint64_t epoch, uint64_t txid, uint32_t rank) {
  RootRow row;
  row.epoch = epoch;
  row.txid = txid;
  row.rank = rank;
  const std::string path = copy_path(row, false);
  const auto file = storage.open(path, OpenMode::read);
  std::array<std::byte, header_length> header{};
  file->read(0, header);
  uint32_t ranks;
  std::memcpy(&ranks, header.data() + 16, 4);
  std::memcpy(&row.body_length, header.data() + 56, 8);
  const uint64_t length = manifest_file_length(row);
  if (length != file->size()) throw CorruptError(path + " does not have the length that it declares");
  std::vector<uint64_t> table((length - row.body_length) / 8);
  file->read(row.body_length, std::as_writable_bytes(std::span(table)));
  row.digest = tree_root(table, row.body_length);
  return open(storage, row, ranks, nullptr);
}

Manifest::Manifest(std::string path, std::unique_ptr<File> file, std::unique_ptr<Mapping> mapping, const RootRow& row,
                   uint32_t ranks)
    : path_(std::move(path)), file_(std::move(file)), mapping_(std::move(mapping)) {
  if (!pin()) throw IoError("open", path_, ENOENT);
  check(row, ranks);
  check_rows();
}

bool Manifest::pin() {
  // A collector holds the exclusive lock only while it removes this very file, so the next open finds it gone.
  lock_ = file_->try_lock(false);
  return lock_ != nullptr && file_->linked();
}

void Manifest::check(const RootRow& row, uint32_t ranks) {
  const Bytes image = mapping_->bytes();
  check_sealed(image, row, path_);
  if (file_->size() != image.size()) throw CorruptError(path_ + " is longer than its commit says");
  ByteReader in(image.first(row.body_length), path_);
  const std::string_view found = as_text(in.take(8));
  const auto version = in.get<uint32_t>();
  const auto rank = in.get<uint32_t>();
  const auto world = in.get<uint32_t>();
  in.get<uint32_t>();
  in.get<uint64_t>();
  const auto incompatible = in.get<uint64_t>();
  const auto epoch = in.get<uint64_t>();
  const auto txid = in.get<uint64_t>();
  const auto body = in.get<uint64_t>();
  if (found != magic) throw CorruptError(path_ + " is no manifest");
  if (version != format_version || incompatible != 0) {
    throw UnsupportedError(path_ + " has format version " + std::to_string(version) + " and incompatible features " +
                           std::to_string(incompatible) + ": use a newer tierload");
  }
  if (rank != row.rank || epoch != row.epoch || txid != row.txid || body != row.body_length) {
    throw CorruptError(path_ + " is the manifest of another commit");
  }
  if (world != ranks) {
    throw CorruptError(path_ + ": shard of rank " + std::to_string(rank) + " is one of " + std::to_string(world) +
                       ", the commit is by " + std::to_string(ranks) + " ranks");
  }
  for (size_t i = 0; i < section_count; ++i) {
    const auto offset = in.get<uint64_t>();
    const auto length = in.get<uint64_t>();
    if (offset < header_length || offset % section_unit != 0 || offset > body || length > body - offset ||
        length % row_size[i] != 0) {
      throw CorruptError(path_ + ": section " + std::to_string(i + 1) + " lies outside of the file");
    }
    sections_[i] = image.subspan(offset, length);
  }
}

void Manifest::check_rows() const {
  const auto fail = [&](const std::string& what, uint64_t row) {
    throw CorruptError(path_ + ": " + what + " " + std::to_string(row) + " is malformed");
  };
  const auto all_segments = segments();
  const auto all_pages = pages();
  const auto all_chunks = chunks();
  const size_t malformed = first_malformed(all_pages, all_segments);
  if (malformed < all_pages.size()) fail("page", malformed);
  uint64_t unpacked = 0;  // pages belong to one chunk unless packed, which also bounds the work below
  const auto all_dims = dims();
  if (index().size() != all_chunks.size()) fail("index", index().size());
  for (const uint32_t number : index()) {
    if (number >= all_chunks.size()) fail("index", number);
  }
  for (size_t i = 0; i < all_chunks.size(); ++i) {
    const ChunkRow& chunk = all_chunks[i];
    if (chunk.key_offset > keys().size() || chunk.key_length > keys().size() - chunk.key_offset ||
        chunk.dims > all_dims.size() || chunk.ndim * uint64_t{3} > all_dims.size() - chunk.dims ||
        chunk.first_page > all_pages.size() || chunk.pages > all_pages.size() - chunk.first_page ||
        (chunk.pages == 0) != (chunk.bytes == 0)) {
      fail("chunk", i);
    }
    if (i > 0 && !in_order(all_chunks[i - 1], chunk)) fail("order of chunk", i);
    if (!(chunk.flags & chunk_packed)) unpacked += chunk.pages;
    if (unpacked > all_pages.size() || ((chunk.flags & chunk_packed) && chunk.pages > 1)) fail("pages of chunk", i);
    uint64_t held = 0;
    for (const PageRow& page : all_pages.subspan(chunk.first_page, chunk.pages)) held += page.raw_length;
    // A packed chunk takes a part of its page; any other takes its pages whole.
    const bool fits = chunk.flags & chunk_packed ? chunk.page_offset <= held && chunk.bytes <= held - chunk.page_offset
                                                 : chunk.page_offset == 0 && chunk.bytes == held;
    if (!fits) fail("extent of chunk", i);
  }
}

// By key, then by the offsets; chunks of one key are parts of one tensor.
bool Manifest::in_order(const ChunkRow& before, const ChunkRow& chunk) const {
  if (key(before) != key(chunk)) return key(before) < key(chunk);
  if (before.dtype != chunk.dtype || before.ndim != chunk.ndim) return false;
  const auto first = dims().subspan(before.dims, before.ndim * uint64_t{2});
  const auto second = dims().subspan(chunk.dims, chunk.ndim * uint64_t{2});
  return std::ranges::equal(first.first(chunk.ndim), second.first(chunk.ndim)) &&
         std::ranges::lexicographical_compare(first.subspan(chunk.ndim), second.subspan(chunk.ndim));
}

uint32_t Manifest::rank() const {
  uint32_t value;
  std::memcpy(&value, mapping_->bytes().data() + 12, 4);
  return value;
}

uint32_t Manifest::world_size() const {
  uint32_t value;
  std::memcpy(&value, mapping_->bytes().data() + 16, 4);
  return value;
}

uint32_t Manifest::page_bytes() const {
  uint32_t value;
  std::memcpy(&value, mapping_->bytes().data() + 20, 4);
  return value;
}

std::string_view Manifest::key(const ChunkRow& chunk) const {
  return as_text(keys().subspan(chunk.key_offset, chunk.key_length));
}

std::optional<uint64_t> Manifest::find(std::string_view wanted) const {
  const auto rows = chunks();
  const auto found = std::ranges::lower_bound(rows, wanted, {}, [this](const ChunkRow& row) { return key(row); });
  if (found == rows.end() || key(*found) != wanted) return std::nullopt;
  return static_cast<uint64_t>(found - rows.begin());
}

std::string Manifest::key_of_page(uint64_t row) const {
  for (const ChunkRow& chunk : chunks()) {
    if (row >= chunk.first_page && row < uint64_t{chunk.first_page} + chunk.pages) return std::string(key(chunk));
  }
  return "";
}

std::string check_manifest_copy(Storage& storage, const RootRow& row, bool mirror) {
  const std::string path = copy_path(row, mirror);
  const std::string problem = check_sealed_copy(storage, path, row, header_length);
  if (problem.empty()) return "";
  const std::string other = mixed_up(storage, path, row);
  return other.empty() ? problem : other;
}

}  // namespace tierload

#include "tierload/root.h"

#include "catalog/sealed.h"
#include "tierload/bytes.h"

namespace tierload {
namespace {

constexpr std::string_view magic = "TLROOT01";

std::string rank_text(uint32_t rank) { return "rank " + std::to_string(rank); }

std::vector<RootRow> decode_root(Bytes image, const RootRow& pin, uint32_t ranks, const std::string& path) {
  check_sealed(image, pin, path);
  ByteReader in(image.first(pin.body_length), path);
  const std::string_view found = as_text(in.take(8));
  const auto version = in.get<uint32_t>();
  const auto count = in.get<uint32_t>();
  const auto epoch = in.get<uint64_t>();
  const auto txid = in.get<uint64_t>();
  const auto body = in.get<uint64_t>();
  in.get<uint64_t>();  // compatible bits: none is known, and none needs to be
  const auto incompatible = in.get<uint64_t>();
  in.get<uint64_t>();
  if (found != magic) throw CorruptError(path + " is no root file");
  if (version != format_version || incompatible != 0) {
    throw UnsupportedError(path + " has format version " + std::to_string(version) + " and incompatible features " +
                           std::to_string(incompatible) + ": use a newer tierload");
  }
  if (epoch != pin.epoch || txid != pin.txid || body != pin.body_length || count != ranks) {
    throw CorruptError(path + " is the root of transaction " + std::to_string(txid) + " by " + std::to_string(count) +
                       " ranks, the commit says " + std::to_string(pin.txid) + " by " + std::to_string(ranks));
  }
  const Bytes rows = in.take(uint64_t{ranks} * sizeof(RootRow));
  if (!in.done()) throw CorruptError(path + " goes on behind its rows");
  std::vector<RootRow> root(ranks);
  std::memcpy(root.data(), rows.data(), rows.size());
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    const std::string fault = row_fault(root[rank], rank, epoch, txid);
    if (!fault.empty()) throw CorruptError(path + ": " + fault);
  }
  return root;
}

}  // namespace

SealedFile encode_root(std::span<const RootRow> rows, uint64_t epoch, uint64_t txid) {
  ByteWriter out;
  out.put(magic);
  out.put(format_version);
  out.put(static_cast<uint32_t>(rows.size()));
  out.put(epoch);
  out.put(txid);
  out.put(root_body_length(static_cast<uint32_t>(rows.size())));
  out.pad(root_header_length);
  out.put(std::as_bytes(rows));
  return seal(out.take());
}

std::string row_fault(const RootRow& row, uint32_t rank, uint64_t epoch, uint64_t txid) {
  if (row.rank != rank) return "the row of " + rank_text(rank) + " is that of " + rank_text(row.rank);
  if (row.txid == 0 || row.txid > txid) {
    return "the shard of " + rank_text(rank) + " is of transaction " + std::to_string(row.txid) +
           ", the commit is of " + std::to_string(txid);
  }
  if (row.epoch == 0 || row.epoch > epoch || (row.txid == txid && row.epoch != epoch)) {
    return "the shard of " + rank_text(rank) + " is of epoch " + std::to_string(row.epoch) + ", the commit is of " +
           std::to_string(epoch);
  }
  if (row.body_length > sealed_body_max) {
    return "the shard of " + rank_text(rank) + " has " + std::to_string(row.body_length) + " bytes";
  }
  return "";
}

std::vector<RootRow> read_root(Storage& storage, const RootRow& row, uint32_t ranks,
                               std::vector<std::string>* warnings) {
  if (ranks == 1) return {row};
  const std::string first = root_path(row.epoch, row.txid);
  return from_either_copy(first, "a root", warnings, [&](const std::string& path) {
    const uint64_t length = sealed_length(row, root_header_length, path);
    const auto file = storage.open(path, OpenMode::read);
    if (const uint64_t size = file->size(); size != length) {
      throw CorruptError(path + " has " + std::to_string(size) + " bytes, its commit says " + std::to_string(length));
    }
    std::vector<std::byte> image(length);
    image.resize(file->read(0, image));
    return decode_root(image, row, ranks, path);
  });
}

std::string check_root_copy(Storage& storage, const RootRow& row, bool mirror) {
  return check_sealed_copy(storage, root_path(row.epoch, row.txid) + (mirror ? ".m" : ""), row, root_header_length);
}

}  // namespace tierload

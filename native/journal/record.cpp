#include "journal/record.h"

#include <algorithm>

#include "tierload/bytes.h"
#include "tierload/digest.h"

namespace tierload {
namespace {

constexpr std::string_view magic = "TLWAL001";

uint32_t salt_seed(uint64_t salt) { return crc32c(std::as_bytes(std::span(&salt, 1))); }

}  // namespace

std::vector<std::byte> encode_header(const JournalHeader& header) {
  ByteWriter out;
  out.put(magic);
  out.put(format_version);
  out.put(uint32_t{0});
  out.put(uint64_t{0});
  out.put(header.features);
  out.put(header.store_id);
  out.put(header.name.epoch);
  out.put(header.name.seq);
  out.put(header.salt);
  out.put(header.first_lsn);
  out.put(header.predecessor.name.epoch);
  out.put(header.predecessor.name.seq);
  out.put(header.predecessor.lsn);
  out.put(header.predecessor.crc);
  std::vector<std::byte> bytes = out.take();
  bytes.resize(sector);
  const uint32_t crc = crc32c(Bytes(bytes).first(sector - 4));
  std::memcpy(bytes.data() + sector - 4, &crc, 4);
  return bytes;
}

std::optional<JournalHeader> decode_header(Bytes bytes, JournalName name) {
  if (bytes.size() < sector) return std::nullopt;
  uint32_t crc;
  std::memcpy(&crc, bytes.data() + sector - 4, 4);
  if (as_text(bytes.first(8)) != magic || crc != crc32c(bytes.first(sector - 4))) return std::nullopt;
  ByteReader in(bytes.first(sector), name.path('c'));
  in.take(8);
  const auto version = in.get<uint32_t>();
  in.take(4);
  in.get<uint64_t>();  // compatible bits: none is known, and none needs to be
  const auto incompatible = in.get<uint64_t>();
  if (version != format_version || (incompatible & ~features_known) != 0) {
    throw UnsupportedError(name.path('c') + " has format version " + std::to_string(version) +
                           " and incompatible features " + std::to_string(incompatible) +
                           "; this release reads version 1 with features " + std::to_string(features_known) +
                           ": use a newer tierload");
  }
  JournalHeader header;
  header.features = incompatible;
  header.store_id = in.get<StoreId>();
  header.name = {in.get<uint64_t>(), in.get<uint64_t>()};
  header.salt = in.get<uint64_t>();
  header.first_lsn = in.get<uint64_t>();
  header.predecessor.name = {in.get<uint64_t>(), in.get<uint64_t>()};
  header.predecessor.lsn = in.get<uint64_t>();
  header.predecessor.crc = in.get<uint32_t>();
  if (header.name != name) return std::nullopt;  // another journal's bytes under this name
  // History goes back from journal to journal: a link that does not go back would never end.
  if (!(header.predecessor.name < name) || header.predecessor.lsn + 1 != header.first_lsn) return std::nullopt;
  return header;
}

uint32_t encode_record(std::vector<std::byte>& out, const Record& record, const JournalHeader& header,
                       uint32_t previous_crc, uint64_t watermark) {
  RecordHeader head{};
  head.length = sizeof head;
  head.type = static_cast<uint8_t>(record.type);
  head.flags = record.flags;
  head.lsn = record.lsn;
  head.txid = record.txid;
  head.epoch = header.name.epoch;
  head.payload_length = static_cast<uint32_t>(record.payload.size());
  head.payload_crc = crc32c(record.payload);
  head.previous_crc = previous_crc;
  head.watermark = watermark;
  head.time = record.time;
  head.crc = crc32c(std::as_bytes(std::span(&head, 1)).subspan(4), salt_seed(header.salt));
  const auto* at = reinterpret_cast<const std::byte*>(&head);
  out.insert(out.end(), at, at + sizeof head);
  out.insert(out.end(), record.payload.begin(), record.payload.end());
  out.resize(round_up(out.size(), 8));
  return head.crc;
}

std::optional<RecordHeader> decode_record_header(Bytes bytes, const JournalHeader& header) {
  if (bytes.size() < sizeof(RecordHeader)) return std::nullopt;
  RecordHeader head;
  std::memcpy(&head, bytes.data(), sizeof head);
  if (head.length != sizeof head || head.payload_length > record_payload_max) return std::nullopt;
  if (head.crc != crc32c(bytes.subspan(4, sizeof head - 4), salt_seed(header.salt))) return std::nullopt;
  return head;
}

}  // namespace tierload

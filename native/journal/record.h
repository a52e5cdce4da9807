// Bytes of journal headers and records (docs/FORMAT.md sections 5 and 5.1).
#pragma once

#include "tierload/journal.h"

namespace tierload {

struct RecordHeader {
  uint32_t crc;
  uint16_t length;
  uint8_t type;
  uint8_t flags;
  uint64_t lsn;
  uint64_t txid;
  uint64_t epoch;
  uint32_t payload_length;
  uint32_t payload_crc;
  uint32_t previous_crc;
  uint32_t reserved;
  uint64_t watermark;
  uint64_t time;
};
static_assert(sizeof(RecordHeader) == 64);

std::vector<std::byte> encode_header(const JournalHeader& header);
// Nothing when the bytes are no valid header of this journal; throws UnsupportedError for a newer format.
std::optional<JournalHeader> decode_header(Bytes bytes, JournalName name);

// Appends header, payload and padding to `out`; returns the header's crc.
uint32_t encode_record(std::vector<std::byte>& out, const Record& record, const JournalHeader& header,
                       uint32_t previous_crc, uint64_t watermark);
// The header at the start of `bytes`, if its crc is right.
std::optional<RecordHeader> decode_record_header(Bytes bytes, const JournalHeader& header);

inline uint64_t record_size(uint64_t payload) { return sizeof(RecordHeader) + (payload + 7) / 8 * 8; }

}  // namespace tierload

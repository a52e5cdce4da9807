// Reading a journal from its two copies.
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <set>

#include "journal/record.h"
#include "tierload/bytes.h"
#include "tierload/digest.h"

namespace tierload {
namespace {

// "c-<8 hex>-<8 hex>"; anything else is not ours and is ignored.
std::optional<JournalName> parse_name(std::string_view file) {
  if (file.size() != 19 || (file[0] != 'c' && file[0] != 'm') || file[1] != '-' || file[10] != '-') {
    return std::nullopt;
  }
  JournalName name;
  const char* text = file.data();
  const auto epoch = std::from_chars(text + 2, text + 10, name.epoch, 16);
  const auto seq = std::from_chars(text + 11, text + 19, name.seq, 16);
  if (epoch.ptr != text + 10 || seq.ptr != text + 19) return std::nullopt;
  if (name.path(file[0]).substr(4) != file) return std::nullopt;  // upper-case digits are not ours
  return name;
}

struct Copy {
  char letter;
  std::unique_ptr<std::byte[]> memory;
  Bytes bytes;
  bool present = false;
};

// More than any journal holds: it rolls at 16 MiB, or at 24 when the disk is full, and a group and a snapshot have at
// most 64 MiB each.
constexpr uint64_t journal_bytes_max = 160u << 20;

Copy read_copy(Storage& storage, JournalName name, char letter) {
  Copy copy{letter, nullptr, {}, false};
  try {
    const auto file = storage.open(name.path(letter), OpenMode::read);
    const uint64_t size = std::min(file->size(), journal_bytes_max);
    copy.memory = std::make_unique_for_overwrite<std::byte[]>(size);
    copy.bytes = {copy.memory.get(), file->read(0, MutableBytes(copy.memory.get(), size))};
    copy.present = true;
  } catch (const IoError& error) {
    // Removed meanwhile, a bad medium, or something else under this name: the other copy must serve.
    if (!error.unusable_file()) throw;
  }
  return copy;
}

// The record that must stand at `offset`, from this copy's bytes.
std::optional<RecordHeader> record_at(Bytes bytes, uint64_t offset, const JournalHeader& header, uint64_t lsn,
                                      uint32_t previous_crc) {
  if (offset >= bytes.size()) return std::nullopt;
  const auto head = decode_record_header(bytes.subspan(offset), header);
  if (!head || head->lsn != lsn || head->epoch != header.name.epoch || head->previous_crc != previous_crc) {
    return std::nullopt;
  }
  if (head->payload_length > bytes.size() - offset - sizeof *head) return std::nullopt;
  const Bytes payload = bytes.subspan(offset + sizeof *head, head->payload_length);
  if (crc32c(payload) != head->payload_crc) return std::nullopt;
  return head;
}

// Whether any later group was written when record `lsn` was already durable: then its loss is damage, not a torn tail.
bool acknowledged_later(Bytes bytes, uint64_t offset, const JournalHeader& header, uint64_t lsn) {
  for (uint64_t at = round_up(offset, sector); at + sizeof(RecordHeader) <= bytes.size(); at += sector) {
    if (bytes[at + 4] == std::byte{0}) continue;  // header length 0: nothing was written here
    const auto head = decode_record_header(bytes.subspan(at), header);
    if (head && head->lsn > lsn && head->watermark >= lsn) return true;
  }
  return false;
}

}  // namespace

std::string JournalName::path(char copy) const {
  char text[32];
  std::snprintf(text, sizeof text, "wal/%c-%08llx-%08llx", copy, static_cast<unsigned long long>(epoch),
                static_cast<unsigned long long>(seq));
  return text;
}

std::vector<JournalName> list_journals(Storage& storage) {
  std::set<JournalName> names;
  for (const std::string& file : storage.list("wal")) {
    if (const auto name = parse_name(file)) names.insert(*name);
  }
  return {names.begin(), names.end()};
}

std::optional<JournalScan> scan_journal(Storage& storage, JournalName name, const StoreId* expected,
                                        uint64_t compared) {
  std::array<Copy, 2> copies{read_copy(storage, name, 'c'), read_copy(storage, name, 'm')};
  JournalScan scan;
  std::optional<JournalHeader> header;
  bool foreign = false;
  for (Copy& copy : copies) {
    const auto found = decode_header(copy.bytes, name);
    if (found && expected != nullptr && found->store_id != *expected) {
      foreign = true;
      copy.bytes = {};
      scan.warnings.push_back(name.path(copy.letter) + ": belongs to another store");
      continue;
    }
    if (found && !header) header = found;
    if (copy.present && !found) scan.warnings.push_back(name.path(copy.letter) + ": damaged header");
    if (!copy.present) scan.warnings.push_back(name.path(copy.letter) + ": missing");
  }
  if (!header && foreign) {
    throw CorruptError(name.path('c') + " belongs to another store: files of two stores were mixed");
  }
  if (!header) return std::nullopt;
  scan.header = *header;
  for (size_t i = 0; i < copies.size(); ++i) {
    if (!decode_header(copies[i].bytes, name)) scan.gaps.push_back({i, 0, sector});
  }
  uint64_t offset = sector;
  uint64_t lsn = header->first_lsn;
  uint32_t previous_crc = header->predecessor.crc;
  while (true) {
    std::optional<RecordHeader> head;
    const Copy* from = nullptr;
    std::array<bool, 2> holds{};
    for (size_t i = 0; i < copies.size(); ++i) {
      const auto found = record_at(copies[i].bytes, offset, *header, lsn, previous_crc);
      if (found && !head) {
        head = found;
        from = &copies[i];
      }
      holds[i] = found.has_value();
    }
    if (!head) break;
    Record record{static_cast<RecordType>(head->type), head->flags, head->lsn, head->txid, head->time, {}};
    const Bytes payload = from->bytes.subspan(offset + sizeof *head, head->payload_length);
    record.payload.assign(payload.begin(), payload.end());
    scan.records.push_back(std::move(record));
    scan.end = {name, lsn, head->crc};
    const uint64_t begin = offset;
    offset += record_size(head->payload_length);
    scan.end_offset = offset;
    if (head->flags & record_last_of_group) offset = round_up(offset, sector);
    for (size_t i = 0; i < copies.size(); ++i) {
      if (!holds[i]) scan.gaps.push_back({i, begin, offset - begin});
    }
    previous_crc = head->crc;
    ++lsn;
  }
  if (!scan.records.empty() && scan.records.front().type != RecordType::snapshot) scan.records.clear();
  for (const Copy& copy : copies) {
    if (acknowledged_later(copy.bytes, offset, *header, lsn)) {
      scan.damage = name.path('c') + " and its mirror are both damaged at byte " + std::to_string(offset) +
                    " (record " + std::to_string(lsn) + "), and later records show that it had been acknowledged";
    }
  }
  if (scan.records.empty() && scan.damage.empty()) return std::nullopt;
  // Both copies were written alike, so bytes that differ below the end are damage in one of them.
  if (copies[0].present && copies[1].present) {
    compared = std::min(compared, scan.end_offset);
    for (const Copy& copy : copies) {
      if (copy.bytes.size() < compared) scan.warnings.push_back(name.path(copy.letter) + ": shorter than its mirror");
    }
    if (std::min(copies[0].bytes.size(), copies[1].bytes.size()) >= compared &&
        std::memcmp(copies[0].bytes.data(), copies[1].bytes.data(), compared) != 0) {
      scan.warnings.push_back(name.path('c') + ": differs from its mirror");
    }
  }
  return scan;
}

// A copy whose name a crash has lost is made again when it is to be written. Nothing when it cannot be opened: then
// what was read came from the other one.
static std::unique_ptr<File> open_copy(Storage& storage, JournalName name, char letter, OpenMode mode) {
  try {
    return storage.open(name.path(letter), mode);
  } catch (const IoError& error) {
    if (!error.unusable_file()) throw;
    if (error.code != ENOENT || mode == OpenMode::read) return nullptr;
    return storage.open(name.path(letter), OpenMode::create);
  }
}

void complete_journal(Storage& storage, const JournalScan& scan) {
  // Only what is missing is written: a torn write must not touch acknowledged records.
  for (const JournalGap& gap : scan.gaps) {
    const auto file = open_copy(storage, scan.header.name, "cm"[gap.copy], OpenMode::read_write);
    if (!file) continue;
    std::vector<std::byte> bytes(gap.length);
    bytes.resize(storage.open(scan.header.name.path("mc"[gap.copy]), OpenMode::read)->read(gap.offset, bytes));
    file->write(gap.offset, Bytes(bytes));
  }
  sync_journal(storage, scan.header.name);
}

void sync_journal(Storage& storage, JournalName name) {
  for (const char letter : {'c', 'm'}) {
    if (const auto file = open_copy(storage, name, letter, OpenMode::read)) file->sync();
  }
  storage.sync_dir("wal");
}

}  // namespace tierload

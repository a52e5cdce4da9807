// libFuzzer target: journals whose crcs are right: scan, replay, undo, open, and go on writing.
//
// The input is a list of pieces. Each begins with a type (the low 3 bits of a byte), how it is used (the other bits),
// and a length (2 bytes, little-endian); the payload follows. Pieces become records of one journal with the right crcs,
// LSNs and chain. With bit 3 a payload is made to fit what has been replayed so far (a COMMIT's txid, a CHANGE's
// digests, ...), so that more than the first check is reached. With bit 4 the record is written into the first copy
// only, with bit 5 into the mirror only; bit 6 ends the sync group; bit 7 is flag bit 7 of the record. The first byte:
// bits 0-1 the SNAPSHOT (0, 1: an empty store; 2: the first piece), bit 2: fields of the header are taken from the
// first piece too.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "journal/record.h"
#include "tests/simulated.h"
#include "tierload/bytes.h"
#include "tierload/catalog.h"
#include "tierload/digest.h"

namespace {

using namespace tierload;

constexpr JournalName name{1, 0};

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "journal fuzzer: %s\n", what);
  std::abort();
}

struct Piece {
  uint8_t head = 0;
  std::vector<std::byte> payload;
};

std::vector<Piece> pieces_of(Bytes input) {
  constexpr size_t pieces_max = 24;
  std::vector<Piece> pieces;
  while (input.size() >= 3 && pieces.size() < pieces_max) {
    const size_t length = std::to_integer<size_t>(input[1]) | std::to_integer<size_t>(input[2]) << 8U;
    const Bytes payload = input.subspan(3, std::min(length, input.size() - 3));
    pieces.push_back({std::to_integer<uint8_t>(input[0]), {payload.begin(), payload.end()}});
    input = input.subspan(3 + payload.size());
  }
  return pieces;
}

std::string text_of(const std::vector<std::byte>& bytes) { return std::string(as_text(bytes)); }

// A payload of the type that can follow the state, made of what the input gives.
std::vector<std::byte> fitted(RecordType type, const std::vector<std::byte>& input, const CatalogState& state) {
  const std::string text = text_of(input);
  const uint64_t choice = text.empty() ? 0 : static_cast<uint8_t>(text[0]);
  switch (type) {
    case RecordType::commit: {
      Commit commit;
      commit.txid = state.next_txid() + choice % 3;
      commit.previous = state.head() ? state.head()->id : Digest{};
      commit.parent = state.head() ? state.head()->txid : 0;
      commit.rollback = (choice & 4U) != 0 && state.head() != nullptr;
      commit.source = commit.rollback ? state.commits().begin()->first : 0;
      commit.ranks = static_cast<uint32_t>(1 + choice / 8 % 3);
      commit.root.txid = commit.txid;
      commit.root.body_length = root_body_length(commit.ranks);
      commit.meta = text;
      const std::string key = text.substr(0, 1);
      const auto found = state.values().find(key);
      if ((choice & 8U) != 0) {
        const bool is_set = found != state.values().end();
        commit.changes.push_back({key, is_set ? std::optional(found->second) : std::nullopt, text});
      }
      return encode_commit(commit);
    }
    case RecordType::change: {
      const std::string key = text.substr(0, choice % 4);
      const auto found = state.values().find(key);
      Change change{key, std::nullopt, text};
      if (found != state.values().end()) change.before = found->second;
      if ((choice & 0x80U) != 0 && change.before) change.after = std::nullopt;
      return encode_change(change);
    }
    case RecordType::tag: {
      const std::string tag = text.substr(0, 1 + choice % 3);
      const auto found = state.tags().find(tag);
      const uint64_t before = found == state.tags().end() ? 0 : found->second;
      return encode_tag({tag, before, state.head() && (choice & 1U) != 0 ? state.head()->txid : 0});
    }
    case RecordType::collect:
      if (state.commits().empty()) return encode_collect({});
      return encode_collect({state.commits().begin()->second});
    default:
      return input;
  }
}

// Forth over all records as far as they fit, and back again: every state has to come back byte for byte.
void replay(const std::vector<Record>& records) {
  std::vector<std::vector<std::byte>> seen;
  CatalogState state;
  size_t applied = 0;
  try {
    state = CatalogState::decode(records.front().payload);
    for (applied = 1; applied < records.size(); ++applied) {
      std::vector<std::byte> before = state.encode();
      require(CatalogState::decode(before).encode() == before, "a snapshot does not read back");
      state.apply(records[applied]);
      seen.push_back(std::move(before));
    }
  } catch (const Error&) {
    // The rest does not fit. A record that failed may have been applied in part, so its undoing means nothing.
    if (applied == 0 || applied < records.size()) return;
  }
  // In a store, the next txid is the head's and one more, and the head the newest; only then an undo can be exact.
  const uint64_t head = seen.empty() ? 0 : CatalogState::decode(seen.front()).next_txid();
  const CatalogState first = CatalogState::decode(records.front().payload);
  const uint64_t newest = first.commits().empty() ? 0 : first.commits().rbegin()->first;
  const bool exact = head == newest + 1 && (newest == 0 || (first.head() && first.head()->txid == newest));
  for (size_t i = records.size(); i-- > 1;) {
    state.undo(records[i]);
    if (exact) require(state.encode() == seen[i - 1], "undoing a record does not give the state before it");
  }
}

void look(const std::shared_ptr<SimulatedStorage>& storage) {
  const auto catalog = Catalog::open_for_reading(storage, default_catalog_options());
  const auto records = catalog->records_after(0);
  for (size_t i = 0; i < records.size(); i += std::max<size_t>(1, records.size() / 2)) {
    try {
      catalog->state_at(records[i].lsn);
    } catch (const Error&) {
      // Older than what is kept, or it does not fit.
    }
  }
}

void go_on(const std::shared_ptr<SimulatedStorage>& storage) {
  CatalogOptions options = default_catalog_options();
  options.journal_fill_bytes = 4096;
  options.journal_roll_bytes = 32 * 1024;
  const auto catalog = Catalog::open_for_writing(storage, options);
  catalog->change("key of the fuzzer", "value", true);
  auto transaction = catalog->begin();
  Commit draft;
  draft.meta = "{}";
  const RootRow row = transaction->shard().write_manifest({});
  const CommitPtr done = transaction->commit(std::move(draft), std::span(&row, 1));
  require(done != nullptr, "an acknowledged commit is not the head");
  transaction = nullptr;
  require(catalog->state().head() == done, "an acknowledged commit is not the head");
  catalog->tag("tag of the fuzzer", done->txid);
  catalog->collect({});
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const uint8_t mode = data[0];
  auto pieces = pieces_of(Bytes(reinterpret_cast<const std::byte*>(data) + 1, size - 1));
  const Piece first = pieces.empty() ? Piece{} : pieces.front();
  JournalHeader header;
  header.name = name;
  header.salt = size;
  if ((mode & 4U) != 0) {
    std::array<uint64_t, 5> fields{};
    const size_t length = std::min(first.payload.size(), sizeof fields);
    if (length > 0) std::memcpy(fields.data(), first.payload.data(), length);
    header.first_lsn = fields[0];
    header.predecessor = {{fields[1], fields[2]}, fields[3], static_cast<uint32_t>(fields[4])};
  }
  std::array<std::vector<std::byte>, 2> copies{encode_header(header), encode_header(header)};
  uint32_t chain = header.predecessor.crc;
  uint64_t lsn = header.first_lsn;
  const auto add = [&](RecordType type, uint8_t head, std::vector<std::byte> payload) {
    Record record{type, static_cast<uint8_t>(head & record_skippable), lsn++, 0, 0, std::move(payload)};
    if ((head & 0x40U) != 0) record.flags |= record_last_of_group;
    const size_t start = copies[0].size();
    chain = encode_record(copies[0], record, header, chain, lsn - 2);
    copies[1].insert(copies[1].end(), copies[0].begin() + static_cast<ptrdiff_t>(start), copies[0].end());
    for (const size_t copy : {0u, 1u}) {
      if ((head & (0x20U >> copy)) != 0 && (head & 0x30U) != 0x30U) {
        std::fill(copies[copy].begin() + static_cast<ptrdiff_t>(start), copies[copy].end(), std::byte{0});
      }
      if ((head & 0x40U) != 0) copies[copy].resize(round_up(copies[copy].size(), sector));
    }
    return record;
  };
  CatalogState state;
  const bool given = (mode & 3U) == 2;
  add(RecordType::snapshot, 0x40, given ? first.payload : state.encode());
  for (const Piece& piece : pieces) {
    const auto type = static_cast<RecordType>(piece.head & 7U);
    const bool fits = (piece.head & 8U) != 0;
    const Record record = add(type, piece.head, fits ? fitted(type, piece.payload, state) : piece.payload);
    try {
      state.apply(record);
    } catch (const Error&) {
      // What follows is made to fit the state that there is.
    }
  }
  const auto storage = std::make_shared<SimulatedStorage>();
  for (const char* dir : {"", "wal", "man", "seg"}) storage->make_dir(dir);
  storage->open(name.path('c'), OpenMode::create)->write(0, Bytes(copies[0]));
  storage->open(name.path('m'), OpenMode::create)->write(0, Bytes(copies[1]));
  try {
    if (const auto scan = scan_journal(*storage, name, nullptr)) replay(scan->records);
  } catch (const Error& error) {
    require(std::strlen(error.what()) != 0, "an error without a message");
  }
  for (const auto& use : {look, go_on}) {
    if (use == go_on && (mode & 8U) == 0) continue;
    try {
      use(storage);
    } catch (const Error& error) {
      require(std::strlen(error.what()) != 0, "an error without a message");
    }
  }
  return 0;
}

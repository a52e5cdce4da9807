#include "catalog/super.h"

#include <cerrno>

#include "tierload/bytes.h"
#include "tierload/digest.h"

namespace tierload {
namespace {

constexpr std::string_view magic = "TLSUPER1";
constexpr const char* path = "SUPER";
// The oldest releases that read what this one writes, without and with several ranks.
constexpr std::string_view oldest_reader = "0.1";
constexpr std::string_view oldest_reader_of_ranks = "0.2";

std::vector<std::byte> encode(const Super& super) {
  ByteWriter out;
  out.put(magic);
  out.put(format_version);
  out.put(uint32_t{0});
  out.put(uint64_t{0});
  out.put(super.features);
  out.put(super.store_id);
  out.put(super.generation);
  out.put(super.epoch);
  out.put(super.base.epoch);
  out.put(super.base.seq);
  const std::string_view least = super.features & feature_ranks ? oldest_reader_of_ranks : oldest_reader;
  out.put(super.needs.empty() ? least : std::string_view(super.needs).substr(0, 16));
  std::vector<std::byte> bytes = out.take();
  bytes.resize(sector);
  const uint32_t crc = crc32c(Bytes(bytes).first(sector - 4));
  std::memcpy(bytes.data() + sector - 4, &crc, 4);
  return bytes;
}

std::optional<Super> decode(Bytes slot, std::string& unsupported) {
  uint32_t crc;
  std::memcpy(&crc, slot.data() + sector - 4, 4);
  if (as_text(slot.first(8)) != magic || crc != crc32c(slot.first(sector - 4))) return std::nullopt;
  ByteReader in(slot, path);
  in.take(8);
  const auto version = in.get<uint32_t>();
  in.take(4);
  in.get<uint64_t>();
  Super super;
  super.features = in.get<uint64_t>();
  super.store_id = in.get<StoreId>();
  super.generation = in.get<uint64_t>();
  super.epoch = in.get<uint64_t>();
  super.base = {in.get<uint64_t>(), in.get<uint64_t>()};
  super.needs = in.text(16);
  super.needs.resize(std::min(super.needs.find('\0'), super.needs.size()));
  if (version != format_version || (super.features & ~features_known) != 0) {
    unsupported = "needs tierload >= " + super.needs + ": the store has format version " + std::to_string(version) +
                  " and incompatible features " + std::to_string(super.features);
  }
  return super;
}

}  // namespace

SuperScan read_super(Storage& storage) {
  SuperScan scan;
  std::unique_ptr<File> file;
  try {
    file = storage.open(path, OpenMode::read);
  } catch (const IoError& error) {
    if (error.code != ENOENT) throw;
    scan.damage = "SUPER is missing";
    return scan;
  }
  std::vector<std::byte> bytes(2 * sector);
  const size_t length = file->read(0, bytes);
  scan.present = length > 0;
  if (file->size() > 2 * sector) scan.damage = "SUPER is longer than its two slots";
  std::string unsupported;
  for (size_t slot = 0; slot < 2; ++slot) {
    if (length < (slot + 1) * sector) {
      scan.damage = "SUPER is cut short";
      continue;
    }
    std::string needs;
    const auto found = decode(Bytes(bytes).subspan(slot * sector, sector), needs);
    if (!found || (found->generation & 1) != slot) {
      scan.damage = "slot " + std::to_string(slot) + " of SUPER is damaged";
    } else if (!scan.best || found->generation > scan.best->generation) {
      scan.best = found;
      unsupported = needs;
    }
  }
  if (!unsupported.empty()) throw UnsupportedError(storage.name() + " " + unsupported);
  return scan;
}

void write_super(Storage& storage, const Super& super) {
  const auto file = storage.open(path, OpenMode::read_write);
  file->write((super.generation & 1) * sector, encode(super));
  file->sync();
}

void create_super(Storage& storage, Super super) {
  const auto file = storage.open(path, storage.size(path) ? OpenMode::read_write : OpenMode::create);
  super.generation = 0;
  file->write(0, encode(super));
  super.generation = 1;
  file->write(sector, encode(super));
  file->sync();
}

}  // namespace tierload

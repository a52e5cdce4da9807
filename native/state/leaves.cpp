#include "state/leaves.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>

namespace tierload {
namespace {

// The first bytes of a key after `skip`, as a number in the order of the keys.
uint64_t prefix_of(std::string_view key, size_t skip) {
  std::array<char, 8> bytes{};
  if (key.size() > skip)
    std::memcpy(bytes.data(), key.data() + skip, std::min<size_t>(key.size() - skip, bytes.size()));
  uint64_t number = 0;
  for (const char byte : bytes) number = number << 8 | static_cast<unsigned char>(byte);
  return number;
}

size_t common_prefix(std::string_view left, std::string_view right) {
  const size_t most = std::min(left.size(), right.size());
  size_t length = 0;
  while (length < most && left[length] == right[length]) ++length;
  return length;
}

void put_number(std::string& out, uint64_t number) {
  std::array<char, 20> digits;
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), number).ptr;
  out.append(digits.data(), end);
}

}  // namespace

void Leaves::add(Leaf leaf, std::span<const int64_t> shape, std::string_view key) {
  keys_ += key;
  add(leaf, shape);
}

void Leaves::add(Leaf leaf, std::span<const int64_t> shape) {
  leaf.shape = sizes_.size();
  leaf.ndim = static_cast<uint8_t>(shape.size());
  leaf.key = rows_.empty() ? 0 : rows_.back().key + rows_.back().key_bytes;
  leaf.key_bytes = static_cast<uint32_t>(keys_.size() - leaf.key);
  for (const int64_t size : shape) sizes_.push_back(size);
  rows_.push_back(leaf);
}

void Leaves::clear() {
  rows_.clear();
  sizes_.clear();
  keys_.clear();
}

size_t Leaves::capacity_bytes() const {
  return rows_.capacity() * sizeof(Leaf) + sizes_.capacity() * sizeof(int64_t) + keys_.capacity();
}

std::vector<uint32_t> meeting(std::span<const MemoryRange> ranges, std::span<const MemoryRange> others) {
  constexpr uint32_t other = 0xFFFFFFFF;
  struct Use {
    MemoryRange range;
    uint32_t number;
  };
  std::vector<Use> uses;
  uses.reserve(ranges.size() + others.size());
  for (uint32_t number = 0; number < ranges.size(); ++number) uses.push_back({ranges[number], number});
  for (const MemoryRange& range : others) uses.push_back({range, other});
  std::ranges::sort(uses, {}, [](const Use& use) { return use.range.start; });
  std::vector<uint32_t> found;
  uint64_t reached = 0;
  for (size_t i = 0; i < uses.size(); ++i) {
    const auto [range, number] = uses[i];
    const bool meets_earlier = range.start < reached;
    const bool meets_later = i + 1 < uses.size() && uses[i + 1].range.start < range.end;
    reached = std::max(reached, range.end);
    if (number != other && (meets_earlier || meets_later)) found.push_back(number);
  }
  std::ranges::sort(found);
  return found;
}

std::vector<uint32_t> Leaves::shared(std::span<const MemoryRange> others) const {
  std::vector<MemoryRange> ranges;
  ranges.reserve(rows_.size());
  for (const Leaf& leaf : rows_) ranges.push_back({leaf.start, leaf.start + leaf.bytes});
  return meeting(ranges, others);
}

bool Leaves::alike(const Leaves& other) const {
  const auto same = [](const Leaf& left, const Leaf& right) {
    return left.bytes == right.bytes && left.ndim == right.ndim && left.dtype == right.dtype &&
           left.key_bytes == right.key_bytes;
  };
  return keys_ == other.keys_ && sizes_ == other.sizes_ && std::ranges::equal(rows_, other.rows_, same);
}

void Leaves::describe(size_t number, uint64_t chunk, std::string& out) const {
  out += "{\"chunk\":";
  put_number(out, chunk);
  out += ",\"shape\":[";
  bool first = true;
  for (const int64_t size : sizes(number)) {
    if (!first) out += ',';
    first = false;
    put_number(out, static_cast<uint64_t>(size));
  }
  out += ']';
  const uint8_t marks = rows_[number].marks;
  if (marks & mark_conj) out += ",\"conj\":true";
  if (marks & mark_neg) out += ",\"neg\":true";
  if (marks & mark_parameter) out += ",\"kind\":\"parameter\"";
  if (marks & mark_grad) out += ",\"grad\":true";
  out += '}';
}

ChunkOrder::ChunkOrder(const Leaves& leaves, std::span<const uint32_t> shared, std::span<const std::string> more) {
  struct Entry {
    uint64_t prefix;
    std::string_view key;
    uint32_t number;
  };
  std::vector<Entry> entries;
  entries.reserve(leaves.count() + more.size());
  auto next_shared = shared.begin();
  for (uint32_t number = 0; number < leaves.count(); ++number) {
    if (next_shared != shared.end() && *next_shared == number) {
      ++next_shared;
    } else {
      entries.push_back({0, leaves.key(number), number});
    }
  }
  for (uint32_t i = 0; i < more.size(); ++i) {
    entries.push_back({0, more[i], static_cast<uint32_t>(leaves.count()) + i});
  }
  if (entries.empty()) return;
  // Keys begin alike: what they have in common is skipped, and the eight bytes after it decide most comparisons.
  size_t skip = entries.front().key.size();
  for (const Entry& entry : entries) skip = std::min(skip, common_prefix(entry.key, entries.front().key));
  for (Entry& entry : entries) entry.prefix = prefix_of(entry.key, skip);
  std::ranges::sort(entries, [](const Entry& left, const Entry& right) {
    return left.prefix != right.prefix ? left.prefix < right.prefix : left.key < right.key;
  });
  chunks_.reserve(entries.size());
  more_.resize(more.size());
  for (uint32_t i = 0; i < entries.size(); ++i) {
    if (i != 0 && entries[i].key == entries[i - 1].key) twice_ = std::string(entries[i].key);
    chunks_.push_back(entries[i].number);
    if (entries[i].number >= leaves.count()) more_[entries[i].number - leaves.count()] = i;
  }
}

}  // namespace tierload

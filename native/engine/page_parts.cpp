#include "engine/page_parts.h"

#include <algorithm>
#include <cstring>
#include <tuple>

#include "tierload/bytes.h"

namespace tierload {
namespace {

constexpr uint64_t gaps_share = 64;  // at most one sector of so many in a call is one that nobody wants
constexpr uint32_t ranks_apart = 2;  // of pages that are read together: about as urgent as one another

}  // namespace

bool PageParts::straight(const Want& want) const {
  return want.row->codec == static_cast<uint8_t>(Codec::raw) && want.parts == 1 && !padding_ &&
         parts_[want.first_part].into.size() == want.row->raw_length;
}

bool PageParts::in_place(const Want& want) const { return straight(want) && device(want) == 0; }

uint8_t PageParts::device(const Want& want) const {
  for (uint32_t i = want.first_part; i < want.first_part + want.parts; ++i) {
    if (parts_[i].device != 0) return parts_[i].device;
  }
  return 0;
}

uint64_t PageParts::extent(const PageRow& row) const {
  return padding_ ? round_up(row.stored_length, sector) : row.stored_length;
}

std::vector<Group> PageParts::group(std::vector<Want>& wants) const {
  std::stable_sort(wants.begin(), wants.end(), [](const Want& a, const Want& b) {
    return std::tie(a.file, a.row->offset) < std::tie(b.file, b.row->offset);
  });
  std::vector<Group> groups;
  uint32_t rank = 0;  // of the newest group's first page
  for (size_t i = 0; i < wants.size(); ++i) {
    const Want& want = wants[i];
    const PageRow& row = *want.row;
    const uint64_t end = row.offset + extent(row);
    if (!groups.empty()) {
      Group& last = groups.back();
      const Want& before = wants[last.end - 1];
      const uint64_t last_end = last.offset + last.length;
      const uint64_t sectors_end = round_up(last_end, sector);
      const uint64_t gaps = last.gaps + (row.offset > sectors_end ? row.offset - sectors_end : 0);
      const uint32_t apart = std::max(rank, want.rank) - std::min(rank, want.rank);
      if (before.file == want.file && !in_place(before) && !in_place(want) && apart <= ranks_apart &&
          end - last.offset <= call_bytes_ && gaps <= (end - last.offset) / gaps_share) {
        last.end = i + 1;
        last.length = std::max(last_end, end) - last.offset;
        last.gaps = gaps;
        continue;
      }
    }
    groups.push_back({i, i + 1, row.offset, end - row.offset, 0});
    rank = want.rank;
  }
  return groups;
}

std::vector<Fetch::Range> PageParts::ranges(std::span<const Want> wants, std::span<const Group> groups) const {
  std::vector<Fetch::Range> out;
  for (const Group& group : groups) {
    const Want& first = wants[group.first];
    Fetch::Range range{first.file, group.offset, group.length, nullptr};
    if (in_place(first)) range.into = parts_[first.first_part].into.data();
    out.push_back(range);
  }
  return out;
}

void PageParts::finish(const Want& want, Bytes extent, PageScratch& scratch, std::span<uint8_t> touched) const {
  const PageRow& row = *want.row;
  const Bytes stored = extent.first(row.stored_length);
  const uint8_t there = device(want);
  const bool left_to_it = verified_there_ && there != 0 && straight(want);
  if (!left_to_it && tree_digest(stored, page_leaf) != row.stored_digest) {
    throw CorruptError("the stored bytes do not match their digest");
  }
  for (const std::byte padding : extent.subspan(row.stored_length)) {
    if (padding != std::byte{0}) throw CorruptError("the padding behind the page is not zero");
  }
  const Codec codec = static_cast<Codec>(row.codec);
  Bytes page = stored;
  if (codec != Codec::raw) {
    const bool whole = want.parts == 1 && there == 0 && parts_[want.first_part].into.size() == row.raw_length;
    MutableBytes into;
    if (whole) {
      touched[want.first_part] = 1;
      into = parts_[want.first_part].into;
    } else if (there != 0) {
      into = scratch.landing.decoded.take(there, row.raw_length).first(row.raw_length);
    } else {
      if (scratch.raw.size() < row.raw_length) scratch.raw.resize(row.raw_length);
      into = MutableBytes(scratch.raw).first(row.raw_length);
    }
    decode_page(stored, codec, row.item_size, into, scratch.codec);
    if (tree_digest(into, page_leaf) != row.raw_digest) {
      throw CorruptError("the decoded bytes do not match their digest");
    }
    if (whole) return;
    page = into;
  } else if (row.raw_digest != row.stored_digest) {
    throw CorruptError("the two digests of a raw page differ");
  }
  if (in_place(want)) return;
  for (uint32_t i = want.first_part; i < want.first_part + want.parts; ++i) {
    const PagePart& part = parts_[i];
    const Bytes from = page.subspan(part.page_offset, part.into.size());
    touched[i] = 1;
    if (part.device != 0) {
      scratch.landing.put(part, from);
    } else {
      std::memcpy(part.into.data(), from.data(), from.size());
    }
  }
  if (there != 0 && codec != Codec::raw) scratch.landing.decoded.used(scratch.landing.moment());
}

PageParts::Need PageParts::need(std::span<const Want> wants, std::span<const Group> groups) const {
  Need need;
  for (const Group& group : groups) {
    uint8_t there = 0;
    for (size_t i = group.first; i < group.end && there == 0; ++i) there = device(wants[i]);
    if (there == 0) continue;
    need.device = there;
    need.bytes = std::max(need.bytes, group.length);
  }
  return need;
}

std::vector<Want> wants_of(std::span<const PagePart> parts, std::span<const PageRow> rows) {
  std::vector<Want> wants;
  for (uint32_t i = 0; i < parts.size(); ++i) {
    const PagePart& part = parts[i];
    if (part.page >= rows.size()) throw UsageError("there is no page " + std::to_string(part.page));
    const PageRow& row = rows[part.page];
    if (part.page_offset > row.raw_length || part.into.size() > row.raw_length - part.page_offset) {
      throw UsageError("a part lies outside of page " + std::to_string(part.page));
    }
    if (part.into.empty()) continue;
    if (wants.empty() || wants.back().page != part.page) wants.push_back({&row, part.page, row.segment, 0, i, 0});
    wants.back().parts = i + 1 - wants.back().first_part;
  }
  return wants;
}

}  // namespace tierload

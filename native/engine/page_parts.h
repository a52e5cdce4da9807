// What is wanted of pages, which of it one call reads, and what happens to a page when its bytes are there.
#pragma once

#include <span>
#include <vector>

#include "codec/scratch.h"
#include "tierload/engine.h"

namespace tierload {

// The parts of one page that are wanted, in a list of parts.
struct Want {
  const PageRow* row = nullptr;
  uint32_t page = 0;
  uint32_t file = 0;  // that its segment is, in a list of files
  uint32_t rank = 0;  // when it is wanted, among others: the lowest one first
  uint32_t first_part = 0;
  uint32_t parts = 0;
};

// Wants that one call reads.
struct Group {
  size_t first = 0;
  size_t end = 0;
  uint64_t offset = 0;
  uint64_t length = 0;
  uint64_t gaps = 0;  // whole sectors that nobody wants
};

struct PageScratch {
  CodecScratch codec;
  std::vector<std::byte> raw;
};

class PageParts {
 public:
  // Pages to be verified to the last byte of their padding are read with it. One call reads at most `call_bytes`, or a
  // page.
  PageParts(std::span<const PagePart> parts, bool padding, uint64_t call_bytes = 4u << 20)
      : parts_(parts), padding_(padding), call_bytes_(call_bytes) {}

  // Sorts wants by file and offset, and groups those that lie close together and are wanted at about the same time.
  std::vector<Group> group(std::vector<Want>& wants) const;
  std::vector<Fetch::Range> ranges(std::span<const Want> wants, std::span<const Group> groups) const;
  // A raw page that goes whole to one place is read straight into it, so it is a group of its own.
  bool straight(const Want& want) const;
  uint64_t extent(const PageRow& row) const;
  // Verifies a page, decodes it and hands out its parts. `touched`, a byte for each of all parts, is set for those
  // whose memory may have been written. Throws CorruptError.
  void finish(const Want& want, Bytes extent, PageScratch& scratch, std::span<uint8_t> touched) const;

 private:
  std::span<const PagePart> parts_;
  bool padding_;
  uint64_t call_bytes_;
};

// The parts of every page that is wanted: `parts` are sorted by page. Throws UsageError.
std::vector<Want> wants_of(std::span<const PagePart> parts, std::span<const PageRow> rows);

}  // namespace tierload

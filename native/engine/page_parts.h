// What is wanted of pages, which of it one call reads, and what happens to a page when its bytes are there.
#pragma once

#include <span>
#include <vector>

#include "codec/scratch.h"
#include "engine/landing.h"
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
  explicit PageScratch(const Moments& after = {}) : landing(after) {}
  CodecScratch codec;
  std::vector<std::byte> raw;
  Landing landing;
};

class PageParts {
 public:
  static constexpr uint64_t usual_call_bytes = 4u << 20;
  // Pages to be verified to the last byte of their padding are read with it. One call reads at most `call_bytes`, or a
  // page. Raw pages that go to an accelerator whole are left to it to verify where `verified_there`.
  PageParts(std::span<const PagePart> parts, bool padding, uint64_t call_bytes = usual_call_bytes,
            bool verified_there = false)
      : parts_(parts), padding_(padding), call_bytes_(call_bytes), verified_there_(verified_there) {}

  // Sorts wants by file and offset, and groups those that lie close together and are wanted at about the same time.
  std::vector<Group> group(std::vector<Want>& wants) const;
  std::vector<Fetch::Range> ranges(std::span<const Want> wants, std::span<const Group> groups) const;
  // Whether it is a raw page that goes whole to one place.
  bool straight(const Want& want) const;
  // In the processor's memory such a page is read straight into it, so it is a group of its own.
  bool in_place(const Want& want) const;
  // The accelerator that a page has parts for; 0: none.
  uint8_t device(const Want& want) const;
  // What a thread needs for calls whose bytes accelerators copy from: which of them, and how much at a time.
  struct Need {
    uint8_t device = 0;  // 0: nothing is for one
    uint64_t bytes = 0;
  };
  Need need(std::span<const Want> wants, std::span<const Group> groups) const;
  uint64_t extent(const PageRow& row) const;
  // Verifies a page, decodes it and hands out its parts. `touched`, a byte for each of all parts, is set for those
  // whose memory may have been written. What accelerators get is there when `scratch.landing` has settled; until then,
  // or until its room is taken again, `extent` stays. Throws CorruptError.
  void finish(const Want& want, Bytes extent, PageScratch& scratch, std::span<uint8_t> touched) const;

 private:
  std::span<const PagePart> parts_;
  bool padding_;
  uint64_t call_bytes_;
  bool verified_there_;
};

// The parts of every page that is wanted: `parts` are sorted by page. Throws UsageError.
std::vector<Want> wants_of(std::span<const PagePart> parts, std::span<const PageRow> rows);

}  // namespace tierload

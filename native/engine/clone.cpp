#include "tierload/clone.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "engine/gather.h"
#include "tierload/bytes.h"
#include "tierload/error.h"

namespace tierload {
namespace {

constexpr uint64_t place_alignment = 4096;
constexpr std::chrono::microseconds look(200);  // between two looks, while a time limit runs

uint64_t bytes_of_page(const PageSource& source) {
  uint64_t bytes = 0;
  for (const SourcePart& part : source.parts) bytes += part.length;
  return bytes;
}

// The accelerator that a page is cloned on; 0: it has nothing of one.
uint8_t device_among(const PageSource& source) {
  for (const SourcePart& part : source.parts) {
    if (part.device != 0) return part.device;
  }
  return 0;
}

uint64_t address(const std::byte* at) { return reinterpret_cast<uint64_t>(at); }

}  // namespace

std::vector<CloneRoom> Clone::room_of(const PageSet& pages) {
  std::map<uint8_t, uint64_t> needed;
  for (const PageSource& source : pages.sources) {
    for (const SourcePart& part : source.parts) {
      if (part.device != 0)
        needed[part.device];  // also one that has parts of others' pages alone: its stream is needed
    }
    if (const uint8_t device = device_among(source)) {
      needed[device] += round_up(bytes_of_page(source), place_alignment);
    }
  }
  std::vector<CloneRoom> rooms;
  for (const auto& [device, bytes] : needed) rooms.push_back({device, 0, std::max(bytes, place_alignment), 0});
  return rooms;
}

Clone::Clone(std::shared_ptr<const PageSet> from, std::span<const CloneRoom> rooms)
    : plan_(plan(std::move(from), rooms)), owner_(::getpid()) {
  begin_or_wait(rooms);
}

Clone::Clone(const Clone& earlier, std::span<const CloneRoom> rooms) : plan_(earlier.plan_), owner_(::getpid()) {
  begin_or_wait(rooms);
}

Clone::~Clone() {
  if (owner_ == ::getpid()) settle();
}

// What was begun may still use memory that is given back now.
void Clone::settle() {
  try {
    for (const auto& moment : fetched_) moment->wait();
    for (const auto& moment : moments_) moment->wait();
  } catch (const AcceleratorError&) {
    return;  // nothing goes on there any more
  }
}

void Clone::begin_or_wait(std::span<const CloneRoom> rooms) {
  try {
    begin(rooms);
  } catch (...) {
    settle();
    throw;
  }
}

std::shared_ptr<const Clone::Plan> Clone::plan(std::shared_ptr<const PageSet> from, std::span<const CloneRoom> rooms) {
  auto made = std::make_shared<Plan>();
  made->from = std::move(from);
  made->sources = made->from->sources;
  made->parts.resize(made->sources.size());
  std::map<uint8_t, CloneRoom> left;
  for (const CloneRoom& room : rooms) left[room.device] = room;
  for (size_t page = 0; page < made->sources.size(); ++page) {
    const PageSource& source = made->from->sources[page];
    const uint8_t device = device_among(source);
    if (device == 0) {
      made->all = false;
      continue;
    }
    const uint64_t bytes = bytes_of_page(source);
    const uint64_t place = round_up(bytes, place_alignment);
    CloneRoom& room = left[device];
    if (room.bytes < place) throw UsageError("a clone needs more room on accelerator " + std::to_string(device));
    made->parts[page] = {reinterpret_cast<const std::byte*>(room.at), bytes, nullptr, 0, device};
    made->sources[page].parts = std::span(&made->parts[page], 1);
    uint64_t into = room.at;
    room.at += place;
    room.bytes -= place;
    std::vector<DeviceCopy>& copies = made->copies[device];
    for (const SourcePart& part : source.parts) {
      if (part.device != device) {
        made->elsewhere.push_back({part, device, into});
        made->elsewhere_bytes += part.length;
      } else if (!copies.empty() && copies.back().from + copies.back().length == address(part.base) &&
                 copies.back().into + copies.back().length == into) {
        copies.back().length += part.length;  // pages of one tensor lie together here as they do there
      } else {
        copies.push_back({address(part.base), into, part.length});
      }
      into += part.length;
    }
  }
  return made;
}

// One launch an accelerator. What pages have of other memory goes through pinned memory, which the accelerator reads by
// itself: it is read once.
void Clone::begin(std::span<const CloneRoom> rooms) {
  std::map<uint8_t, std::unique_ptr<Lane>> lanes;
  for (const CloneRoom& room : rooms) lanes[room.device] = accelerator(room.device).lane_of(room.stream);
  std::map<uint8_t, std::vector<DeviceCopy>> more;
  if (!plan_->elsewhere.empty()) from_host_ = accelerator(rooms.front().device).pin(plan_->elsewhere_bytes);
  MutableBytes free = from_host_ ? from_host_->memory() : MutableBytes();
  for (const Elsewhere& one : plan_->elsewhere) {
    const MutableBytes room = free.first(one.part.length);
    free = free.subspan(one.part.length);
    if (one.part.device != 0) {
      lanes.at(one.part.device)->to_host(room.data(), address(one.part.base), one.part.length);
      fetched_.push_back(lanes.at(one.part.device)->moment());
    } else if (one.part.view) {
      gather(*one.part.view, one.part.base, one.part.from, room);
    } else {
      std::memcpy(room.data(), one.part.base, one.part.length);
    }
    more[one.device].push_back({address(room.data()), one.into, one.part.length});
  }
  for (const auto& [device, copies] : plan_->copies) {
    for (const auto& moment : fetched_) lanes.at(device)->after(moment);
    lanes.at(device)->copy(copies, more[device]);
    moments_.push_back(lanes.at(device)->moment());
  }
}

bool Clone::wait_done(std::chrono::nanoseconds timeout) {
  if (timeout.count() < 0) {
    for (const auto& moment : moments_) moment->wait();
    return true;
  }
  const auto end = std::chrono::steady_clock::now() + timeout;
  while (!std::ranges::all_of(moments_, [](const auto& moment) { return moment->passed(); })) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(look);
  }
  return true;
}

}  // namespace tierload

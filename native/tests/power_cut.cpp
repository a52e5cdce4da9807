#include "tests/power_cut.h"

#include <algorithm>
#include <map>

#include "tierload/bytes.h"

namespace tierload {
namespace {

constexpr uint64_t torn_unit = 512;

// A write of which each sector is there or not. A disk that rewrites physical blocks also loses sectors around it.
void tear(Content& file, const Call& call, bool rewrites_blocks, std::mt19937_64& random) {
  const uint64_t end = call.offset + call.data->size();
  if (rewrites_blocks) {
    const uint64_t blocks_end = std::min(round_up(end, block_bytes), file.size);
    for (uint64_t at = call.offset / block_bytes * block_bytes; at < blocks_end; at += torn_unit) {
      if (random() % 2 == 0) file.punch(at, torn_unit);
    }
  }
  if (random() % 2 == 0 && file.size < end) file.resize(end);  // longer, without the bytes
  for (uint64_t at = call.offset; at < end;) {
    const uint64_t next = std::min(end, (at / torn_unit + 1) * torn_unit);
    if (random() % 2 == 0) file.write(at, Bytes(*call.data).subspan(at - call.offset, next - at));
    at = next;
  }
}

}  // namespace

void PowerCut::advance(const Call& call) {
  const auto settled = [&](const Call& earlier) {
    switch (earlier.kind) {
      case Call::Kind::create:
      case Call::Kind::remove:
      case Call::Kind::make_dir:
        return call.kind == Call::Kind::sync_dir && parent(earlier.path) == call.path;
      default:
        return call.kind == Call::Kind::sync && earlier.inode == call.inode;
    }
  };
  if (call.kind == Call::Kind::make_dir && call.path.empty()) {
    durable_.apply(call);
    return;
  }
  if (call.kind != Call::Kind::sync && call.kind != Call::Kind::sync_dir) {
    pending_.push_back(call);
    return;
  }
  std::vector<Call> left;
  for (Call& earlier : pending_) {
    if (settled(earlier)) {
      durable_.apply(earlier);
    } else {
      left.push_back(std::move(earlier));
    }
  }
  pending_ = std::move(left);
}

Image PowerCut::with(const std::vector<bool>& kept) const {
  Image image = durable_;
  for (size_t i = 0; i < pending_.size(); ++i) {
    if (kept[i]) image.apply(pending_[i]);
  }
  return image;
}

Image PowerCut::torn(std::mt19937_64& random) const {
  Image image = durable_;
  const uint64_t keep_of_8 = random() % 9;
  const bool rewrites_blocks = random() % 4 == 0;
  for (const Call& call : pending_) {
    if (random() % 8 >= keep_of_8) continue;
    if (call.kind != Call::Kind::write || random() % 2 == 0) {
      image.apply(call);
      continue;
    }
    tear(image.files[call.inode], call, rewrites_blocks, random);
  }
  return image;
}

// Everything is there, but of each file the blocks of the newest write are torn. Two copies of a journal are written
// one right after the other, so this is what shows whether acknowledged records are safe beside a new one.
Image PowerCut::torn_ends(std::mt19937_64& random) const {
  std::map<uint32_t, const Call*> newest;
  for (const Call& call : pending_) {
    if (call.kind == Call::Kind::write) newest[call.inode] = &call;
  }
  Image image = durable_;
  for (const Call& call : pending_) {
    if (call.kind == Call::Kind::write && newest[call.inode] == &call) {
      tear(image.files[call.inode], call, true, random);
    } else {
      image.apply(call);
    }
  }
  return image;
}

}  // namespace tierload

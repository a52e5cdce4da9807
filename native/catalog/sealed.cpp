#include "catalog/sealed.h"

#include <algorithm>
#include <cerrno>
#include <future>
#include <optional>
#include <thread>

#include "tierload/bytes.h"

namespace tierload {
namespace {

// A large file is verified by several threads: a MiB is worth starting one.
constexpr uint64_t leaves_of_a_thread = 16;
constexpr unsigned threads_max = 4;

uint64_t leaf_count(uint64_t body_length) { return (body_length + manifest_leaf - 1) / manifest_leaf; }

}  // namespace

unsigned checking_threads() {
  static const unsigned threads = std::clamp(std::thread::hardware_concurrency(), 1u, threads_max);  // reads a file
  return threads;
}

SealedFile seal(std::vector<std::byte> body) {
  SealedFile sealed;
  sealed.body_length = body.size();
  const Bytes bytes = body;
  std::vector<uint64_t> leaves;
  for (uint64_t at = 0; at < body.size(); at += manifest_leaf) {
    leaves.push_back(xxh3(bytes.subspan(at, std::min<uint64_t>(manifest_leaf, body.size() - at))));
  }
  sealed.digest = tree_root(leaves, sealed.body_length);
  const Bytes table = std::as_bytes(std::span(leaves));
  body.insert(body.end(), table.begin(), table.end());
  sealed.file = std::move(body);
  return sealed;
}

uint64_t sealed_length(const RootRow& row, uint64_t header_length, const std::string& path) {
  if (row.body_length < header_length || row.body_length > sealed_body_max) {
    throw CorruptError(path + ": its commit declares a body of " + std::to_string(row.body_length) + " bytes");
  }
  return row.body_length + leaf_count(row.body_length) * 8;
}

void check_sealed(Bytes image, const RootRow& row, const std::string& path) {
  const uint64_t leaves = leaf_count(row.body_length);
  if (image.size() != row.body_length + leaves * 8) {
    throw CorruptError(path + " has " + std::to_string(image.size()) + " bytes, its commit says " +
                       std::to_string(row.body_length + leaves * 8));
  }
  std::vector<uint64_t> table(leaves);
  if (leaves > 0) std::memcpy(table.data(), image.data() + row.body_length, leaves * 8);
  if (tree_root(table, row.body_length) != row.digest) {
    throw CorruptError(path + ": its leaf table does not match the digest in the commit");
  }
  const Bytes body = image.first(row.body_length);
  const auto first_damaged = [&](uint64_t begin, uint64_t end) -> std::optional<uint64_t> {
    for (uint64_t leaf = begin; leaf < end; ++leaf) {
      const uint64_t at = leaf * manifest_leaf;
      if (xxh3(body.subspan(at, std::min<uint64_t>(manifest_leaf, body.size() - at))) != table[leaf]) return at;
    }
    return std::nullopt;
  };
  const uint64_t parts = std::clamp<uint64_t>(leaves / leaves_of_a_thread, 1, checking_threads());
  std::vector<std::future<std::optional<uint64_t>>> others;
  for (uint64_t part = 1; part < parts; ++part) {  // where no thread can be had, get() does the work
    others.push_back(std::async(first_damaged, leaves * part / parts, leaves * (part + 1) / parts));
  }
  std::optional<uint64_t> damaged = first_damaged(0, leaves / parts);
  for (auto& other : others) {
    const auto found = other.get();
    if (!damaged) damaged = found;
  }
  if (damaged) {
    throw CorruptError(path + ": the 64 KiB at byte " + std::to_string(*damaged) + " do not match their digest");
  }
}

std::string check_sealed_copy(Storage& storage, const std::string& path, const RootRow& row, uint64_t header_length) {
  try {
    const auto file = storage.open(path, OpenMode::read);
    const auto mapping = file->map(sealed_length(row, header_length, path));
    check_sealed(mapping->bytes(), row, path);
    if (file->size() != mapping->bytes().size()) return path + " is longer than its commit says";
  } catch (const CorruptError& error) {
    return error.what();
  } catch (const IoError& error) {
    return error.code == EINVAL ? path + " is shorter than its commit says" : error.what();
  }
  return "";
}

}  // namespace tierload

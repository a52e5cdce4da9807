#include "tests/in_flight.h"

#include "tests/model.h"
#include "tierload/bytes.h"

namespace tierload {

InFlight::InFlight(Catalog& catalog, uint64_t parent) {
  if (parent != 0) parent_ = catalog.open_manifest(parent);
  transaction_ = catalog.begin();
}

WriteResult write_contents(ShardWriter& shard, const std::vector<uint64_t>& contents,
                           std::span<const Manifest* const> parents, unsigned threads) {
  std::vector<std::vector<std::byte>> pages;
  for (const uint64_t content : contents) pages.push_back(page_bytes(content));
  std::vector<SourcePart> raw;
  for (const auto& bytes : pages) raw.push_back({bytes.data(), bytes.size()});
  std::vector<PageSource> sources;
  for (const SourcePart& part : raw) sources.push_back({std::span(&part, 1), 4, false, false});
  WriteOptions options;
  options.threads = threads;
  options.compression = Compression::off;
  options.segment_bytes = 16 * 1024;
  return write_pages(shard, sources, parents, options, nullptr);
}

void write_manifest_of(ShardWriter& shard, const WriteResult& written) {
  ManifestParts parts;
  parts.page_bytes = 16 * 1024;
  parts.segments = written.segments;
  parts.pages = written.pages;
  const auto bytes = static_cast<int64_t>(written.raw_bytes);
  const std::vector<int64_t> dims{bytes, 0, bytes};
  ChunkRow chunk{};
  chunk.key_hash = xxh3(as_bytes("w"));
  chunk.key_length = 1;
  chunk.dtype = 2;
  chunk.ndim = 1;
  chunk.bytes = written.raw_bytes;
  chunk.pages = static_cast<uint32_t>(written.pages.size());
  parts.chunks = std::span(&chunk, 1);
  parts.dims = dims;
  parts.keys = as_bytes("w");
  parts.state = as_bytes("{}");
  shard.write_manifest(parts);
}

void InFlight::write_pages(const std::vector<uint64_t>& contents, unsigned threads) {
  std::vector<const Manifest*> parents;
  if (parent_) parents.push_back(parent_.get());
  written_ = write_contents(transaction_->shard(), contents, parents, threads);
}

void InFlight::write_manifest() { write_manifest_of(transaction_->shard(), written_); }

CommitPtr InFlight::commit(uint64_t number, const std::vector<std::string>& tags) {
  Commit draft;
  draft.step = static_cast<int64_t>(number);
  draft.raw_bytes = written_.raw_bytes;
  draft.written_bytes = written_.written_bytes;
  draft.meta = meta_of(number);
  return transaction_->commit(std::move(draft), std::span(&transaction_->shard().row(), 1), tags);
}

}  // namespace tierload

#include "tests/in_flight.h"

#include "tests/model.h"
#include "tierload/bytes.h"

namespace tierload {

InFlight::InFlight(Catalog& catalog, uint64_t parent) {
  if (parent != 0) parent_ = catalog.open_manifest(parent);
  transaction_ = catalog.begin();
}

void InFlight::write_pages(const std::vector<uint64_t>& contents, unsigned threads) {
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
  written_ = tierload::write_pages(*transaction_, sources, parent_.get(), options, nullptr);
}

void InFlight::write_manifest() {
  ManifestParts parts;
  parts.page_bytes = 16 * 1024;
  parts.segments = written_.segments;
  parts.pages = written_.pages;
  const auto bytes = static_cast<int64_t>(written_.raw_bytes);
  const std::vector<int64_t> dims{bytes, 0, bytes};
  ChunkRow chunk{};
  chunk.key_hash = xxh3(as_bytes("w"));
  chunk.key_length = 1;
  chunk.dtype = 2;
  chunk.ndim = 1;
  chunk.bytes = written_.raw_bytes;
  chunk.pages = static_cast<uint32_t>(written_.pages.size());
  parts.chunks = std::span(&chunk, 1);
  parts.dims = dims;
  parts.keys = as_bytes("w");
  parts.state = as_bytes("{}");
  root_ = transaction_->write_manifest(parts);
}

CommitPtr InFlight::commit(uint64_t number, const std::vector<std::string>& tags) {
  Commit draft;
  draft.step = static_cast<int64_t>(number);
  draft.raw_bytes = written_.raw_bytes;
  draft.written_bytes = written_.written_bytes;
  draft.root = {root_};
  draft.meta = meta_of(number);
  return transaction_->commit(std::move(draft), tags);
}

}  // namespace tierload

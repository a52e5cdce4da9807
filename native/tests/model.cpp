#include "tests/model.h"

#include <random>

#include "tests/ranks_in_flight.h"
#include "tierload/bytes.h"
#include "tierload/engine.h"

namespace tierload {

std::vector<std::byte> page_bytes(uint64_t content) {
  std::mt19937_64 random(content);
  std::vector<uint64_t> words(64 + random() % 1200);
  words[0] = content;
  for (size_t i = 1; i < words.size(); ++i) words[i] = random();
  const Bytes bytes = std::as_bytes(std::span(words));
  return {bytes.begin(), bytes.end()};
}

uint64_t number_of(const Commit& commit) { return std::stoull(commit.meta.substr(commit.meta.find(':') + 1)); }
std::string meta_of(uint64_t number) { return "{\"number\":" + std::to_string(number) + "}"; }

namespace {

const Digest& page_digest(uint64_t content) {
  thread_local std::map<uint64_t, Digest> known;
  const auto [at, added] = known.try_emplace(content);
  if (added) at->second = tree_digest(page_bytes(content), page_leaf);
  return at->second;
}

std::vector<uint64_t> read_contents(Storage& storage, const Manifest& manifest) {
  std::vector<uint64_t> contents(manifest.pages().size());
  std::vector<PagePart> parts;
  for (uint32_t i = 0; i < contents.size(); ++i) {
    parts.push_back({i, 0, std::as_writable_bytes(std::span(&contents[i], 1))});
  }
  std::vector<uint8_t> touched(parts.size());
  read_pages(storage, manifest, parts, 0, touched, nullptr);
  for (size_t i = 0; i < contents.size(); ++i) {
    if (manifest.pages()[i].raw_digest != page_digest(contents[i])) {
      throw CorruptError("a verified page has wrong bytes");
    }
  }
  return contents;
}

}  // namespace

std::string Model::text() const {
  std::string out = "head " + std::to_string(head) + ", commits";
  for (const auto& [number, pages] : commits) {
    out += " " + std::to_string(number) + "(";
    for (const uint64_t page : pages) out += std::to_string(page) + " ";
    out += ")";
  }
  for (const auto& [name, number] : tags) out += ", " + name + "=" + std::to_string(number);
  for (const auto& [key, value] : values) out += ", " + key + ":" + value;
  return out;
}

Model read_model(Catalog& catalog) {
  Model model;
  const CatalogState& state = catalog.state();
  for (const auto& [txid, commit] : state.commits()) {
    RankContents contents;
    for (uint32_t rank = 0; rank < commit->ranks; ++rank) {
      contents.push_back(read_contents(catalog.storage(), *catalog.open_manifest(txid, rank)));
    }
    model.commits[number_of(*commit)] = joined(contents);
    if (txid == state.head()->txid) model.head = number_of(*commit);
  }
  for (const auto& [name, txid] : state.tags()) model.tags[name] = number_of(*state.find(txid));
  model.values = state.values();
  return model;
}

}  // namespace tierload

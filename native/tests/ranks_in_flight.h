// A save by several ranks, rank by rank and step by step. The ranks share a file system and nothing else: each writes
// through a storage of its own, which tests may let fail.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tests/in_flight.h"

namespace tierload {

// What each rank writes, as numbers of pages' contents.
using RankContents = std::vector<std::vector<uint64_t>>;
// As a Model has it: one rank's after the other's, with a 0 between them.
std::vector<uint64_t> joined(const RankContents& contents);
RankContents split(const std::vector<uint64_t>& contents);

class RanksInFlight {
 public:
  // Begins. Pages that any rank has in commit `parent` (0: none) are not written again.
  RanksInFlight(Catalog& catalog, const std::shared_ptr<Storage>& storage, uint64_t parent, uint32_t ranks);
  void write_pages(uint32_t rank, const std::vector<uint64_t>& contents);
  void write_manifest(uint32_t rank);
  // Instead of both: the shard is the parent's.
  void refer(uint32_t rank);
  // Makes what a rank wrote durable; a rank other than 0 hands its row in by it.
  void flush(uint32_t rank);
  RootRow row(uint32_t rank);
  std::vector<RootRow> rows();
  CommitPtr commit(uint64_t number, const std::vector<RootRow>& rows, const std::vector<std::string>& tags = {});

  // The storage of a rank other than 0.
  FaultyStorage& storage_of(uint32_t rank) { return *storages_.at(rank - 1); }
  // A rank other than 0, which goes on without the others.
  std::unique_ptr<RankWriter> part_with(uint32_t rank) { return std::move(writers_.at(rank - 1)); }
  const WriteResult& written(uint32_t rank) const { return written_.at(rank); }

 private:
  ShardWriter& shard(uint32_t rank);

  std::vector<RootRow> parent_rows_;
  std::vector<std::unique_ptr<Manifest>> parents_;  // open as long as the transaction lives
  std::unique_ptr<Transaction> transaction_;
  std::vector<std::shared_ptr<FaultyStorage>> storages_;
  std::vector<std::unique_ptr<RankWriter>> writers_;
  std::vector<WriteResult> written_;
};

}  // namespace tierload

#include "tests/ranks_in_flight.h"

#include "tests/model.h"

namespace tierload {

std::vector<uint64_t> joined(const RankContents& contents) {
  std::vector<uint64_t> all;
  for (const auto& of_rank : contents) {
    if (&of_rank != &contents.front()) all.push_back(0);
    all.insert(all.end(), of_rank.begin(), of_rank.end());
  }
  return all;
}

RankContents split(const std::vector<uint64_t>& contents) {
  RankContents ranks(1);
  for (const uint64_t content : contents) {
    if (content == 0) {
      ranks.emplace_back();
    } else {
      ranks.back().push_back(content);
    }
  }
  return ranks;
}

RanksInFlight::RanksInFlight(Catalog& catalog, const std::shared_ptr<Storage>& storage, uint64_t parent, uint32_t ranks)
    : written_(ranks) {
  if (parent != 0) parent_rows_ = catalog.root(parent);
  for (uint32_t rank = 0; rank < parent_rows_.size(); ++rank) parents_.push_back(catalog.open_manifest(parent, rank));
  transaction_ = catalog.begin(ranks);
  for (uint32_t rank = 1; rank < ranks; ++rank) {
    storages_.push_back(faulty_storage(storage));
    writers_.push_back(
        std::make_unique<RankWriter>(storages_.back(), catalog.store_id(), transaction_->attempt(), rank));
  }
}

ShardWriter& RanksInFlight::shard(uint32_t rank) {
  return rank == 0 ? transaction_->shard() : writers_.at(rank - 1)->shard();
}

void RanksInFlight::write_pages(uint32_t rank, const std::vector<uint64_t>& contents) {
  std::vector<const Manifest*> parents;
  for (const auto& parent : parents_) parents.push_back(parent.get());
  written_[rank] = write_contents(shard(rank), contents, parents, 0);
}

void RanksInFlight::write_manifest(uint32_t rank) { write_manifest_of(shard(rank), written_[rank]); }

void RanksInFlight::refer(uint32_t rank) { shard(rank).refer(parent_rows_.at(rank)); }

void RanksInFlight::flush(uint32_t rank) {
  if (rank == 0) {
    shard(0).flush();
  } else {
    writers_.at(rank - 1)->prepare();
  }
}

RootRow RanksInFlight::row(uint32_t rank) { return rank == 0 ? shard(0).row() : writers_.at(rank - 1)->row(); }

std::vector<RootRow> RanksInFlight::rows() {
  std::vector<RootRow> rows;
  for (uint32_t rank = 0; rank < written_.size(); ++rank) rows.push_back(row(rank));
  return rows;
}

CommitPtr RanksInFlight::commit(uint64_t number, const std::vector<RootRow>& rows,
                                const std::vector<std::string>& tags) {
  Commit draft;
  draft.step = static_cast<int64_t>(number);
  draft.meta = meta_of(number);
  for (const WriteResult& written : written_) {
    draft.raw_bytes += written.raw_bytes;
    draft.written_bytes += written.written_bytes;
  }
  return transaction_->commit(std::move(draft), rows, tags);
}

}  // namespace tierload

// A save of pages by number, step by step, so that tests can do something else between the steps.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tierload/catalog.h"
#include "tierload/engine.h"

namespace tierload {

// Pages by number, in segments of 16 KiB.
WriteResult write_contents(ShardWriter& shard, const std::vector<uint64_t>& contents,
                           std::span<const Manifest* const> parents, unsigned threads);
// A manifest that has them all in one chunk.
void write_manifest_of(ShardWriter& shard, const WriteResult& written);

class InFlight {
 public:
  // Begins. Pages that commit `parent` (0: none) has are not written again.
  InFlight(Catalog& catalog, uint64_t parent);
  void write_pages(const std::vector<uint64_t>& contents, unsigned threads = 0);
  void write_manifest();
  void flush() { transaction_->shard().flush(); }
  CommitPtr commit(uint64_t number, const std::vector<std::string>& tags = {});
  const WriteResult& written() const { return written_; }

 private:
  std::unique_ptr<Manifest> parent_;  // open as long as the transaction lives
  std::unique_ptr<Transaction> transaction_;
  WriteResult written_;
};

}  // namespace tierload

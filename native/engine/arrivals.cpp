#include "tierload/arrivals.h"

#include <algorithm>

#include "engine/page_parts.h"

namespace tierload {
namespace {

constexpr uint64_t not_demanded = uint64_t{1} << 32;
constexpr uint64_t call_bytes = 1u << 20;  // less than a load reads at once: what is demanded waits for what is begun

}  // namespace

Arrivals::Arrivals(std::shared_ptr<Storage> storage, std::vector<ArrivingParts> sources, std::vector<uint32_t> ranks,
                   unsigned threads, Moments moments)
    : storage_(std::move(storage)),
      threads_(std::max(threads, 1u)),
      moments_(std::move(moments)),
      sources_(std::move(sources)) {
  for (const ArrivingParts& source : sources_) {
    if (source.units.size() != source.parts.size()) throw UsageError("each part needs a unit");
    for (const uint32_t unit : source.units) {
      if (unit >= ranks.size()) throw UsageError("there is no unit " + std::to_string(unit));
    }
    const auto base = static_cast<uint32_t>(parts_.size());
    const auto file = static_cast<uint32_t>(files_.size());
    for (Want want : wants_of(source.parts, source.manifest->pages())) {
      want.first_part += base;
      want.file += file;
      want.rank = UINT32_MAX;
      for (uint32_t i = 0; i < want.parts; ++i) {
        want.rank = std::min(want.rank, ranks[source.units[want.first_part - base + i]]);
      }
      total_bytes_ += want.row->raw_length;
      wants_.push_back(want);
    }
    parts_.insert(parts_.end(), source.parts.begin(), source.parts.end());
    units_.insert(units_.end(), source.units.begin(), source.units.end());
    for (const SegmentRow& segment : source.manifest->segments()) files_.push_back(segment.path());
  }
  reader_ = std::make_unique<PageParts>(parts_, false, call_bytes);
  groups_ = reader_->group(wants_);
  groups_left_ = groups_.size();
  touched_.resize(parts_.size());
  failed_.resize(ranks.size());
  groups_of_.resize(ranks.size());
  left_ = std::make_unique<std::atomic<uint32_t>[]>(ranks.size());
  for (uint32_t number = 0; number < groups_.size(); ++number) {
    uint32_t rank = UINT32_MAX;
    for (size_t i = groups_[number].first; i < groups_[number].end; ++i) {
      const Want& want = wants_[i];
      rank = std::min(rank, want.rank);
      for (uint32_t part = want.first_part; part < want.first_part + want.parts; ++part) {
        std::vector<uint32_t>& of_unit = groups_of_[units_[part]];
        if (of_unit.empty() || of_unit.back() != number) of_unit.push_back(number);
        left_[units_[part]].fetch_add(1, std::memory_order_relaxed);
      }
    }
    keys_.push_back(not_demanded + rank);
    queue_.emplace(keys_.back(), number);
  }
  // What has no bytes is there.
  for (uint32_t unit = 0; unit < ranks.size(); ++unit) {
    if (arrived(unit)) news_.push_back(unit);
  }
}

Arrivals::~Arrivals() = default;

void Arrivals::work() {
  if (groups_.empty()) return;
  try {
    std::call_once(begun_,
                   [this] { fetch_ = storage_->fetch(files_, reader_->ranges(wants_, groups_), threads_, this); });
    PageScratch scratch(moments_);
    const PageParts::Need need = reader_->need(wants_, groups_);
    while (!stopped_) {
      const MutableBytes room = need.device ? scratch.landing.read.take(need.device, need.bytes) : MutableBytes();
      const auto arrival = fetch_->next(room);
      if (!arrival) return;
      const Taken taken{*fetch_, *arrival};
      use(*arrival, scratch);
    }
  } catch (...) {
    stop();
    throw;
  }
}

void Arrivals::stop() {
  const std::lock_guard guard(mutex_);
  stopped_ = true;
  changed_.notify_all();
}

void Arrivals::release() {
  fetch_.reset();
  storage_.reset();
  sources_.clear();  // whose rows the wants point to
  wants_.clear();
}

size_t Arrivals::next() {
  const std::lock_guard guard(mutex_);
  const size_t group = queue_.begin()->second;
  queue_.erase(queue_.begin());
  return group;
}

void Arrivals::use(const Fetch::Arrival& arrival, PageScratch& scratch) {
  const Group& group = groups_[arrival.range];
  for (size_t i = group.first; i < group.end && !stopped_; ++i) {
    const Want& want = wants_[i];
    std::string problem = arrival.error;
    try {
      const uint64_t at = want.row->offset - group.offset;
      if (!problem.empty()) throw CorruptError(problem);
      if (at + want.row->stored_length > arrival.bytes.size()) throw CorruptError("the segment ends inside the page");
      reader_->finish(want, arrival.bytes.subspan(at, want.row->stored_length), scratch, touched_);
      scratch.landing.settle();  // what has arrived is there, for every stream: nobody has to wait for a copy
    } catch (const CorruptError& error) {
      problem = error.what();
    }
    finish(want, problem);
  }
  const std::lock_guard guard(mutex_);
  if (--groups_left_ == 0) changed_.notify_all();
}

// A page is there, or is damaged.
void Arrivals::finish(const Want& want, const std::string& problem) {
  bytes_ += want.row->raw_length;
  std::vector<uint32_t> news;
  for (uint32_t part = want.first_part; part < want.first_part + want.parts; ++part) {
    const uint32_t unit = units_[part];
    if (!problem.empty()) {
      if (news.empty() || news.back() != unit) news.push_back(unit);
    } else if (left_[unit].fetch_sub(1, std::memory_order_acq_rel) == 1) {
      news.push_back(unit);
    }
  }
  if (news.empty()) return;
  const std::lock_guard guard(mutex_);
  for (const uint32_t unit : news) {
    if (!problem.empty() && std::exchange(failed_[unit], uint8_t{1}) == 0) {
      failures_.push_back({unit, {want.page, files_[want.file], want.row->offset, problem}});
    }
  }
  news_.insert(news_.end(), news.begin(), news.end());
  changed_.notify_all();
}

void Arrivals::move_to(size_t group, uint64_t key) {
  const auto number = static_cast<uint32_t>(group);
  if (queue_.erase({keys_[group], number}) == 0) return;  // it is under way
  keys_[group] = key;
  queue_.emplace(key, number);
}

void Arrivals::order(std::span<const uint32_t> units, std::span<const uint32_t> ranks) {
  if (units.size() != ranks.size()) throw UsageError("each unit needs a rank");
  const std::lock_guard guard(mutex_);
  for (size_t i = 0; i < units.size(); ++i) {
    if (units[i] >= groups_of_.size()) throw UsageError("there is no unit " + std::to_string(units[i]));
    for (const uint32_t group : groups_of_[units[i]]) {
      // Of a group with several units the most urgent one counts, and this one may have been it: a demand stands.
      if (keys_[group] >= not_demanded) move_to(group, not_demanded + ranks[i]);
    }
  }
}

void Arrivals::demand(uint32_t unit) {
  if (arrived(unit)) return;
  const std::lock_guard guard(mutex_);
  const uint64_t key = std::min(demands_++, not_demanded - 1);
  for (const uint32_t group : groups_of_[unit]) {
    if (keys_[group] >= not_demanded) move_to(group, key);
  }
}

bool Arrivals::wait(uint32_t unit, std::chrono::nanoseconds time) {
  if (arrived(unit)) return true;
  std::unique_lock guard(mutex_);
  changed_.wait_for(guard, time, [&] { return arrived(unit) || failed_[unit] || stopped_; });
  if (failed_[unit]) {
    const auto found =
        std::find_if(failures_.begin(), failures_.end(), [&](const auto& failure) { return failure.first == unit; });
    throw corrupt_page(found->second);
  }
  return arrived(unit);
}

std::vector<uint32_t> Arrivals::next(std::chrono::nanoseconds time) {
  std::unique_lock guard(mutex_);
  changed_.wait_for(guard, time, [&] { return !news_.empty() || groups_left_ == 0 || stopped_; });
  return std::exchange(news_, {});
}

std::vector<std::pair<uint32_t, PageFailure>> Arrivals::failures() {
  const std::lock_guard guard(mutex_);
  return failures_;
}

bool Arrivals::over() {
  const std::lock_guard guard(mutex_);
  return groups_left_ == 0 || stopped_;
}

size_t Arrivals::queued() {
  const std::lock_guard guard(mutex_);
  return queue_.size();
}

}  // namespace tierload

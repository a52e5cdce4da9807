// Appending and fetching by plain reads and writes: what every storage can do.
#include "storage/plain.h"

#include <atomic>
#include <cerrno>
#include <deque>
#include <mutex>

#include "tierload/error.h"

namespace tierload {
namespace {

class PlainAppender : public Appender {
 public:
  explicit PlainAppender(File& file) : file_(file) {}

  void append(std::span<const Bytes> parts) override {
    file_.write(offset_, parts);
    for (const Bytes part : parts) offset_ += part.size();
  }
  void skip(uint64_t bytes) override { offset_ += bytes; }
  void finish() override {}

 private:
  File& file_;
  uint64_t offset_ = 0;
};

class PlainFetch : public Fetch {
 public:
  PlainFetch(Storage& storage, std::vector<std::string> files, std::vector<Range> ranges, unsigned threads,
             FetchOrder* order)
      : storage_(storage), files_(std::move(files)), ranges_(std::move(ranges)), ahead_(threads), order_(order) {}

  std::optional<Arrival> next(MutableBytes room) override {
    size_t number = next_++;
    if (number >= ranges_.size()) return std::nullopt;
    if (order_) number = order_->next();
    const Range& range = ranges_[number];
    Arrival arrival{number, {}, "", no_slot};
    const auto file = open(range.file, arrival.error);
    if (!file) return arrival;
    file->will_read(range.offset, range.length);
    // What this thread will come to next, so that the device has something to do meanwhile.
    if (const size_t next = number + ahead_; !order_ && next < ranges_.size() && ranges_[next].file == range.file) {
      file->will_read(ranges_[next].offset, ranges_[next].length);
    }
    MutableBytes into(range.into, range.length);
    if (range.into == nullptr) {
      into = room.size() >= range.length ? room.first(range.length) : borrow(range.length, arrival.slot);
    }
    try {
      arrival.bytes = into.first(file->read(range.offset, into));
    } catch (const IoError& error) {
      arrival.error = error.what();
    }
    return arrival;
  }

  void release(const Arrival& arrival) override {
    if (arrival.slot == no_slot) return;
    const std::lock_guard guard(mutex_);
    free_.push_back(arrival.slot);
  }

 private:
  // Ranges come sorted by file, so the newest file is enough; whoever still reads from an older one holds it.
  std::shared_ptr<File> open(uint32_t number, std::string& error) {
    const std::lock_guard guard(mutex_);
    if (number == opened_) {
      error = problem_;
      return file_;
    }
    file_ = open_readable(storage_, files_[number], problem_);
    opened_ = number;
    error = problem_;
    return file_;
  }

  MutableBytes borrow(uint64_t length, size_t& slot) {
    const std::lock_guard guard(mutex_);
    if (free_.empty()) {
      free_.push_back(buffers_.size());
      buffers_.emplace_back();
    }
    slot = free_.back();
    free_.pop_back();
    auto& buffer = buffers_[slot];
    if (buffer.size() < length) buffer.resize(length);
    return MutableBytes(buffer).first(length);
  }

  static constexpr uint32_t none = 0xFFFFFFFF;
  static constexpr size_t no_slot = SIZE_MAX;  // nothing was borrowed: the file is missing, or there is room elsewhere
  Storage& storage_;
  const std::vector<std::string> files_;
  const std::vector<Range> ranges_;
  const size_t ahead_;
  FetchOrder* const order_;
  std::atomic<size_t> next_{0};
  std::mutex mutex_;
  uint32_t opened_ = none;
  std::shared_ptr<File> file_;
  std::string problem_;
  std::deque<std::vector<std::byte>> buffers_;  // by slot; they stay where they are
  std::vector<size_t> free_;
};

}  // namespace

std::unique_ptr<File> open_readable(Storage& storage, const std::string& path, std::string& problem) {
  problem.clear();
  try {
    return storage.open(path, OpenMode::read);
  } catch (const IoError& error) {
    if (!error.unusable_file()) throw;
    problem = error.code == ENOENT ? "the segment is missing" : error.what();
    return nullptr;
  }
}

std::unique_ptr<Appender> Storage::append(File& file, const std::string&, uint64_t) {
  return std::make_unique<PlainAppender>(file);
}

std::unique_ptr<Fetch> Storage::fetch(std::vector<std::string> files, std::vector<Fetch::Range> ranges,
                                      unsigned threads, FetchOrder* order) {
  return std::make_unique<PlainFetch>(*this, std::move(files), std::move(ranges), threads, order);
}

}  // namespace tierload

// Reading ranges past the page cache, several at a time.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>

#include "storage/direct.h"
#include "storage/plain.h"
#include "tierload/bytes.h"

namespace tierload::posix {
namespace {

class DirectFetch : public Fetch {
 public:
  DirectFetch(RingLoan ring, Storage& plain, std::shared_ptr<Tree> tree, std::vector<std::string> files,
              std::vector<Range> ranges, FetchOrder* order)
      : plain_(plain),
        tree_(std::move(tree)),
        names_(std::move(files)),
        ranges_(std::move(ranges)),
        order_(order),
        files_(names_.size()),
        ring_(std::move(ring)),
        range_of_slot_(ring_->buffers()) {
    for (const Range& range : ranges_) ++files_[range.file].ranges;
    for (uint32_t i = 0; i < ring_->buffers(); ++i) free_slots_.push_back(i);
    for (uint32_t i = 0; i < Ring::files_max; ++i) free_numbers_.push_back(i);
  }

  ~DirectFetch() override {
    while (ring_->under_way() > 0) {  // into the ring's memory, from files of ours
      ring_->wait();
      ring_->take();
    }
    for (const File& file : files_) {
      if (file.fd.valid()) ring_->set_file(file.number, -1);
    }
  }

  std::optional<Arrival> next(MutableBytes room) override {
    std::unique_lock guard(mutex_);
    std::optional<Arrival> arrival;
    try {
      arrival = wait_for_one(guard);
    } catch (...) {
      if (!guard.owns_lock()) guard.lock();
      over_ = true;  // nobody is to wait for what this thread was about to do
      changed_.notify_all();
      throw;
    }
    guard.unlock();
    if (!arrival) return std::nullopt;
    const Range& range = ranges_[arrival->range];
    std::byte* const into = range.into != nullptr ? range.into : room.size() >= range.length ? room.data() : nullptr;
    if (into != nullptr && !arrival->bytes.empty()) {
      std::memcpy(into, arrival->bytes.data(), arrival->bytes.size());
      arrival->bytes = {into, arrival->bytes.size()};
    }
    return arrival;
  }

  void release(const Arrival& arrival) override {
    const std::lock_guard guard(mutex_);
    free_slots_.push_back(static_cast<uint32_t>(arrival.slot));  // within what it had at first: never allocates
    changed_.notify_all();
  }

 private:
  struct File {
    Fd fd;
    uint32_t number = 0;   // in the ring
    size_t ranges = 0;     // that are not read yet
    size_t under_way = 0;  // of these
  };

  std::optional<Arrival> wait_for_one(std::unique_lock<std::mutex>& guard) {
    while (true) {
      if (over_) return std::nullopt;
      start_what_fits();
      if (!ready_.empty()) {
        Arrival arrival = std::move(ready_.front());  // what was begun first is wanted first
        ready_.pop_front();
        return arrival;
      }
      // What a thread waits for in the kernel is for it to take: it would wait for ever if another had taken the last.
      const auto done = waiting_ ? std::nullopt : ring_->take();
      if (done) {
        arrive(*done);
        continue;
      }
      if (ring_->under_way() == 0 && begun_ == ranges_.size()) return std::nullopt;
      if (waiting_ || ring_->under_way() == 0) {  // another thread waits for the device, or others hold all slots
        changed_.wait(guard);
        continue;
      }
      waiting_ = true;
      guard.unlock();
      ring_->wait();
      guard.lock();
      waiting_ = false;
      changed_.notify_all();
    }
  }

  void start_what_fits() {
    while (begun_ < ranges_.size() && !free_slots_.empty()) {
      const size_t number = next_ ? *next_ : order_ ? order_->next() : begun_;
      next_ = number;
      const Range& range = ranges_[number];
      File& file = files_[range.file];
      if (!file.fd.valid()) {
        if (free_numbers_.empty()) close_idle_file();
        if (free_numbers_.empty()) return;  // files that are nearly done come first
        Fd fd = open_direct(*tree_, names_[range.file], O_RDONLY);
        if (!fd.valid()) {
          const uint32_t slot = free_slots_.back();
          free_slots_.pop_back();
          ready_.push_back(read_plainly(number, slot));
          begin_next();
          --file.ranges;
          continue;
        }
        file.fd = std::move(fd);
        file.number = free_numbers_.back();
        free_numbers_.pop_back();
        ring_->set_file(file.number, file.fd.get());
      }
      const uint32_t slot = free_slots_.back();
      free_slots_.pop_back();
      range_of_slot_[slot] = number;
      begin_next();
      ++file.under_way;
      ring_->read(file.number, slot, block_start(range), block_bytes(range));
    }
  }

  void begin_next() {
    ++begun_;
    next_.reset();
  }

  // In an order of its own a fetch may come to another file before it is through with any.
  void close_idle_file() {
    for (File& file : files_) {
      if (file.fd.valid() && file.under_way == 0) {
        close(file);
        return;
      }
    }
  }

  void close(File& file) {
    ring_->set_file(file.number, -1);
    free_numbers_.push_back(file.number);
    file.fd = Fd();
  }

  void arrive(const Ring::Done& done) {
    const size_t number = range_of_slot_[done.buffer];
    const Range& range = ranges_[number];
    const uint64_t skipped = range.offset - block_start(range);
    const uint64_t got = done.result < 0 ? 0 : static_cast<uint64_t>(done.result);
    if (got >= skipped + range.length) {
      ready_.push_back({number, Bytes(ring_->buffer(done.buffer)).subspan(skipped, range.length), "", done.buffer});
    } else {
      ready_.push_back(read_plainly(number, done.buffer));
    }
    File& file = files_[range.file];
    --file.under_way;
    if (--file.ranges == 0) close(file);
  }

  // What direct I/O did not read whole (the file is missing or short, the medium is bad): the page cache's answer is
  // final.
  Arrival read_plainly(size_t number, uint32_t slot) {
    const Range& range = ranges_[number];
    Arrival arrival{number, {}, "", slot};
    const auto file = open_readable(plain_, names_[range.file], arrival.error);
    if (!file) return arrival;
    const MutableBytes into = ring_->buffer(slot).first(range.length);
    try {
      arrival.bytes = into.first(file->read(range.offset, into));
    } catch (const IoError& error) {
      arrival.error = error.what();
    }
    return arrival;
  }

  Storage& plain_;
  const std::shared_ptr<Tree> tree_;
  const std::vector<std::string> names_;
  const std::vector<Range> ranges_;
  FetchOrder* const order_;
  std::vector<File> files_;
  std::mutex mutex_;
  std::condition_variable changed_;
  const RingLoan ring_;
  std::vector<size_t> range_of_slot_;
  std::vector<uint32_t> free_slots_;
  std::vector<uint32_t> free_numbers_;
  std::deque<Arrival> ready_;
  size_t begun_ = 0;
  std::optional<size_t> next_;  // the range that begins when there is room
  bool waiting_ = false;        // a thread is in the kernel
  bool over_ = false;           // a thread failed
};

// Kernels from 6.5 on count the cached pages of a range; the number and the structures are the kernel's.
struct CachestatRange {
  uint64_t offset;
  uint64_t length;
};
struct Cachestat {
  uint64_t cached, dirty, writeback, evicted, recently_evicted;
};
constexpr long cachestat_call = 451;

uint64_t cached_in_map(int fd, uint64_t offset, uint64_t length) {
  void* const data = ::mmap(nullptr, length, PROT_READ, MAP_SHARED, fd, static_cast<off_t>(offset));
  if (data == MAP_FAILED) return 0;
  std::vector<unsigned char> pages(length / sector);
  if (::mincore(data, length, pages.data()) != 0) pages.clear();
  ::munmap(data, length);
  return static_cast<uint64_t>(std::count_if(pages.begin(), pages.end(), [](auto page) { return page & 1; })) * sector;
}

}  // namespace

uint64_t block_start(const Fetch::Range& range) { return range.offset / sector * sector; }

uint64_t block_bytes(const Fetch::Range& range) {
  return round_up(range.offset + range.length, sector) - block_start(range);
}

uint64_t cached_bytes(Tree& tree, const std::vector<std::string>& files, const std::vector<Fetch::Range>& ranges) {
  uint64_t cached = 0;
  Fd fd;
  for (size_t i = 0; i < ranges.size(); ++i) {
    if (i == 0 || ranges[i].file != ranges[i - 1].file) {
      const Place place = tree.find("open", files[ranges[i].file]);
      fd = Fd();
      if (place.code == 0) {
        fd = Fd(
            retry([&] { return ::openat(place.dir->get(), place.name.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC); }));
      }
    }
    if (!fd.valid()) continue;
    CachestatRange asked{block_start(ranges[i]), block_bytes(ranges[i])};
    Cachestat counted{};
    if (::syscall(cachestat_call, fd.get(), &asked, &counted, 0) == 0) {
      cached += counted.cached * sector;
    } else {
      cached += cached_in_map(fd.get(), asked.offset, asked.length);
    }
  }
  return cached;
}

std::unique_ptr<Fetch> direct_fetch(RingLoan ring, Storage& plain, std::shared_ptr<Tree> tree,
                                    std::vector<std::string> files, std::vector<Fetch::Range> ranges,
                                    FetchOrder* order) {
  return std::make_unique<DirectFetch>(std::move(ring), plain, std::move(tree), std::move(files), std::move(ranges),
                                       order);
}

}  // namespace tierload::posix

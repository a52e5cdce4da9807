// Pacing on a clock and a device of its own: what is asserted are counts and times that follow from the rules.
#include "tierload/pace.h"

#include <doctest/doctest.h>

#include <functional>
#include <random>
#include <utility>

#include "tests/simulated.h"
#include "tests/workload.h"
#include "tierload/engine.h"
#include "tierload/error.h"

namespace tierload {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

class FakeTime : public TimeSource {
 public:
  nanoseconds now() override { return now_; }
  void sleep(nanoseconds time) override {
    longest = std::max(longest, time);
    ++sleeps;
    now_ += time;
    if (on_sleep) on_sleep();
  }
  void pass(nanoseconds time) { now_ += time; }

  nanoseconds longest{0};
  int sleeps = 0;
  std::function<void()> on_sleep;

 private:
  nanoseconds now_{std::chrono::hours(3)};
};

struct Moment {
  nanoseconds time;
  uint64_t bytes;
};

// Over every window: what passed is no more than the rate allows and one burst.
void check_never_above(const std::vector<Moment>& moments, double rate, uint64_t burst) {
  for (size_t first = 0; first < moments.size(); ++first) {
    double bytes = 0;
    for (size_t last = first; last < moments.size(); ++last) {
      bytes += static_cast<double>(moments[last].bytes);
      const double seconds = std::chrono::duration<double>(moments[last].time - moments[first].time).count();
      REQUIRE(bytes <= rate * seconds + static_cast<double>(burst) + 1e-3);
    }
  }
}

// Writing a page and syncing a segment take time.
class SlowStorage : public SimulatedStorage {
 public:
  SlowStorage(FakeTime& time, nanoseconds sync) : time_(time), sync_(sync) {}
  std::unique_ptr<File> open(const std::string& path, OpenMode mode) override {
    auto file = SimulatedStorage::open(path, mode);
    if (!path.starts_with("seg/")) return file;
    return std::make_unique<SlowFile>(*this, std::move(file));
  }

  static constexpr uint64_t bytes_per_millisecond = 64 * 1024;
  std::vector<Moment> writes;  // when they began
  std::function<void()> on_write;

 private:
  class SlowFile : public File {
   public:
    SlowFile(SlowStorage& storage, std::unique_ptr<File> file) : storage_(storage), file_(std::move(file)) {}
    void write(uint64_t offset, std::span<const Bytes> parts) override {
      uint64_t bytes = 0;
      for (const Bytes part : parts) bytes += part.size();
      storage_.writes.push_back({storage_.time_.now(), bytes});
      storage_.time_.pass(nanoseconds(bytes * 1000000 / bytes_per_millisecond));
      file_->write(offset, parts);
      if (storage_.on_write) storage_.on_write();
    }
    void sync() override {
      storage_.time_.pass(storage_.sync_);
      file_->sync();
    }
    size_t read(uint64_t offset, MutableBytes into) override { return file_->read(offset, into); }
    uint64_t size() override { return file_->size(); }
    void truncate(uint64_t size) override { file_->truncate(size); }
    bool punch(uint64_t offset, uint64_t length) override { return file_->punch(offset, length); }
    std::unique_ptr<Mapping> map(uint64_t length) override { return file_->map(length); }
    bool linked() override { return file_->linked(); }
    std::unique_ptr<Lock> try_lock(bool exclusive) override { return file_->try_lock(exclusive); }
    bool locked() override { return file_->locked(); }

   private:
    SlowStorage& storage_;
    std::unique_ptr<File> file_;
  };

  FakeTime& time_;
  const nanoseconds sync_;
};

// A store on a device whose syncs take `sync`, and different pages of 64 KiB, each of which takes it a millisecond.
struct Fixture {
  static constexpr uint64_t page = SlowStorage::bytes_per_millisecond;

  explicit Fixture(size_t pages, nanoseconds sync = milliseconds(5))
      : storage(std::make_shared<SlowStorage>(time, sync)),
        catalog(Catalog::open_for_writing(storage, workload_options(1, Mutant::none))),
        bytes(pages * page),
        parts(pages) {
    std::mt19937_64 random(3);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    for (size_t i = 0; i < pages; ++i) {
      parts[i] = {bytes.data() + i * page, page};
      sources.push_back({std::span(&parts[i], 1)});
    }
    options.compression = Compression::off;
    options.clock = &time;
  }

  WriteResult write() {
    const auto transaction = catalog->begin();
    WriteResult result = write_pages(transaction->shard(), sources, {}, options, nullptr);
    uint64_t all = 0;
    REQUIRE(result.times.size() == result.segments.size());
    for (size_t i = 0; i < result.segments.size(); ++i) {
      CHECK(result.times[i].bytes == result.segments[i].size);
      CHECK(storage->size(result.segments[i].path()) == result.segments[i].size);
      all += result.segments[i].size;
    }
    CHECK(all == result.written_bytes);
    CHECK(all == bytes.size());
    return result;
  }

  FakeTime time;
  std::shared_ptr<SlowStorage> storage;
  std::unique_ptr<Catalog> catalog;
  std::vector<std::byte> bytes;
  std::vector<SourcePart> parts;
  std::vector<PageSource> sources;
  WriteOptions options;
};

double ms(const SegmentTime& time) { return time.seconds * 1e3; }

TEST_CASE("bucket: the burst is a tenth of a second, in whole blocks, and at most a write call") {
  FakeTime time;
  CHECK(TokenBucket(1e9, time).burst() == 8u << 20);
  CHECK(TokenBucket(10e6, time).burst() == 1000000 / 4096 * 4096);
  CHECK(TokenBucket(100, time).burst() == 4096);
  for (const double rate : {0.0, 0.5, -1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    CHECK_THROWS_AS(TokenBucket(rate, time), UsageError);
  }
}

TEST_CASE("bucket: no window has more than the cap and a burst, and nobody waits longer than that takes") {
  for (const double rate : {3e4, 1e6, 77e6, 3e9}) {
    FakeTime time;
    TokenBucket bucket(rate, time);
    std::mt19937_64 random(static_cast<uint64_t>(rate));
    std::vector<Moment> moments;
    double busy = 0;
    const nanoseconds start = time.now();
    nanoseconds idle{0};
    for (int i = 0; i < 300; ++i) {
      if (random() % 10 == 0) {
        const nanoseconds pause(static_cast<int64_t>(random() % 500000000));
        time.pass(pause);
        idle += pause;
      }
      const uint64_t bytes = 1 + random() % bucket.burst();
      const nanoseconds expected = bucket.wait_of(bytes);
      CHECK(bucket.take(bytes, nullptr) == expected);
      moments.push_back({time.now(), bytes});
      busy += static_cast<double>(bytes) / rate;
    }
    check_never_above(moments, rate, bucket.burst());
    CHECK(std::chrono::duration<double>(time.now() - start - idle).count() <= busy + 1e-3);
  }
}

TEST_CASE("bucket: a cancelled wait ends at the next look") {
  FakeTime time;
  TokenBucket bucket(4096, time);
  std::atomic<bool> cancelled = false;
  bucket.take(4096, &cancelled);
  time.on_sleep = [&] { cancelled = time.sleeps == 3; };
  CHECK_THROWS_AS(bucket.take(4096, &cancelled), CancelledError);
  CHECK(time.sleeps == 3);
  CHECK(time.longest <= cancel_poll);
}

TEST_CASE("pacing: without an interval a segment ends at its size, and its time is known, the last one's too") {
  Fixture fixture(10);
  fixture.options.segment_bytes = 4 * Fixture::page;
  const WriteResult result = fixture.write();
  REQUIRE(result.times.size() == 3);
  CHECK(ms(result.times[0]) == doctest::Approx(4 + 5));
  CHECK(ms(result.times[1]) == doctest::Approx(4 + 5));
  CHECK(ms(result.times[2]) == doctest::Approx(2 + 5));
  CHECK(result.late_segments == 0);
  CHECK(result.throttled_seconds == 0);
}

TEST_CASE("pacing: a segment ends early, with time for the sync; the first does not know yet how long one takes") {
  Fixture fixture(100);
  fixture.options.flush_interval = milliseconds(20);
  const WriteResult result = fixture.write();
  REQUIRE(result.times.size() == 7);
  CHECK(ms(result.times[0]) == doctest::Approx(20 + 5));
  for (size_t i = 1; i < 6; ++i) {
    CHECK(result.times[i].bytes == 15 * Fixture::page);
    CHECK(ms(result.times[i]) == doctest::Approx(15 + 5));
  }
  CHECK(result.late_segments == 1);
}

TEST_CASE("pacing: where a sync takes longer than the interval, segments are late but not tiny") {
  Fixture fixture(50, milliseconds(60));
  fixture.options.flush_interval = milliseconds(20);
  const WriteResult result = fixture.write();
  CHECK(result.late_segments == result.times.size());
  for (size_t i = 1; i < result.times.size(); ++i) {
    CHECK(result.times[i].bytes == 5 * Fixture::page);
    CHECK(ms(result.times[i]) == doctest::Approx(5 + 60));
  }
}

TEST_CASE("pacing: the cap wins over the interval, and what was late for it is counted") {
  for (const unsigned threads : {0u, 2u}) {
    Fixture fixture(30);
    const double rate = 10.0 * Fixture::page;  // a page in 100 ms
    TokenBucket bucket(rate, fixture.time);
    fixture.options.threads = threads;
    fixture.options.bucket = &bucket;
    fixture.options.flush_interval = milliseconds(50);
    const nanoseconds start = fixture.time.now();
    const WriteResult result = fixture.write();
    check_never_above(fixture.storage->writes, rate, bucket.burst());
    CHECK(std::chrono::duration<double>(fixture.time.now() - start).count() >= 2.9);
    CHECK(result.times.size() == 30);
    CHECK(result.late_segments == 29);  // the first page is the burst
    CHECK(result.throttled_seconds > 2.5);
  }
}

TEST_CASE("pacing: a segment ends before the cap makes it late") {
  Fixture fixture(30);
  TokenBucket bucket(10.0 * Fixture::page, fixture.time);
  fixture.options.bucket = &bucket;
  fixture.options.flush_interval = milliseconds(500);
  const WriteResult result = fixture.write();
  CHECK(result.late_segments == 0);
  CHECK(result.times.size() >= 6);
  CHECK(result.times.size() <= 8);
}

TEST_CASE("pacing: pages larger than the burst are handed on in pieces") {
  Fixture fixture(4);
  const double rate = 1e5;
  TokenBucket bucket(rate, fixture.time);
  REQUIRE(bucket.burst() < Fixture::page);
  fixture.options.bucket = &bucket;
  fixture.write();
  check_never_above(fixture.storage->writes, rate, bucket.burst());
  for (const Moment& write : fixture.storage->writes) CHECK(write.bytes % 4096 == 0);
}

TEST_CASE("pacing: a save that is cancelled leaves no files, and the next one works") {
  for (const unsigned threads : {0u, 2u}) {
    for (const bool throttled : {false, true}) {
      Fixture fixture(40);
      TokenBucket bucket(10.0 * Fixture::page, fixture.time);
      std::atomic<bool> cancelled = false;
      fixture.options.threads = threads;
      fixture.options.segment_bytes = 4 * Fixture::page;
      fixture.options.cancelled = &cancelled;
      if (throttled) {
        fixture.options.bucket = &bucket;
        fixture.time.on_sleep = [&] { cancelled = fixture.time.sleeps > 20; };
      } else {
        fixture.storage->on_write = [&] { cancelled = true; };
      }
      const auto files = fixture.storage->list("seg");
      CHECK_THROWS_AS(fixture.write(), CancelledError);
      CHECK(fixture.storage->list("seg") == files);
      CHECK(!fixture.catalog->state().head());
      CHECK_NOTHROW(fixture.catalog->check_usable());
      fixture.time.on_sleep = nullptr;
      fixture.storage->on_write = nullptr;
      cancelled = false;
      CHECK(fixture.write().times.size() == 10);
    }
  }
}

}  // namespace
}  // namespace tierload

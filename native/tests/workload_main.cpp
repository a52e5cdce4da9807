// tierload_workload: a seeded workload on a real file system, to be killed from outside, and the check afterwards.
//   tierload_workload run STORE SEED OPERATIONS LOG     LOG, on another file system, gets what was begun and what was
//                                                       acknowledged
//   tierload_workload check STORE SEED OPERATIONS LOG   opens STORE and compares; exit code 1: something is wrong
// Options, behind LOG:
//   --direct   all data goes past the page cache by io_uring, however little it is; at the end, how much it was
//   --ask      a run waits for a line on standard input after each line that it wrote into LOG
// The check knows what must be there by running the same seed on the simulated file system.
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string_view>

#include "tests/simulated.h"
#include "tests/workload.h"

namespace {

using namespace tierload;

struct Options {
  bool direct = false;
  bool ask = false;
};

std::shared_ptr<Storage> storage_at(const char* store, const Options& options) {
  if (!options.direct) return posix_storage(store);
  posix_storage(store)->make_dir("");  // direct_storage() wants one that exists
  return direct_storage(store, {.block_bytes = 4096, .depth = 4, .least_bytes = 0, .warm = 0});
}

void report(const Storage& storage, const Options& options) {
  if (!options.direct) return;
  std::printf("direct bytes %llu\n", static_cast<unsigned long long>(storage.direct_bytes()));
}

int run(const char* store, uint64_t seed, unsigned operations, const char* log_path, const Options& options) {
  const int log = open(log_path, O_CREAT | O_WRONLY | O_TRUNC | O_APPEND | O_CLOEXEC, 0666);
  if (log < 0) return std::perror(log_path), 2;
  const auto storage = storage_at(store, options);
  Workload workload(storage, seed, Mutant::none);
  const auto note = [&](char what) {
    const std::string line = what + std::to_string(workload.models().size() - 1) + "\n";
    if (write(log, line.data(), line.size()) != static_cast<ssize_t>(line.size())) std::abort();
    while (options.ask) {
      const int answer = std::getchar();
      if (answer == EOF) std::abort();
      if (answer == '\n') break;
    }
  };
  workload.on_begin = [&] { note('b'); };
  workload.on_acknowledged = [&](bool durable) { note(durable ? 'd' : 'a'); };
  try {
    workload.run(operations);
  } catch (const Error& error) {
    // A fault that was injected from outside: what was acknowledged so far is what counts.
    std::fprintf(stderr, "%s\n", error.what());
    return 3;
  }
  report(*storage, options);
  return 0;
}

int check(const char* store, uint64_t seed, unsigned operations, const char* log_path, const Options& options) {
  size_t oldest = 0;
  size_t newest = 0;
  std::ifstream log(log_path);
  for (std::string line; std::getline(log, line);) {
    const size_t number = std::strtoull(line.c_str() + 1, nullptr, 10);
    if (line[0] == 'b') newest = number;
    if (line[0] == 'd') oldest = number;
  }
  Workload same(std::make_shared<SimulatedStorage>(), seed, Mutant::none);
  same.run(operations);
  Model found;
  try {
    const auto storage = storage_at(store, options);
    const auto catalog = Catalog::open_for_writing(storage, workload_options(seed, Mutant::none));
    found = read_model(*catalog);
    report(*storage, options);
  } catch (const Error& error) {
    std::printf("does not open: %s\n", error.what());
    return 1;
  }
  for (size_t i = oldest; i <= newest; ++i) {
    if (same.models().at(i) == found) return 0;
  }
  std::printf("found %s; expected operation %zu to %zu, at least %s\n", found.text().c_str(), oldest, newest,
              same.models().at(oldest).text().c_str());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  bool known = argc >= 6;
  for (int i = 6; i < argc; ++i) {
    const std::string_view option = argv[i];
    if (option == "--direct") {
      options.direct = true;
    } else if (option == "--ask") {
      options.ask = true;
    } else {
      known = false;
    }
  }
  if (known) {
    const uint64_t seed = std::strtoull(argv[3], nullptr, 10);
    const auto operations = static_cast<unsigned>(std::strtoul(argv[4], nullptr, 10));
    if (std::strcmp(argv[1], "run") == 0) return run(argv[2], seed, operations, argv[5], options);
    if (std::strcmp(argv[1], "check") == 0) return check(argv[2], seed, operations, argv[5], options);
  }
  std::fprintf(stderr, "usage: tierload_workload run|check STORE SEED OPERATIONS LOG [--direct] [--ask]\n");
  return 2;
}

// How a process ends: each case in a forked child, where none of it has been called yet.
#include "tierload/ending.h"

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <utility>

using namespace tierload;

namespace {

bool outermost = true;

// Minus the signal that ended the child, or its status.
int ended(const std::function<void()>& body) {
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    ::alarm(60);
    if (std::exchange(outermost, false)) ::signal(SIGTERM, SIG_DFL);  // doctest has a handler
    body();
    std::exit(0);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace

TEST_CASE("a failed exit has a status other than 0") {
  CHECK(ended([] {}) == 0);
  CHECK(ended([] { fail_exit(); }) == 1);
  CHECK(ended([] {
          fail_exit();
          std::exit(3);
        }) == 3);
  CHECK(ended([] {
          fail_exit();
          std::exit(256);  // 0 to whoever waits
        }) == 1);
  CHECK(ended([] {
          fail_exit();
          forgive_exit();
        }) == 0);
  CHECK(ended([] {
          fail_exit();
          const int inner = ended([] {});
          if (inner != 0) ::_exit(100 + inner);
        }) == 1);
}

TEST_CASE("handlers that were there before a failure run all the same") {
  static int pipe_ends[2];
  REQUIRE(::pipe(pipe_ends) == 0);
  CHECK(ended([] {
          std::atexit([] { [[maybe_unused]] const ssize_t count = ::write(pipe_ends[1], "x", 1); });
          fail_exit();
        }) == 1);
  ::close(pipe_ends[1]);
  char byte = 0;
  CHECK(::read(pipe_ends[0], &byte, 1) == 1);
  ::close(pipe_ends[0]);
}

TEST_CASE("a termination waits for saves, and only where the disposition was the default one") {
  CHECK(ended([] {
          watch_termination(600);
          ::raise(SIGTERM);
        }) == -SIGTERM);
  CHECK(ended([] {
          save_begins(1, "a save");
          watch_termination(0);
          ::raise(SIGTERM);
          for (;;) ::pause();
        }) == -SIGTERM);
  CHECK(ended([] {
          save_begins(1, "a save");
          watch_termination(600);
          ::raise(SIGTERM);
          if (!terminating()) ::_exit(9);
          save_begins(2, "a save that nobody waits for");
          save_ends(1);
          for (;;) ::pause();
        }) == -SIGTERM);
  CHECK(ended([] {
          ::signal(SIGTERM, SIG_IGN);
          save_begins(1, "a save");
          watch_termination(600);
          ::raise(SIGTERM);
        }) == 0);
  CHECK(ended([] {
          ::signal(SIGTERM, [](int) { ::_exit(7); });
          save_begins(1, "a save");
          watch_termination(600);
          ::raise(SIGTERM);
        }) == 7);
}

TEST_CASE("a forked child ends at once, and can watch by itself") {
  CHECK(ended([] {
          save_begins(1, "a save");
          watch_termination(600);
          const int inner = ended([] { ::raise(SIGTERM); });
          ::_exit(inner == -SIGTERM ? 0 : 1);
        }) == 0);
  CHECK(ended([] {
          save_begins(1, "a save");
          watch_termination(600);
          const int inner = ended([] {
            save_begins(2, "the child's save");
            watch_termination(600);
            ::raise(SIGTERM);
            if (!terminating()) ::_exit(9);
            save_ends(2);
            for (;;) ::pause();
          });
          ::_exit(inner == -SIGTERM && !terminating() ? 0 : 1);
        }) == 0);
}

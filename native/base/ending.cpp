// The handler does what is allowed in one: it reads atomics and posts a semaphore. A thread that waits for that does
// the rest. What both share is made by the process that it is for, and found to be somebody else's in a forked child.
#include "tierload/ending.h"

#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

namespace tierload {
namespace {

using Saves = std::map<uint64_t, std::string>;

struct Ending {
  Ending() { ::sem_init(&came, 0, 0); }
  const pid_t owner = ::getpid();
  sem_t came;  // SIGTERM, with saves in flight
  std::atomic<bool> terminating = false;
  std::atomic<size_t> in_flight = 0;  // how many, for the handler
  std::atomic<double> grace_seconds = 0;

  std::mutex mutex;  // of all that follows
  std::condition_variable ended;
  Saves saves;
  bool watched = false;  // the thread runs
};

std::atomic<Ending*> current = nullptr;
static_assert(std::atomic<Ending*>::is_always_lock_free && std::atomic<size_t>::is_always_lock_free);

// What there is for this process, or nullptr. It is never deleted: signals come at any time, until the very end; and in
// a forked child its mutex may be held by a thread that exists in the parent only.
Ending* known() {
  Ending* const ending = current;
  return ending != nullptr && ending->owner == ::getpid() ? ending : nullptr;
}

Ending& mine() {
  Ending* before = current;
  if (before != nullptr && before->owner == ::getpid()) return *before;
  Ending* const fresh = new Ending;
  if (current.compare_exchange_strong(before, fresh)) return *fresh;
  delete fresh;
  return *before;  // of another thread of this process, a moment ago
}

// Async-signal-safe. It returns only when somebody installs a handler at this very moment.
void end_by_default() {
  struct sigaction standard{};
  standard.sa_handler = SIG_DFL;
  ::sigaction(SIGTERM, &standard, nullptr);
  sigset_t only;
  ::sigemptyset(&only);
  ::sigaddset(&only, SIGTERM);
  ::pthread_sigmask(SIG_UNBLOCK, &only, nullptr);
  ::raise(SIGTERM);
}

void on_termination(int) {
  const int before = errno;
  Ending* const ending = known();
  if (ending == nullptr || ending->in_flight == 0 || ending->terminating.exchange(true)) {
    end_by_default();
  } else {
    ::sem_post(&ending->came);
  }
  errno = before;
}

// A reader who does not read must not hold up the end: what does not fit is dropped.
void say(std::string line) {
  pollfd room{STDERR_FILENO, POLLOUT, 0};
  if (::poll(&room, 1, 0) != 1 || (room.revents & POLLOUT) == 0) return;
  line = "tierload: SIGTERM: " + line + "\n";
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), std::min<size_t>(line.size(), PIPE_BUF));
}

std::string listed(const Saves& saves) {
  std::string text;
  for (const auto& [id, what] : saves) text += (text.empty() ? "" : ", ") + what;
  return text;
}

std::string seconds(double count) {
  char text[32];
  std::snprintf(text, sizeof text, "%g s", count);
  return text;
}

void end_after_saves(Ending& ending) {
  std::unique_lock lock(ending.mutex);
  const double grace = ending.grace_seconds;
  if (grace > 0 && !ending.saves.empty()) {
    say("finishing " + listed(ending.saves) + ", for up to " + seconds(grace) + "; a second signal ends at once");
  }
  constexpr double for_ever = 1e9;  // seconds that every clock can add
  const std::chrono::duration<double> most(std::min(grace, for_ever));
  if (ending.ended.wait_for(lock, most, [&] { return ending.saves.empty(); })) return;
  say("not finished within " + seconds(grace) + ": " + listed(ending.saves) + "; the store is whole without it");
}

void watch(Ending& ending) {
  while (::sem_wait(&ending.came) != 0) {
  }
  end_after_saves(ending);
  end_by_default();
}

// A thread that starts within this scope takes no signals: they are for the program's own threads.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

std::atomic<pid_t> failing = 0;  // the process whose exit fails

// glibc lets a handler exit again: those that are left are called, with the new status.
void on_exit_handler(int status, void*) {
  if ((status & 0xff) == 0 && failing == ::getpid()) std::exit(1);
}

}  // namespace

void watch_termination(double grace_seconds) {
  Ending& ending = mine();
  ending.grace_seconds = grace_seconds;
  const std::lock_guard lock(ending.mutex);
  struct sigaction action{};
  ::sigaction(SIGTERM, nullptr, &action);
  const bool simple = (action.sa_flags & SA_SIGINFO) == 0;
  const bool ours = simple && action.sa_handler == on_termination;  // also in a child that inherited it
  if (!ours && !(simple && action.sa_handler == SIG_DFL)) return;
  if (::getpid() == 1) return;  // the kernel keeps the default action from the first process of a container
  if (!ending.watched) {
    const SignalsBlocked blocked;
    std::thread(watch, std::ref(ending)).detach();
    ending.watched = true;
  }
  if (ours) return;
  action = {};
  action.sa_handler = on_termination;
  action.sa_flags = SA_RESTART | SA_ONSTACK;  // the program goes on meanwhile and should not notice
  ::sigaction(SIGTERM, &action, nullptr);
}

bool terminating() {
  const Ending* const ending = known();
  return ending != nullptr && ending->terminating;
}

void save_begins(uint64_t id, const std::string& what) {
  Ending& ending = mine();
  const std::lock_guard lock(ending.mutex);
  if (ending.terminating) return;  // not waited for: a training loop goes on, and could keep the process for ever
  ending.saves[id] = what;
  ending.in_flight = ending.saves.size();
}

void save_ends(uint64_t id) {
  Ending& ending = mine();
  const std::lock_guard lock(ending.mutex);
  ending.saves.erase(id);
  ending.in_flight = ending.saves.size();
  ending.ended.notify_all();
}

void fail_exit() {
  [[maybe_unused]] static const int registered = ::on_exit(on_exit_handler, nullptr);
  failing = ::getpid();
}

void forgive_exit() {
  if (failing == ::getpid()) failing = 0;
}

}  // namespace tierload

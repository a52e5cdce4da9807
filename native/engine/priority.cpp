#include "engine/priority.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

// Failures are ignored on purpose: a sandbox may refuse these calls, and a save that is not nice is still a save.
namespace tierload {
namespace {

// linux/ioprio.h, which not every system's headers have.
constexpr int who_process = 1;  // of 0: the calling thread
constexpr int class_shift = 13;
constexpr int best_effort_last = (2 << class_shift) | 7;
constexpr int nicer = 10;

void set_io_priority(int priority) { ::syscall(SYS_ioprio_set, who_process, 0, priority); }

}  // namespace

void lower_priority() {
  const auto self = static_cast<id_t>(::gettid());  // on Linux a thread has a nice value of its own
  ::setpriority(PRIO_PROCESS, self, ::getpriority(PRIO_PROCESS, self) + nicer);  // the kernel stops at 19
  set_io_priority(best_effort_last);
}

LowIoPriority::LowIoPriority() : before_(::syscall(SYS_ioprio_get, who_process, 0)) {
  set_io_priority(best_effort_last);
}

LowIoPriority::~LowIoPriority() {
  // Without a class a thread has what its nice value gives; the kernel may name a level with it, but takes none back.
  const bool classless = before_ < 0 || before_ >> class_shift == 0;
  set_io_priority(classless ? 0 : static_cast<int>(before_));
}

}  // namespace tierload

// A preloaded library for user-mode Linux on processors whose register state is larger than it knows (AMX).
//
//   cc -shared -fPIC -O2 -o uml_xstate.so uml_xstate.c -ldl       LD_PRELOAD=uml_xstate.so LD_BIND_NOW=1 linux.uml ...
//
// Debian 12's user-mode Linux keeps 2696 bytes of a process's extended state, and the host refuses to set a part of it:
// the first process ends with a kernel panic. Here the rest is what the process has now: the state of units that it
// never uses.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/types.h>
#include <sys/uio.h>

static long (*next)(enum __ptrace_request, ...);

// Now, because the first call may be on a stack that is too small to look a symbol up.
__attribute__((constructor)) static void find_next(void) { next = dlsym(RTLD_NEXT, "ptrace"); }

long ptrace(enum __ptrace_request request, ...) {
  static char whole[1 << 14];  // static, because the stacks are small; there is one thread
  va_list arguments;
  va_start(arguments, request);
  const pid_t pid = va_arg(arguments, pid_t);
  void* const address = va_arg(arguments, void*);
  void* const data = va_arg(arguments, void*);
  va_end(arguments);
  if (request != PTRACE_SETREGSET || address != (void*)NT_X86_XSTATE) return next(request, pid, address, data);
  const struct iovec* const given = data;
  struct iovec all = {whole, sizeof whole};
  const long result = next(PTRACE_GETREGSET, pid, address, &all);
  if (result != 0) return result;
  if (all.iov_len <= given->iov_len) return next(request, pid, address, data);
  memcpy(whole, given->iov_base, given->iov_len);
  return next(request, pid, address, &all);
}

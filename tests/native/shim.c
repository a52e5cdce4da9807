// A preloaded library for fault and power-cut tests of a real process.
//
//   cc -shared -fPIC -O2 -o shim.so shim.c -ldl        LD_PRELOAD=shim.so TIERLOAD_SHIM_...=... program
//
//   TIERLOAD_SHIM_DIR    calls on this directory and on what is below it are counted, from 1; all others pass
//   TIERLOAD_SHIM_AT     the number of the call that is hit
//   TIERLOAD_SHIM_DO     what happens there, before the call is made:
//     shutdown   the file system at TIERLOAD_SHIM_MOUNT is shut down without flushing its log (ext4, XFS: what a
//                power cut leaves), and the process exits with 77; with 78 if that did not work
//     kill       the process kills itself with SIGKILL
//     errno:N    this one call fails with errno N
//     short      a write (with TIERLOAD_SHIM_READS, a read too) moves half of its bytes, at least one; any other call
//                is made as it is
//     drop       this write and all later ones report success and write nothing
//   TIERLOAD_SHIM_LIE    these report success and do nothing, whatever their number: `1` fsync and fdatasync,
//                        `fsync` or `fdatasync` only that one
//   TIERLOAD_SHIM_READS  not empty: pread is counted too
//   TIERLOAD_SHIM_COUNT  a file that gets the number of counted calls when the process ends normally
//   TIERLOAD_SHIM_LOG    a file that gets a line for every counted call: number, name, path
//
// Each process counts for itself; a forked child goes on from its parent's count.
//
// Counted: open and openat (not with O_PATH, which only looks), creat, every kind of write, fsync, fdatasync,
// ftruncate, fallocate, unlink, rename, mkdir, each with its variants, and pread on demand. Not seen: io_uring, mmap,
// raw system calls, stdio, and what the C library does inside itself.
#undef _FORTIFY_SOURCE  // these two would turn the definitions below into something else
#undef _FILE_OFFSET_BITS
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

// The next definition of a function: the C library's. Looked up at each call; dlsym has no lock worth avoiding here.
#define REAL(name) ((__typeof__(&name))(uintptr_t)dlsym(RTLD_NEXT, #name))

enum { go_on, fail_now, cut_short, pretend };

static atomic_long counted;
static char directory[PATH_MAX];
static long at = -1;
static const char *action = "";
static const char *lie = "";
static int count_reads;
static const char *log_path;
static const char *count_path;
static pid_t owner;

static void canonical(int dir, const char *path, char out[PATH_MAX]);

// ---- settings -------------------------------------------------------------------------------------------------------

static void read_settings(void) {
  static atomic_int done;
  if (atomic_exchange(&done, 1)) return;
  const char *text = getenv("TIERLOAD_SHIM_DIR");
  if (text != NULL && *text != '\0') canonical(AT_FDCWD, text, directory);
  text = getenv("TIERLOAD_SHIM_AT");
  if (text != NULL) at = atol(text);
  text = getenv("TIERLOAD_SHIM_DO");
  if (text != NULL) action = text;
  text = getenv("TIERLOAD_SHIM_LIE");
  if (text != NULL) lie = text;
  text = getenv("TIERLOAD_SHIM_READS");
  count_reads = text != NULL && *text != '\0';
  log_path = getenv("TIERLOAD_SHIM_LOG");
  count_path = getenv("TIERLOAD_SHIM_COUNT");
  owner = getpid();
}

__attribute__((constructor)) static void begin(void) { read_settings(); }

// Writes with real calls, so that nothing here counts itself.
static void put_line(const char *path, int flags, const char *line) {
  const int fd = REAL(open)(path, O_WRONLY | O_CREAT | O_CLOEXEC | flags, 0666);
  if (fd < 0) return;
  if (REAL(write)(fd, line, strlen(line)) < 0) fprintf(stderr, "shim: cannot write %s\n", path);
  close(fd);
}

__attribute__((destructor)) static void end(void) {
  // A forked child has its parent's count in it, and a program that counted nothing (a shell around the real one)
  // has nothing to say when somebody else has spoken.
  const long number = atomic_load(&counted);
  if (count_path == NULL || getpid() != owner || (number == 0 && access(count_path, F_OK) == 0)) return;
  char line[32];
  snprintf(line, sizeof line, "%ld\n", number);
  put_line(count_path, O_TRUNC, line);
}

// ---- which calls count ----------------------------------------------------------------------------------------------

static int path_of_fd(int fd, char out[PATH_MAX]) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, out, PATH_MAX - 1);
  out[length < 0 ? 0 : length] = '\0';
  return length > 0;
}

// Appends to a path; one that becomes too long for any call becomes empty, which is inside of nothing.
static void append(char path[PATH_MAX], const char *text) {
  if (strlen(path) + strlen(text) < PATH_MAX) {
    strcat(path, text);
  } else {
    path[0] = '\0';
  }
}

// The path with links and dots resolved, except in its last name, which may not exist.
static void canonical(int dir, const char *path, char out[PATH_MAX]) {
  char whole[PATH_MAX] = "";
  if (path[0] != '/') {
    if (dir == AT_FDCWD ? getcwd(whole, sizeof whole) == NULL : !path_of_fd(dir, whole)) whole[0] = '\0';
    append(whole, "/");
  }
  append(whole, path);
  for (size_t length = strlen(whole); length > 1 && whole[length - 1] == '/';) whole[--length] = '\0';
  out[0] = '\0';
  char *const slash = strrchr(whole, '/');
  if (slash == NULL) return;
  char *const name = slash + 1;
  if (slash == whole || strcmp(name, ".") == 0 || strcmp(name, "..") == 0) {
    if (realpath(whole, out) == NULL) out[0] = '\0';
    return;
  }
  *slash = '\0';
  if (realpath(whole, out) == NULL) {
    out[0] = '\0';
    append(out, whole);  // nothing is there: the call will fail, or the directory is made later
  }
  if (strcmp(out, "/") != 0) append(out, "/");
  append(out, name);
}

static int inside(const char *path) {
  const size_t length = strlen(directory);
  return length > 0 && strncmp(path, directory, length) == 0 && (path[length] == '\0' || path[length] == '/');
}

// ---- what happens at the chosen call --------------------------------------------------------------------------------

static void power_cut(void) {
  const char *const mount = getenv("TIERLOAD_SHIM_MOUNT");
  uint32_t flags = 2;  // *_GOING_FLAGS_NOLOGFLUSH
  const int fd = mount == NULL ? -1 : REAL(open)(mount, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd >= 0 && ioctl(fd, _IOR('X', 125, uint32_t), &flags) == 0) _exit(77);
  fprintf(stderr, "shim: cannot shut down %s: %s\n", mount == NULL ? "(no mount)" : mount, strerror(errno));
  _exit(78);
}

static int lies(const char *name, long number) {
  if (strcmp(action, "drop") == 0 && at > 0 && number >= at && strstr(name, "write") != NULL) return 1;
  const int sync = strcmp(name, "fsync") == 0 || strcmp(name, "fdatasync") == 0;
  return sync && (strcmp(lie, "1") == 0 || strcmp(lie, name) == 0);
}

static int count(const char *name, const char *path) {
  const long number = atomic_fetch_add(&counted, 1) + 1;
  if (log_path != NULL) {
    char line[PATH_MAX + 64];
    snprintf(line, sizeof line, "%ld %s %s\n", number, name, path);
    put_line(log_path, O_APPEND, line);
  }
  if (number != at) return lies(name, number) ? pretend : go_on;
  if (strcmp(action, "shutdown") == 0) power_cut();
  if (strcmp(action, "kill") == 0) {
    kill(getpid(), SIGKILL);
    while (1) pause();  // the signal is on its way
  }
  if (strncmp(action, "errno:", 6) == 0) {
    errno = atoi(action + 6);
    return fail_now;
  }
  if (strcmp(action, "short") == 0) return cut_short;
  return lies(name, number) ? pretend : go_on;
}

// The path is asked for anew at each call and not remembered from the open: numbers are reused, dup'ed, inherited.
static int at_fd(const char *name, int fd) {
  read_settings();
  if (directory[0] == '\0') return go_on;
  char path[PATH_MAX];
  const int before = errno;
  const int ours = path_of_fd(fd, path) && inside(path);
  errno = before;
  return ours ? count(name, path) : go_on;
}

static int at_path(const char *name, int dir, const char *path) {
  read_settings();
  if (directory[0] == '\0') return go_on;
  char whole[PATH_MAX];
  const int before = errno;
  canonical(dir, path, whole);
  errno = before;
  return inside(whole) ? count(name, whole) : go_on;
}

static int at_open(const char *name, int dir, const char *path, int flags) {
  return (flags & O_PATH) ? go_on : at_path(name, dir, path);
}

// ---- the calls ------------------------------------------------------------------------------------------------------

#define MODE_OF(flags, mode)                                   \
  mode_t mode = 0;                                             \
  if (((flags)&O_CREAT) || ((flags)&O_TMPFILE) == O_TMPFILE) { \
    va_list list;                                              \
    va_start(list, flags);                                     \
    mode = va_arg(list, mode_t);                               \
    va_end(list);                                              \
  }

#define OPEN(name)                                                    \
  int name(const char *path, int flags, ...) {                        \
    MODE_OF(flags, mode)                                              \
    if (at_open(#name, AT_FDCWD, path, flags) == fail_now) return -1; \
    return REAL(name)(path, flags, mode);                             \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                             \
  int name(int dir, const char *path, int flags, ...) {          \
    MODE_OF(flags, mode)                                         \
    if (at_open(#name, dir, path, flags) == fail_now) return -1; \
    return REAL(name)(dir, path, flags, mode);                   \
  }
OPENAT(openat)
OPENAT(openat64)

// What _FORTIFY_SOURCE makes of the above when there is no mode.
#define OPEN_2(name)                                                  \
  int name(const char *path, int flags);                              \
  int name(const char *path, int flags) {                             \
    if (at_open(#name, AT_FDCWD, path, flags) == fail_now) return -1; \
    return REAL(name)(path, flags);                                   \
  }
OPEN_2(__open_2)
OPEN_2(__open64_2)

#define OPENAT_2(name)                                           \
  int name(int dir, const char *path, int flags);                \
  int name(int dir, const char *path, int flags) {               \
    if (at_open(#name, dir, path, flags) == fail_now) return -1; \
    return REAL(name)(dir, path, flags);                         \
  }
OPENAT_2(__openat_2)
OPENAT_2(__openat64_2)

#define CREAT(name)                                            \
  int name(const char *path, mode_t mode) {                    \
    if (at_path(#name, AT_FDCWD, path) == fail_now) return -1; \
    return REAL(name)(path, mode);                             \
  }
CREAT(creat)
CREAT(creat64)

static size_t half(size_t length) { return length > 1 ? length / 2 : length; }

ssize_t write(int fd, const void *data, size_t length) {
  const int what = at_fd("write", fd);
  if (what == fail_now) return -1;
  if (what == pretend) return (ssize_t)length;
  return REAL(write)(fd, data, what == cut_short ? half(length) : length);
}

#define PWRITE(name, offset_type)                                                   \
  ssize_t name(int fd, const void *data, size_t length, offset_type offset) {       \
    const int what = at_fd(#name, fd);                                              \
    if (what == fail_now) return -1;                                                \
    if (what == pretend) return (ssize_t)length;                                    \
    return REAL(name)(fd, data, what == cut_short ? half(length) : length, offset); \
  }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

#define PREAD(name, offset_type)                                                    \
  ssize_t name(int fd, void *data, size_t length, offset_type offset) {             \
    const int what = count_reads ? at_fd(#name, fd) : go_on;                        \
    if (what == fail_now) return -1;                                                \
    return REAL(name)(fd, data, what == cut_short ? half(length) : length, offset); \
  }
PREAD(pread, off_t)
PREAD(pread64, off64_t)

static ssize_t sum(const struct iovec *parts, int parts_count) {
  size_t bytes = 0;
  for (int i = 0; i < parts_count; ++i) bytes += parts[i].iov_len;
  return (ssize_t)bytes;
}

// The first half of the bytes of `parts`, in `some`; returns how many parts that are.
static int first_half(const struct iovec *parts, int parts_count, struct iovec some[IOV_MAX]) {
  size_t left = half((size_t)sum(parts, parts_count));
  int used = 0;
  for (; used < parts_count && used < IOV_MAX && left > 0; ++used) {
    some[used] = parts[used];
    if (some[used].iov_len > left) some[used].iov_len = left;
    left -= some[used].iov_len;
  }
  return used;
}

// `types` and `values` are the parameters after the parts.
#define WRITEV(name, types, values)                                        \
  ssize_t name(int fd, const struct iovec *parts, int parts_count types) { \
    struct iovec some[IOV_MAX];                                            \
    const int what = at_fd(#name, fd);                                     \
    if (what == fail_now) return -1;                                       \
    if (what == pretend) return sum(parts, parts_count);                   \
    if (what == cut_short) {                                               \
      parts_count = first_half(parts, parts_count, some);                  \
      parts = some;                                                        \
    }                                                                      \
    return REAL(name)(fd, parts, parts_count values);                      \
  }
#define LIST(...) , __VA_ARGS__
WRITEV(writev, , )
WRITEV(pwritev, LIST(off_t offset), LIST(offset))
WRITEV(pwritev64, LIST(off64_t offset), LIST(offset))
WRITEV(pwritev2, LIST(off_t offset, int flags), LIST(offset, flags))
WRITEV(pwritev64v2, LIST(off64_t offset, int flags), LIST(offset, flags))

#define ON_FD(name, types, ...)        \
  int name types {                     \
    const int what = at_fd(#name, fd); \
    if (what == fail_now) return -1;   \
    if (what == pretend) return 0;     \
    return REAL(name)(__VA_ARGS__);    \
  }
ON_FD(fsync, (int fd), fd)
ON_FD(fdatasync, (int fd), fd)
ON_FD(ftruncate, (int fd, off_t length), fd, length)
ON_FD(ftruncate64, (int fd, off64_t length), fd, length)
ON_FD(fallocate, (int fd, int mode, off_t offset, off_t length), fd, mode, offset, length)
ON_FD(fallocate64, (int fd, int mode, off64_t offset, off64_t length), fd, mode, offset, length)

#define ON_PATH(name, types, dir, ...)                    \
  int name types {                                        \
    if (at_path(#name, dir, path) == fail_now) return -1; \
    return REAL(name)(__VA_ARGS__);                       \
  }
ON_PATH(unlink, (const char *path), AT_FDCWD, path)
ON_PATH(unlinkat, (int dir, const char *path, int flags), dir, dir, path, flags)
ON_PATH(mkdir, (const char *path, mode_t mode), AT_FDCWD, path, mode)
ON_PATH(mkdirat, (int dir, const char *path, mode_t mode), dir, dir, path, mode)

// A rename counts once, when either of its names is ours.
static int at_rename(const char *name, int from_dir, const char *from, int dir, const char *path) {
  read_settings();
  if (directory[0] == '\0') return go_on;
  char source[PATH_MAX];
  const int before = errno;
  canonical(from_dir, from, source);
  errno = before;
  return inside(source) ? count(name, source) : at_path(name, dir, path);
}

#define RENAME(name, types, from_dir, dir, ...)                             \
  int name types {                                                          \
    if (at_rename(#name, from_dir, from, dir, path) == fail_now) return -1; \
    return REAL(name)(__VA_ARGS__);                                         \
  }
RENAME(rename, (const char *from, const char *path), AT_FDCWD, AT_FDCWD, from, path)
RENAME(renameat, (int from_dir, const char *from, int dir, const char *path), from_dir, dir, from_dir, from, dir, path)
RENAME(renameat2, (int from_dir, const char *from, int dir, const char *path, unsigned flags), from_dir, dir, from_dir,
       from, dir, path, flags)

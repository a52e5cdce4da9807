#include "tierload/error.h"

#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

namespace tierload {
namespace {

// glibc's own tables: they never touch the locale, so messages are the same everywhere.
#if defined(__GLIBC__) && (__GLIBC__ > 2 || (__GLIBC__ == 2 && __GLIBC_MINOR__ >= 32))
std::string describe(int code) {
  const char* name = strerrorname_np(code);
  const char* text = strerrordesc_np(code);
  if (name == nullptr || text == nullptr) return "unknown error (errno " + std::to_string(code) + ")";
  return std::string(text) + " (" + name + ")";
}
#else
std::string describe(int code) {
  return std::generic_category().message(code) + " (errno " + std::to_string(code) + ")";
}
#endif

std::string message(const std::string& op, const std::string& path, int code) {
  return op + " " + path + ": " + describe(code);
}

}  // namespace

IoError::IoError(std::string operation, std::string target, int number)
    : Error(message(operation, target, number)), op(std::move(operation)), path(std::move(target)), code(number) {}

bool IoError::out_of_space() const { return code == ENOSPC || code == EDQUOT || code == EFBIG; }

bool IoError::unusable_file() const {
  return code == ENOENT || code == ENOTDIR || code == EIO || code == ELOOP || code == EISDIR || code == EINVAL ||
         code == ENXIO;
}

}  // namespace tierload

// Errors of the native core. Each carries what a person needs: what was found, where, and what to do.
// They become Python exceptions in bind/ and nowhere else.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace tierload {

// Base of every error that the core raises on purpose.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The operating system refused: `op` on `path` failed with `code` (an errno value).
class IoError : public Error {
 public:
  IoError(std::string operation, std::string on_path, int errno_code);
  const std::string op;
  const std::string path;
  const int code;
  bool out_of_space() const;   // no room: nothing is broken
  bool unusable_file() const;  // missing, unreadable, or no plain file: a mirror has to serve
};

// Bytes on disk are not what was written: a digest, crc, bound or link is wrong.
class CorruptError : public Error {
 public:
  using Error::Error;
};

// A page failed its digest or cannot be decoded. `row` is its number in the manifest.
class CorruptPageError : public CorruptError {
 public:
  CorruptPageError(const std::string& what, uint64_t at_row, std::string in_path, uint64_t at_offset)
      : CorruptError(what), row(at_row), path(std::move(in_path)), offset(at_offset) {}
  const uint64_t row;
  const std::string path;
  const uint64_t offset;
};

// The store needs a newer release.
class UnsupportedError : public Error {
 public:
  using Error::Error;
};

// Somebody else holds the store; `holder` is the text of LOCK.
class BusyError : public Error {
 public:
  BusyError(const std::string& what, std::string holder_text) : Error(what), holder(std::move(holder_text)) {}
  const std::string holder;
};

// Another writer took the store over: nothing that this one does counts any more.
class FencedError : public Error {
 public:
  using Error::Error;
};

// An earlier failed sync or write: this writer acknowledges nothing more.
class PoisonedError : public Error {
 public:
  using Error::Error;
};

// The caller asked for something that does not exist or is not allowed.
class UsageError : public Error {
 public:
  using Error::Error;
};

// An accelerator or its driver failed, or is not there.
class AcceleratorError : public Error {
 public:
  using Error::Error;
};

// Somebody cancelled a save before it was committed: nothing of it is kept, and nothing is broken.
class CancelledError : public Error {
 public:
  using Error::Error;
};

}  // namespace tierload

// Little-endian encoding into growing memory, and bounded decoding out of untrusted memory.
#pragma once

#include <bit>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "tierload/error.h"
#include "tierload/storage.h"

namespace tierload {

static_assert(std::endian::native == std::endian::little, "rows are used in place, so the host must be little-endian");

constexpr uint64_t sector = 4096;  // pages, journal groups and SUPER slots start on multiples of this

constexpr uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

inline Bytes as_bytes(std::string_view text) { return std::as_bytes(std::span(text.data(), text.size())); }
inline std::string_view as_text(Bytes bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

class ByteWriter {
 public:
  template <typename T>
    requires std::is_trivially_copyable_v<T>
  void put(const T& value) {
    const auto* at = reinterpret_cast<const std::byte*>(&value);
    data_.insert(data_.end(), at, at + sizeof value);
  }
  void put(Bytes bytes) { data_.insert(data_.end(), bytes.begin(), bytes.end()); }
  void put(std::string_view text) { put(as_bytes(text)); }
  void pad(uint64_t unit) { data_.resize(round_up(data_.size(), unit)); }
  size_t size() const { return data_.size(); }
  Bytes bytes() const { return data_; }
  std::vector<std::byte> take() { return std::move(data_); }

 private:
  std::vector<std::byte> data_;
};

// Every read is checked against what is there; `what` names the thing in the error.
class ByteReader {
 public:
  ByteReader(Bytes data, std::string what) : data_(data), what_(std::move(what)) {}

  template <typename T>
    requires std::is_trivially_copyable_v<T>
  T get() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  Bytes take(uint64_t length) {
    if (length > data_.size() - at_) {
      throw CorruptError(what_ + " ends at byte " + std::to_string(data_.size()) + ", but " + std::to_string(length) +
                         " bytes are declared at " + std::to_string(at_));
    }
    const Bytes part = data_.subspan(at_, length);
    at_ += length;
    return part;
  }
  std::string text(uint64_t length) { return std::string(as_text(take(length))); }
  // Skips to the next multiple of `unit`.
  void align(uint64_t unit) { take(round_up(at_, unit) - at_); }
  bool done() const { return at_ == data_.size(); }
  size_t at() const { return at_; }

 private:
  Bytes data_;
  size_t at_ = 0;
  std::string what_;
};

}  // namespace tierload

// Names of data files: "<epoch:8x>-<txid:12x>.r<rank:4x>" and what follows.
#pragma once

#include <charconv>
#include <cstdint>
#include <optional>
#include <string_view>

namespace tierload {

struct DataName {
  uint64_t epoch = 0;
  uint64_t txid = 0;
  uint32_t rank = 0;
  std::string_view rest;  // manifests: "" or ".m"; segments: ".<n:4x>"

  bool of_manifest() const { return rest.empty() || rest == ".m"; }
  bool of_segment() const {
    return rest.size() == 5 && rest[0] == '.' &&
           rest.find_first_not_of("0123456789abcdef", 1) == std::string_view::npos;
  }
};

inline std::optional<DataName> parse_data_name(std::string_view file) {
  DataName name;
  if (file.size() < 27 || file[8] != '-' || file[21] != '.' || file[22] != 'r') return std::nullopt;
  const char* text = file.data();
  const auto epoch = std::from_chars(text, text + 8, name.epoch, 16);
  const auto txid = std::from_chars(text + 9, text + 21, name.txid, 16);
  const auto rank = std::from_chars(text + 23, text + 27, name.rank, 16);
  if (epoch.ptr != text + 8 || txid.ptr != text + 21 || rank.ptr != text + 27) return std::nullopt;
  if (file.substr(0, 27).find_first_of("ABCDEF") != std::string_view::npos) return std::nullopt;
  name.rest = file.substr(27);
  return name;
}

}  // namespace tierload

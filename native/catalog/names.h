// Names of data files: "<epoch:8x>-<txid:12x>", then ".r<rank:4x>" or ".root", and what follows.
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
  bool root = false;
  std::string_view rest;  // manifests and roots: "" or ".m"; segments: ".<n:4x>"

  bool of_manifest() const { return !root && mirrored(); }
  bool of_root() const { return root && mirrored(); }
  bool of_segment() const {
    return !root && rest.size() == 5 && rest[0] == '.' &&
           rest.find_first_not_of("0123456789abcdef", 1) == std::string_view::npos;
  }

 private:
  bool mirrored() const { return rest.empty() || rest == ".m"; }
};

inline std::optional<DataName> parse_data_name(std::string_view file) {
  DataName name;
  if (file.size() < 26 || file[8] != '-') return std::nullopt;
  const char* text = file.data();
  const auto epoch = std::from_chars(text, text + 8, name.epoch, 16);
  const auto txid = std::from_chars(text + 9, text + 21, name.txid, 16);
  if (epoch.ptr != text + 8 || txid.ptr != text + 21) return std::nullopt;
  size_t end = 26;
  if (file.substr(21, 5) == ".root") {
    name.root = true;
  } else {
    end = 27;
    if (file.size() < end || file[21] != '.' || file[22] != 'r') return std::nullopt;
    if (std::from_chars(text + 23, text + end, name.rank, 16).ptr != text + end) return std::nullopt;
  }
  if (file.substr(0, end).find_first_of("ABCDEF") != std::string_view::npos) return std::nullopt;
  name.rest = file.substr(end);
  return name;
}

}  // namespace tierload

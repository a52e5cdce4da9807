// libFuzzer target: JsonReader on any bytes. Whatever is told to the handler before a text is refused has to be in
// order: brackets close what is open, members of objects have names and others none, strings are UTF-8 (in which lone
// surrogates have three bytes). A text that is read is written again, in the plainest form, and has to read the same.
#include "state/json.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "tierload/error.h"

namespace {

using namespace tierload;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "json fuzzer: %s\n", what);
  std::abort();
}

// The code points of a string, each in its shortest form.
std::vector<uint32_t> points_of(std::string_view text) {
  std::vector<uint32_t> points;
  for (size_t at = 0; at < text.size();) {
    const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
    const unsigned char lead = byte(at++);
    require(lead < 0x80 || (lead >= 0xC2 && lead < 0xF5), "a byte that begins no character");
    const size_t more = lead < 0x80 ? 0 : lead < 0xE0 ? 1 : lead < 0xF0 ? 2 : 3;
    require(text.size() - at >= more, "a character that is cut off");
    uint32_t point = more == 0 ? lead : lead & (0x3Fu >> more);
    for (size_t i = 0; i < more; ++i, ++at) {
      require((byte(at) & 0xC0u) == 0x80, "a byte that continues no character");
      point = point << 6 | (byte(at) & 0x3Fu);
    }
    constexpr uint32_t least[] = {0, 0x80, 0x800, 0x10000};
    require(point >= least[more] && point < 0x110000, "a character in more bytes than it needs");
    const bool second = point >= 0xDC00 && point < 0xE000;
    const bool pair = second && !points.empty() && points.back() >= 0xD800 && points.back() < 0xDC00;
    require(!pair, "a pair of surrogates that is no character");
    points.push_back(point);
  }
  return points;
}

// Checks the order of what it is told, and writes it down.
class Checker : public JsonHandler {
 public:
  void null() override { value("null"); }
  void boolean(bool is) override { value(is ? "true" : "false"); }
  void integer(int64_t number) override { value(std::to_string(number)); }
  void real(double number) override {
    require(std::isfinite(number), "a number that is none");
    char digits[40];
    std::snprintf(digits, sizeof digits, "%.17e", number);
    value(digits);
  }
  void string(std::string_view content, bool ascii) override { value(quoted(content, ascii)); }

  void name(std::string_view content, bool ascii) override {
    require(!open_.empty() && open_.back().object && !named_, "a name where none belongs");
    named_ = true;
    if (open_.back().members++ != 0) text_ += ',';
    text_ += quoted(content, ascii) + ':';
  }

  void open(bool object) override {
    value(object ? "{" : "[");
    open_.push_back({object, 0});
    require(open_.size() <= json_depth_max, "more levels than may be");
  }

  void close() override {
    require(!open_.empty() && !named_, "an end where nothing can end");
    text_ += open_.back().object ? '}' : ']';
    open_.pop_back();
  }

  // What was read, once that is done.
  const std::string& text() const {
    require(roots_ == 1 && open_.empty() && !named_, "a text that is no value");
    return text_;
  }

 private:
  struct Open {
    bool object;
    size_t members;
  };

  void value(const std::string& written) {
    if (open_.empty()) {
      require(roots_++ == 0, "a second value");
    } else {
      require(open_.back().object == named_, "a member without its name");
      if (!named_ && open_.back().members++ != 0) text_ += ',';
    }
    named_ = false;
    text_ += written;
  }

  static std::string quoted(std::string_view content, bool ascii) {
    std::string out = "\"";
    bool all = true;
    const auto escape = [&out](uint32_t unit) {
      char digits[8];
      std::snprintf(digits, sizeof digits, "\\u%04x", unit);
      out += digits;
    };
    for (const uint32_t point : points_of(content)) {
      all = all && point < 0x80;
      if (point >= 0x10000) escape(0xD800 + ((point - 0x10000) >> 10));
      escape(point >= 0x10000 ? 0xDC00 + (point & 0x3FF) : point);
    }
    require(all == ascii, "ASCII is something else");
    return out + '"';
  }

  std::vector<Open> open_;
  bool named_ = false;  // a name waits for its value
  int roots_ = 0;
  std::string text_;
};

std::string read(std::string_view text) {
  Checker checker;
  JsonReader(text, checker).read();
  return checker.text();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // Exactly as large as the text, so that the sanitizer sees every byte beyond.
  const std::vector<char> exact(data, data + size);
  std::string plain;
  try {
    plain = read({exact.data(), exact.size()});
  } catch (const CorruptError& error) {
    require(std::strlen(error.what()) != 0, "an error without a message");
    return 0;
  }
  try {
    require(read(plain) == plain, "what was read does not read the same again");
  } catch (const CorruptError&) {
    require(false, "what was read is refused");
  }
  return 0;
}

#include "state/json.h"

#include <charconv>

#include "tierload/error.h"

namespace tierload {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

void put_utf8(std::string& out, uint32_t point) {
  const auto put = [&out](uint32_t byte) { out += static_cast<char>(byte); };
  if (point < 0x80) {
    put(point);
  } else if (point < 0x800) {
    put(0xC0 | point >> 6);
    put(0x80 | (point & 0x3F));
  } else if (point < 0x10000) {
    put(0xE0 | point >> 12);
    put(0x80 | (point >> 6 & 0x3F));
    put(0x80 | (point & 0x3F));
  } else {
    put(0xF0 | point >> 18);
    put(0x80 | (point >> 12 & 0x3F));
    put(0x80 | (point >> 6 & 0x3F));
    put(0x80 | (point & 0x3F));
  }
}

}  // namespace

void JsonReader::read() {
  value();
  while (!open_.empty()) next_member();
  blanks();
  if (at_ != text_.size()) refuse("more text after the end");
}

void JsonReader::refuse(const std::string& what) const {
  throw CorruptError("the state document cannot be read: " + what + " at character " + std::to_string(at_));
}

void JsonReader::blanks() {
  while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t' || text_[at_] == '\r')) {
    ++at_;
  }
}

// The next character, which is not taken.
char JsonReader::peek() {
  blanks();
  if (at_ == text_.size()) refuse("it ends too early");
  return text_[at_];
}

// What comes next in the innermost container: its end, or a member.
void JsonReader::next_member() {
  const char closing = open_.back() == '{' ? '}' : ']';
  if (peek() == closing) {
    ++at_;
    open_.pop_back();
    first_ = false;
    handler_.close();
    return;
  }
  if (!first_) {
    if (text_[at_] != ',') refuse("no comma");
    ++at_;
  }
  first_ = false;
  if (closing == '}') {
    if (peek() != '"') refuse("no name");
    bool ascii = true;
    const std::string_view name = string(ascii);
    handler_.name(name, ascii);
    if (peek() != ':') refuse("no colon");
    ++at_;
  }
  value();
}

void JsonReader::value() {
  const char c = peek();
  bool ascii = true;
  switch (c) {
    case '{':
    case '[':
      open(c);
      break;
    case '"': {
      const std::string_view text = string(ascii);
      handler_.string(text, ascii);
      break;
    }
    case 'n':
      literal("null");
      handler_.null();
      break;
    case 't':
      literal("true");
      handler_.boolean(true);
      break;
    case 'f':
      literal("false");
      handler_.boolean(false);
      break;
    default:
      number();
  }
}

void JsonReader::open(char opening) {
  if (open_.size() >= json_depth_max) refuse("it nests deeper than " + std::to_string(json_depth_max) + " levels");
  ++at_;
  open_.push_back(opening);
  first_ = true;
  handler_.open(opening == '{');
}

void JsonReader::literal(std::string_view word) {
  if (text_.substr(at_, word.size()) != word) refuse("no value");
  at_ += word.size();
}

void JsonReader::number() {
  const size_t start = at_;
  const auto digits = [this] {
    const size_t from = at_;
    while (at_ < text_.size() && is_digit(text_[at_])) ++at_;
    if (at_ == from) refuse("no value");
  };
  if (text_[at_] == '-') ++at_;
  const size_t first = at_;
  digits();
  if (text_[first] == '0' && at_ > first + 1) refuse("a number with a leading zero");
  bool real = false;
  if (at_ < text_.size() && text_[at_] == '.') {
    real = true;
    ++at_;
    digits();
  }
  if (at_ < text_.size() && (text_[at_] == 'e' || text_[at_] == 'E')) {
    real = true;
    ++at_;
    if (at_ < text_.size() && (text_[at_] == '+' || text_[at_] == '-')) ++at_;
    digits();
  }
  const char* from = text_.data() + start;
  const char* to = text_.data() + at_;
  if (real) {
    double value = 0;
    if (std::from_chars(from, to, value).ec != std::errc()) refuse("a number beyond 64 bits");
    handler_.real(value);
  } else {
    int64_t value = 0;
    if (std::from_chars(from, to, value).ec != std::errc()) refuse("a number beyond 64 bits");
    handler_.integer(value);
  }
}

// The string that begins here. It points into the text, or into unescaped_ until the next one.
std::string_view JsonReader::string(bool& ascii) {
  const size_t start = ++at_;
  unescaped_.clear();
  bool escaped = false;
  for (;; ++at_) {
    if (at_ == text_.size()) refuse("a string without end");
    const char c = text_[at_];
    if (c == '"') break;
    if (const auto byte = static_cast<unsigned char>(c); byte < ' ' || byte > 0x7F)
      refuse("a byte that is not ASCII's");
    if (c == '\\') {
      if (!escaped) unescaped_.assign(text_, start, at_ - start);
      escaped = true;
      escape();
    } else if (escaped) {
      unescaped_ += c;
    }
  }
  const size_t end = at_++;
  if (!escaped) return text_.substr(start, end - start);
  for (const char c : unescaped_) ascii = ascii && static_cast<unsigned char>(c) < 0x80;
  return unescaped_;
}

// Leaves at_ on the last character of the escape.
void JsonReader::escape() {
  ++at_;
  if (at_ == text_.size()) refuse("a string without end");
  const char c = text_[at_];
  constexpr std::string_view letters = "\"\\/bfnrt";
  constexpr std::string_view meanings = "\"\\/\b\f\n\r\t";
  if (const size_t found = letters.find(c); found != std::string_view::npos) {
    unescaped_ += meanings[found];
    return;
  }
  if (c != 'u') refuse("an unknown escape");
  uint32_t point = hex4();
  const bool high = point >= 0xD800 && point < 0xDC00;
  if (high && text_.substr(at_ + 1, 2) == "\\u") {
    const size_t before = at_;
    at_ += 2;
    const uint32_t low = hex4();
    if (low >= 0xDC00 && low < 0xE000) {
      point = 0x10000 + ((point - 0xD800) << 10) + (low - 0xDC00);
    } else {
      at_ = before;  // two that do not belong together
    }
  }
  put_utf8(unescaped_, point);
}

// The four digits after at_, which is left on the last of them.
uint32_t JsonReader::hex4() {
  const std::string_view digits = text_.substr(at_ + 1, 4);
  uint32_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
  if (digits.size() != 4 || error != std::errc() || end != digits.data() + 4) refuse("a damaged escape");
  at_ += 4;
  return value;
}

}  // namespace tierload

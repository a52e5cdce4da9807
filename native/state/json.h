// A strict reader of JSON in ASCII, as the state document is (docs/FORMAT.md section 8): it trusts nothing, keeps its
// own stack, and tells a handler what it meets.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tierload {

constexpr size_t json_depth_max = 2600;  // a state nests 500 deep, and a typed value takes at most 5 levels

class JsonHandler {
 public:
  virtual ~JsonHandler() = default;
  virtual void null() = 0;
  virtual void boolean(bool value) = 0;
  virtual void integer(int64_t value) = 0;
  virtual void real(double value) = 0;
  // UTF-8, in which a lone surrogate has three bytes; `ascii` when no byte has its highest bit set.
  virtual void string(std::string_view value, bool ascii) = 0;
  virtual void name(std::string_view value, bool ascii) = 0;  // of the member whose value comes next
  virtual void open(bool object) = 0;
  virtual void close() = 0;
};

class JsonReader {
 public:
  JsonReader(std::string_view text, JsonHandler& handler) : text_(text), handler_(handler) {}
  // Throws CorruptError where the text is no JSON of one value, nests too deep, or has a number beyond 64 bits.
  void read();

 private:
  void value();
  void next_member();
  void open(char opening);
  void number();
  std::string_view string(bool& ascii);
  void escape();
  uint32_t hex4();
  void literal(std::string_view word);
  void blanks();
  char peek();
  [[noreturn]] void refuse(const std::string& what) const;

  std::string_view text_;
  JsonHandler& handler_;
  size_t at_ = 0;
  std::vector<char> open_;  // the opening brackets of the containers that are open
  bool first_ = true;       // no member of the innermost container has been read
  std::string unescaped_;
};

}  // namespace tierload

#include "state/json.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <charconv>
#include <limits>

#include "tierload/error.h"

namespace tierload {
namespace {

// What a reader tells, as text: strings are quoted as they are, and `~` marks those that are no ASCII.
class Told : public JsonHandler {
 public:
  void null() override { text += "null "; }
  void boolean(bool value) override { text += value ? "true " : "false "; }
  void integer(int64_t value) override { text += "i" + std::to_string(value) + " "; }
  void real(double value) override {
    char digits[64];
    text += "r" + std::string(digits, std::to_chars(digits, digits + sizeof digits, value).ptr) + " ";
  }
  void string(std::string_view value, bool ascii) override { put(value, ascii, " "); }
  void name(std::string_view value, bool ascii) override { put(value, ascii, ": "); }
  void open(bool object) override { text += object ? "{ " : "[ "; }
  void close() override { text += ") "; }
  std::string text;

 private:
  void put(std::string_view value, bool ascii, const char* after) {
    text += ascii ? "'" : "~'";
    text += value;
    text += std::string("'") + after;
  }
};

std::string told(std::string_view text) {
  Told handler;
  JsonReader(text, handler).read();
  if (!handler.text.empty()) handler.text.pop_back();
  return handler.text;
}

bool refused(std::string_view text) {
  try {
    told(text);
  } catch (const CorruptError&) {
    return true;
  }
  return false;
}

TEST_CASE("json: values, names and brackets come in the order of the text") {
  CHECK(told("null") == "null");
  CHECK(told(" [ ] ") == "[ )");
  CHECK(told("{}") == "{ )");
  CHECK(told("\t{\"a\" :[1,\r\n{\"b\":true} , -2.5],\"\":null}\n") == "{ 'a': [ i1 { 'b': true ) r-2.5 ) '': null )");
  CHECK(told("[[],[[]],{\"\":{}}]") == "[ [ ) [ [ ) ) { '': { ) ) )");
  CHECK(told(R"({"a":1,"a":2})") == "{ 'a': i1 'a': i2 )");  // whether a name may come twice is the handler's to say
}

TEST_CASE("json: strings") {
  CHECK(told(R"("")") == "''");
  CHECK(told(R"("plain text ~")") == "'plain text ~'");
  CHECK(told("\"\x7F\"") == "'\x7F'");
  CHECK(told(R"("\"\\\/\b\f\n\r\t")") == "'\"\\/\b\f\n\r\t'");
  CHECK(told(R"("before\nafter")") == "'before\nafter'");
  CHECK(told(R"("\u0000")") == std::string("'\0'", 3));
  CHECK(told(R"("\u007f\u0080\u00e9\u00E9")") == "~'\x7F\xC2\x80\xC3\xA9\xC3\xA9'");
  CHECK(told(R"("\u07ff\u0800\uffff")") == "~'\xDF\xBF\xE0\xA0\x80\xEF\xBF\xBF'");
  CHECK(told(R"({"\u00e9":"a","b":"\u0041"})") == "{ ~'\xC3\xA9': 'a' 'b': 'A' )");
}

TEST_CASE("json: surrogates that belong together are one character, others stand for themselves") {
  CHECK(told(R"("\ud800\udc00")") == "~'\xF0\x90\x80\x80'");
  CHECK(told(R"("\udbff\udfff")") == "~'\xF4\x8F\xBF\xBF'");
  CHECK(told(R"("\uD83D\uDE00x")") == "~'\xF0\x9F\x98\x80x'");
  CHECK(told(R"("\ud800")") == "~'\xED\xA0\x80'");
  CHECK(told(R"("\udc00\ud800")") == "~'\xED\xB0\x80\xED\xA0\x80'");
  CHECK(told(R"("\ud800\u0041")") ==
        "~'\xED\xA0\x80"
        "A'");
  CHECK(told(R"("\ud800\ud800\udc00")") == "~'\xED\xA0\x80\xF0\x90\x80\x80'");
  CHECK(told(R"("\ud800\n")") == "~'\xED\xA0\x80\n'");
  CHECK(refused(R"("\ud800\u")"));
  CHECK(refused(R"("\ud800\u00g0")"));
}

TEST_CASE("json: numbers at their limits") {
  CHECK(told("0") == "i0");
  CHECK(told("-0") == "i0");
  CHECK(told("9223372036854775807") == "i9223372036854775807");
  CHECK(told("-9223372036854775808") == "i-9223372036854775808");
  CHECK(refused("9223372036854775808"));
  CHECK(refused("-9223372036854775809"));
  CHECK(refused("99999999999999999999999999999999999999999"));
  CHECK(told("-0.0") == "r-0");
  CHECK(told("1e2") == "r100");
  CHECK(told("1E+2") == "r100");
  CHECK(told("0.1e-1") == "r0.01");
  for (const double limit : {std::numeric_limits<double>::max(), std::numeric_limits<double>::lowest(),
                             std::numeric_limits<double>::min(), std::numeric_limits<double>::denorm_min(),
                             std::numeric_limits<double>::epsilon(), 0.1 + 0.2, 2.2250738585072011e-308}) {
    char digits[64];
    const std::string text(digits,
                           std::to_chars(digits, digits + sizeof digits, limit, std::chars_format::scientific).ptr);
    Told handler;
    handler.real(limit);
    CHECK(told(text) + " " == handler.text);
  }
  CHECK(refused("1e309"));
  CHECK(refused("-1e309"));
  for (const char* text : {"01", "-01", "00", "+1", "-", ".5", "1.", "1.e1", "1e", "1e+", "--1", "0x1", "1_0", "NaN",
                           "Infinity", "-Infinity", "inf", "nan", "1 2"}) {
    CAPTURE(text);
    CHECK(refused(text));
  }
}

TEST_CASE("json: what is no JSON is refused") {
  for (const char* text : {"",
                           " ",
                           "[",
                           "]",
                           "{",
                           "}",
                           "[}",
                           "{]",
                           "[1,]",
                           "[,1]",
                           "[1 2]",
                           "{\"a\"}",
                           "{\"a\":}",
                           "{\"a\":1,}",
                           "{,}",
                           "{1:2}",
                           "{null:1}",
                           "{\"a\" 1}",
                           "{\"a\":1 \"b\":2}",
                           "nul",
                           "nulll",
                           "True",
                           "tru",
                           "'a'",
                           "\"a",
                           "\"\\\"",
                           "\"\\x\"",
                           "\"\\u12\"",
                           "\"\\u12g4\"",
                           "\"\\u+123\"",
                           "\"\\u 123\"",
                           "\"\\U0041\"",
                           "\"\n\"",
                           "\"\t\"",
                           "\"\xC3\xA9\"",
                           "\xEF\xBB\xBF"
                           "1",
                           "[] []",
                           "1,",
                           "// x\n1",
                           "[1]x",
                           "\v1"}) {
    CAPTURE(text);
    CHECK(refused(text));
  }
  CHECK(refused(std::string_view("\0", 1)));
  CHECK(refused(std::string_view("1\0", 2)));
  CHECK(refused(std::string_view("\"\0\"", 3)));
}

TEST_CASE("json: nesting has a limit") {
  const auto nested = [](size_t depth, const std::string& open, const std::string& inner, const std::string& close) {
    std::string text;
    for (size_t i = 0; i < depth; ++i) text += open;
    text += inner;
    for (size_t i = 0; i < depth; ++i) text += close;
    return text;
  };
  CHECK_FALSE(refused(nested(json_depth_max, "[", "", "]")));
  CHECK(refused(nested(json_depth_max + 1, "[", "", "]")));
  CHECK_FALSE(refused(nested(json_depth_max, "{\"a\":", "1", "}")));
  CHECK(refused(nested(json_depth_max + 1, "{\"a\":", "1", "}")));
  CHECK(refused(std::string(10'000'000, '[')));
  // It counts what is open, not what has been.
  CHECK_FALSE(refused("[" + nested(10 * json_depth_max, "[],", "", "") + "[]]"));
}

TEST_CASE("json: every prefix of a text is refused, and every byte that no text has") {
  const std::string text =
      R"({"version":1,"root":{"d":{"a":[null,true,false,-12.5e-3,{"t":{"chunk":0,"shape":[2,3]}}],"\u00e9\ud800":"\n"}}})";
  REQUIRE_FALSE(refused(text));
  for (size_t length = 0; length < text.size(); ++length) {
    CAPTURE(length);
    CHECK(refused(text.substr(0, length)));
    for (const char byte : {'\0', '\x1F', '\x80', '\xFF'}) {
      std::string changed = text;
      changed[length] = byte;
      CHECK(refused(changed));
    }
  }
}

}  // namespace
}  // namespace tierload

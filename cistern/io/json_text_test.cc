#include "cistern/io/json_text.h"

#include <gtest/gtest.h>

#include <chrono>

#include "cistern/base/error.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/test_folder.h"

namespace cistern {
namespace {

TEST(ParseJson, KeepsOrderAndNamesThePlace) {
  EXPECT_EQ(ParseJson(R"({"b": 1, "a": [true, null, "x"]})", "f").dump(),
            R"({"b":1,"a":[true,null,"x"]})");
  const std::string message =
      ErrorMessage([] { ParseJson("{\n  \"a\": 1,\n  \"b\": }\n", "config.json"); });
  EXPECT_EQ(message.rfind("config.json:3:8: not valid JSON: syntax error", 0), 0u) << message;
  EXPECT_EQ(ErrorMessage([] { ParseJson("", "f"); }).rfind("f:1:1: not valid JSON", 0), 0u);
  EXPECT_EQ(ErrorMessage([] { ParseJson("[1,]", "f", 7); }).rfind("f:7:4: not valid JSON", 0), 0u);
}

TEST(ParseJson, RefusesDuplicatesDepthAndHugeNumbers) {
  EXPECT_EQ(ErrorMessage([] { ParseJson(R"({"a": {"x": 1}, "b": {"x": 1, "x": 2}})", "f"); }),
            "f: key 'x' is given twice in one object");
  const auto nested = [](size_t depth) {
    return std::string(depth, '[') + std::string(depth, ']');
  };
  EXPECT_EQ(ErrorMessage([&] { ParseJson(nested(kMaxJsonDepth), "f"); }), "no error");
  for (const size_t depth : {size_t(kMaxJsonDepth) + 1, size_t{100'000}, size_t{10'000'000}}) {
    EXPECT_EQ(ErrorMessage([&] { ParseJson(nested(depth), "f"); }),
              "f: nested deeper than 64 levels");
    EXPECT_EQ(ErrorMessage([&] { ParseSortedJson(nested(depth), "f"); }),
              "f: nested deeper than 64 levels");
  }
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += "{\"a\":";
  EXPECT_EQ(ErrorMessage([&] { ParseJson(objects, "f", 3); }), "f:3: nested deeper than 64 levels");
  EXPECT_NE(ErrorMessage([] { ParseJson("1e999", "f"); }).find("f: not valid JSON"),
            std::string::npos);
  EXPECT_NE(ErrorMessage([] { ParseJson("\"\xff\"", "f"); }).find("f:1:2: not valid JSON"),
            std::string::npos);
}

// Both kinds stay fast, or say no: the library's own hook takes 100 s for such a file.
TEST(ParseJson, ManyObjectsAndManyKeys) {
  std::string text = "{";
  for (int i = 0; i < 200'000; ++i) text += StrCat(i ? "," : "", "\"k", i, "\":{\"x\":[1]}");
  text += "}";
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(ParseSortedJson(text, "f").size(), 200'000u);
  EXPECT_EQ(ErrorMessage([&] { ParseJson(text, "f"); }), "f: an object has more than 10000 keys");
  std::string list = "[";
  for (int i = 0; i < 200'000; ++i) list += StrCat(i ? "," : "", "{\"x\":[1]}");
  EXPECT_EQ(ParseJson(list + "]", "f").size(), 200'000u);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
}

TEST(ParseToml, BecomesJson) {
  const Json json = ParseToml(
      "z = 1\na = 0.5\n[train]\nsteps = 1_000\nnames = ['x', \"y\"]\nday = 2024-05-06\non = true\n",
      "f");
  EXPECT_EQ(
      json.dump(),
      R"({"z":1,"a":0.5,"train":{"steps":1000,"names":["x","y"],"day":"2024-05-06","on":true}})");
  EXPECT_EQ(ErrorMessage([] {
              ParseToml("a = 1\nb = = 2\n", "c.toml");
            }).rfind("c.toml:2:5: not valid TOML: ", 0),
            0u)
      << ErrorMessage([] { ParseToml("a = 1\nb = = 2\n", "c.toml"); });
  EXPECT_EQ(ErrorMessage([] { ParseToml("a = 1\na = 2\n", "c.toml"); }).rfind("c.toml:2:", 0), 0u);
}

TEST(ParseToml, NonAsciiOnlyInQuotesAndComments) {
  EXPECT_EQ(
      ErrorMessage([] { ParseToml("a = 1\ntzn\xce\x8b", "c.toml"); }),
      "c.toml:2:4: not valid TOML: unexpected here: a character outside ASCII, or a backtick, "
      "must be in quotes");
  const std::string text =
      "\xef\xbb\xbf# \xc3\xa9 'x\na = \"\\\"\xc3\xa9\"\nb = '\xc3\xa9'\nc = "
      "\"\"\"\"\xc3\xa9\n\"\"\"\"\nd = 1 # \xc3\xa9\n";
  EXPECT_EQ(ParseToml(text, "f").dump(),
            "{\"a\":\"\\\"\xc3\xa9\",\"b\":\"\xc3\xa9\",\"c\":\"\\\"\xc3\xa9\\n\\\"\",\"d\":1}");
  EXPECT_EQ(
      ParseToml("\"\xc3\xa9`\" = '`c3`'\nb = \"\"\"x \\\n  \xc3\xa9\\u00e9\"\"\"", "f").dump(),
      "{\"\xc3\xa9`\":\"`c3`\",\"b\":\"x \xc3\xa9\xc3\xa9\"}");
}

// Inputs on which toml++ alone has undefined behaviour, and others that must be refused.
TEST(ParseToml, NonAsciiThatIsRefused) {
  const auto message = [](const std::string& text) {
    return ErrorMessage([&] { ParseToml(text, "f"); });
  };
  EXPECT_EQ(message("a = 26\"6~\xce\x8b\"").rfind("f:1:", 0), 0u);
  EXPECT_EQ(message("a = \"\"\"\\\xc3\xa9\"\"\"").rfind("f:1:", 0), 0u);
  EXPECT_EQ(message("\xc3\xa9 = 1").rfind("f:1:1: not valid TOML", 0), 0u);
  EXPECT_EQ(message("a = 1\nb = 'x\xc3\xa9\xc3\xa9' = 2").rfind("f:2:13: not valid TOML", 0), 0u)
      << message("a = 1\nb = 'x\xc3\xa9\xc3\xa9' = 2");
  EXPECT_EQ(message("a = '\xff'"), "f: not valid TOML: not UTF-8");
  EXPECT_EQ(message("a = 1\nb = \"\\u0060\""), "f:2:6: write a backtick as itself, not as \\u0060");
}

TEST(ParseToml, RefusesDepthAndManyKeys) {
  const auto message = [](const std::string& text) {
    return ErrorMessage([&] { ParseToml(text, "f"); });
  };
  const auto times = [](size_t n, const std::string& text) {
    std::string all;
    for (size_t i = 0; i < n; ++i) all += text;
    return all;
  };
  EXPECT_EQ(message("a" + times(kMaxJsonDepth - 1, ".a") + " = 1"), "no error");
  for (const size_t more : {size_t{kMaxJsonDepth}, size_t{100'000}, size_t{2'000'000}}) {
    const std::string deep = "a" + times(more, ".a"), spaced = "'a'" + times(more, " . \"a\"");
    for (const std::string& text :
         {deep + " = 1", "[" + deep + "]", "[[" + deep + "]]", "x = { " + deep + " = 1 }",
          spaced + " = 1", "x = [\"\"\"y\"\"\"\"\", { " + deep + " = 1 }]",
          "x = 'y' # ''' \"\"\" '\n" + deep + " = 1", "x = \"\\\"#\"\n" + deep + " = 1"})
      EXPECT_EQ(message(text), "f: nested deeper than 64 levels") << text.substr(0, 40);
  }
  const std::string dots(200, '.');
  EXPECT_EQ(message("a = '" + dots + "' # " + dots + "\nb = \"\"\"\n" + dots + "\\\"\"\"\"\nc = [" +
                    times(200, "0.5, ") + "]\n"),
            "no error");
  std::string many;
  for (int i = 0; i < 200'000; ++i) many += StrCat("k", i, " = 1\n");
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(message(many), "f: an object has more than 10000 keys");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
}

TEST(ReadFiles, NameTheFile) {
  TestFolder folder;
  WriteFileAtomically(folder / "a.json", "{");
  EXPECT_EQ(ErrorMessage([&] {
              ReadJsonFile(folder / "a.json");
            }).rfind((folder / "a.json") + ":1:2: not valid JSON", 0),
            0u);
  WriteFileAtomically(folder / "a.toml", "x = 3");
  EXPECT_EQ(ReadTomlFile(folder / "a.toml")["x"], 3);
  EXPECT_NE(ErrorMessage([&] { ReadTomlFile(folder / "b.toml"); }).find("No such file"),
            std::string::npos);
}

TEST(JsonLine, AlwaysGivesUtf8) {
  EXPECT_EQ(JsonLine(Json{{"a", "\xff"}}), "{\"a\":\"\xef\xbf\xbd\"}");
}

}  // namespace
}  // namespace cistern

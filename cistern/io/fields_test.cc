#include "cistern/io/fields.h"

#include <gtest/gtest.h>

#include "cistern/io/test_folder.h"

namespace cistern {
namespace {

struct Options {
  int64_t steps = 100;
  double lr = 0.004;
  bool amp = false;
  enum class Schedule { kCosine, kLinear };
  Schedule schedule = Schedule::kCosine;
  std::vector<std::string> mechanisms = {"latte"};
  std::vector<int64_t> lengths = {64, 128};
  Json extra = Json::object();

  static EnumNames<Schedule> Schedules() {
    return {{Schedule::kCosine, "cosine"}, {Schedule::kLinear, "linear"}};
  }
  Fields fields() {
    Fields train;
    train.Add("lr", &lr, "learning rate", {0, 10})
        .Add("steps", &steps, "optimizer steps", {.min = 1})
        .Add("amp", &amp, "use bf16");
    train.Add("schedule", &schedule, "of the learning rate", Schedules());
    Fields all;
    all.Add("mechanisms", &mechanisms, "what to compare")
        .Add("lengths", &lengths, "in tokens", {1, 1000});
    all.Add("extra", &extra, "the mechanism's own").Group("train", train);
    return all;
  }
};

std::string ReadError(const char* text) {
  Options options;
  return ErrorMessage([&] { options.fields().Read(Json::parse(text), "config.json"); });
}

std::string SetError(const std::string& text) {
  Options options;
  try {
    options.fields().Set(text);
  } catch (const UsageError& e) {
    return e.what();
  }
  return "no UsageError";
}

TEST(Fields, ReadsAndWrites) {
  Options options;
  Fields fields = options.fields();
  fields.Read(
      Json::parse(
          R"({"train": {"steps": 1e3, "lr": 1, "amp": true}, "mechanisms": "softmax", "lengths": [1, 2], "extra": {"k": [1]}})"),
      "x");
  EXPECT_EQ(options.steps, 1000);
  EXPECT_EQ(options.lr, 1.0);
  EXPECT_TRUE(options.amp);
  EXPECT_EQ(options.mechanisms, std::vector<std::string>{"softmax"});
  EXPECT_EQ(options.lengths, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(
      fields.Write().dump(),
      R"({"mechanisms":["softmax"],"lengths":[1,2],"extra":{"k":[1]},"train":{"lr":1.0,"steps":1000,"amp":true,"schedule":"cosine"}})");
  EXPECT_EQ(fields.Names(),
            (std::vector<std::string>{"mechanisms", "lengths", "extra", "train.lr", "train.steps",
                                      "train.amp", "train.schedule"}));
}

TEST(Fields, ReadErrorsSayWhatIsAllowed) {
  EXPECT_EQ(ReadError(R"({"train": {"lrr": 1}})"),
            "config.json: unknown key 'train.lrr'; did you mean 'train.lr'?");
  EXPECT_EQ(ReadError(R"({"steps": 1})"),
            "config.json: unknown key 'steps'; did you mean 'train.steps'?");
  EXPECT_EQ(ReadError(R"({"train.lr": 1})"),
            "config.json: unknown key 'train.lr'; did you mean 'train.lr'?");
  EXPECT_EQ(ReadError(R"({"train": {"zzzzzzzzzzzz": 1}})"),
            "config.json: unknown key 'train.zzzzzzzzzzzz'; known are: train.lr, train.steps, "
            "train.amp, train.schedule");
  EXPECT_EQ(
      ReadError(R"({"qqqqqqqqqqqq": 1})"),
      "config.json: unknown key 'qqqqqqqqqqqq'; known are: mechanisms, lengths, extra, train");
  EXPECT_EQ(ReadError(R"({"train": {"lr": "fast"}})"),
            "config.json: 'train.lr' is \"fast\"; expected a number (0 .. 10)");
  EXPECT_EQ(ReadError(R"({"train": {"lr": -1}})"),
            "config.json: 'train.lr' is -1; expected a number (0 .. 10)");
  EXPECT_EQ(ReadError(R"({"train": {"steps": 0}})"),
            "config.json: 'train.steps' is 0; expected an integer (at least 1)");
  EXPECT_EQ(ReadError(R"({"train": {"steps": 1.5}})"),
            "config.json: 'train.steps' is 1.5; expected an integer (at least 1)");
  EXPECT_EQ(ReadError(R"({"train": {"steps": 18446744073709551615}})"),
            "config.json: 'train.steps' is 18446744073709551615; expected an integer (at least 1)");
  EXPECT_EQ(ReadError(R"({"train": {"amp": 1}})"),
            "config.json: 'train.amp' is 1; expected true or false");
  EXPECT_EQ(ReadError(R"({"train": {"schedule": "cosin"}})"),
            "config.json: 'train.schedule': unknown value 'cosin'; did you mean 'cosine'?");
  EXPECT_EQ(ReadError(R"({"lengths": [1, 2000]})"),
            "config.json: 'lengths' is 2000; expected a list of integers (1 .. 1000)");
  EXPECT_EQ(ReadError(R"({"train": 3})"), "config.json: 'train' is 3; expected an object");
  EXPECT_EQ(ReadError("[1]"), "config.json: expected an object, got [1]");
}

TEST(Fields, Set) {
  Options options;
  Fields fields = options.fields();
  for (const char* text : {"train.lr=4e-3", "train.steps=2e3", "train.amp=on",
                           "train.schedule=linear", "mechanisms=a, b", "lengths=7",
                           "extra={\"k\": 1}", "extra.deep.feature=elu", "extra.deep.slots=32"}) {
    fields.Set(text);
  }
  EXPECT_EQ(options.lr, 4e-3);
  EXPECT_EQ(options.steps, 2000);
  EXPECT_TRUE(options.amp);
  EXPECT_EQ(options.schedule, Options::Schedule::kLinear);
  EXPECT_EQ(options.mechanisms, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(options.lengths, std::vector<int64_t>{7});
  EXPECT_EQ(options.extra.dump(), R"({"k":1,"deep":{"feature":"elu","slots":32}})");
  fields.Set("train.lr=.5");  // as users write it
  EXPECT_EQ(options.lr, 0.5);
  fields.Set("extra=1,2.5");
  EXPECT_EQ(options.extra, Json({1, 2.5}));
  fields.Set("lengths=[1,2]");
  fields.Set("mechanisms=");
  fields.Set("train={\"lr\": 2}");
  EXPECT_EQ(options.lengths, (std::vector<int64_t>{1, 2}));
  EXPECT_TRUE(options.mechanisms.empty());
  EXPECT_EQ(options.lr, 2.0);
}

TEST(Fields, SetErrors) {
  EXPECT_EQ(SetError("train.lr"), "--set: expected key=value, got 'train.lr'");
  EXPECT_EQ(SetError("lr=1"), "--set: unknown key 'lr'; did you mean 'train.lr'?");
  EXPECT_EQ(SetError("train.lr=nan"), "--set: 'train.lr' is \"nan\"; expected a number (0 .. 10)");
  EXPECT_EQ(SetError("train.steps="),
            "--set: 'train.steps' is \"\"; expected an integer (at least 1)");
  EXPECT_EQ(SetError("lengths=1,x"),
            "--set: 'lengths' is \"x\"; expected a list of integers (1 .. 1000)");
  EXPECT_EQ(SetError("extra={").rfind("--set extra:1:2: not valid JSON", 0), 0u)
      << SetError("extra={");
  EXPECT_EQ(SetError("lengths=[1").rfind("--set:1:3: not valid JSON", 0), 0u)
      << SetError("lengths=[1");
  EXPECT_EQ(SetError("train.lr.x=1").rfind("--set: unknown key 'train.lr.x'", 0), 0u);
  for (const int levels : {64, 60'000}) {  // more than the stack has room for
    std::string deep = "extra";
    for (int i = 0; i < levels; ++i) deep += ".a";
    EXPECT_EQ(SetError(deep + "=1"), "--set: 'extra' would be nested deeper than 64 levels");
  }
}

TEST(Fields, HelpIsAligned) {
  Options options;
  EXPECT_EQ(options.fields().Help(2),
            "  mechanisms      texts = latte      what to compare\n"
            "  lengths         integers = 64,128  in tokens (1 .. 1000)\n"
            "  extra           json = {}          the mechanism's own\n"
            "  train.lr        number = 0.004     learning rate (0 .. 10)\n"
            "  train.steps     integer = 100      optimizer steps (at least 1)\n"
            "  train.amp       bool = false       use bf16\n"
            "  train.schedule  text = cosine      of the learning rate (cosine, linear)\n");
}

TEST(Fields, RefusesBadNames) {
  int64_t x = 0;
  EXPECT_THROW(Fields().Add("a", &x, "").Add("a", &x, ""), Error);
  EXPECT_THROW(Fields().Add("a.b", &x, ""), Error);
}

TEST(Fields, TextHasToBeUtf8) {
  std::string name;
  Fields fields;
  fields.Add("name", &name, "a name");
  fields.Set("name=caf\xc3\xa9");
  EXPECT_EQ(name, "caf\xc3\xa9");
  EXPECT_THROW(fields.Set("name=caf\xe9"), UsageError);
  EXPECT_EQ(name, "caf\xc3\xa9");
}

// Blanks around a value are no part of it, those between quotes are.
TEST(Fields, BlanksOfAText) {
  std::string name, kind;
  Fields fields;
  fields.Add("name", &name, "a name").Add("kind", &kind, "a kind", {"a", "b"});
  for (const auto& [value, read] : {std::pair{"= a ", "a"},
                                    {" = a ", "a"},
                                    {"=a b", "a b"},
                                    {"=", ""},
                                    {"=\" a \"", " a "},
                                    {" = \" a\"\" ", " a\""},
                                    {"=\"", "\""},
                                    {"=\"\"", ""}}) {
    fields.Set(StrCat("name", value));
    EXPECT_EQ(name, read) << value;
    fields.Set("name=" + AsAssigned(read));
    EXPECT_EQ(name, read) << value;
  }
  fields.Set("kind= a ");
  EXPECT_EQ(kind, "a");
}

enum class Colour { kRed, kBlue };

TEST(Fields, EnumerationsAreReadAndWrittenByName) {
  const EnumNames<Colour> names = {{Colour::kRed, "red"}, {Colour::kBlue, "blue"}};
  Colour colour = Colour::kRed;
  std::optional<Colour> other;
  Fields fields;
  fields.Add("colour", &colour, "of it", names).Add("other", &other, "none said: red", names);
  EXPECT_EQ(fields.Write().dump(), R"({"colour":"red"})");
  fields.Read(Json{{"colour", "blue"}, {"other", "red"}}, "x");
  EXPECT_EQ(colour, Colour::kBlue);
  EXPECT_EQ(other, Colour::kRed);
  EXPECT_EQ(fields.Write().dump(), R"({"colour":"blue","other":"red"})");
  fields.Set("other=blue");
  EXPECT_EQ(other, Colour::kBlue);
  EXPECT_EQ(ErrorMessage([&] { fields.Set("colour=bleu"); }),
            "--set: 'colour': unknown value 'bleu'; did you mean 'blue'?");
  EXPECT_EQ(ErrorMessage([&] {
              fields.Read(Json{{"other", ""}}, "x");
            }),
            "x: 'other': unknown value ''; known are: red, blue");
  EXPECT_EQ(ErrorMessage([&] {
              fields.Read(Json{{"colour", 1}}, "x");
            }),
            "x: 'colour' is 1; expected a text (one of red, blue)");
  EXPECT_EQ(colour, Colour::kBlue);
  EXPECT_EQ(fields.Help(),
            "colour  text = red  of it (red, blue)\n"
            "other   text = \"\"   none said: red (red, blue)\n");
  EXPECT_EQ(NameOf(Colour::kBlue, names), "blue");
  EXPECT_EQ(ErrorMessage([&] { ValueOf("rod", names, "colour"); }),
            "unknown colour 'rod'; did you mean 'red'?");
}

}  // namespace
}  // namespace cistern

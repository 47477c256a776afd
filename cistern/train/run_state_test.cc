#include "cistern/train/run_state.h"

#include <gtest/gtest.h>

#include "cistern/base/error.h"
#include "cistern/io/json_text.h"
#include "cistern/io/test_folder.h"

namespace cistern {
namespace {

RunState SomeState() {
  RunState s;
  s.step = 7, s.total_steps = 30, s.trained_seconds = 0.1, s.has_best = true;
  s.best = 1.0 / 3, s.best_metrics = {{"accuracy", 2.0 / 3}}, s.best_file = "0123456789abcdef";
  s.evals_without_better = 2, s.evaluation_due = true, s.window_loss = 1e-300;
  s.window_seconds = 3, s.window_tokens = 4, s.window_steps = 5, s.log_bytes = 6, s.seed = 9;
  s.experiment = {{"model", {{"dim", 16}}}, {"text", "caf\xc3\xa9"}};
  return s;
}

TEST(RunState, ComesBackBitForBit) {
  RunState s = SomeState();
  const std::string text = RunStateText(s);
  RunState read = ParseRunState(text, "t");
  EXPECT_EQ(read.Describe().Write(), s.Describe().Write());
  EXPECT_EQ(read.best, s.best);
  EXPECT_EQ(RunStateText(read), text);
}

TEST(RunState, EveryChangeIsSeen) {
  const std::string text = RunStateText(SomeState());
  int accepted = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    for (const char c : {char(text[i] ^ 1), char(text[i] ^ 2), char(text[i] ^ 16)}) {
      std::string changed = text;
      changed[i] = c;
      const std::string message =
          ErrorMessage([&] { accepted += RunStateText(ParseRunState(changed, "t")) != text; });
      if (message != "no error") {
        EXPECT_EQ(message.rfind("t", 0), 0u) << message;
      }
    }
  }
  EXPECT_EQ(accepted, 0);  // white space may change, nothing that is read
  for (size_t n = 0; n + 2 < text.size(); ++n)
    EXPECT_NE(ErrorMessage([&] { ParseRunState(text.substr(0, n), "t"); }), "no error") << n;
}

TEST(RunState, NumbersThatNoRunHas) {
  RunState s = SomeState();
  s.step = 31;
  EXPECT_EQ(ErrorMessage([&] { ParseRunState(RunStateText(s), "t"); }),
            "t: step 31 is beyond total_steps 30");
  s.step = -1;
  EXPECT_NE(ErrorMessage([&] { ParseRunState(RunStateText(s), "t"); }).find("'step' is -1"),
            std::string::npos);
  EXPECT_NE(ErrorMessage([] { ParseRunState("{}", "t"); }).find("step, total_steps or checksum"),
            std::string::npos);
}

TEST(CompareRuns, LengthsAndPlacesMayChangeAndNothingElse) {
  const Json begun = {{"seed", 1},
                      {"task", {{"text", "a.txt"}, {"length", 16}}},
                      {"model", {{"heads", 2}, {"attention", {"latte"}}}},
                      {"train", {{"steps", 3000}, {"batch", 8}}},
                      {"data", {{"text", "a.txt"}, {"xxh64", "12"}, {"notes", {"x"}}}}};
  const Json defaults = {{"model", {{"of_a_later_program", 3}, {"layer_drop", 0.0}}}};
  EXPECT_TRUE(CompareRuns(begun, begun, defaults, "run").empty());
  Json asked = begun;
  asked["train"]["steps"] = 700, asked["task"]["text"] = "b.txt", asked["data"]["text"] = "b.txt";
  asked["data"]["notes"] = Json::array();
  asked["model"]["of_a_later_program"] = 3;
  const std::vector<std::string> changes = CompareRuns(asked, begun, defaults, "run");
  ASSERT_EQ(changes.size(), 2u);
  EXPECT_EQ(changes[0], "task.text=\"b.txt\" (it was \"a.txt\")");
  EXPECT_EQ(changes[1], "train.steps=700 (it was 3000)");
  const auto refusal = [&](auto&& change) {
    Json other = begun;
    change(other);
    return ErrorMessage([&] { CompareRuns(other, begun, defaults, "run"); });
  };
  EXPECT_EQ(refusal([](Json& j) { j["model"]["heads"] = 4; }),
            "run was begun with model.heads=2, and 4 is asked for now: that is another run; leave "
            "it away, or give another --out");
  EXPECT_NE(refusal([](Json& j) { j["seed"] = 2; }), "no error");
  EXPECT_NE(refusal([](Json& j) { j["train"]["batch"] = 4; }), "no error");
  EXPECT_NE(refusal([](Json& j) { j["task"]["length"] = 8; }), "no error");
  EXPECT_NE(refusal([](Json& j) { j["model"]["attention"] = {"latte", "abc"}; }), "no error");
  EXPECT_NE(
      refusal([](Json& j) {
        j["data"]["xxh64"] = "13";
      }).find("was begun with other data than a.txt holds: xxh64 is \"13\" now and was \"12\""),
      std::string::npos);
  EXPECT_NE(refusal([](Json& j) {
              j["data"] = {{"data", "my/images"}, {"xxh64", "13"}};
            }).find("was begun with other data than my/images holds: xxh64 is \"13\""),
            std::string::npos);
  // What an earlier version did not record of the data.
  EXPECT_EQ(refusal([](Json& j) { j["data"]["xxh64_exact"] = "14"; }), "no error");
  // Options that are not written while they are unset, either way round.
  EXPECT_EQ(refusal([](Json& j) { j["model"]["of_a_later_program"] = 4; }),
            "run was begun with model.of_a_later_program=3, and 4 is asked for now: that is "
            "another run; leave it away, or give another --out");
  EXPECT_EQ(refusal([](Json& j) { j["model"]["layer_drop"] = 0.0; }), "no error");
  EXPECT_NE(refusal([](Json& j) { j["model"]["layer_drop"] = 0.5; }), "no error");
  EXPECT_NE(refusal([](Json& j) { j["model"].erase("heads"); }), "no error");
  EXPECT_NE(refusal([](Json& j) {
              j["model"]["options"] = {{"latte", {{"latents", 2}}}};
            }),
            "no error");
  EXPECT_EQ(refusal([](Json& j) { j["model"]["options"] = Json::object(); }), "no error");
  EXPECT_EQ(refusal([](Json& j) { j["published"]["row"] = "1"; }), "no error");
}

TEST(CompareRuns, FilesOfSplitsAndTargetsMayMove) {
  for (const char* place : {"text", "data", "valid", "test", "target", "valid_target"}) {
    const Json begun = {{"task", {{"kind", "x"}, {"x", {{place, "old"}}}}},
                        {"data", {{"xxh64", "12"}, {"valid", 7}}}};
    Json asked = begun;
    asked["task"]["x"][place] = "new";
    EXPECT_EQ(CompareRuns(asked, begun, {}, "run"),
              std::vector<std::string>{StrCat("task.x.", place, "=\"new\" (it was \"old\")")});
    asked["data"]["xxh64"] = "13";
    EXPECT_NE(ErrorMessage([&] { CompareRuns(asked, begun, {}, "run"); }), "no error") << place;
    asked["data"] = {{"xxh64", "12"}, {"valid", 8}};  // how many rows
    EXPECT_NE(ErrorMessage([&] { CompareRuns(asked, begun, {}, "run"); }), "no error") << place;
  }
  // No place: which of the training images validate.
  const Json begun = {{"task", {{"image", {{"valid", "last"}}}}}};
  const Json asked = {{"task", {{"image", {{"valid", "random"}}}}}};
  EXPECT_NE(ErrorMessage([&] { CompareRuns(asked, begun, {}, "run"); }), "no error");
}

}  // namespace
}  // namespace cistern

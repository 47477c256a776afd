// What a run is that goes on from a checkpoint, or that ends twice.
#include <ATen/ATen.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <thread>

#include "cistern/base/error.h"
#include "cistern/base/interrupt.h"
#include "cistern/io/jsonl.h"
#include "cistern/tasks/evaluate.h"
#include "cistern/train/checkpoint.h"
#include "cistern/train/testing_trainer.h"

namespace cistern {
namespace {

using testing::TrainerTest;

TEST_F(TrainerTest, AnAverageThatIsInterruptedIsNoEnd) {
  train_.average_last = 2, train_.eval_every = 2;
  Trainer trainer(MakeModel(config_, 3), *task_, train_, 7, folder_ / "run", Json::object(), false);
  int evaluations = 0;
  trainer.Observe([&](Model&) {
    if (++evaluations == 2) Interrupted() = true;  // after the last step
    return Json::object();
  });
  const TrainResult result = trainer.Run();
  Interrupted() = false;
  EXPECT_EQ(evaluations, 2);
  EXPECT_EQ(result.steps, 4);
  EXPECT_TRUE(result.interrupted);
}

TEST_F(TrainerTest, ARunThatRanOutOfPatienceHasEnded) {
  train_.eval_every = 2, train_.patience = 1, train_.checkpoint_every = 1000, train_.lr = 1e-12;
  for (const bool timed : {false, true}) {
    for (const int64_t averaged : {0, 2}) {
      train_.steps = timed ? 0 : 40, train_.seconds = timed ? 60 : 0;
      train_.average_last = averaged;
      const std::string run = StrCat("run", timed, averaged);
      Trained(run);
      const auto lines = [&] { return ReadJsonl(folder_ / (run + "/metrics.jsonl")).size(); };
      const size_t before = lines();
      const std::string model = ReadFile(folder_ / (run + "/model.safetensors"));
      for (const int64_t threads : {1, 1, 2}) {  // another number is a setting that changed
        Trainer again(MakeModel(config_, 3), *task_, train_, 7, folder_ / run,
                      {{"environment", {{"threads", threads}}}}, false);
        again.Resume();
        const TrainResult result = again.Run();
        EXPECT_TRUE(result.had_ended && result.out_of_patience) << run;
        EXPECT_EQ(result.steps, 4) << run;
        EXPECT_EQ(lines(), before) << run;
      }
      EXPECT_TRUE(ReadFile(folder_ / (run + "/model.safetensors")) == model) << run;
    }
  }
}

// The model of a run that was killed after it was saved, before the next checkpoint. Steps in a
// budget of time do not come again, nor do those of a run that goes on where sums are rounded
// otherwise.
TEST_F(TrainerTest, ABetterModelThanTheCheckpointKnowsIsMeasured) {
  for (const bool timed : {true, false}) {
    train_.steps = timed ? 0 : 4, train_.seconds = timed ? 0.2 : 0;
    const std::string run = timed ? "timed" : "counted";
    Trained(run);
    const auto other = MakeModel(config_, 9);
    SaveModel(*other, folder_ / run);
    Trainer again(MakeModel(config_, 3), *task_, train_, 7, folder_ / run, Json::object(), false);
    again.Resume();
    const TrainResult result = again.Run();
    const Evaluation wanted = Evaluate(*task_, *other, Split::kValid, {});
    EXPECT_EQ(result.valid, task_->Metrics(wanted.score)) << run;
  }
}

TEST_F(TrainerTest, OtherRowsMeasureTheBestModelAgain) {
  Prepare(600);
  const auto run = [&](int64_t tokens, bool resume) {
    train_.eval_tokens = tokens;
    Trainer trainer(MakeModel(config_, 3), *task_, train_, 7, folder_ / "run",
                    {{"train", {{"eval_tokens", tokens}}}}, false);
    if (resume) trainer.Resume();
    return trainer.Run();
  };
  const TrainResult few = run(20, false), all = run(0, true);
  EXPECT_TRUE(all.had_ended);
  EXPECT_LT(few.valid["examples"], all.valid["examples"]);
  const auto model = LoadModel(folder_ / "run");
  const Evaluation wanted = Evaluate(*task_, *model, Split::kValid, {});
  EXPECT_EQ(all.valid, task_->Metrics(wanted.score));
}

// Else a run that is killed before its next checkpoint would go on with the earlier ones.
TEST_F(TrainerTest, NewSettingsAreSavedBeforeTheNextStep) {
  for (const int64_t every : {5, 6}) {
    train_.log_every = every;
    Trainer trainer(MakeModel(config_, 3), *task_, train_, 7, folder_ / "run",
                    {{"train", {{"log_every", every}}}}, false);
    if (every == 6) trainer.Resume();
    EXPECT_EQ(trainer.Run().steps, 4);
    const RunState state = ReadRunState(*NewestCheckpoint(folder_ / "run"));
    EXPECT_EQ(state.experiment["train"]["log_every"], every);
  }
}

// What ended with the mean of its last evaluations goes on with the best that it knew: its patience
// does not begin anew.
TEST_F(TrainerTest, ALongerRunOfMeansKeepsItsPatience) {
  train_.average_last = 2, train_.eval_every = 1, train_.lr = 1e-12, train_.patience = 5;
  Trained("run");
  train_.steps = 8;
  Trainer again(MakeModel(config_, 3), *task_, train_, 7, folder_ / "run",
                Json{{"train", {{"steps", 8}}}}, false);
  again.Resume();
  const TrainResult result = again.Run();
  EXPECT_TRUE(result.out_of_patience);
  EXPECT_EQ(result.steps, 6);  // nothing was better than the first of the evaluations
}

TEST_F(TrainerTest, ARunThatIsCutToItsStepIsMeasuredThere) {
  train_.eval_every = 3, train_.checkpoint_every = 1, train_.steps = 10;
  const auto lines = [&](const std::string& event) {
    std::vector<int64_t> steps;
    for (const Json& line : ReadJsonl(folder_ / "run/metrics.jsonl")) {
      if (line.at("event") == event) steps.push_back(line.at("step"));
    }
    return steps;
  };
  const auto train = [&](bool resume) {
    Trainer trainer(MakeModel(config_, 3), *task_, train_, 7, folder_ / "run",
                    Json{{"train", {{"steps", train_.steps}}}}, false);
    if (resume) trainer.Resume();
    // The interrupt is taken after the step.
    trainer.Observe([&, calls = 0](Model&) mutable {
      if (++calls == 1 && !resume) Interrupted() = true;
      return Json::object();
    });
    return trainer.Run();
  };
  EXPECT_EQ(train(false).steps, 4);
  Interrupted() = false;
  train_.steps = 4;
  for (int time = 0; time < 2; ++time) {
    EXPECT_TRUE(train(true).had_ended);
    EXPECT_EQ(lines("valid"), (std::vector<int64_t>{3, 4}));
    EXPECT_EQ(lines("step"), std::vector<int64_t>{4});  // as of a run of four steps
  }
}

TEST_F(TrainerTest, APauseIsNoTraining) {
  const auto model = MakeModel(config_, 3);
  int steps = 0;
  model->parameters()[0].register_hook([&](const at::Tensor&) {
    if (++steps != 3) return;
    std::raise(SIGCONT);  // as at the end of a pause
    std::this_thread::sleep_for(std::chrono::milliseconds(800));
  });
  Trainer trainer(model, *task_, train_, 7, folder_ / "run", Json::object(), false);
  trainer.Run();
  int pauses = 0;
  for (const Json& line : ReadJsonl(folder_ / "run/metrics.jsonl")) {
    if (line.at("event") != "paused") continue;
    ++pauses;
    EXPECT_EQ(line.at("step"), 3);
    EXPECT_GT(line.at("paused_seconds").get<double>(), 0);
  }
  EXPECT_EQ(pauses, 1);
}

// As timeout(1) sends it, after another signal.
TEST_F(TrainerTest, ASignalToGoOnIsNoPause) {
  const auto model = MakeModel(config_, 3);
  int steps = 0;
  model->parameters()[0].register_hook([&](const at::Tensor&) {
    std::raise(SIGCONT);
    std::this_thread::sleep_for(std::chrono::milliseconds(20) * ++steps);  // longer than the last
  });
  Trainer trainer(model, *task_, train_, 7, folder_ / "run", Json::object(), false);
  trainer.Run();
  for (const Json& line : ReadJsonl(folder_ / "run/metrics.jsonl"))
    EXPECT_NE(line.at("event"), "paused") << line;
}

// TensorBoard has one point of it, however often the run that had ended is resumed.
TEST_F(TrainerTest, TheMeanOfTheLastEvaluationsIsShownOnce) {
  train_.average_last = 2, train_.eval_every = 2;
  const auto points = [&](const std::string& tag) {
    int count = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder_ / "run")) {
      if (!entry.path().filename().string().starts_with("events")) continue;
      const std::string bytes = ReadFile(entry.path().string());
      for (size_t at = bytes.find(tag); at != bytes.npos; at = bytes.find(tag, at + 1)) ++count;
    }
    return count;
  };
  Trained("run");
  for (int time = 0; time < 2; ++time) {
    EXPECT_EQ(points("averaged/accuracy"), 1);
    EXPECT_EQ(points("valid/accuracy"), 2);
    Trainer again(MakeModel(config_, 3), *task_, train_, 7, folder_ / "run", Json::object(), false);
    again.Resume();
    EXPECT_TRUE(again.Run().had_ended);
  }
  train_.steps = 6;  // the mean at the new end is another point
  Trainer longer(MakeModel(config_, 3), *task_, train_, 7, folder_ / "run",
                 Json{{"train", {{"steps", 6}}}}, false);
  longer.Resume();
  longer.Run();
  EXPECT_EQ(points("averaged/accuracy"), 2);
}

// A checkpoint of an earlier version does not say at which step the run was measured last.
TEST_F(TrainerTest, AnEndedRunOfAnEarlierVersionIsNotMeasuredAgain) {
  Trained("run");
  const auto newest = *NewestCheckpoint(folder_ / "run");
  RunState state = ReadRunState(newest);
  EXPECT_EQ(state.measured_step, 4);
  state.measured_step = -1;
  WriteFileAtomically(newest + "/trainer.json", RunStateText(state));
  const size_t lines = ReadJsonl(folder_ / "run/metrics.jsonl").size();
  Trainer again(MakeModel(config_, 3), *task_, train_, 7, folder_ / "run", Json::object(), false);
  again.Resume();
  EXPECT_TRUE(again.Run().had_ended);
  EXPECT_EQ(ReadJsonl(folder_ / "run/metrics.jsonl").size(), lines);
}

TEST_F(TrainerTest, TheMemoryOfARunIsTheMostOfItsProcesses) {
  Trained("run");
  const auto newest = *NewestCheckpoint(folder_ / "run");
  RunState state = ReadRunState(newest);
  EXPECT_GT(state.peak_bytes, 0);
  state.peak_bytes = int64_t{1} << 50;
  WriteFileAtomically(newest + "/trainer.json", RunStateText(state));
  Trainer again(MakeModel(config_, 3), *task_, train_, 7, folder_ / "run", Json::object(), false);
  again.Resume();
  EXPECT_EQ(again.Run().peak_bytes, int64_t{1} << 50);
}

TEST(RunDefaults, ANumberOfProcessesIsSaid) {
  const auto of = [](int64_t count) { return Json{{"environment", {{"processes", count}}}}; };
  const auto changes = [](const Json& asked, const Json& begun) {
    return CompareRuns(asked, begun, RunDefaults(asked), "run");
  };
  EXPECT_EQ(changes(of(1), of(2)), std::vector<std::string>{"environment.processes=1 (it was 2)"});
  EXPECT_EQ(changes(of(1), Json::object()), std::vector<std::string>{});  // of an earlier version
}

}  // namespace
}  // namespace cistern

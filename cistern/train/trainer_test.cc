// What the loop makes of its options, against the same steps taken by hand.
#include "cistern/train/trainer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>

#include "cistern/base/error.h"
#include "cistern/base/random.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/jsonl.h"
#include "cistern/io/test_folder.h"
#include "cistern/ops/testing.h"
#include "cistern/tasks/evaluate.h"
#include "cistern/tensors/device.h"
#include "cistern/tensors/testing_device.h"
#include "cistern/train/checkpoint.h"
#include "cistern/train/testing_processes.h"
#include "cistern/train/testing_trainer.h"

namespace cistern {
namespace {

using testing::ExpectContains;
using testing::TrainerTest;

void ExpectSame(const Model& a, const std::map<std::string, at::Tensor>& b, double most) {
  for (const auto& p : a.named_parameters()) {
    const double difference = (p.value().detach() - b.at(p.key())).abs().max().item<double>();
    EXPECT_LE(difference, most) << p.key();
  }
}

std::map<std::string, at::Tensor> WeightsOf(const Model& model) {
  std::map<std::string, at::Tensor> all;
  for (const auto& p : model.named_parameters()) all[p.key()] = p.value().detach().clone();
  return all;
}

TEST_F(TrainerTest, ClipsEachOfTheAccumulatedBatches) {
  train_.accumulate = 3, train_.clip = 0.05, train_.clip_each = true;
  train_.optimizer.kind = OptimizerKind::kSgd, train_.optimizer.momentum = 0.5;
  train_.optimizer.weight_decay = 0;
  const auto trained = Trained("run");
  const auto model = MakeModel(config_, 3);
  std::map<std::string, at::Tensor> velocity;
  bool clipped = false;
  for (int64_t step = 0; step < 4; ++step) {
    std::map<std::string, at::Tensor> mean;
    for (int64_t micro = 0; micro < 3; ++micro) {
      Differentiate(*model, 3 * step + micro);
      double squares = 0;
      for (const at::Tensor& p : model->parameters())
        squares += p.grad().to(at::kDouble).square().sum().item<double>();
      const double factor = std::min(1.0, 0.05 / std::sqrt(squares));
      clipped = clipped || factor < 1;
      for (const auto& p : model->named_parameters()) {
        const at::Tensor share = p.value().grad() * (factor / 3);
        mean[p.key()] = mean.count(p.key()) ? mean[p.key()] + share : share;
        p.value().mutable_grad() = at::Tensor();
      }
    }
    const at::NoGradGuard guard;
    for (const auto& p : model->named_parameters()) {
      at::Tensor& v = velocity[p.key()];
      v = v.defined() ? 0.5 * v + mean[p.key()] : mean[p.key()];
      at::Tensor(p.value()).sub_(v, 0.02);
    }
  }
  EXPECT_TRUE(clipped);
  ExpectSame(*trained, WeightsOf(*model), 1e-6);
  // Clipping the mean is another thing.
  train_.clip_each = false;
  const auto other = Trained("other");
  EXPECT_GT((other->parameters()[0] - trained->parameters()[0]).abs().max().item<double>(), 1e-5);
}

// Two batches of four rows are one of eight, although they have other numbers of targets, or other
// sums of their classes' weights.
TEST_F(TrainerTest, AccumulatedBatchesAreOneOfAllTheirRows) {
  train_.steps = train_.eval_every = train_.log_every = 1, train_.clip = 0;
  train_.optimizer.kind = OptimizerKind::kSgd, train_.optimizer.momentum = 0;
  train_.optimizer.weight_decay = 0;
  const auto loss = [&](const std::string& run) {
    return ReadJsonl(folder_ / (run + "/metrics.jsonl"))[0].at("loss").get<double>();
  };
  const auto compare = [&](const std::vector<std::string>& assignments) {
    const std::string name = options_.kind;
    Fields fields;
    fields.Group("task", options_.Describe());
    for (const std::string& assignment : assignments)
      fields.Set(TaskOptions::Grouped(assignment, name));
    task_ = options_.Make();
    task_->Prepare();
    task_->Complete(config_);
    EXPECT_NE(task_->Terms(task_->TrainBatch(7, 0, 4)), task_->Terms(task_->TrainBatch(7, 1, 4)))
        << name;
    train_.batch = 8, train_.accumulate = 1;
    const auto whole = Trained(name + "-whole");
    train_.batch = 4, train_.accumulate = 2;
    ExpectSame(*Trained(name + "-parts"), WeightsOf(*whole), 1e-6);
    EXPECT_NEAR(loss(name + "-parts"), loss(name + "-whole"), 1e-6) << name;
  };
  compare({"task.class_weights=balanced", "task.group_by_length=false"});
  std::string pairs;
  for (int i = 0; i < 60; ++i)
    pairs += StrCat("row ", i, "\tof ", std::string(size_t(i * i % 17), 'x'), "\n");
  WriteFileAtomically(folder_ / "pairs.tsv", pairs);
  options_.kind = "translation";
  config_.kind = options_.info().models[0], config_.classes = 0, config_.tie_embeddings = false;
  compare({"task.data=" + (folder_ / "pairs.tsv"), "task.tokenizer=bytes", "task.beam=1",
           "task.group_by_length=false"});
}

// Every optimizer, evaluation and the files of a run, on another device as on the CPU.
TEST_F(TrainerTest, TrainsOnAnotherDeviceAsOnTheCpu) {
  for (const auto& [kind, name] : OptimizerKinds()) {
    train_.optimizer.kind = kind;
    const auto here = Trained(StrCat("cpu-", name));
    SetActiveDevice(testing::kMadeUpDevice);
    const auto there = Trained(StrCat("device-", name));
    SetActiveDevice(at::kCPU);
    EXPECT_EQ(there->options().device(), testing::kMadeUpDevice);
    there->to(at::kCPU);
    ExpectSame(*there, WeightsOf(*here), 1e-5);
  }
}

// The model that is saved is the average of the weights after each update; training itself goes on
// without it, and a run that stopped goes on to the same bits.
TEST_F(TrainerTest, SavesTheMovingAverageOfTheWeights) {
  train_.ema = 0.7;
  const auto trained = Trained("run");
  const auto model = MakeModel(config_, 3);
  const auto optimizer = MakeOptimizer(*model, {});
  std::map<std::string, at::Tensor> average;
  for (const auto& [name, w] : WeightsOf(*model)) average[name] = w.to(at::kDouble);
  for (int64_t step = 0; step < 4; ++step) {
    Differentiate(*model, step);
    optimizer->Step(0.02, 1.0);
    for (const auto& [name, w] : WeightsOf(*model)) average[name] = 0.7 * average[name] + 0.3 * w;
  }
  ExpectSame(*trained, average, 1e-6);  // the best model, which Run leaves in it
  const auto best = MakeModel(config_, 1);
  LoadWeights(*best, folder_ / "run/model.safetensors");
  ExpectSame(*best, WeightsOf(*trained), 0);
  const auto raw = MakeModel(config_, 1);
  LoadWeights(*raw, *NewestCheckpoint(folder_ / "run") + "/model.safetensors");
  ExpectSame(*raw, WeightsOf(*model), 1e-6);

  // Two updates, then resumed to four.
  train_.steps = 2, train_.eval_every = 2;
  Trained("cut");
  train_.steps = 4;
  const auto resumed = MakeModel(config_, 1);
  Trainer trainer(resumed, *task_, train_, 7, folder_ / "cut", Json{{"train", {{"steps", 4}}}},
                  false);
  trainer.Resume();
  trainer.Run();
  const auto after = MakeModel(config_, 1);
  LoadWeights(*after, *NewestCheckpoint(folder_ / "cut") + "/model.safetensors");
  ExpectSame(*after, WeightsOf(*raw), 0);
  const TensorFile a = LoadTensors(*NewestCheckpoint(folder_ / "run") + "/optimizer.safetensors"),
                   b = LoadTensors(*NewestCheckpoint(folder_ / "cut") + "/optimizer.safetensors");
  ASSERT_EQ(a.tensors.size(), b.tensors.size());
  int averages = 0;
  for (size_t i = 0; i < a.tensors.size(); ++i) {
    EXPECT_TRUE(at::equal(a.tensors[i].value, b.tensors[i].value)) << a.tensors[i].name;
    averages += a.tensors[i].name.starts_with("average.");
  }
  EXPECT_EQ(averages, int(model->parameters().size()));
}

// The final model is the mean of the weights at the last three of five evaluations, also where the
// run was interrupted between them.
TEST_F(TrainerTest, AveragesTheLastEvaluations) {
  train_.average_last = 3, train_.steps = 10, train_.eval_every = 2;
  const auto trained = Trained("run");
  const auto model = MakeModel(config_, 3);
  const auto optimizer = MakeOptimizer(*model, {});
  std::map<std::string, at::Tensor> mean;
  for (int64_t step = 0; step < 10; ++step) {
    Differentiate(*model, step);
    optimizer->Step(0.02, 1.0);
    if (step != 5 && step != 7 && step != 9) continue;
    for (const auto& [name, w] : WeightsOf(*model)) {
      const at::Tensor share = w.to(at::kDouble) / 3;
      mean[name] = mean.count(name) ? mean[name] + share : share;
    }
  }
  ExpectSame(*trained, mean, 1e-6);
  const auto saved = MakeModel(config_, 1);
  LoadWeights(*saved, folder_ / "run/model.safetensors");
  ExpectSame(*saved, WeightsOf(*trained), 0);

  train_.steps = 7;  // and an evaluation at its end, which the longer run does not have
  Trained("cut");
  train_.steps = 10;
  const auto resumed = MakeModel(config_, 1);
  Trainer trainer(resumed, *task_, train_, 7, folder_ / "cut", Json{{"train", {{"steps", 10}}}},
                  false);
  trainer.Resume();
  const TrainResult result = trainer.Run();
  EXPECT_EQ(result.steps, 10);
  // Evaluations at 7, 8 and 10.
  const auto other = MakeModel(config_, 3);
  const auto again = MakeOptimizer(*other, {});
  std::map<std::string, at::Tensor> cut;
  for (int64_t step = 0; step < 10; ++step) {
    Differentiate(*other, step);
    again->Step(0.02, 1.0);
    if (step != 6 && step != 7 && step != 9) continue;
    for (const auto& [name, w] : WeightsOf(*other)) {
      const at::Tensor share = w.to(at::kDouble) / 3;
      cut[name] = cut.count(name) ? cut[name] + share : share;
    }
  }
  ExpectSame(*resumed, cut, 1e-6);
}

// A task that is asked for batches, and says which.
class Asked : public Task {
 public:
  explicit Asked(const Task& task, int64_t rows) : task_(task), rows_(rows) {}
  mutable std::vector<std::pair<uint64_t, int64_t>> batches;  // seed and step
  mutable std::atomic<int64_t> trained{0};                    // rows

  void SaveAssets(const std::string& folder) const override { task_.SaveAssets(folder); }
  void LoadAssets(const std::string&) override {}
  void Prepare() override {}
  Json DataSummary() const override { return task_.DataSummary(); }
  void Complete(ModelConfig& config) const override { task_.Complete(config); }
  int64_t tokens_per_row() const override { return task_.tokens_per_row(); }
  Batch TrainBatch(uint64_t seed, int64_t step, int64_t rows) const override {
    batches.emplace_back(seed, step);
    return task_.TrainBatch(seed, step, rows);
  }
  int64_t train_rows() const override { return rows_; }
  at::Tensor Loss(Model& model, const Batch& batch, double smoothing) const override {
    trained += batch.rows;
    return task_.Loss(model, batch, smoothing);
  }
  std::unique_ptr<BatchReader> Read(Split split, const ReadOptions& options) const override {
    return task_.Read(split, options);
  }
  Score Measure(Model& model, const Batch& batch) const override {
    return task_.Measure(model, batch);
  }
  Json Metrics(const Score& score) const override { return task_.Metrics(score); }
  const Metric& metric() const override { return task_.metric(); }

 private:
  const Task& task_;
  int64_t rows_;
};

// Its metric is always the same.
class Constant : public Asked {
 public:
  Constant(const Task& task, double value) : Asked(task, 0), value_(value) {}
  Json Metrics(const Score& score) const override {
    Json metrics = Asked::Metrics(score);
    metrics[metric().name] = value_;
    return metrics;
  }

 private:
  double value_;
};

TEST_F(TrainerTest, AMetricThatIsNotFiniteIsNoBetterOne) {
  train_.steps = 40, train_.eval_every = 2, train_.patience = 3;
  const Constant task(*task_, std::nan(""));
  Trainer trainer(MakeModel(config_, 3), task, train_, 7, folder_ / "run", Json::object(), false);
  ::testing::internal::CaptureStderr();
  const TrainResult result = trainer.Run();
  ExpectContains(::testing::internal::GetCapturedStderr(),
                 {"at step 6 the metric of the validation split, accuracy, is nan"});
  EXPECT_TRUE(result.out_of_patience);
  EXPECT_EQ(result.steps, 6);
  EXPECT_TRUE(result.valid.is_null());
  EXPECT_TRUE(std::filesystem::exists(folder_ / "run/model.safetensors"));
}

TEST_F(TrainerTest, OfEqualModelsTheLastIsKept) {
  train_.steps = 40, train_.eval_every = 2, train_.patience = 3;
  const Constant task(*task_, 0.5);
  const auto model = MakeModel(config_, 3);
  Trainer trainer(model, task, train_, 7, folder_ / "run", Json::object(), false);
  std::map<std::string, at::Tensor> last;
  trainer.Observe([&](Model& at) {
    last = WeightsOf(at);
    return Json::object();
  });
  const TrainResult result = trainer.Run();
  EXPECT_TRUE(result.out_of_patience);
  EXPECT_EQ(result.steps, 8);  // the first is better than none, three are not better than it
  const auto kept = MakeModel(config_, 1);
  LoadWeights(*kept, folder_ / "run/model.safetensors");
  ExpectSame(*kept, last, 0);
}

TEST_F(TrainerTest, TenEvaluationsInARun) {
  train_.eval_every = 0;
  for (const int64_t steps : {3, 10, 19, 25}) {
    train_.steps = steps;
    const std::string run = StrCat("run", steps);
    Trained(run);
    int64_t evaluations = 0;
    for (const Json& line : ReadJsonl(folder_ / (run + "/metrics.jsonl")))
      evaluations += line["event"] == "valid";
    EXPECT_EQ(evaluations, std::min<int64_t>(steps, 10)) << steps;
  }
}

TEST_F(TrainerTest, OrderOfBatches) {
  train_.steps = 12, train_.eval_every = 12, train_.batch = 6;
  using Batches = std::vector<std::pair<uint64_t, int64_t>>;
  const auto asked = [&](BatchOrder order, int64_t rows = 12 * 6) {
    train_.order = order;
    const Asked task(*task_, 29);  // four batches of six an epoch, five rows are left
    const auto model = MakeModel(config_, 3);
    Trainer trainer(model, task, train_, 7, folder_ / NameOf(order, BatchOrders()), Json::object(),
                    false);
    trainer.Run();
    EXPECT_EQ(task.trained, rows);
    Batches first(task.batches.begin(), task.batches.begin() + 12);
    return first;
  };
  Batches endless, replayed, whole;
  for (int64_t i = 0; i < 12; ++i) {
    endless.emplace_back(7, i);
    replayed.emplace_back(7, i % 5);
    whole.emplace_back(7, i % 4);
  }
  EXPECT_EQ(asked(BatchOrder::kEndless), endless);
  EXPECT_EQ(asked(BatchOrder::kReplay, 29 + 29 + 2 * 6), replayed);
  EXPECT_EQ(asked(BatchOrder::kReplayDropLast), whole);
  const Batches dropped = asked(BatchOrder::kDropLast);
  for (size_t i = 0; i < 12; ++i) {
    EXPECT_EQ(dropped[i].second, int64_t(i % 4));
    EXPECT_EQ(dropped[i].first, dropped[i / 4 * 4].first) << i;  // one order for each epoch
    if (i >= 4) {
      EXPECT_NE(dropped[i].first, dropped[i - 4].first) << i;  // another for the next
    }
  }
  EXPECT_EQ(dropped[0].first, 7u);
}

// The validation split has six rows: one batch of four, and two rows that are left out.
TEST_F(TrainerTest, EvaluatesWholeBatchesAlone) {
  train_.batch = 4;
  const auto examples = [&](const std::string& run) {
    std::ifstream lines((folder_ / run) + "/metrics.jsonl");
    int64_t count = -1;
    for (std::string line; std::getline(lines, line);) {
      const Json json = Json::parse(line);
      if (json.at("event") == "valid") count = json.at("examples").get<int64_t>();
    }
    return count;
  };
  Trained("all");
  EXPECT_EQ(examples("all"), 6);
  train_.eval_drop_last = true;
  Trained("whole");
  EXPECT_EQ(examples("whole"), 4);
  train_.batch = 7;
  ExpectContains(ErrorMessage([&] { Trained("none"); }), {"eval_drop_last", "valid split", "7"});
  // A test split that is too small is no news for the end of a run.
  Fields fields;
  fields.Group("task", options_.Describe());
  fields.Set("task.classify.test_share=0.05");
  task_ = options_.Make();
  task_->Prepare();
  train_.batch = 4, train_.final_test = true;
  ExpectContains(ErrorMessage([&] { Trained("untested"); }), {"test split", "a batch of 4"});
  EXPECT_FALSE(std::filesystem::exists(folder_ / "untested"));
  train_.final_test = false;
  Trained("untested");
}

TEST_F(TrainerTest, AnEpochHasEachRowOnce) {
  EXPECT_EQ(task_->train_rows(), 48);  // four fifths of 60
  std::map<std::string, int> seen;
  for (int64_t i = 0; i < 48 / 6; ++i) {
    const Batch batch = task_->TrainBatch(11, i, 6);
    for (int64_t r = 0; r < 6; ++r) {
      std::string row;
      const int64_t length = batch["lengths"][r].item<int64_t>();
      for (int64_t t = 0; t < length; ++t) row += StrCat(batch["ids"][r][t].item<int64_t>(), " ");
      ++seen[row];
    }
  }
  int rows = 0;
  for (const auto& [row, count] : seen) rows += count;
  EXPECT_EQ(rows, 48);
  EXPECT_GT(seen.size(), 20u);
}

TEST_F(TrainerTest, RefusesAnOrderWithoutEpochs) {
  train_.order = BatchOrder::kReplay;
  const auto model = MakeModel(config_, 3);
  for (const int64_t rows : {0, 5}) {
    const Asked task(*task_, rows);
    ExpectContains(ErrorMessage([&] {
                     Trainer(model, task, train_, 7, folder_ / "refused", Json::object(), false);
                   }),
                   {"train.order=replay", rows == 0 ? "no epochs" : "lower train.batch"});
  }
}

TEST(TrainOptions, SchedulesRefuseWhatTheyDoNotHave) {
  const auto message = [](const std::vector<std::string>& assignments) {
    TrainOptions o;
    Fields f = o.Describe();
    for (const std::string& a : assignments) f.Set(a);
    return ErrorMessage([&] { o.Validate(); });
  };
  ExpectContains(message({"schedule=rsqrt", "warmup_init=1e-7"}), {"train.warmup_init", "rsqrt"});
  ExpectContains(message({"schedule_power=2"}), {"train.schedule_power", "polynomial"});
  ExpectContains(message({"schedule=inverse_sqrt", "min_lr=1e-5"}),
                 {"train.min_lr", "inverse_sqrt", "cosine"});
  ExpectContains(message({"warmup=0", "warmup_init=1e-7"}), {"train.warmup_init", "warmup=0"});
  ExpectContains(message({"schedule=constant", "schedule_steps=9"}),
                 {"train.schedule_steps", "constant", "cosine"});
  ExpectContains(message({"schedule_period=9"}), {"train.schedule_period", "cosine_restarts"});
  ExpectContains(message({"schedule=cosine_restarts"}), {"needs train.schedule_period"});
  ExpectContains(message({"schedule=cosine_restarts", "schedule_period=9", "seconds=5"}),
                 {"cosine_restarts", "train.steps"});
  ExpectContains(message({"schedule_every=9", "seconds=5"}), {"schedule_every", "train.steps"});
  ExpectContains(message({"schedule_steps=9", "seconds=5"}), {"schedule_steps", "train.steps"});
  ExpectContains(message({"warmup_init=1"}), {"train.warmup_init=1", "train.lr"});
  ExpectContains(message({"clip_each=true"}), {"clip_each", "accumulate=1"});
  ExpectContains(message({"clip_each=true", "accumulate=2", "clip=0"}), {"clip_each", "clip=0"});
  EXPECT_EQ(message({"schedule=cosine_restarts", "schedule_period=9", "schedule_growth=2",
                     "schedule_shrink=0.75", "warmup_init=1e-7", "steps=100"}),
            "no error");
}

// The keys of the run: the horizon, of which the warm-up is a share, the hold, the first number.
TEST_F(TrainerTest, RatesOfTheLog) {
  const auto rates = [&](const std::string& run) {
    train_.log_every = 1, train_.eval_every = 100;
    Trained(run);
    std::vector<double> lr;
    std::ifstream lines(folder_ / (run + "/metrics.jsonl"));
    for (std::string line; std::getline(lines, line);) {
      const Json json = Json::parse(line);
      if (json.at("event") == "step") lr.push_back(json.at("lr").get<double>());
    }
    return lr;
  };
  // Two updates of warm-up of ten (a fifth), of which six run; as optax within MultiSteps.
  train_.steps = 6, train_.schedule = ScheduleKind::kCosine, train_.lr = 1, train_.warmup = 0.2;
  train_.schedule_steps = 10, train_.schedule_from = 0;
  std::vector<double> lr = rates("horizon");
  ASSERT_EQ(lr.size(), 6u);
  for (int n = 0; n < 6; ++n) {
    const double expected = n < 2 ? n / 2.0 : (1 + std::cos(M_PI * (n - 2) / 8.0)) / 2;
    EXPECT_NEAR(lr[size_t(n)], expected, 1e-12) << n;
  }
  // Held for three updates, no warm-up: the first has the whole rate.
  train_.warmup = 0, train_.schedule_every = 3, train_.schedule_steps = 0;
  lr = rates("held");
  for (int n = 0; n < 6; ++n) EXPECT_NEAR(lr[size_t(n)], n < 3 ? 1 : .5, 1e-12) << n;
  // Counted from 1: the second update is the schedule's second.
  train_.steps = 4, train_.schedule_from = 1, train_.schedule_every = 0;
  lr = rates("none");
  for (int n = 0; n < 4; ++n)
    EXPECT_NEAR(lr[size_t(n)], (1 + std::cos(M_PI * n / 4.0)) / 2, 1e-12) << n;
  train_.warmup = 1e-3;  // a share of the run: one update at least
  lr = rates("least");
  for (int n = 0; n < 4; ++n)
    EXPECT_NEAR(lr[size_t(n)], n == 0 ? 1 : (1 + std::cos(M_PI * (n - 1) / 3.0)) / 2, 1e-12) << n;
  train_.steps = 6, train_.schedule_from = 0;
  // Tensor2Tensor's, by the model's width.
  train_.schedule = ScheduleKind::kT2t, train_.warmup = 4, train_.schedule_every = 0;
  lr = rates("t2t");
  for (int n = 0; n < 6; ++n) {
    const double s = n,
                 expected = std::min(s / 4, 1.0) / std::sqrt(std::max(s, 4.0)) / std::sqrt(12.0);
    EXPECT_NEAR(lr[size_t(n)], expected, 1e-12) << n;
  }
}

// Two processes, each with rows of its own and a folder of its own, are one run: the same weights,
// figures and end as of one process.
TEST_F(TrainerTest, ProcessesTrainAsOne) {
  train_.steps = 12, train_.eval_every = 2, train_.patience = 2, train_.final_test = true;
  train_.ema = 0.5, train_.accumulate = 2;
  const auto run = [&](const std::shared_ptr<Model>& model, const std::string& name,
                       const std::shared_ptr<Processes>& p, TrainResult* result) {
    Trainer trainer(model, *task_, train_, 7, folder_ / name, Json::object(), false, p);
    *result = trainer.Run();
    return WeightsOf(*model);
  };
  TrainResult alone;
  const auto weights = run(MakeModel(config_, 3), "alone", std::make_shared<Processes>(), &alone);
  const std::vector<std::shared_ptr<Model>> models = {MakeModel(config_, 3), MakeModel(config_, 3)};
  EXPECT_LT(alone.steps, 12);
  std::vector<TrainResult> results(2);
  const auto errors = testing::Together(2, [&](const std::shared_ptr<Processes>& p) {
    const auto rank = size_t(p->rank());
    for (const auto& [name, w] : run(models[rank], StrCat("rank", rank), p, &results[rank]))
      testing::ExpectClose(w, weights.at(name), 1e-5, name.c_str());
  });
  EXPECT_EQ(errors, std::vector<std::string>(2));
  for (const TrainResult& r : results) {
    EXPECT_EQ(r.steps, alone.steps);
    EXPECT_EQ(r.valid, results[0].valid);
    EXPECT_EQ(r.test, results[0].test);
    for (const auto& [name, value] : alone.test.items()) {
      if (!value.is_number()) continue;
      EXPECT_NEAR(r.valid[name].get<double>(), alone.valid[name].get<double>(), 1e-4) << name;
      EXPECT_NEAR(r.test[name].get<double>(), value.get<double>(), 1e-4) << name;
    }
    EXPECT_EQ(r.seconds, results[0].seconds);
  }
  EXPECT_TRUE(NewestCheckpoint(folder_ / "rank0"));
  EXPECT_FALSE(NewestCheckpoint(folder_ / "rank1"));
}

// A budget of time: all go by one clock, so that all evaluate and end at the same steps.
TEST_F(TrainerTest, ProcessesHaveOneClock) {
  train_.steps = 0, train_.seconds = 0.6, train_.eval_every = 0, train_.log_every = 1;
  const std::vector<std::shared_ptr<Model>> models = {MakeModel(config_, 3), MakeModel(config_, 3)};
  const auto errors = testing::Together(2, [&](const std::shared_ptr<Processes>& p) {
    const auto rank = size_t(p->rank());
    Trainer trainer(models[rank], *task_, train_, 7, folder_ / StrCat("rank", rank), Json::object(),
                    false, p);
    trainer.Run();
  });
  EXPECT_EQ(errors, std::vector<std::string>(2));
  const auto times = [&](const std::string& rank) {
    std::vector<std::string> lines;
    ForEachJsonl(folder_ / (rank + "/metrics.jsonl"), [&](const Json& line, size_t) {
      lines.push_back(StrCat(line["event"].dump(), line["step"].dump(), line["seconds"].dump()));
    });
    return lines;
  };
  EXPECT_GE(times("rank0").size(), 20);
  EXPECT_EQ(times("rank0"), times("rank1"));
}

}  // namespace
}  // namespace cistern

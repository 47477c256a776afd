#include "cistern/train/row_parts.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>

#include "cistern/base/testing_threads.h"
#include "cistern/io/test_folder.h"
#include "cistern/nn/attention_observer.h"
#include "cistern/ops/draws.h"
#include "cistern/ops/testing.h"
#include "cistern/tasks/task.h"
#include "cistern/train/testing_processes.h"

namespace cistern {
namespace {

using testing::ExpectContains;
using testing::Threads;

// Every task that can be made of a little text or table, with a model of its own.
class RowPartsTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    std::string text, rows = "text\tlabel\n";
    for (int i = 0; i < 300; ++i) {
      text += StrCat("line ", i * i % 97, " tells of ", i * 7 % 31, " ships and a sea\n");
      rows += StrCat("row ", i * i % 89, i % 3 ? " has ships\ta\n" : " has none of them\tb\n");
    }
    if (GetParam() == "translation") {
      rows = "source\ttarget\n";
      for (int i = 0; i < 60; ++i)
        rows += StrCat("ship ", i * i, "\tfour ", i % 3 ? "" : "old ", "ships ", i, "\n");
    }
    std::ofstream(folder_ / "a.txt") << text;
    std::ofstream(folder_ / "a.tsv") << rows;
    options_.kind = GetParam().substr(0, GetParam().find(' '));
    Fields fields;
    fields.Group("task", options_.Describe());
    const auto set = [&](const std::string& assignment) {
      fields.Set(TaskOptions::Grouped(assignment, options_.kind));
    };
    if (options_.kind != "copy" && options_.kind != "recall")
      set("task.cache=" + (folder_ / "cache"));
    if (options_.kind == "copy" || options_.kind == "recall") {  // made up
    } else if (options_.kind == "retrieval") {
      for (const char* part : {"train", "eval", "test"}) {
        std::string pairs;
        for (int i = 0; i < 20; ++i)
          pairs += StrCat(i % 3 ? "1.0" : "0.0", "\tA\tB\tship ", i * i % 17, "\tsea ", i * 5 % 7,
                          " and all\n");
        std::ofstream(folder_ / (StrCat("new_aan_pairs.", part, ".tsv"))) << pairs;
      }
      set("task.data=" + folder_.path());
    } else if (options_.kind == "forecast" || options_.kind == "series") {
      std::string values = options_.kind == "series" ? "label,a,b,c,d\n" : "x,y\n";
      for (int i = 0; i < 120; ++i) {
        if (options_.kind == "series") values += i % 2 ? "up," : "down,";
        for (int c = 0; c < (options_.kind == "series" ? 4 : 2); ++c)
          values += (c > 0 ? "," : "") + (i % 5 == c ? "?" : std::to_string(i * (c + 3) % 19));
        values += "\n";
      }
      std::ofstream(folder_ / "a.csv") << values;
      set("task.data=" + (folder_ / "a.csv"));
      if (options_.kind == "forecast") set("task.length=12");
    } else if (options_.kind == "translation") {
      set("task.data=" + (folder_ / "a.tsv"));
      set("task.tokenizer=bytes");
    } else if (options_.kind == "classify") {
      set("task.data=" + (folder_ / "a.tsv"));
      if (GetParam() == "classify balanced") set("task.class_weights=balanced");
    } else {
      set("task.text=" + (folder_ / "a.txt"));
      set("task.tokenizer=bytes");
      set("task.length=24");
    }
    task_ = options_.Make();
    task_->Prepare();
    ModelConfig c;
    c.kind = options_.info().models[0];
    c.dim = 12, c.layers = 2, c.heads = 2, c.init_std = 0.3,
    c.positions = PositionKind::kSinusoidal;
    c.attention = {"latte", "softmax"};
    task_->Complete(c);
    model_ = MakeModel(c, 3);
    model_->train();
  }

  std::vector<at::Tensor> Gradients(const Batch& batch, int64_t parts, double* loss,
                                    bool bfloat16 = false) {
    model_->zero_grad();
    *loss =
        AddGradients(*model_, LossOf(*task_, *model_, smoothing_), batch, 0.5, bfloat16, parts, 8);
    std::vector<at::Tensor> out;
    for (const auto& p : model_->named_parameters()) {
      EXPECT_TRUE(p.value().grad().defined()) << p.key();
      out.push_back(p.value().grad().clone());
    }
    return out;
  }

  TestFolder folder_;
  TaskOptions options_;
  double smoothing_ = GetParam() == "forecast" ? 0 : 0.1;
  std::unique_ptr<Task> task_;
  std::shared_ptr<Model> model_;
};

TEST_P(RowPartsTest, PartsTogetherAreTheWhole) {
  model_->to(at::kDouble);
  const Batch batch = task_->TrainBatch(5, 0, 7);
  double terms = 0;
  for (const auto& [begin, end] : {std::pair(0, 2), std::pair(2, 3), std::pair(3, 7)}) {
    const Batch part = batch.Rows(begin, end);
    EXPECT_EQ(part.rows, end - begin);
    terms += task_->Terms(part);
  }
  EXPECT_NEAR(terms, task_->Terms(batch), 1e-9);
  double whole_loss = 0, loss = 0;
  const auto whole = Gradients(batch, 1, &whole_loss);
  for (const int threads : {1, 2}) {
    const Threads scope(threads);
    for (const int64_t parts : {2, 3, 7}) {
      const auto together = Gradients(batch, parts, &loss);
      EXPECT_NEAR(loss, whole_loss, 1e-12 * whole_loss);
      for (size_t i = 0; i < whole.size(); ++i)
        testing::ExpectClose(together[i], whole[i], 1e-10, GetParam());
    }
  }
}

// Of a batch in two parts this thread sees what it takes itself.
TEST_P(RowPartsTest, PartsRunInThreadsOfTheirOwn) {
  struct Seen : AttentionObserver {
    void Attended(const AttentionCall& call) override { rows += call.y.size(0); }
    void Written(const AttentionLayer&, Mechanism&, const std::vector<at::Tensor>&,
                 const ops::Mask&) override {}
    int64_t rows = 0;
  };
  const Batch batch = task_->TrainBatch(5, 0, 6);
  const auto seen = [&](int threads) {
    const Threads scope(threads);
    const Seen here;
    // A part waits until as many have begun as there are threads, however late those wake.
    std::atomic<int> begun = 0;
    RowsLoss of = LossOf(*task_, *model_, smoothing_);
    const auto loss = of.loss;
    of.loss = [&, loss](const Batch& rows) {
      ++begun;
      const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
      while (begun < threads && std::chrono::steady_clock::now() < end) std::this_thread::yield();
      return loss(rows);
    };
    AddGradients(*model_, of, batch, 0.5, false, 2, 8);
    return here.rows;
  };
  const int64_t all = seen(1);
  // Two layers; two texts a row, or those of an encoder and the two of a decoder.
  EXPECT_EQ(all, 2 * 6 * (GetParam() == "retrieval" ? 2 : GetParam() == "translation" ? 3 : 1));
  EXPECT_LT(seen(2), all);
}

// The same number of threads gives the same bits, whichever takes what.
TEST_P(RowPartsTest, AreTheSameBitsAlways) {
  const Batch batch = task_->TrainBatch(5, 1, 6);
  double first_loss = 0, loss = 0;
  std::vector<at::Tensor> first;
  const Threads scope(2);
  first = Gradients(batch, 3, &first_loss);
  for (int repeat = 0; repeat < 3; ++repeat) {
    const auto again = Gradients(batch, 3, &loss);
    EXPECT_EQ(loss, first_loss);
    for (size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(again[i].equal(first[i]));
  }
  // Autocast holds in every thread, and ends with it.
  const auto half = Gradients(batch, 3, &loss, true);
  EXPECT_NE(loss, first_loss);
  EXPECT_NEAR(loss, first_loss, 0.05 * std::abs(first_loss));
  Gradients(batch, 3, &loss);
  EXPECT_EQ(loss, first_loss);
}

TEST_P(RowPartsTest, ALossThatIsNotFiniteLeavesNoGradients) {
  {
    const at::NoGradGuard guard;
    model_->parameters()[0].fill_(std::nan(""));
  }
  EXPECT_TRUE(std::isnan(AddGradients(*model_, LossOf(*task_, *model_, 0),
                                      task_->TrainBatch(5, 1, 4), 1, false, 2, 8)));
  for (const at::Tensor& p : model_->parameters()) EXPECT_FALSE(p.grad().defined());
}

// Each process with weights of its own: the gradients of the whole batch, the same bits in all.
TEST_P(RowPartsTest, ProcessesTogetherAreTheWhole) {
  model_->to(at::kDouble);
  const Batch batch = task_->TrainBatch(5, 0, 7);
  double whole_loss = 0;
  const auto whole = Gradients(batch, 1, &whole_loss);
  for (const int64_t parts : {1, 2}) {
    std::vector<std::vector<at::Tensor>> of_ranks(3);
    std::vector<std::shared_ptr<Model>> models;  // not made by threads: all draw from one generator
    for (int rank = 0; rank < 3; ++rank) {
      models.push_back(MakeModel(model_->config(), 3));
      models.back()->to(at::kDouble);
      models.back()->train();
    }
    const auto errors = testing::Together(3, [&](const std::shared_ptr<Processes>& p) {
      const std::shared_ptr<Model> model = models[size_t(p->rank())];
      for (int repeat = 0; repeat < 2; ++repeat) {  // adds to what is there
        const double loss = AddGradients(*model, LossOf(*task_, *model, smoothing_), batch, 0.5,
                                         false, parts, 8, *p);
        EXPECT_NEAR(loss, whole_loss, 1e-12 * whole_loss);
      }
      for (const at::Tensor& w : model->parameters())
        of_ranks[size_t(p->rank())].push_back(w.grad() / 2);
    });
    EXPECT_EQ(errors, std::vector<std::string>(3));
    for (const auto& gradients : of_ranks) {
      ASSERT_EQ(gradients.size(), whole.size());
      for (size_t i = 0; i < whole.size(); ++i) {
        testing::ExpectClose(gradients[i], whole[i], 1e-10, GetParam());
        EXPECT_TRUE(at::equal(gradients[i], of_ranks[0][i]));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Tasks, RowPartsTest,
                         ::testing::Values("lm", "mlm", "classify", "classify balanced",
                                           "retrieval", "series", "forecast", "copy", "recall",
                                           "translation"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), ' ', '_');
                           return name;
                         });

std::shared_ptr<Model> Made(const std::function<void(ModelConfig&)>& change) {
  ModelConfig c;
  c.vocab_size = 9, c.dim = 8, c.layers = 2, c.heads = 2;
  change(c);
  return MakeModel(c, 1);
}

TEST(RowParts, AreTakenWhereTheyCanBe) {
  const auto plain = Made([](ModelConfig&) {});
  {
    const Threads scope(4);
    EXPECT_EQ(RowParts(ThreadsTake::kAuto, *plain, 8), 4);
    EXPECT_EQ(RowParts(ThreadsTake::kAuto, *plain, 6),
              1);  // two of the threads would wait for the others
    EXPECT_EQ(RowParts(ThreadsTake::kRows, *plain, 6), 4);
    EXPECT_EQ(RowParts(ThreadsTake::kAuto, *plain, 17), 4);
    EXPECT_EQ(RowParts(ThreadsTake::kAuto, *plain, 3), 1);
    EXPECT_EQ(RowParts(ThreadsTake::kOperations, *plain, 8), 1);
    ExpectContains(ErrorMessage([&] { RowParts(ThreadsTake::kRows, *plain, 3); }),
                   {"fewer rows", "operations"});
    const auto drops = Made([](ModelConfig& c) { c.dropout = c.layer_drop = 0.1; });
    EXPECT_EQ(RowParts(ThreadsTake::kAuto, *drops, 8), 4);
    for (const auto& model : {Made([](ModelConfig& c) {
                                c.attention = {"latte", "performer"};
                              }),
                              Made([](ModelConfig& c) { c.attention = {"softmax:1+rfa:1"}; })}) {
      EXPECT_EQ(RowParts(ThreadsTake::kAuto, *model, 8), 1);
      ExpectContains(ErrorMessage([&] { RowParts(ThreadsTake::kRows, *model, 8); }),
                     {"random numbers"});
    }
  }
  const auto meeting = Made([](ModelConfig& c) {
    c.kind = "encoder_classifier", c.classes = 3, c.attention = {"softmax", "nystrom"};
    c.attention_options = Json{{"nystrom", {{"start", "batch"}}}};
  });
  {
    const Threads scope(2);
    EXPECT_EQ(RowParts(ThreadsTake::kAuto, *meeting, 8), 1);
    ExpectContains(ErrorMessage([&] { RowParts(ThreadsTake::kRows, *meeting, 8); }),
                   {"change each other", "start=batch"});
  }
  // Where gradients for each thread would take much memory, as asked for alone.
  const auto large = Made([](ModelConfig& c) { c.dim = 512, c.ffn_dim = 20480; });  // 176 MB
  {
    const Threads scope(2);
    EXPECT_EQ(RowParts(ThreadsTake::kAuto, *large, 8), 2);
  }
  {
    const Threads scope(4);
    EXPECT_EQ(RowParts(ThreadsTake::kAuto, *large, 8), 1);
    EXPECT_EQ(RowParts(ThreadsTake::kRows, *large, 8), 4);
  }
  const Threads scope(1);
  EXPECT_EQ(RowParts(ThreadsTake::kAuto, *plain, 8), 1);
}

TEST(RowParts, ProcessesAreRefusedWhereRowsAreNotApart) {
  const auto plain = Made([](ModelConfig&) {});
  CheckProcesses(1, *plain, 1);
  CheckProcesses(3, *plain, 3);
  ExpectContains(ErrorMessage([&] { CheckProcesses(3, *plain, 2); }),
                 {"3 processes cannot share", "a batch of 2 has fewer rows", "train.batch"});
  const auto draws = Made([](ModelConfig& c) { c.attention = {"performer"}; });
  CheckProcesses(1, *draws, 8);
  ExpectContains(ErrorMessage([&] { CheckProcesses(2, *draws, 8); }),
                 {"random numbers", "without torchrun"});
}

// A weight that the rows of one process alone use, one that none uses, and a loss that one alone
// finds not finite.
TEST(RowParts, ProcessesAgreeOnWhatOnlyOneSees) {
  std::vector<std::vector<at::Tensor>> of_ranks(2);
  const std::vector<std::shared_ptr<Model>> models = {Made([](ModelConfig&) {}),
                                                      Made([](ModelConfig&) {})};
  const auto errors = testing::Together(2, [&](const std::shared_ptr<Processes>& p) {
    const std::shared_ptr<Model> model = models[size_t(p->rank())];
    const std::vector<at::Tensor> weights = model->parameters();
    Batch batch;
    batch.rows = batch.tokens = 4;
    batch.tensors = {{"ids", at::arange(4).view({4, 1})}};
    double bad = 0;
    const RowsLoss of = {[&](const Batch& rows) {
                           const at::Tensor ids = rows["ids"].to(at::kFloat);
                           at::Tensor loss = weights[0].sum() * ids.mean();
                           if (ids.min().item<double>() == 0) loss = loss + weights[1].sum() + bad;
                           return loss;
                         },
                         [](const Batch& rows) { return double(rows.rows); }};
    AddGradients(*model, of, batch, 1, false, 1, 6, *p);
    of_ranks[size_t(p->rank())] = {weights[0].grad().clone(), weights[1].grad().clone()};
    for (size_t i = 2; i < weights.size(); ++i) EXPECT_FALSE(weights[i].grad().defined());
    bad = std::nan("");
    EXPECT_TRUE(std::isnan(AddGradients(*model, of, batch, 1, false, 1, 6, *p)));
    EXPECT_TRUE(at::equal(weights[0].grad(), of_ranks[size_t(p->rank())][0]));
  });
  EXPECT_EQ(errors, std::vector<std::string>(2));
  for (const auto& gradients : of_ranks) {
    ASSERT_EQ(gradients.size(), 2);
    EXPECT_TRUE(at::equal(gradients[0], at::full_like(gradients[0], 1.5)));  // ids' mean
    EXPECT_TRUE(at::equal(gradients[1], at::full_like(gradients[1], 0.5)));  // half of the rows
  }
}

// A model of three rows, and what of it drops: everything that goes with the others.
struct Dropping {
  ModelConfig config;
  Batch batch;
};

// uneven: of three lengths, with padding that may be left out where the kind of model takes tokens.
std::optional<Dropping> DroppingModel(const ModelInfo& kind, const MechanismInfo& mechanism,
                                      bool uneven) {
  const bool values = kind.name == "forecaster";
  for (int without = 0; without < 8; ++without) {
    ModelConfig c;
    c.kind = kind.name, c.vocab_size = 9, c.dim = 8, c.layers = 3, c.heads = 2;
    c.max_length = 32, c.attention = {mechanism.name}, c.init_std = 0.3;
    if (kind.classifies) c.classes = 3;
    if (values) c.own[kind.name] = Json{{"inputs", 4}, {"outputs", 2}};
    c.dropout = 0.2, c.ffn_dropout = 0.3, c.ffn_out_dropout = 0.1;
    if ((without & 1) == 0) c.attention_dropout = 0.4;
    if ((without & 2) == 0) c.layer_drop = 0.3;
    Json options = Json::object();
    if ((without & 4) == 0) options["dropout"] = 0.2;
    // Of tokens that weigh alike any may be taken, and rows of no more tokens than are taken drop
    // others.
    if (mechanism.name == "shared_workspace") options["top_k"] = 1, options["init"] = "normal";
    if (!options.empty()) c.attention_options = Json{{mechanism.name, options}};
    if (ErrorMessage([&] { c.Validate(); }) != "no error") continue;
    const at::Tensor ids = at::arange(24).reshape({3, 8}).remainder(9),
                     lengths =
                         uneven ? at::tensor({8, 5, 3}, at::kLong) : at::full({3}, 8, at::kLong),
                     padding = at::arange(8).unsqueeze(0) >= lengths.unsqueeze(1);
    Batch batch;
    batch.rows = 3, batch.tokens = lengths.sum().item<int64_t>();
    batch.tensors = {{"ids", ids},
                     {"lengths", lengths},
                     {"values", at::ones({3, 8, 4}, at::kDouble)},
                     {"second_ids", ids.remainder(7)},
                     {"second_lengths", (lengths + 2).div(2, "floor")},
                     {"targets", kind.classifies ? at::arange(3)
                                 : kind.name == "span_predictor"
                                     ? at::tensor({0, 1, 0, 0, 0, 2}, at::kLong).view({3, 2})
                                 : values ? at::ones({3, 8, 2}, at::kDouble)
                                          : ids.masked_fill(padding, -100)}};
    if (uneven && !values) {
      batch.padded = {{"ids", "lengths"}, {"second_ids", "second_lengths"}};
      if (batch["targets"].sizes() == ids.sizes()) batch.padded.push_back({"targets", "lengths"});
    }
    return Dropping{c, batch};
  }
  return std::nullopt;
}

// Terms of the losses of such models: rows, or tokens that have a target.
double TermsOf(const Batch& batch) {
  const at::Tensor& targets = batch["targets"];
  return targets.scalar_type() == at::kLong && targets.sizes() == batch["ids"].sizes()
             ? double(targets.ne(-100).sum().item<int64_t>())
             : double(batch.rows);
}

// Threads that take rows drop what one thread does that has them all; they draw nothing from the
// generator, and change no tensor of the model's.
void CheckThatPartsDropWhatTheWholeDoes(const MechanismInfo& info, const ModelInfo& kind,
                                        bool uneven, int* apart) {
  const auto made = kind.forms.size() > 1 ? std::nullopt : DroppingModel(kind, info, uneven);
  if (!made) return;
  const std::string what = StrCat(kind.name, " ", info.name, uneven ? " uneven" : "");
  const auto model = MakeModel(made->config, 1);
  model->to(at::kDouble);
  model->train();
  std::vector<at::Tensor> buffers;
  for (const auto& b : model->buffers()) buffers.push_back(b.clone());
  at::manual_seed(4);
  const at::Tensor drawn = at::rand({1});
  at::manual_seed(4);
  std::atomic<int64_t> widths = 0;  // that the model was given, of all parts together
  const RowsLoss of = {[&](const Batch& rows) {
                         widths += rows["ids"].size(1);
                         return model->TrainingLoss(model->ReadOf(rows.tensors));
                       },
                       TermsOf};
  const auto gradients = [&](int64_t parts, uint64_t seed, double* loss) {
    model->zero_grad();
    *loss = AddGradients(*model, of, made->batch, 1, false, parts, seed);
    std::vector<at::Tensor> out;
    for (const at::Tensor& p : model->parameters())
      out.push_back(p.grad().defined() ? p.grad().clone() : at::zeros_like(p));
    return out;
  };
  const Threads scope(2);
  double whole_loss = 0, loss = 0, other_loss = 0;
  const auto whole = gradients(1, 6, &whole_loss);
  widths = 0;
  const auto parts = gradients(3, 6, &loss);
  const bool alone = !made->batch.padded.empty() && RowsStandAlone(*model);
  EXPECT_EQ(widths, alone ? 8 + 5 + 3 : 3 * 8) << what;
  gradients(2, 7, &other_loss);
  EXPECT_NEAR(loss, whole_loss, 1e-11 * whole_loss) << what;
  EXPECT_GT(std::abs(other_loss - whole_loss), 1e-6 * whole_loss) << what;
  for (size_t i = 0; i < whole.size(); ++i) {
    if (whole[i].abs().max().item<double>() < 1e-14) {  // the last bias of a span_predictor
      EXPECT_LT(parts[i].abs().max().item<double>(), 1e-14) << what;
    } else {
      testing::ExpectClose(parts[i], whole[i], 1e-9, what);
    }
  }
  EXPECT_TRUE(at::rand({1}).equal(drawn)) << what;
  const auto after = model->buffers();
  for (size_t i = 0; i < buffers.size(); ++i) EXPECT_TRUE(buffers[i].equal(after[i])) << what;
  *apart += alone;
}

TEST(RowParts, DropWhatTheWholeBatchDoes) {
  for (const bool uneven : {false, true}) {
    int apart = 0;
    for (const MechanismInfo* info : Mechanisms()) {
      if (info->stochastic) continue;
      for (const ModelInfo* kind : Models())
        CheckThatPartsDropWhatTheWholeDoes(*info, *kind, uneven, &apart);
    }
    EXPECT_EQ(apart > 60, uneven) << apart;
  }
}

TEST(RowParts, GroupsAreSharedEvenly) {
  std::vector<RowGroup> groups;
  double sum = 0;
  for (int64_t g = 0; g < 12; ++g) {
    groups.push_back({2 * g, 2 * g + 2, double(3000 + 1700 * g % 2600)});
    sum += groups.back().tokens;
  }
  for (const int64_t parts : {1, 2, 3}) {
    std::vector<bool> taken(groups.size());
    for (const std::vector<size_t>& part : Shared(groups, parts)) {
      double tokens = 0;
      for (const size_t g : part) {
        EXPECT_FALSE(taken[g]);
        taken[g] = true, tokens += groups[g].tokens;
      }
      EXPECT_NEAR(tokens, sum / double(parts), 0.05 * sum / double(parts));
    }
    EXPECT_EQ(std::count(taken.begin(), taken.end(), false), 0);
  }
}

// A batch of many tokens goes in groups, padded or not, and its gradients are those of the whole.
TEST(RowParts, RowsThatStandAloneGoInGroupsOf4096Tokens) {
  const Threads scope(2);
  for (const bool padded : {false, true}) {
    for (const auto& [name, alone] : {std::pair{"linear", true}, {"nystrom", false}}) {
      const auto model = Made([&](ModelConfig& c) {
        c.kind = "encoder_classifier", c.classes = 3, c.attention = {name}, c.max_length = 2000;
        c.attention_options["nystrom"]["start"] = "batch";
        c.dropout = 0.1;
      });
      model->to(at::kDouble);
      model->train();
      Batch batch;
      batch.rows = 9;
      at::Tensor lengths = at::full({9}, 2000, at::kLong);
      if (padded) lengths = lengths - 150 * at::arange(9);
      batch.tokens = lengths.sum().item<int64_t>();
      batch.Add("ids", at::arange(18000).reshape({9, 2000}).remainder(7));
      batch.Add("targets", at::arange(9).remainder(3));
      batch.Add("lengths", lengths);
      if (padded) batch.padded = {{"ids", "lengths"}};
      std::mutex mutex;
      std::vector<int64_t> rows;
      const RowsLoss of = {[&](const Batch& b) {
                             const std::lock_guard<std::mutex> lock(mutex);
                             rows.push_back(b.rows);
                             return model->TrainingLoss(b.tensors);
                           },
                           [](const Batch& b) { return double(b.rows); }};
      const std::string what = StrCat(name, padded ? " padded" : "");
      const auto gradients = [&] {
        std::vector<at::Tensor> out;
        for (const at::Tensor& p : model->parameters()) out.push_back(p.grad().clone());
        model->zero_grad();
        return out;
      };
      at::Tensor loss;
      {
        const ops::DrawScope draws(6, 0);
        loss = model->TrainingLoss(batch.tensors);
      }
      loss.backward();
      const auto whole = gradients();
      for (const int64_t parts : {1, 2}) {
        rows.clear();
        const double of_groups = AddGradients(*model, of, batch, 1, false, parts, 6);
        EXPECT_NEAR(of_groups, loss.item<double>(), 1e-11 * of_groups) << what;
        EXPECT_EQ(std::accumulate(rows.begin(), rows.end(), int64_t{0}), 9);
        const int64_t most = *std::max_element(rows.begin(), rows.end());
        EXPECT_EQ(rows.size() > size_t(parts), alone) << what;
        EXPECT_LE(std::min<int64_t>(9, most * parts), RowsAtOnce(model->config(), 9, 2000, parts))
            << what;
        const auto got = gradients();
        for (size_t i = 0; i < whole.size(); ++i)
          testing::ExpectClose(got[i], whole[i], 1e-9, what.c_str());
      }
    }
  }
}

// Words of an adaptive softmax's bands are some of the tokens, and drop as those do.
TEST(RowParts, DropWhatAnAdaptiveSoftmaxOfTheWholeBatchDoes) {
  const auto model = Made([](ModelConfig& c) {
    c.init_std = 0.5;
    c.own["decoder_lm"] = Json{{"embedding", "adaptive"},
                               {"cutoffs", {3, 6}},
                               {"embedding_factor", 2},
                               {"adaptive_dropout", 0.4}};
  });
  model->to(at::kDouble);
  model->train();
  const at::Tensor ids = at::arange(40).reshape({5, 8}).remainder(9);
  Batch batch;
  batch.rows = 5, batch.tokens = 40, batch.tensors = {{"ids", ids}, {"targets", ids}};
  const RowsLoss of = {[&](const Batch& rows) { return model->TrainingLoss(rows.tensors); },
                       [](const Batch& rows) { return double(rows.rows); }};
  const double whole = AddGradients(*model, of, batch, 1, false, 1, 6);
  for (const int64_t parts : {2, 5})
    EXPECT_NEAR(AddGradients(*model, of, batch, 1, false, parts, 6), whole, 1e-12 * whole);
  model->eval();
  EXPECT_GT(std::abs(AddGradients(*model, of, batch, 1, false, 1, 6) - whole), 1e-4 * whole);
}

}  // namespace
}  // namespace cistern

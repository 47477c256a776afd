#pragma once
// For tests of the trainer: a task and a model that train in a moment.
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "cistern/io/atomic_file.h"
#include "cistern/io/test_folder.h"
#include "cistern/ops/testing.h"
#include "cistern/train/trainer.h"

namespace cistern::testing {

// A small table of labelled rows.
class TrainerTest : public ::testing::Test {
 protected:
  void SetUp() override { Prepare(60); }
  void Prepare(int count) {
    std::string rows = "text\tlabel\n";
    for (int i = 0; i < count; ++i)
      rows += StrCat("row ", i * i % 89, i % 3 ? " has ships\ta\n" : " has none of them\tb\n");
    WriteFileAtomically(folder_ / "a.tsv", rows);
    options_.kind = "classify";
    Fields fields;
    fields.Group("task", options_.Describe());
    for (const std::string& assignment :
         {"task.cache=" + (folder_ / "cache"), "task.data=" + (folder_ / "a.tsv"),
          std::string("task.tokenizer=bytes")})
      fields.Set(TaskOptions::Grouped(assignment, options_.kind));
    task_ = options_.Make();
    task_->Prepare();
    config_.kind = options_.info().models[0];
    config_.dim = 12, config_.layers = 1, config_.heads = 2, config_.init_std = 0.3;
    config_.attention = {"softmax"};
    task_->Complete(config_);
    train_.steps = 4, train_.batch = 6, train_.eval_every = 4, train_.final_test = false;
    train_.lr = 0.02, train_.schedule = ScheduleKind::kConstant, train_.warmup = 0;
  }

  std::shared_ptr<Model> Trained(const std::string& run) {
    const auto model = MakeModel(config_, 3);
    Trainer trainer(model, *task_, train_, 7, folder_ / run, Json::object(), false);
    trainer.Run();
    return model;
  }

  // The gradients of a batch, as backward leaves them in the parameters.
  void Differentiate(Model& model, int64_t index) {
    model.train();
    task_->Loss(model, task_->TrainBatch(7, index, train_.batch), 0).backward();
  }

  TestFolder folder_;
  TaskOptions options_;
  std::unique_ptr<Task> task_;
  ModelConfig config_;
  TrainOptions train_;
};

}  // namespace cistern::testing

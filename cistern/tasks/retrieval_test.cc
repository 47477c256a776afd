// Pairs of texts as batches of two towers.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <fstream>
#include <set>

#include "cistern/base/error.h"
#include "cistern/io/test_folder.h"
#include "cistern/models/classifier.h"
#include "cistern/tasks/evaluate.h"
#include "cistern/tasks/retrieval_task.h"

namespace cistern {
namespace {

std::shared_ptr<Model> ModelOf(const RetrievalTask& task) {
  ModelConfig c;
  c.kind = "two_tower", c.dim = 8, c.layers = 1, c.heads = 2, c.ffn_dim = 8, c.init_std = 0.3;
  task.Complete(c);
  EXPECT_EQ(c.vocab_size, 257);
  const auto model = MakeModel(c, 3);
  model->eval();
  return model;
}

TEST(Retrieval, AanBytesAreIdsPlusOne) {
  const TestFolder folder;
  for (const char* part : {"train", "eval", "test"}) {
    std::ofstream file(folder / (std::string("new_aan_pairs.") + part + ".tsv"), std::ios::binary);
    file << "1.0\tA\tB\tab\xff\tlonger than eight\n0.0\tA\tC\t\tz\n1.0\tD\tE\tq\tr\n";
  }
  for (const PadTo to : {PadTo::kLongest, PadTo::kLength}) {
    RetrievalTask::Options o;
    o.data = folder.path(), o.length = 8, o.pad_to = to;
    RetrievalTask task(o, "");
    task.Prepare();
    EXPECT_EQ(&TaskOfData(folder.path()), &FindTask("retrieval"));
    const Batch batch = *task.Read(Split::kTest, {})->Next();
    const at::Tensor ids = batch["ids"], second = batch["second_ids"];
    EXPECT_EQ(ids.sizes(), (std::vector<int64_t>{3, to == PadTo::kLongest ? 3 : 8}));
    EXPECT_EQ(second.size(1), 8);
    EXPECT_TRUE(at::equal(batch["lengths"], at::tensor({3, 0, 1}, at::kLong)));
    EXPECT_TRUE(at::equal(batch["second_lengths"], at::tensor({8, 1, 1}, at::kLong)));
    EXPECT_TRUE(at::equal(batch["targets"], at::tensor({1, 0, 1}, at::kLong)));
    EXPECT_EQ(ids[0][0].item<int64_t>(), 'a' + 1);
    EXPECT_EQ(ids[0][2].item<int64_t>(), 256);
    EXPECT_EQ(ids[1].abs().sum().item<int64_t>(), 0);
    EXPECT_EQ(second[0][7].item<int64_t>(), 't' + 1);  // "longer t"
    EXPECT_EQ(batch.tokens, 4 + 10);
    EXPECT_EQ(task.DataSummary()["classes"]["1"], 2);
    const auto model = ModelOf(task);
    const Json m = task.Metrics(Evaluate(task, *model, Split::kValid).score);
    EXPECT_EQ(m["examples"], 3);
    EXPECT_NEAR(m["majority"].get<double>(), 200.0 / 3, 1e-9);
    task.Loss(*model, task.TrainBatch(1, 0, 2), 0).backward();
    // Of a file whose labels are not known, by what is saved with the model.
    std::ofstream(folder / "new.tsv") << "?\tA\tB\tone\ttwo\n\tA\tB\tthree\tfour\n";
    task.SaveAssets(folder.path());
    RetrievalTask loaded(o, "");
    loaded.LoadAssets(folder.path());
    const auto said =
        loaded.Predict(*model, *loaded.ReadFile(folder / "new.tsv", false, {})->Next());
    ASSERT_EQ(said.size(), 2u);
    EXPECT_EQ(said[1]["line"], 2);
    EXPECT_TRUE(said[0]["label"] == "0" || said[0]["label"] == "1");
    EXPECT_NE(ErrorMessage([&] { loaded.ReadFile(folder / "new.tsv", true, {}); }).find("got '?'"),
              std::string::npos);
  }
}

TEST(Retrieval, DocumentsAreSplitBeforeTheyArePaired) {
  const TestFolder folder;
  const std::string path = folder / "d.jsonl";
  {
    std::ofstream file(path);
    for (int i = 0; i < 50; ++i) {
      std::string text;
      while (text.size() < 80) text += "d" + std::to_string(i) + " ";
      file << "{\"text\": \"" << text << "\"}\n";
    }
  }
  RetrievalTask::Options o;
  o.data = path, o.length = 16;
  RetrievalTask task(o, "");
  task.Prepare();
  EXPECT_EQ(task.DataSummary()["train"], task.train_rows());
  std::array<std::set<std::string>, 3> texts;
  for (const Split split : {Split::kTrain, Split::kValid, Split::kTest}) {
    const auto reader = task.Read(split, {3});
    int64_t ones = 0, rows = 0;
    while (const auto batch = reader->Next()) {
      ones += (*batch)["targets"].sum().item<int64_t>();
      rows += batch->rows;
      for (int64_t r = 0; r < batch->rows; ++r) {
        std::string document;  // "d17"
        for (int64_t t = 0; t < 16; ++t) {
          const auto c = char((*batch)["ids"][r][t].item<int64_t>() - 1);
          if (c == ' ') break;
          document += c;
        }
        texts[size_t(split)].insert(document);
      }
    }
    EXPECT_EQ(rows, split == Split::kTrain ? 80 : 10);
    EXPECT_EQ(2 * ones, rows);
    EXPECT_EQ(int64_t(texts[size_t(split)].size()), rows / 2);
  }
  std::set<std::string> all;
  for (const auto& part : texts) all.insert(part.begin(), part.end());
  EXPECT_EQ(all.size(), 50u);  // no document is in two parts
  o.data = folder / "few.jsonl";
  std::ofstream(o.data) << "{\"text\": \"" << std::string(99, 'a') << "\"}\n";
  EXPECT_NE(ErrorMessage([&] { RetrievalTask(o, "").Prepare(); }).find("1 documents"),
            std::string::npos);
  EXPECT_NE(ErrorMessage([&] { RetrievalTask({}, "").Prepare(); }).find("data is empty"),
            std::string::npos);
}

TEST(Retrieval, ATableOfOneColumnMayBeWithoutAHeader) {
  const TestFolder folder;
  RetrievalTask::Options o;
  o.data = folder / "d.tsv";
  std::ofstream file(o.data);
  for (int i = 0; i < 20; ++i) file << std::string(70, char('a' + i)) << "\n";
  file.close();
  const auto notes = [&] {
    RetrievalTask task(o, "");
    task.Prepare();
    return task.DataSummary()["notes"].dump();
  };
  EXPECT_NE(notes().find("19 documents"), std::string::npos);
  o.header = TableOptions::Header::kNo;
  EXPECT_NE(notes().find("20 documents"), std::string::npos);
  o.data = folder.path();
  EXPECT_NE(ErrorMessage(notes).find("task.retrieval.header has no effect"), std::string::npos);
  o.header = TableOptions::Header::kAuto, o.text_column = "text";
  EXPECT_NE(ErrorMessage(notes).find("task.retrieval.text_column has no effect"),
            std::string::npos);
}

}  // namespace
}  // namespace cistern

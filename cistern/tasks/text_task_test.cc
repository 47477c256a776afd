// How a text is parted into training windows, validation and test.
#include "cistern/tasks/text_task.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <fstream>
#include <set>

#include "cistern/base/interrupt.h"
#include "cistern/data/interruptible.h"
#include "cistern/io/test_folder.h"
#include "cistern/ops/testing.h"
#include "cistern/tasks/lm_task.h"

namespace cistern {
namespace {

using testing::ExpectContains;

// Lines that each stand once, so that a window says where it is from.
std::string Lines(int64_t bytes) {
  std::string text;
  for (int i = 0; int64_t(text.size()) < bytes; ++i) text += StrCat("<", i, ">\n");
  return text;
}

class TextSplitTest : public ::testing::Test {
 protected:
  std::unique_ptr<LmTask> Prepared(const std::string& text) {
    std::ofstream(folder_ / "a.txt", std::ios::binary) << text;
    options_.text = folder_ / "a.txt";
    options_.tokenizer = TokenizerKind::kBytes;
    auto task = std::make_unique<LmTask>(options_, folder_ / "cache");
    task->Prepare();
    return task;
  }
  // Where the rows of a batch, targets included, begin in the text.
  static std::vector<int64_t> Places(const Batch& batch, const std::string& text) {
    const at::Tensor ids = batch["ids"], targets = batch["targets"];
    std::vector<int64_t> places;
    for (int64_t r = 0; r < ids.size(0); ++r) {
      std::string row;
      for (int64_t t = 0; t < ids.size(1); ++t) row += char(ids[r][t].item<int64_t>());
      row += char(targets[r][ids.size(1) - 1].item<int64_t>());
      const size_t at = text.find(row);
      EXPECT_NE(at, text.npos) << row;
      EXPECT_EQ(text.find(row, at + 1), text.npos);
      places.push_back(int64_t(at));
    }
    return places;
  }
  TestFolder folder_;
  LmTask::Options options_;
};

// No window crosses the border of a block, nor holds a token of validation or test; an epoch visits
// each window of each piece once.
TEST_F(TextSplitTest, TrainingWindowsStayInTheirPiece) {
  const std::string text = Lines(500 << 10);
  options_.length = 1000;
  const auto task = Prepared(text);
  const TextSplits splits = SplitText(TextSource(options_.text));
  ASSERT_EQ(splits.train.size(), 3u);
  int64_t windows = 0;
  for (const ByteRange& piece : splits.train) windows += (piece.size() - 1000) / 1000;
  for (const int64_t epoch : {0, 1, 2}) {
    std::set<int64_t> seen;
    for (int64_t i = 0; i < windows; ++i) {
      const int64_t at = Places(task->TrainBatch(5, epoch * windows + i, 1), text)[0];
      EXPECT_TRUE(seen.insert(at).second);
      EXPECT_TRUE(std::any_of(splits.train.begin(), splits.train.end(), [&](const ByteRange& r) {
        return at >= r.begin && at + 1001 <= r.end;
      })) << at;
    }
    for (auto at = seen.begin(); std::next(at) != seen.end(); ++at)
      EXPECT_GE(*std::next(at) - *at, 1000);  // apart but for the token at their border
  }
}

// Over many epochs a piece is trained on up to its last token, however much is left over beside its
// windows.
TEST_F(TextSplitTest, EpochsTogetherCoverAPiece) {
  options_.length = 7;
  options_.valid = options_.test = folder_ / "other.txt";
  std::ofstream(options_.valid) << "another text";
  for (const int64_t tokens : {15, 19, 20, 21, 27}) {
    std::string text;  // each byte once
    for (int64_t i = 0; i < tokens; ++i) text += char('0' + i);
    const auto task = Prepared(text);
    ASSERT_EQ(task->DataSummary()["train"]["tokens"], tokens);
    std::set<int64_t> seen;
    for (int64_t i = 0; i < 600; ++i) {
      const int64_t at = Places(task->TrainBatch(5, i, 1), text)[0];
      for (int64_t t = 0; t <= options_.length; ++t) seen.insert(at + t);
    }
    EXPECT_EQ(int64_t(seen.size()), tokens);
  }
}

// A signal ends the first look at a text too, where nothing is to be made any more.
TEST_F(TextSplitTest, ASignalEndsTheScan) {
  options_.length = 100;
  const std::string text = Lines(20 << 10);
  Prepared(text);
  const InterruptibleData ends;
  Interrupted() = true;
  EXPECT_THROW(Prepared(text), DataInterrupted);
  Interrupted() = false;
  Prepared(text);
}

// Uniform over the vocabulary, whatever the text says; the same whenever a row is asked for.
TEST_F(TextSplitTest, RandomIds) {
  const std::string text = Lines(60 << 10);
  options_.length = 100;
  options_.random_ids = true;
  const auto task = Prepared(text);
  const Batch batch = task->TrainBatch(7, 3, 64), again = task->TrainBatch(7, 3, 64);
  EXPECT_TRUE(at::equal(batch["ids"], again["ids"]));
  EXPECT_TRUE(at::equal(batch["ids"].narrow(1, 1, 99), batch["targets"].narrow(1, 0, 99)));
  // Rows by their number alone: step 6 of 32 rows holds those of step 3 of 64.
  EXPECT_TRUE(at::equal(batch["ids"].narrow(0, 0, 32), task->TrainBatch(7, 6, 32)["ids"]));
  EXPECT_FALSE(at::equal(batch["ids"], task->TrainBatch(8, 3, 64)["ids"]));
  EXPECT_FALSE(at::equal(batch["ids"], task->TrainBatch(7, 4, 64)["ids"]));
  EXPECT_FALSE(at::equal(batch["ids"][0], batch["ids"][1]));
  // Chi-square of 6,400 draws over 256 bytes: mean 255, standard deviation 22.6.
  const at::Tensor counts = at::bincount(batch["ids"].flatten(), {}, 256).to(at::kDouble);
  ASSERT_EQ(counts.size(0), 256);
  const double chi2 = ((counts - 25).square() / 25).sum().item<double>();
  EXPECT_GT(chi2, 255 - 5 * 22.6);
  EXPECT_LT(chi2, 255 + 5 * 22.6);
  // Measured rows: as many and as long as those of the text, the same every time, read whole or
  // not.
  LmTask::Options plain = options_;
  plain.random_ids = false;
  LmTask of_text(plain, folder_ / "cache");
  of_text.Prepare();
  for (const Split split : {Split::kValid, Split::kTest}) {
    const TokenText random = *task->Text(split), real = *of_text.Text(split);
    EXPECT_EQ(random.tokens, real.tokens);
    std::vector<int64_t> whole(50), part(20), words(50);
    random.read(0, 50, whole.data());
    random.read(30, 20, part.data());
    real.read(0, 50, words.data());
    EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + 30));
    EXPECT_NE(whole, words);
  }
  // A file that is named is read as it is.
  const auto file = task->ReadFile(options_.text, true, {.rows = 1})->Next();
  EXPECT_EQ(Places(*file, text), (std::vector<int64_t>{0}));
}

// The tail is one piece: an epoch visits each of its windows once, all at one offset.
TEST_F(TextSplitTest, TheTailIsOnePiece) {
  const std::string text = Lines(50000);
  options_.split = TextSplit::kTail;
  options_.length = 100;
  const auto task = Prepared(text);
  const int64_t train = task->DataSummary()["train"]["tokens"].get<int64_t>();
  EXPECT_EQ(train, SplitText(TextSource(options_.text), TextSplit::kTail).train[0].size());
  const int64_t windows = (train - 1 - 99) / 100;
  std::set<int64_t> offsets, seen;
  for (int64_t i = 0; i < windows; ++i) {
    const int64_t at = Places(task->TrainBatch(5, i, 1), text)[0];
    offsets.insert(at % 100);
    seen.insert(at);
  }
  EXPECT_EQ(offsets.size(), 1u);
  EXPECT_EQ(int64_t(seen.size()), windows);
}

TEST_F(TextSplitTest, ValidationAndTestAreTheBlocks) {
  const std::string text = Lines(500 << 10);
  options_.length = 300;
  const auto task = Prepared(text);
  const TextSplits splits = SplitText(TextSource(options_.text));
  for (const auto& [split, ranges] :
       {std::pair{Split::kValid, splits.valid}, std::pair{Split::kTest, splits.test}}) {
    std::vector<int> predicted(text.size());
    const auto reader = task->Read(split, {});
    while (const auto batch = reader->Next()) {
      for (const int64_t at : Places(*batch, text)) {
        for (int64_t t = 1; t <= (*batch)["ids"].size(1); ++t) ++predicted[size_t(at + t)];
      }
    }
    std::vector<int> expected(text.size());
    for (const ByteRange& r : ranges) {
      for (int64_t t = r.begin + 1; t < r.end; ++t) expected[size_t(t)] = 1;
    }
    EXPECT_EQ(predicted, expected);
  }
  EXPECT_EQ(task->SplitSummary(), "3 blocks spread over the text");
  EXPECT_EQ(task->DataSummary()["blocks"], 3);
}

TEST_F(TextSplitTest, PiecesTooShortForARow) {
  options_.length = 200000;
  const std::string text = Lines(500 << 10);
  ExpectContains(ErrorMessage([&] { Prepared(text); }), {"task.split=tail"});
  options_.length = 153400;  // one row a piece, and hardly room to move it
  const auto task = Prepared(text);
  std::set<int64_t> places;
  for (int64_t i = 0; i < 3; ++i) places.insert(Places(task->TrainBatch(5, i, 1), text)[0]);
  EXPECT_EQ(places.size(), 3u);
}

TEST_F(TextSplitTest, OptionsWithoutEffectAreRefused) {
  options_.text = "a.txt";
  const auto message = [&] { return ErrorMessage([&] { LmTask(options_, ""); }); };
  options_.valid = "b.txt", options_.test = "c.txt", options_.split = TextSplit::kTail;
  ExpectContains(message(), {"task.lm", "split=tail", "omit valid and test"});
  options_.split = TextSplit::kSpread;
  EXPECT_EQ(message(), "no error");
}

// An option that a record lacks is of an earlier version, whose split was the tail.
TEST_F(TextSplitTest, RecordsOfEarlierVersions) {
  const Json old = {{"kind", "lm"}, {"lm", {{"length", 64}}}};
  EXPECT_EQ(TaskOptions::Recorded(old, "lm")["lm"]["split"], "tail");
  EXPECT_EQ(TaskOptions::Recorded({{"kind", "lm"}, {"length", 64}}, "lm")["lm"]["split"], "tail");
  const Json spread = {{"kind", "mlm"}, {"mlm", {{"split", "spread"}}}};
  EXPECT_EQ(TaskOptions::Recorded(spread, "mlm"), spread);
  EXPECT_FALSE(TaskOptions::Grouped(old, "lm", true)["lm"].contains("split"));
}

}  // namespace
}  // namespace cistern

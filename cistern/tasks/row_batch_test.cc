// Batches of rows: what ListOps and the classifier gave before their padding was in one place,
// counted out here from the rows of their data files.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <fstream>

#include "cistern/base/error.h"
#include "cistern/io/test_folder.h"
#include "cistern/tasks/classify_task.h"
#include "cistern/tasks/listops_task.h"
#include "cistern/tasks/row_batch.h"

namespace cistern {
namespace {

// ids [B,width] of rows with `padding` behind each, element by element.
void ExpectRows(const Batch& batch, const std::vector<std::vector<int64_t>>& rows, int64_t width,
                int64_t padding = 0) {
  const at::Tensor &ids = batch["ids"], &lengths = batch["lengths"];
  ASSERT_EQ(ids.scalar_type(), at::kLong);
  ASSERT_EQ(lengths.scalar_type(), at::kLong);
  ASSERT_EQ(ids.sizes(), (std::vector<int64_t>{int64_t(rows.size()), width}));
  int64_t tokens = 0;
  for (size_t r = 0; r < rows.size(); ++r) {
    EXPECT_EQ(lengths[int64_t(r)].item<int64_t>(), int64_t(rows[r].size()));
    for (int64_t t = 0; t < width; ++t) {
      const int64_t want = t < int64_t(rows[r].size()) ? rows[r][size_t(t)] : padding;
      ASSERT_EQ(ids[int64_t(r)][t].item<int64_t>(), want) << r << " " << t;
    }
    tokens += int64_t(rows[r].size());
  }
  EXPECT_EQ(batch.tokens, tokens);
  EXPECT_EQ(batch.rows, int64_t(rows.size()));
}

TEST(RowBatch, PadsToTheLongestOrToTheLength) {
  const std::vector<int32_t> a = {7, 8, 9}, b = {}, c = {4};
  for (const PadTo to : {PadTo::kLongest, PadTo::kLength}) {
    Batch batch;
    AddIds<int32_t>({a, b, c}, {to, 5}, &batch, 1);
    ExpectRows(batch, {{8, 9, 10}, {}, {5}}, to == PadTo::kLongest ? 3 : 5);
  }
  Batch batch;
  AddIds<int32_t>({b, b}, {}, &batch, 0, "second_");
  EXPECT_EQ(batch["second_ids"].sizes(), (std::vector<int64_t>{2, 1}));  // never without a column
  EXPECT_EQ(batch["second_lengths"].sum().item<int64_t>(), 0);
  EXPECT_NE(ErrorMessage([&] {
              AddIds<int32_t>({a}, {PadTo::kLength, 2}, &batch);
            }).find("3"),
            std::string::npos);
}

// Rows would depend on the others of their batch, by a setting of the model or by a mechanism's.
TEST(RowBatch, WherePaddingTakesPartItsNumberHasToBeSaid) {
  const auto config = [](const std::string& mechanism, const Json& options) {
    ModelConfig c;
    c.kind = "encoder_classifier", c.dim = 8, c.layers = 2, c.heads = 2, c.attention = {mechanism};
    c.attention_options = Json{{mechanism, options}};
    return c;
  };
  const Json none = Json::object();
  for (const char* name : {"softmax", "linformer", "conv_luna", "nystrom"}) {
    CheckPadding(config(name, none), PadTo::kLongest);
    CheckPadding(config(name, none));
  }
  ModelConfig pooled = config("softmax", none), seen = pooled;
  pooled.pooling = PoolingKind::kMeanZeros, seen.padding = PaddingKind::kSeen;
  for (const ModelConfig& c :
       {pooled, seen, config("linformer", {{"mask", "none"}}),
        config("conv_luna", {{"mask", "none"}}), config("nystrom", {{"padding", "zeroes"}})}) {
    CheckPadding(c, PadTo::kLength);
    std::string said = ErrorMessage([&] { CheckPadding(c, PadTo::kLongest); });
    EXPECT_NE(said.find("set task.pad_to=length"), std::string::npos) << said;
    said = ErrorMessage([&] { CheckPadding(c); });  // of a task that has no pad_to
    EXPECT_NE(said.find("depend on the others"), std::string::npos) << said;
    EXPECT_EQ(said.find("pad_to"), std::string::npos) << said;
  }
}

TEST(RowBatch, PaddingThatMayBeLeftOut) {
  const std::vector<int32_t> a = {7, 8}, b = {}, c = {4, 5, 6}, d = {9};
  Batch batch;
  AddIds<int32_t>({a, b, c}, {}, &batch);
  AddIds<int32_t>({d, d, b}, {}, &batch, 0, "second_");
  AddNumbers("targets", {1, 2, 3}, &batch);
  batch.tokens = 5;
  EXPECT_TRUE(batch.TokensOfRows().equal(at::tensor({3, 1, 3}, at::kLong)));
  const Batch other = batch.InOrder(at::tensor({2, 0, 1}, at::kLong));
  ExpectRows(other, {{4, 5, 6}, {7, 8}, {}}, 3);
  EXPECT_TRUE(other["targets"].equal(at::tensor({3, 1, 2}, at::kLong)));
  EXPECT_TRUE(other.TokensOfRows().equal(at::tensor({3, 3, 1}, at::kLong)));
  const Batch cut = other.Rows(1, 3).WithoutPadding();
  ExpectRows(cut, {{7, 8}, {}}, 2);
  EXPECT_EQ(cut["second_ids"].sizes(), (std::vector<int64_t>{2, 1}));
  EXPECT_EQ(other.Rows(2, 3).WithoutPadding()["ids"].size(1), 1);  // never without a column
  // Padding to a length takes part, and stays.
  Batch whole;
  AddIds<int32_t>({a, d}, {PadTo::kLength, 5}, &whole);
  EXPECT_EQ(whole.WithoutPadding()["ids"].size(1), 5);
  EXPECT_EQ(whole.TokensOfRows().sum().item<int64_t>(), 0);
}

// The order of training rows is asked of the task itself; what is in them is counted out.
TEST(RowBatch, ListOpsGivesWhatItGave) {
  const TestFolder folder;
  const std::vector<std::pair<std::string, int>> rows = {
      {"[MAX 3 9 ]", 9}, {"[SM 1 2 3 4 ]", 0}, {"7", 7}, {"[MIN [MED 5 6 7 ] 4 ]", 4}};
  const std::string words[] = {"",  "0", "1", "2",    "3",    "4",    "5",   "6",
                               "7", "8", "9", "[MIN", "[MAX", "[MED", "[SM", "]"};
  for (const char* name : {"train", "val", "test"}) {
    std::ofstream file(folder / (std::string("basic_") + name + ".tsv"));
    file << "Source\tTarget\n";
    for (const auto& [text, label] : rows) file << text << "\t" << label << "\n";
  }
  std::vector<std::vector<int64_t>> ids;
  for (const auto& [text, label] : rows) {
    std::istringstream in(text);
    ids.emplace_back();
    for (std::string word; in >> word;)
      ids.back().push_back(std::find(std::begin(words), std::end(words), word) - std::begin(words));
  }
  for (const PadTo to : {PadTo::kLongest, PadTo::kLength}) {
    ListOpsTask::Options o;
    o.data = folder.path(), o.length = 12, o.pad_to = to;
    ListOpsTask task(o, "");
    task.Prepare();
    const auto reader = task.Read(Split::kTest, {3});
    const Batch first = *reader->Next(), second = *reader->Next();
    ExpectRows(first, {ids[0], ids[1], ids[2]}, to == PadTo::kLongest ? 6 : 12);
    ExpectRows(second, {ids[3]}, to == PadTo::kLongest ? 8 : 12);
    EXPECT_FALSE(reader->Next().has_value());
    EXPECT_TRUE(at::equal(first["targets"], at::tensor({9, 0, 7}, at::kLong)));
    std::vector<std::string> names;
    for (const NamedTensor& t : first.tensors.all()) names.push_back(t.name);
    EXPECT_EQ(names, (std::vector<std::string>{"ids", "lengths", "targets"}));
    // Four rows of an epoch: each once, in an order of the seed.
    const ShuffledOrder order(4);
    std::vector<std::vector<int64_t>> picked;
    for (int64_t i = 0; i < 4; ++i) picked.push_back(ids[size_t(order.At(5, 8 + i, 4))]);
    ExpectRows(task.TrainBatch(5, 2, 4), picked, to == PadTo::kLongest ? 8 : 12);
  }
}

TEST(RowBatch, ClassifyGivesWhatItGave) {
  const TestFolder folder;
  const std::string train = folder / "train.tsv", test = folder / "test.tsv";
  for (const std::string& path : {train, test}) {
    std::ofstream file(path);
    file << "text\tlabel\n";
    for (int i = 0; i < 9; ++i)
      file << std::string(size_t(1 + i), char('a' + i)) << "\t" << (i % 2 ? "1.5" : "0.5") << "\n";
  }
  for (const bool regression : {false, true}) {
    for (const PadTo to : {PadTo::kLongest, PadTo::kLength}) {
      ClassifyTask::Options o;
      o.data = train, o.valid = o.test = test, o.length = 7, o.pad_to = to;
      o.regression = regression;
      ClassifyTask task(o, "");
      task.Prepare();
      const auto reader = task.Read(Split::kTest, {4});
      const Batch first = *reader->Next(), second = *reader->Next();
      const auto ids = [&](int from, int count) {
        std::vector<std::vector<int64_t>> rows;
        for (int i = from; i < from + count; ++i)
          rows.emplace_back(size_t(std::min(7, 1 + i)), int64_t('a' + i));
        return rows;
      };
      // The padding of `length` has an id of its own, after the bytes.
      const int64_t padding = to == PadTo::kLongest ? 0 : 256;
      ExpectRows(first, ids(0, 4), to == PadTo::kLongest ? 4 : 7, padding);
      ExpectRows(second, ids(4, 4), 7, padding);
      EXPECT_TRUE(at::equal(first["lines"], at::tensor({2, 3, 4, 5}, at::kLong)));
      if (regression) {
        // Five labels of 0.5 and four of 1.5: their mean and deviation.
        const double mean = 17.0 / 18, deviation = std::sqrt(20.0) / 9;
        EXPECT_EQ(first["targets"].scalar_type(), at::kDouble);
        EXPECT_NEAR(first["targets"][0].item<double>(), (0.5 - mean) / deviation, 1e-12);
        EXPECT_NEAR(first["targets"][1].item<double>(), (1.5 - mean) / deviation, 1e-12);
      } else {
        EXPECT_TRUE(at::equal(first["targets"], at::tensor({0, 1, 0, 1}, at::kLong)));
      }
      std::vector<std::string> names;
      for (const NamedTensor& t : first.tensors.all()) names.push_back(t.name);
      EXPECT_EQ(names, (std::vector<std::string>{"ids", "lengths", "targets", "lines"}));
    }
  }
}

// Every row once, and any beginning of the order has of every tenth of the rows its share.
TEST(RowBatch, SpreadRowsAreEvenFromTheFirst) {
  for (const int64_t count : {1, 2, 3, 10, 60, 97, 1000, 25000}) {
    std::vector<int64_t> tenths(10), seen(static_cast<size_t>(count));
    int64_t odd = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = SpreadRow(i, count);
      ASSERT_GE(row, 0);
      ASSERT_LT(row, count);
      ++seen[size_t(row)];
      ++tenths[size_t(row * 10 / count)];
      odd += row % 2;
      if (count < 60) continue;
      for (const int64_t tenth : tenths) EXPECT_NEAR(double(tenth), double(i + 1) / 10, 6) << count;
      EXPECT_NEAR(double(odd), double(i + 1) / 2, 0.2 * double(i + 1) + 3) << count;
    }
    for (const int64_t times : seen) ASSERT_EQ(times, 1);
  }
}

// Rows sorted by label: a part of the validation rows has both classes, baseline included.
TEST(RowBatch, SomeTokensAreOfRowsFromEverywhere) {
  const TestFolder folder;
  std::string table = "label\ttext\n";
  for (int i = 0; i < 200; ++i) table += StrCat(i < 100 ? "a" : "b", "\t", "text ", 1000 + i, "\n");
  std::ofstream(folder / "t.tsv") << table;
  ClassifyTask::Options options;
  options.data = options.valid = options.test = folder / "t.tsv";
  options.group_by_length = false;
  ClassifyTask task(options, "");
  task.Prepare();
  const auto labels = [&](int64_t max_tokens) {
    const auto reader = task.Read(Split::kValid, {.rows = 10, .max_tokens = max_tokens});
    return (*reader->Next())["targets"].sum().item<int64_t>();
  };
  EXPECT_EQ(labels(0), 0);  // all rows, in the order of the file
  EXPECT_GE(labels(100), 4);
  EXPECT_LE(labels(100), 6);
  const auto rows = [&] {
    return (*task.Read(Split::kValid, {.rows = 10, .max_tokens = 100})->Next())["lines"];
  };
  EXPECT_TRUE(at::equal(rows(), rows()));
  const auto reader = task.Read(Split::kValid, {.rows = 10, .max_tokens = 100});
  reader->Next();
  EXPECT_EQ(reader->Facts(), (Json{{"part", "10 of 200 rows, spread evenly"}}));
  EXPECT_EQ(task.Read(Split::kValid, {.rows = 10})->Facts(), Json::object());
}

}  // namespace
}  // namespace cistern

// Images as rows of tokens, their splits and what a model of them reads.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <fstream>
#include <set>

#include "cistern/base/error.h"
#include "cistern/base/random.h"
#include "cistern/io/test_folder.h"
#include "cistern/models/classifier.h"
#include "cistern/tasks/evaluate.h"
#include "cistern/tasks/image_task.h"

namespace cistern {
namespace {

// 40 and 10 records of CIFAR-10 with many black pixels; the pixel bytes of the training records.
std::vector<uint8_t> WriteCifar(const TestFolder& folder) {
  Random random(3);
  std::vector<uint8_t> train;
  const auto write = [&](const std::string& name, int records) {
    std::ofstream file(folder / name, std::ios::binary);
    for (int i = 0; i < records; ++i) {
      file.put(char(i % 10));
      for (int p = 0; p < 3072; ++p) {
        const auto byte = uint8_t(random.Below(4) == 0 ? 0 : random.Below(256));
        file.put(char(byte));
        if (name.starts_with("data")) train.push_back(byte);
      }
    }
  };
  write("data_batch_1.bin", 25);
  write("data_batch_2.bin", 15);
  write("test_batch.bin", 10);
  std::ofstream(folder / "batches.meta.txt") << "a\nb\nc\nd\ne\nf\ng\nh\ni\nj\n\n";
  return train;
}

ImageTask::Options Options(const TestFolder& folder) {
  ImageTask::Options o;
  o.data = folder.path();
  return o;
}

std::vector<int64_t> LinesOf(const ImageTask& task, Split split) {
  std::vector<int64_t> lines;
  const auto reader = task.Read(split, {7});
  while (const auto batch = reader->Next()) {
    for (int64_t r = 0; r < batch->rows; ++r) lines.push_back((*batch)["lines"][r].item<int64_t>());
  }
  return lines;
}

TEST(Image, SplitsAreThoseOfTheProtocols) {
  const TestFolder folder;
  WriteCifar(folder);
  const auto counted = [](int64_t begin, int64_t end) {
    std::vector<int64_t> lines;
    for (int64_t i = begin; i < end; ++i) lines.push_back(i);
    return lines;
  };
  ImageTask last(Options(folder), "");
  last.Prepare();
  EXPECT_EQ(LinesOf(last, Split::kTrain), counted(1, 37));  // the first 90 % of 40
  EXPECT_EQ(last.train_rows(), 36);  // eval_drop_last and train.order need epochs
  EXPECT_EQ(LinesOf(last, Split::kValid), counted(37, 41));
  EXPECT_EQ(LinesOf(last, Split::kTest), counted(1, 11));
  // Of 4, as records are numbered by class in each file; those for validation do not count.
  EXPECT_EQ(last.DataSummary()["classes"]["a"], 5);
  EXPECT_EQ(last.DataSummary()["classes"]["b"], 4);
  ImageTask::Options o = Options(folder);
  o.valid = ImageTask::Valid::kRandom;
  ImageTask random(o, "");
  random.Prepare();
  std::vector<int64_t> both = LinesOf(random, Split::kTrain);
  const std::vector<int64_t> valid = LinesOf(random, Split::kValid);
  EXPECT_EQ(valid.size(), 4u);
  EXPECT_NE(valid, counted(37, 41));
  both.insert(both.end(), valid.begin(), valid.end());
  EXPECT_EQ(std::set<int64_t>(both.begin(), both.end()).size(), 40u);
  o.valid = ImageTask::Valid::kTest;
  ImageTask ucu(o, "");
  ucu.Prepare();
  EXPECT_EQ(LinesOf(ucu, Split::kTrain), counted(1, 41));
  EXPECT_EQ(LinesOf(ucu, Split::kValid), counted(1, 11));
  EXPECT_NE(ucu.DataSummary()["notes"].dump().find("not honest"), std::string::npos);
}

TEST(Image, IdsInTheOrderOfPixelsAndColours) {
  const TestFolder folder;
  const std::vector<uint8_t> bytes = WriteCifar(folder);
  ImageTask::Options o = Options(folder);
  o.colour = ImageColour::kRgb;
  ImageTask task(o, "");
  task.Prepare();
  EXPECT_EQ(task.tokens_per_row(), 3072);
  const Batch batch = *task.Read(Split::kTrain, {3})->Next();
  for (const int64_t p : {0, 1, 31, 32, 1023}) {
    for (int64_t c = 0; c < 3; ++c) {
      EXPECT_EQ(batch["ids"][2][3 * p + c].item<int64_t>(), bytes[size_t(2 * 3072 + c * 1024 + p)]);
    }
  }
}

// Black pixels are left out as if they were masked: what remains keeps its place.
TEST(Image, ZeroAsPaddingKeepsPositions) {
  const TestFolder folder;
  WriteCifar(folder);
  ImageTask whole(Options(folder), "");
  whole.Prepare();
  ImageTask::Options o = Options(folder);
  o.pixels.zero_is_padding = true;
  ImageTask task(o, "");
  task.Prepare();
  const Batch all = *whole.Read(Split::kTrain, {4})->Next(),
              seen = *task.Read(Split::kTrain, {4})->Next();
  int64_t tokens = 0;
  for (int64_t r = 0; r < 4; ++r) {
    int64_t k = 0;
    for (int64_t i = 0; i < 1024; ++i) {
      const int64_t id = all["ids"][r][i].item<int64_t>();
      if (id == 0) continue;
      EXPECT_EQ(seen["ids"][r][k].item<int64_t>(), id);
      EXPECT_EQ(seen["positions"][r][k].item<int64_t>(), i);
      ++k;
    }
    EXPECT_EQ(seen["lengths"][r].item<int64_t>(), k);
    tokens += k;
  }
  EXPECT_EQ(seen.tokens, tokens);
  EXPECT_LT(tokens, 4 * 1024);
  // Without the padding of the shortest row both are narrower.
  const int64_t least = seen["lengths"].argmin().item<int64_t>();
  const Batch one = seen.Rows(least, least + 1).WithoutPadding();
  EXPECT_LT(one["ids"].size(1), seen["ids"].size(1));
  EXPECT_EQ(one["positions"].sizes(), one["ids"].sizes());
  // To a model that is the whole image with its zeros masked and with the positions of the pixels.
  for (const PoolingKind pooling : {PoolingKind::kMean, PoolingKind::kCls}) {
    ModelConfig config;
    config.kind = "encoder_classifier", config.dim = 8, config.layers = 2, config.heads = 2;
    config.attention = {"softmax"}, config.positions = PositionKind::kLearned;
    config.pooling = pooling, config.init_std = 0.3, config.embedding_std = 1;
    task.Complete(config);
    const auto model = std::dynamic_pointer_cast<Classifier>(MakeModel(config, 3));
    model->to(at::kDouble);
    model->eval();
    NamedTensors masked = model->ReadOf(all.tensors);
    masked.Set("valid", all["ids"].ne(0));
    masked.Set("positions", at::arange(1024).expand({4, 1024}));
    const at::Tensor want = model->Logits(masked), got = model->Logits(model->ReadOf(seen.tensors));
    EXPECT_TRUE(at::allclose(got, want, 0, 1e-12)) << got << want;
    NamedTensors moved = model->ReadOf(seen.tensors);
    moved.Set("positions", at::arange(seen["ids"].size(1)).expand_as(seen["ids"]));
    EXPECT_GT((model->Logits(moved) - want).abs().max().item<double>(), 1e-4);
  }
}

TEST(Image, RelativePositionsBesideZeroAsPaddingAreRefused) {
  const TestFolder folder;
  WriteCifar(folder);
  for (const bool padding : {false, true}) {
    ImageTask::Options o = Options(folder);
    o.pixels.zero_is_padding = padding;
    ImageTask task(o, "");
    task.Prepare();
    ModelConfig config;
    config.kind = "encoder_classifier", config.attention = {"softmax"};
    config.positions = PositionKind::kRelative;
    const std::string said = ErrorMessage([&] { task.Complete(config); });
    EXPECT_EQ(said.find("positions=relative") != std::string::npos, padding) << said;
  }
}

// With pad_to=length the black pixels follow the others, so that a mean over the whole length does
// not depend on the batch.
TEST(Image, ZeroAsPaddingOfTheWholeLength) {
  const TestFolder folder;
  WriteCifar(folder);
  ImageTask::Options o = Options(folder);
  o.pixels.zero_is_padding = true;
  ImageTask longest(o, "");
  longest.Prepare();
  o.pixels.pad_to = PadTo::kLength;
  ImageTask task(o, "");
  task.Prepare();
  const Batch some = *longest.Read(Split::kTrain, {4})->Next(),
              all = *task.Read(Split::kTrain, {4})->Next(),
              one = *task.Read(Split::kTrain, {1})->Next();
  ASSERT_EQ(all["ids"].sizes(), (std::vector<int64_t>{4, 1024}));
  EXPECT_TRUE(all["lengths"].equal(some["lengths"]));
  EXPECT_EQ(all.tokens, some.tokens);
  EXPECT_EQ(all.WithoutPadding()["ids"].size(1), 1024);
  for (int64_t r = 0; r < 4; ++r) {
    const int64_t k = all["lengths"][r].item<int64_t>();
    const at::Tensor ids = all["ids"][r], places = all["positions"][r];
    EXPECT_TRUE(ids.slice(0, 0, k).equal(some["ids"][r].slice(0, 0, k)));
    EXPECT_EQ(ids.slice(0, k).abs().sum().item<int64_t>(), 0);
    EXPECT_TRUE(places.slice(0, 0, k).equal(some["positions"][r].slice(0, 0, k)));
    EXPECT_TRUE(std::get<0>(places.sort()).equal(at::arange(1024)));  // each once
  }
  const auto model = [&](const ImageTask& of, PoolingKind pooling) {
    ModelConfig config;
    config.kind = "encoder_classifier", config.dim = 8, config.layers = 1, config.heads = 2;
    config.attention = {"softmax"}, config.positions = PositionKind::kLearned;
    config.pooling = pooling, config.head = HeadKind::kLinear, config.embedding_std = 1;
    of.Complete(config);
    const auto made = std::dynamic_pointer_cast<Classifier>(MakeModel(config, 3));
    made->to(at::kDouble);
    made->eval();
    return made;
  };
  const auto zeros = model(task, PoolingKind::kMeanZeros);
  const at::Tensor got = zeros->Logits(zeros->ReadOf(all.tensors));
  EXPECT_TRUE(
      at::allclose(zeros->Logits(zeros->ReadOf(one.tensors)), got.slice(0, 0, 1), 0, 1e-12));
  // Divided by the image's length: the mean over what is seen, times its share.
  const at::Tensor share = all["lengths"].to(at::kDouble).unsqueeze(1) / 1024,
                   want = model(longest, PoolingKind::kMean)->Logits(zeros->ReadOf(some.tensors)) *
                          share;
  EXPECT_TRUE(at::allclose(got, want, 0, 1e-12)) << got << want;
  const std::string said = ErrorMessage([&] { model(longest, PoolingKind::kMeanZeros); });
  EXPECT_NE(said.find("task.pad_to=length"), std::string::npos) << said;
}

TEST(Image, ValuesAndPatches) {
  const TestFolder folder;
  const std::vector<uint8_t> bytes = WriteCifar(folder);
  ImageTask::Options o = Options(folder);
  o.colour = ImageColour::kRgb;
  o.pixels.kind = PixelInput::Kind::kValues;
  o.pixels.scale = PixelInput::Scale::kUcu;
  const double mean[] = {.4914, .4822, .4465}, deviation[] = {.2470, .2435, .2616};  // spec 4.7
  const auto value = [&](int64_t image, int64_t y, int64_t x, int64_t c) {
    return (bytes[size_t(image * 3072 + c * 1024 + y * 32 + x)] / 255.0 - mean[c]) / deviation[c];
  };
  for (const int64_t patch : {1, 4}) {
    o.pixels.patch = patch;
    ImageTask task(o, "");
    task.Prepare();
    const Batch batch = *task.Read(Split::kTrain, {2})->Next();
    const at::Tensor values = batch["values"];
    const int64_t across = 32 / patch, channels = 3 * patch * patch;
    ASSERT_EQ(values.sizes(), (std::vector<int64_t>{2, across * across, channels}));
    for (int64_t y = 0; y < 32; ++y) {
      for (int64_t x = 0; x < 32; ++x) {
        for (int64_t c = 0; c < 3; ++c) {
          const int64_t token = y / patch * across + x / patch,
                        inside = (y % patch * patch + x % patch) * 3 + c;
          EXPECT_NEAR(values[1][token][inside].item<double>(), value(1, y, x, c), 1e-5);
        }
      }
    }
  }
  // P000's: x w + b with w of N(0, 1) and b of N(0, 0.1).
  o.colour = ImageColour::kGrey;
  o.pixels.scale = PixelInput::Scale::kConvLuna, o.pixels.patch = 1;
  ImageTask task(o, "");
  task.Prepare();
  const Batch batch = *task.Read(Split::kTrain, {2})->Next();
  const ImageSet grey = ReadImages(folder.path(), false, ImageColour::kGrey);
  EXPECT_NEAR(batch["values"][1][77][0].item<double>(), (grey.Image(1)[77] / 255.0 - .48) / .24,
              1e-5);
  ModelConfig config;
  config.kind = "encoder_classifier", config.dim = 4096, config.heads = 1, config.layers = 1;
  config.ffn_dim = 8;
  config.init.values_std = 1, config.init.values_bias_std = 0.1;
  task.Complete(config);
  EXPECT_EQ(config.vocab_size, 0);
  const auto model = MakeModel(config, 1);
  const auto weights = model->named_parameters();
  EXPECT_EQ(weights["embed_values.weight"].sizes(), (std::vector<int64_t>{4096, 1}));
  EXPECT_NEAR(weights["embed_values.weight"].std().item<double>(), 1, 0.05);
  EXPECT_NEAR(weights["embed_values.bias"].std().item<double>(), 0.1, 0.005);
}

TEST(Image, IsTrainedMeasuredAndPredicted) {
  const TestFolder folder;
  WriteCifar(folder);
  for (const bool values : {false, true}) {
    ImageTask::Options o = Options(folder);
    if (values) o.pixels.kind = PixelInput::Kind::kValues, o.pixels.patch = 2;
    ImageTask task(o, "");
    task.Prepare();
    ModelConfig config;
    config.kind = "encoder_classifier", config.dim = 8, config.layers = 1, config.heads = 2;
    config.positions = PositionKind::kLearned;
    task.Complete(config);
    const auto model = MakeModel(config, 3);
    const at::Tensor loss = task.Loss(*model, task.TrainBatch(1, 2, 4), 0);
    loss.backward();
    for (const auto& p : model->named_parameters())
      EXPECT_TRUE(p.value().grad().defined()) << p.key();
    const Json m = task.Metrics(Evaluate(task, *model, Split::kTest).score);
    EXPECT_EQ(m["examples"], 10);
    EXPECT_NEAR(m["majority"].get<double>(), 10, 1e-9);
    task.SaveAssets(folder.path());
    ImageTask loaded(o, "");
    loaded.LoadAssets(folder.path());
    const auto reader = loaded.ReadFile(folder / "test_batch.bin", false, {4});
    model->eval();
    const std::vector<Json> said = loaded.Predict(*model, *reader->Next());
    ASSERT_EQ(said.size(), 4u);
    EXPECT_EQ(said[3]["line"], 4);
    EXPECT_EQ(said[0]["probabilities"].size(), 10u);
    // What is saved is a model: it is loaded and says the same.
    SaveModel(*model, folder / "model");
    const auto again = LoadModel(folder / "model");
    EXPECT_EQ(
        loaded.Predict(
            *again,
            *loaded.ReadFile(folder / "test_batch.bin", false, {4})->Next())[3]["probability"],
        said[3]["probability"]);
  }
}

TEST(Image, LabelsMayBeMissingWhereTheyAreNotMeasured) {
  const TestFolder folder;
  const auto write = [&](const std::string& name, const std::string& header, int bytes) {
    std::ofstream file(folder / name, std::ios::binary);
    file << header;
    for (int i = 0; i < bytes; ++i) file.put(char(i % 2));
  };
  const std::string images("\0\0\x8\x3\0\0\0\x14\0\0\0\x2\0\0\0\x2", 16),
      labels("\0\0\x8\x1\0\0\0\x14", 8);  // 20 images of 2 x 2
  for (const std::string part : {"train", "t10k"}) {
    write(part + "-images-idx3-ubyte", images, 80);
    write(part + "-labels-idx1-ubyte", labels, 20);
  }
  ImageTask task(Options(folder), "");
  task.Prepare();
  write("new-images-idx3-ubyte", images, 80);
  EXPECT_EQ(task.ReadFile(folder / "new-images-idx3-ubyte", false, {})->Next()->rows, 20);
  EXPECT_NE(ErrorMessage([&] {
              task.ReadFile(folder / "new-images-idx3-ubyte", true, {});
            }).find("labels are missing"),
            std::string::npos);
}

TEST(Image, OptionsThatDoNotFitAreRefused) {
  const TestFolder folder;
  WriteCifar(folder);
  const auto message = [&](auto change) {
    ImageTask::Options o = Options(folder);
    change(o);
    return ErrorMessage([&] { ImageTask(o, "").Prepare(); });
  };
  const auto expect = [](const std::string& said, const char* phrase) {
    EXPECT_NE(said.find(phrase), std::string::npos) << said;
  };
  expect(message([](auto& o) { o.pixels.patch = 4; }), "input=values");
  expect(message([](auto& o) {
           o.pixels.kind = PixelInput::Kind::kValues, o.pixels.zero_is_padding = true;
         }),
         "zero_is_padding");
  expect(message([](auto& o) { o.pixels.pad_to = PadTo::kLength; }), "pad_to=length is of");
  expect(message([](auto& o) { o.pixels.kind = PixelInput::Kind::kValues, o.pixels.patch = 5; }),
         "patch=5 does not divide images of 32 x 32");
  expect(message([](auto& o) {
           o.pixels.kind = PixelInput::Kind::kValues, o.pixels.scale = PixelInput::Scale::kUcu;
         }),
         "three colours");
  expect(message([](auto& o) { o.valid = ImageTask::Valid::kTest, o.valid_share = 0.2; }),
         "omit valid_share");
  expect(message([&](auto& o) { o.data = folder / "data_batch_1.bin"; }), "test is empty");
  // A model of values needs a task that gives them.
  ModelConfig config;
  config.kind = "encoder_classifier", config.vocab_size = 9, config.classes = 2;
  config.own["encoder_classifier"] = Json{{"input", "values"}};
  expect(ErrorMessage([&] { MakeModel(config, 1); }), "task.input=values");
  config.own.clear();
  config.init.values_std = 1;
  expect(ErrorMessage([&] { MakeModel(config, 1); }), "reads tokens");
}

}  // namespace
}  // namespace cistern

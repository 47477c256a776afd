#include "cistern/decode/generate.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>

#include "cistern/base/error.h"
#include "cistern/base/testing_threads.h"
#include "cistern/decode/lm_folder.h"
#include "cistern/decode/measure.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/test_folder.h"
#include "cistern/models/decoder_lm.h"
#include "cistern/tensors/testing_device.h"

namespace cistern {
namespace {

ModelConfig TinyConfig(const std::string& mechanism) {
  ModelConfig c;
  c.vocab_size = 256;
  c.dim = 16;
  c.layers = 2;
  c.heads = 2;
  c.conv = 3;
  c.init_std = 0.3;  // far from uniform, so that greedy choices are clear
  c.attention = {mechanism};
  return c;
}

std::shared_ptr<DecoderLm> TinyModel(const ModelConfig& config) {
  auto model = std::dynamic_pointer_cast<DecoderLm>(MakeModel(config, 5));
  model->to(at::kDouble);
  model->eval();
  return model;
}

std::shared_ptr<const Tokenizer> ByteTokens() { return MakeByteTokenizer(); }

const std::string kLong = [] {
  std::string text;
  for (int i = 0; i < 12; ++i) text += "a prompt of some length, " + std::to_string(i * 37);
  return text;
}();

class GenerateTest : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Mechanisms, GenerateTest,
                         ::testing::Values("latte", "abc_mlp", "softmax"));

// While a text is written, the state of a mechanism of bounded size stays where it is; a text that
// was kept stays what it was.
TEST_P(GenerateTest, TheStateIsWrittenInPlace) {
  if (GetParam() == "softmax") GTEST_SKIP() << "its cache grows";
  const auto model = TinyModel(TinyConfig(GetParam()));
  Generator generator(model, ByteTokens());
  TextState text = EmptyTextState(*model, 1);
  GenerateOptions options;
  options.max_tokens = 3;
  generator.Continue(text, {StringSource(kLong)}, options);
  const auto places = [&] {
    std::vector<const void*> now;
    for (const State& layer : text.model.layers) {
      for (const NamedTensor& t : layer.tensors) {
        if (t.value.defined() && (t.value.dim() == 4 || t.name == "decoding"))
          now.push_back(t.value.const_data_ptr());
      }
    }
    return now;
  };
  const auto before = places();
  EXPECT_FALSE(before.empty());
  generator.Continue(text, {StringSource("")}, options);
  EXPECT_EQ(places(), before);

  const TextState held = text;  // shares its tensors
  std::vector<at::Tensor> copies;
  for (const State& layer : held.model.layers) {
    for (const NamedTensor& t : layer.tensors)
      copies.push_back(t.value.defined() ? t.value.clone() : t.value);
  }
  generator.Continue(text, {StringSource("")}, options);
  size_t i = 0;
  for (const State& layer : held.model.layers) {
    for (const NamedTensor& t : layer.tensors) {
      const at::Tensor& copy = copies[i++];
      EXPECT_TRUE(copy.defined() ? at::equal(t.value, copy) : !t.value.defined()) << t.name;
    }
  }
  EXPECT_NE(places(), before);
}

TEST_P(GenerateTest, PiecesEqualTheWhole) {
  const auto model = TinyModel(TinyConfig(GetParam()));
  at::NoGradGuard guard;
  const std::vector<int32_t> ids = ByteTokens()->Encode(kLong);
  const at::Tensor all = at::tensor(ids, at::kLong).unsqueeze(0);
  ModelState whole = model->EmptyState(1), parts = model->EmptyState(1);
  const at::Tensor expected = model->Extend(all, whole);
  std::vector<at::Tensor> pieces;
  for (const at::Tensor& piece : all.split(97, 1)) pieces.push_back(model->Extend(piece, parts));
  EXPECT_LT((at::cat(pieces, 1) - expected).abs().max().item<double>(), 1e-10);

  Generator generator(model, ByteTokens());
  GenerateOptions options;
  options.max_tokens = 20;
  const Generation once = generator.Run(kLong, options);
  for (const int64_t piece : {1, 64, 133}) {
    options.piece = piece;
    const Generation g = generator.Run(kLong, options);
    EXPECT_EQ(g.tokens, once.tokens);
    EXPECT_EQ(g.prompt_tokens, int64_t(ids.size()));
    for (size_t i = 0; i < g.logprobs.size(); ++i)
      EXPECT_NEAR(g.logprobs[i], once.logprobs[i], 1e-9);
  }
  EXPECT_EQ(generator.stats().tokens, 20);
}

TEST_P(GenerateTest, ABatchEqualsEachAlone) {
  const auto model = TinyModel(TinyConfig(GetParam()));
  Generator generator(model, ByteTokens());
  GenerateOptions options;
  options.max_tokens = 40;
  options.piece = 50;
  options.sampler = {
      .temperature = 1, .top_k = 50, .top_p = 0.9, .repetition_penalty = 1.2, .seed = 3};
  options.stop = {"e", "q"};  // rows end at different times
  const std::vector<std::string> prompts = {"short", kLong, "",
                                            "of middling length, with a few words more", "short"};
  std::vector<PromptSource> sources;
  for (const std::string& p : prompts) sources.push_back(StringSource(p));
  std::vector<std::string> streamed(prompts.size());
  const auto batch = generator.Run(std::move(sources), options,
                                   [&](size_t b, std::string_view text) { streamed[b] += text; });
  for (size_t b = 0; b < prompts.size(); ++b) {
    options.first_row = int64_t(b);
    const Generation alone = generator.Run(prompts[b], options);
    EXPECT_EQ(batch[b].tokens, alone.tokens) << b;
    EXPECT_EQ(batch[b].text, alone.text) << b;
    EXPECT_EQ(batch[b].finish, alone.finish) << b;
    EXPECT_EQ(streamed[b], alone.text) << b;
    for (size_t i = 0; i < alone.logprobs.size(); ++i)
      EXPECT_NEAR(batch[b].logprobs[i], alone.logprobs[i], 1e-9);
  }
  EXPECT_NE(batch[0].tokens, batch[4].tokens);  // another row, other draws
}

// What lets the loop take another number of threads while it draws (decode_threads.h).
TEST_P(GenerateTest, TheNumberOfThreadsChangesNoBit) {
  ModelConfig config = TinyConfig(GetParam());
  config.dim = 256;
  const auto model = std::dynamic_pointer_cast<LanguageModel>(MakeModel(config, 5));
  model->eval();
  const auto drawn = [&](int threads, size_t rows) {
    const testing::Threads scope(threads);
    Generator generator(model, ByteTokens());
    GenerateOptions options;
    options.max_tokens = 12;
    std::vector<PromptSource> prompts;
    for (size_t b = 0; b < rows; ++b) prompts.push_back(StringSource("abc"));
    std::vector<double> logprobs;
    for (const Generation& g : generator.Run(std::move(prompts), options))
      logprobs.insert(logprobs.end(), g.logprobs.begin(), g.logprobs.end());
    return logprobs;
  };
  for (const size_t rows : {size_t{1}, size_t{9}}) EXPECT_EQ(drawn(1, rows), drawn(3, rows));
}

TEST_P(GenerateTest, AnotherDeviceWritesAsTheCpu) {
  const auto model = TinyModel(TinyConfig(GetParam()));
  GenerateOptions options;
  options.max_tokens = 12;
  options.sampler = {.temperature = 0.8, .top_k = 50, .repetition_penalty = 1.2, .seed = 3};
  const auto write = [&] {
    Generator generator(model, ByteTokens());
    std::vector<std::vector<int32_t>> tokens;
    for (const Generation& g :
         generator.Run({StringSource(kLong), StringSource("short"), StringSource("")}, options))
      tokens.push_back(g.tokens);
    return tokens;
  };
  const auto here = write();
  model->to(testing::kMadeUpDevice);
  EXPECT_EQ(write(), here);
}

TEST_P(GenerateTest, LogprobsAreThoseOfTheModel) {
  const auto model = TinyModel(TinyConfig(GetParam()));
  Generator generator(model, ByteTokens());
  GenerateOptions options;
  options.max_tokens = 30;
  options.sampler = {.temperature = 2, .top_k = 100, .repetition_penalty = 1.5};
  options.top_logprobs = 256;
  const Generation g = generator.Run("some words", options);
  std::vector<int32_t> ids = ByteTokens()->Encode("some words");
  const int64_t prompt = int64_t(ids.size());
  ids.insert(ids.end(), g.tokens.begin(), g.tokens.end());
  at::NoGradGuard guard;
  const at::Tensor all = at::tensor(ids, at::kLong).unsqueeze(0);
  ModelState state = model->EmptyState(1);
  const at::Tensor logp = at::log_softmax(model->Extend(all, state), -1);
  const at::Tensor expected =
      logp.narrow(1, prompt - 1, 30).gather(2, all.narrow(1, prompt, 30).unsqueeze(2)).sum();
  double sum = 0;
  for (const double x : g.logprobs) sum += x;
  EXPECT_NEAR(sum, expected.item<double>(), 1e-9);
  for (const auto& top : g.top) {
    double probability = 0;
    for (const TokenLogprob& t : top) probability += std::exp(t.logprob);
    EXPECT_NEAR(probability, 1, 1e-9);
  }
}

TEST(Generate, StopsAcrossTokens) {
  Generator generator(TinyModel(TinyConfig("latte")), ByteTokens());
  GenerateOptions options;
  options.max_tokens = 60;
  options.sampler = {.temperature = 1, .seed = 11};
  const Generation free = generator.Run("x", options);
  EXPECT_EQ(free.finish, Finish::kLength);
  std::string bytes;
  for (const int32_t t : free.tokens) bytes += char(t);
  const std::string stop = bytes.substr(20, 3);  // three tokens of one byte
  const size_t at = bytes.find(stop);
  options.stop = {stop};
  const Generation g = generator.Run("x", options);
  EXPECT_EQ(g.finish, Finish::kStopString);
  EXPECT_EQ(g.tokens.size(), at + 3);
  Utf8Stream characters;
  std::string expected = characters.Push(bytes.substr(0, at));
  expected += characters.Finish();
  EXPECT_EQ(g.text, expected);
}

TEST(Generate, EmptyPromptBeginsWithANewline) {
  Generator generator(TinyModel(TinyConfig("latte")), ByteTokens());
  GenerateOptions options;
  options.max_tokens = 10;
  const Generation g = generator.Run("", options);
  EXPECT_EQ(g.prompt_tokens, 1);
  EXPECT_EQ(g.tokens, generator.Run("\n", options).tokens);
  options.max_tokens = 0;
  EXPECT_EQ(generator.Run("abc", options).text, "");
}

TEST(Generate, InterruptKeepsWhatIsThere) {
  Generator generator(TinyModel(TinyConfig("latte")), ByteTokens());
  std::atomic<bool> interrupt{false};
  int shown = 0;
  const auto g = generator.Run(
      {StringSource("abc")}, GenerateOptions{},
      [&](size_t, std::string_view) { interrupt = ++shown == 3; }, &interrupt);
  EXPECT_EQ(g[0].finish, Finish::kInterrupted);
  EXPECT_FALSE(g[0].text.empty());
  EXPECT_LT(g[0].tokens.size(), 200u);
  interrupt = true;
  EXPECT_EQ(
      generator.Run({StringSource("abc")}, GenerateOptions{}, {}, &interrupt)[0].tokens.size(), 0u);
}

TEST(Generate, Errors) {
  ModelConfig config = TinyConfig("latte");
  config.positions = PositionKind::kLearned;
  config.max_length = 32;
  Generator learned(TinyModel(config), ByteTokens());
  GenerateOptions options;
  options.max_tokens = 20;
  EXPECT_EQ(learned.Run("twelve bytes", options).tokens.size(), 20u);
  EXPECT_NE(ErrorMessage([&] {
              learned.Run("thirteen byte", options);
            }).find("the 32 tokens where the positions"),
            std::string::npos);
  options.max_tokens = -1;
  EXPECT_NE(ErrorMessage([&] { learned.Run("a", options); }).find("max-tokens must be 0 or above"),
            std::string::npos);

  const auto broken = TinyModel(TinyConfig("latte"));
  {
    at::NoGradGuard guard;
    broken->parameters()[0].fill_(std::nan(""));
  }
  EXPECT_NE(ErrorMessage([&] {
              Generator(broken, ByteTokens()).Run("a", GenerateOptions{});
            }).find("is nan"),
            std::string::npos);

  config.vocab_size = 300;
  EXPECT_NE(ErrorMessage([&] {
              Generator(TinyModel(config), ByteTokens());
            }).find("300 tokens, the tokenizer 256"),
            std::string::npos);
  EXPECT_NE(ErrorMessage([] { FileSource("/no/such/file"); }).find("cannot read /no/such/file"),
            std::string::npos);
  EXPECT_NE(ErrorMessage([] { FileSource("/tmp"); }).find("it is a folder"), std::string::npos);
}

TEST(Generate, AByteOrderMarkIsNoPartOfAPrompt) {
  const TestFolder folder;
  const std::string mark = "\xef\xbb\xbf";
  for (const auto& [text, read] :
       {std::pair(mark + "a" + mark, "a" + mark), {mark, ""}, {"\xef", "\xef"}, {"", ""}}) {
    WriteFileAtomically(folder / "prompt", text);
    const PromptSource source = FileSource(folder / "prompt");
    EXPECT_EQ(source(), read);
    EXPECT_EQ(source(), "");
  }
}

// The keys of the decoder's group come before the model's.
TEST(Generate, PositionsEndWhereThoseOfTheStackDo) {
  const auto refused = [](const ModelConfig& config, int64_t tokens) {
    GenerateOptions options;
    options.max_tokens = tokens;
    size_t shown = 0;
    const std::string message = ErrorMessage([&] {
      Generator(TinyModel(config), ByteTokens())
          .Run({StringSource("twelve bytes")}, options, [&](size_t, std::string_view) { ++shown; });
    });
    EXPECT_TRUE(message == "no error" || shown == 0) << message;
    return message;
  };
  ModelConfig config = TinyConfig("latte");
  config.max_length = 32;
  config.decoder.positions = PositionKind::kLearned;
  EXPECT_EQ(refused(config, 20), "no error");
  EXPECT_NE(refused(config, 21).find("the 32 tokens where the"), std::string::npos);
  config.positions = PositionKind::kLearned;
  config.decoder.max_length = 48;
  EXPECT_EQ(refused(config, 36), "no error");
  EXPECT_NE(refused(config, 37).find("the 48 tokens where the"), std::string::npos);
  config.decoder.positions = PositionKind::kNone;
  EXPECT_EQ(refused(config, 60), "no error");
}

TEST(Generate, GrowingStatesAreForetold) {
  EXPECT_NE(ErrorMessage([] {
              CheckStateGrowth(TinyConfig("softmax"), 600'000'000, 4096, 1'000'000'000);
            }).find("softmax attention grows"),
            std::string::npos);
  EXPECT_NO_THROW(CheckStateGrowth(TinyConfig("softmax"), 400'000'000, 4096, 1'000'000'000));
  EXPECT_NO_THROW(CheckStateGrowth(TinyConfig("latte"), 600'000'000, 4096, 1'000'000'000));
}

TEST(Measure, BoundedStatesStayFlat) {
  const auto flat = MeasureDecoding(*TinyModel(TinyConfig("latte")), {0, 200, 400}, 8);
  ASSERT_EQ(flat.size(), 3u);
  EXPECT_EQ(flat[2].position, 400);
  EXPECT_EQ(flat[0].state_bytes, flat[2].state_bytes);
  EXPECT_GT(flat[1].milliseconds, 0);
  const auto softmax = TinyModel(TinyConfig("softmax"));
  const auto grows = MeasureDecoding(*softmax, {0, 400}, 8);
  EXPECT_LT(grows[0].state_bytes, grows[1].state_bytes);
  // Without the room that a cache keeps to grow into.
  EXPECT_EQ(grows[0].state_bytes, softmax->StateBytes(1, 0));
  EXPECT_EQ(grows[1].state_bytes, softmax->StateBytes(1, 400));
  // The choice of the next token is part of what is timed.
  const SamplerOptions wrong{.temperature = -1};
  EXPECT_THROW(MeasureDecoding(*TinyModel(TinyConfig("latte")), {0}, 2, nullptr, wrong), Error);
}

TEST(LmFolder, OpensAndRefuses) {
  TestFolder folder;
  const std::string path = folder / "model";
  EXPECT_NE(ErrorMessage([&] { OpenLmFolder(path); }).find("there is no folder"),
            std::string::npos);
  const auto model = std::dynamic_pointer_cast<DecoderLm>(MakeModel(TinyConfig("latte"), 5));
  SaveModel(*model, path);
  SaveModel(*model, path + "/epoch-2");  // without it, too
  const std::string lacks = ErrorMessage([&] { OpenLmFolder(path); });
  EXPECT_NE(lacks.find("lacks tokenizer.json"), std::string::npos) << lacks;
  EXPECT_EQ(lacks.find("model folders inside"), std::string::npos) << lacks;
  ByteTokens()->Save(path + "/tokenizer.json");
  EXPECT_EQ(OpenLmFolder(path).model->options().dtype(), at::kFloat);
  EXPECT_EQ(OpenLmFolder(path, "float64").model->options().dtype(), at::kDouble);
  EXPECT_EQ(OpenLmFolder(path, "bfloat16").model->options().dtype(), at::kFloat);
  EXPECT_NE(
      ErrorMessage([&] { OpenLmFolder(folder.path()); }).find("model folders inside: " + path),
      std::string::npos);
  EXPECT_NE(ErrorMessage([&] { OpenLmFolder(path + "/config.json"); }).find("is a file"),
            std::string::npos);
  // A run before its first evaluation: checkpoints are no way out.
  const std::string run = folder / "a run";
  SaveModel(*model, run + "/checkpoint-2");
  WriteFileAtomically(run + "/checkpoint-2/trainer.json", "{}");
  const std::string early = ErrorMessage([&] { OpenLmFolder(run); });
  EXPECT_NE(early.find("train --resume --out '" + run + "'`"), std::string::npos) << early;
  EXPECT_EQ(early.find("checkpoint-2"), std::string::npos) << early;

  ModelConfig other = TinyConfig("latte");
  other.kind = "encoder_classifier";
  other.classes = 3;
  other.conv = 0;
  SaveModel(*MakeModel(other, 1), folder / "classifier");
  EXPECT_NE(
      ErrorMessage([&] { OpenLmFolder(folder / "classifier"); }).find("kind encoder_classifier"),
      std::string::npos);
}

// docs/decoding.md shows the very code of examples/decode.
TEST(Docs, ShowTheExample) {
  const char* root = std::getenv("CISTERN_SOURCE_DIR");
  if (!root) GTEST_SKIP() << "CISTERN_SOURCE_DIR is not set";
  const std::string code = ReadFile(std::string(root) + "/examples/decode/decode.cc"),
                    page = ReadFile(std::string(root) + "/docs/decoding.md");
  for (const std::string part : {"decode", "text"}) {
    const std::string mark = "// [begin " + part + "]\n";
    const size_t begin = code.find(mark), end = code.find("// [end " + part + "]");
    ASSERT_NE(begin, std::string::npos);
    EXPECT_NE(page.find(code.substr(begin + mark.size(), end - begin - mark.size())),
              std::string::npos)
        << "copy the part between the marks of '" << part << "' into docs/decoding.md";
  }
}

}  // namespace
}  // namespace cistern

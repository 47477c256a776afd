// A text read once and continued: in one piece or after a stop, from memory or a file, to the
// bit.
#include "cistern/decode/text_state.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <utility>

#include "cistern/attention/mechanism.h"
#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/decode/generate.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/test_folder.h"
#include "cistern/models/decoder_lm.h"
#include "cistern/models/model_state_file.h"

namespace cistern {
namespace {

ModelConfig StateConfig(std::vector<std::string> attention) {
  ModelConfig c;
  c.vocab_size = 256;
  c.dim = 16;
  c.heads = 2;
  c.conv = 3;
  c.init_std = 0.3;
  c.layers = int64_t(attention.size());
  c.attention = std::move(attention);
  for (const MechanismInfo* info : Mechanisms()) c.attention_options[info->name] = info->cases[0];
  return c;
}

std::shared_ptr<DecoderLm> StateModel(const ModelConfig& config, uint64_t seed = 5) {
  auto model = std::dynamic_pointer_cast<DecoderLm>(MakeModel(config, seed));
  model->eval();
  return model;
}

std::vector<std::string> Decoding() {
  std::vector<std::string> names;
  for (const MechanismInfo* info : Mechanisms()) {
    if (info->verbs && info->Supports(Form::kCausal)) names.push_back(info->name);
  }
  return names;
}

std::vector<PromptSource> Sources(const std::vector<std::string>& prompts) {
  std::vector<PromptSource> out;
  for (const std::string& p : prompts) out.push_back(StringSource(p));
  return out;
}

std::unique_ptr<Tokenizer> Bpe(const std::string& text, int64_t vocab_size) {
  bool given = false;
  return TrainBpe(
      [&] { return std::exchange(given, true) ? std::string_view() : std::string_view(text); },
      vocab_size);
}

GenerateOptions Drawing(int64_t tokens) {
  GenerateOptions options;
  options.max_tokens = tokens;
  options.sampler = {.temperature = 1,
                     .top_p = 0.95,
                     .repetition_penalty = 1.3,
                     .repetition_window = 30,
                     .seed = 3};
  return options;
}

Generation Joined(Generation a, const Generation& b) {
  a.tokens.insert(a.tokens.end(), b.tokens.begin(), b.tokens.end());
  a.logprobs.insert(a.logprobs.end(), b.logprobs.begin(), b.logprobs.end());
  return a;
}

TEST(TextState, StoppingChangesNoBit) {
  const TestFolder folder;
  const std::string path = folder / "text.state", prompt = "a prompt of some length: ";
  const std::shared_ptr<const Tokenizer> tokenizer = MakeByteTokenizer();
  std::vector<std::vector<std::string>> models = {Decoding()};
  for (const std::string& name : Decoding()) models.push_back({name, name});
  for (const auto& attention : models) {
    const auto model = StateModel(StateConfig(attention));
    const std::string what = model->config().Summary();
    Generator generator(model, tokenizer);
    const Generation whole = generator.Run(Sources({prompt}), Drawing(40))[0];
    ASSERT_EQ(whole.tokens.size(), 40u);
    for (const int64_t first : {0, 1, 17}) {
      for (const bool file : {false, true}) {
        TextState text = generator.Empty();
        const Generation a = generator.Continue(text, Sources({prompt}), Drawing(first))[0];
        EXPECT_EQ(text.position(0), int64_t(prompt.size()) + first) << what;
        if (file) {
          SaveTextState(path, *model, *tokenizer, text);
          text = LoadTextState(path, *model, *tokenizer);
        }
        const Generation b = generator.Continue(text, Sources({""}), Drawing(40 - first))[0];
        const Generation both = Joined(a, b);
        EXPECT_EQ(both.tokens, whole.tokens) << what << ", stopped after " << first;
        EXPECT_EQ(both.logprobs, whole.logprobs) << what << ", stopped after " << first;
      }
    }
  }
}

TEST(TextState, AFileHasTheWidthOfTheStack) {
  const TestFolder folder;
  const std::string path = folder / "text.state";
  ModelConfig config = StateConfig({"latte"});
  config.decoder.dim = 24;
  const auto model = StateModel(config);
  const std::shared_ptr<const Tokenizer> tokenizer = MakeByteTokenizer();
  Generator generator(model, tokenizer);
  TextState text = generator.Empty();
  generator.Continue(text, Sources({"a prompt"}), Drawing(0));
  SaveTextState(path, *model, *tokenizer, text);
  TextState loaded = LoadTextState(path, *model, *tokenizer);
  EXPECT_EQ(generator.Continue(loaded, Sources({""}), Drawing(10))[0].tokens,
            generator.Continue(text, Sources({""}), Drawing(10))[0].tokens);
}

TEST(TextState, ReadOnceUsedOften) {
  const auto model = StateModel(StateConfig(Decoding()));
  model->to(at::kDouble);
  Generator generator(model, MakeByteTokenizer());
  const std::string book = "a long book that is read once; ";
  TextState text = generator.Empty();
  generator.Continue(text, Sources({book}), Drawing(0));
  const std::vector<std::string> prompts = {"and so", "", "but then a longer one", "and so"};
  for (int round = 0; round < 2; ++round) {  // what was read stays as it is
    const auto batch = generator.Run(Sources(prompts), Drawing(20), {}, nullptr, &text);
    for (size_t b = 0; b < prompts.size(); ++b) {
      GenerateOptions options = Drawing(20);
      options.first_row = int64_t(b);
      const Generation alone = generator.Run(book + prompts[b], options);
      EXPECT_EQ(batch[b].tokens, alone.tokens) << b;
      EXPECT_EQ(batch[b].prompt_tokens, int64_t(prompts[b].size()));
    }
  }
  // A checkpoint, and back.
  const TextState kept = text.Clone();
  const Generation first = generator.Continue(text, Sources({"one way"}), Drawing(10))[0];
  text = kept.Clone();
  generator.Continue(text, Sources({"another way"}), Drawing(10));
  text = kept.Clone();
  EXPECT_EQ(generator.Continue(text, Sources({"one way"}), Drawing(10))[0].tokens, first.tokens);
  EXPECT_NE(ErrorMessage([&] {
              generator.Continue(text, Sources({"a", "b"}), Drawing(1));
            }).find("1 rows, got 2 prompts"),
            std::string::npos);
  TextState two = text.Reorder({0, 0});
  EXPECT_NE(ErrorMessage([&] {
              generator.Run(Sources({"a"}), Drawing(1), {}, nullptr, &two);
            }).find("one row, got 2"),
            std::string::npos);
}

TEST(TextState, RowsThatEndAtDifferentTimesGoOnAsEachAlone) {
  const auto model = StateModel(StateConfig({"latte", "softmax"}));
  model->to(at::kDouble);
  Generator generator(model, MakeByteTokenizer());
  GenerateOptions options = Drawing(30);
  options.stop = {"e", "q", "7"};
  const std::vector<std::string> prompts = {"short", "a good deal longer than that", "", "short"},
                                 more = {"x", "", "yz", ""};
  TextState text = generator.Empty(4);
  const auto first = generator.Continue(text, Sources(prompts), options);
  const auto second = generator.Continue(text, Sources(more), options);
  bool different = false;
  for (size_t b = 0; b < prompts.size(); ++b) {
    different = different || first[b].tokens.size() != first[0].tokens.size();
    options.first_row = int64_t(b);
    TextState alone = generator.Empty();
    EXPECT_EQ(generator.Continue(alone, Sources({prompts[b]}), options)[0].tokens, first[b].tokens)
        << b;
    EXPECT_EQ(alone.position(0), text.position(int64_t(b)) - int64_t(more[b].size()) -
                                     int64_t(second[b].tokens.size()))
        << b;
    EXPECT_EQ(generator.Continue(alone, Sources({more[b]}), options)[0].tokens, second[b].tokens)
        << b;
    // All that was read and drawn is in the state, the stop string too.
    EXPECT_EQ(alone.position(0), text.position(int64_t(b))) << b;
    for (const int32_t token : first[b].tokens) EXPECT_TRUE(text.history[b].ever[size_t(token)]);
  }
  EXPECT_TRUE(different) << "the rows should end at different steps";
}

TEST(TextState, TheEndOfATextIsLeftOut) {
  // Bytes and <|endoftext|>, and a model whose head likes nothing else.
  const TestFolder folder;
  std::string json = MakeByteTokenizer()->ToJson();
  const std::string none = "\"added_tokens\": []";
  ASSERT_NE(json.find(none), std::string::npos);
  json.replace(json.find(none), none.size(),
               R"("added_tokens": [{"id": 256, "content": "<|endoftext|>", "special": true}])");
  WriteFileAtomically(folder / "tokenizer.json", json);
  const std::shared_ptr<const Tokenizer> tokenizer = LoadTokenizer(folder / "tokenizer.json");
  const int32_t end = tokenizer->AddedToken("<|endoftext|>");
  ASSERT_EQ(end, 256);
  ModelConfig config = StateConfig({"latte"});
  config.vocab_size = tokenizer->vocab_size();
  config.tie_embeddings = false, config.head_bias = true;
  const auto model = StateModel(config);
  {
    at::NoGradGuard guard;
    model->named_parameters()["lm_head.bias"][end].fill_(1e6);
  }
  Generator generator(model, tokenizer);
  TextState text = generator.Empty();
  const Generation g = generator.Continue(text, Sources({"the sea"}), Drawing(5))[0];
  EXPECT_EQ(g.finish, Finish::kStopToken);
  EXPECT_EQ(g.tokens, std::vector<int32_t>{end});
  EXPECT_EQ(text.position(0), g.prompt_tokens);
  EXPECT_EQ(generator.Continue(text, Sources({""}), Drawing(5))[0].tokens, g.tokens);
}

TEST(TextState, AnInterruptSaysWhetherThePromptWasRead) {
  Generator generator(StateModel(StateConfig({"latte"})), MakeByteTokenizer());
  std::atomic<bool> interrupt{true};
  TextState text = generator.Empty();
  EXPECT_FALSE(
      generator.Continue(text, Sources({"abc"}), Drawing(5), {}, &interrupt)[0].prompt_read);
  interrupt = false;
  const auto g = generator.Continue(
      text, Sources({"abc"}), Drawing(50), [&](size_t, std::string_view) { interrupt = true; },
      &interrupt)[0];
  EXPECT_TRUE(g.prompt_read);
  EXPECT_EQ(g.finish, Finish::kInterrupted);
  EXPECT_EQ(text.position(0), 3 + int64_t(g.tokens.size()));  // and the text can be continued
}

TEST(TextState, FilesThatDoNotFit) {
  at::NoGradGuard guard;
  const TestFolder folder;
  const std::string path = folder / "text.state";
  const auto model = StateModel(StateConfig({"latte"}));
  const std::shared_ptr<const Tokenizer> tokenizer = MakeByteTokenizer();
  Generator generator(model, tokenizer);
  TextState text = generator.Empty();
  EXPECT_NE(ErrorMessage([&] {
              SaveTextState(path, *model, *tokenizer, text);
            }).find("nothing has been read yet"),
            std::string::npos);
  generator.Continue(text, Sources({"abc"}), Drawing(2));
  SaveTextState(path, *model, *tokenizer, text);

  const auto message = [&] {
    return ErrorMessage([&] { LoadTextState(path, *model, *tokenizer); });
  };
  EXPECT_EQ(message(), "no error");
  const std::string own = HexText(tokenizer->Hash());
  const auto other = Bpe("abcabcabc", 257);
  EXPECT_NE(ErrorMessage([&] {
              LoadTextState(path, *model, *other);
            }).find("another tokenizer (hash " + own),
            std::string::npos);

  // Everything but the model's own state, changed.
  const auto changed = [&](const std::string& name, const at::Tensor& value) {
    SaveTextState(path, *model, *tokenizer, text);
    ModelStateFile file = LoadModelState(path, *model, {{"tokenizer", own}});
    std::erase_if(file.extra, [&](const NamedTensor& t) { return t.name == name; });
    if (value.defined()) file.extra.push_back({name, value});
    SaveModelState(path, *model, file);
    return message();
  };
  EXPECT_EQ(changed("text.none", at::Tensor()), "no error");
  const auto expect = [](const std::string& text_, const std::vector<std::string>& parts) {
    for (const std::string& part : parts)
      EXPECT_NE(text_.find(part), std::string::npos) << "'" << part << "' is missing in " << text_;
  };
  expect(changed("text.hidden", at::Tensor()),
         {path, "text.hidden", "missing", "can be continued"});
  expect(changed("text.hidden", at::ones({1, 16})), {path, "text.hidden", "[1, 16]", "[1, 1, 16]"});
  expect(changed("text.drawn", at::ones({1})), {path, "text.drawn", "Float", "Long"});
  expect(changed("text.drawn", at::tensor({int64_t{-2}})), {path, "text.drawn", "below 0"});
  expect(changed("text.ever", at::ones({1, 255}, at::kBool)),
         {path, "text.ever", "[1, 255]", "[1, 256]"});
  expect(changed("text.recent", at::full({1, 3}, 256, at::kInt)), {path, "text.recent", "256"});
  expect(changed("text.recent", at::ones({3}, at::kInt)), {path, "text.recent", "[3]"});
}

TEST(TextState, ALongHistoryRefusesLongerWindows) {
  Generator generator(StateModel(StateConfig({"latte"})), MakeByteTokenizer());
  TextState text = generator.Empty();
  GenerateOptions options = Drawing(2);
  options.sampler.repetition_window = TokenHistory::kRecent + 1;
  generator.Continue(text, Sources({std::string(TokenHistory::kRecent, 'a')}), options);
  EXPECT_EQ(int64_t(text.history[0].recent.size()), TokenHistory::kRecent);
  EXPECT_NE(ErrorMessage([&] {
              generator.Continue(text, Sources({""}), options);
            }).find("its last 8192 tokens"),
            std::string::npos);
  options.sampler.repetition_window = TokenHistory::kRecent;
  EXPECT_NO_THROW(generator.Continue(text, Sources({""}), options));
  options.sampler.repetition_window = 0;
  EXPECT_NO_THROW(generator.Continue(text, Sources({""}), options));
}

}  // namespace
}  // namespace cistern

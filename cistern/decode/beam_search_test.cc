// Beams against plain searches that run whole sequences, without states.
#include "cistern/decode/beam_search.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "cistern/base/error.h"
#include "cistern/decode/eval_scope.h"
#include "cistern/io/test_folder.h"

namespace cistern {
namespace {

constexpr int32_t kEnd = 3;

std::shared_ptr<LanguageModel> Translator(const std::string& attention, int64_t vocab,
                                          int64_t seed = 1) {
  ModelConfig c;
  c.kind = "encoder_decoder";
  c.vocab_size = vocab, c.dim = 12, c.heads = 2, c.max_length = 64, c.layers = 2;
  c.attention = {attention}, c.positions = PositionKind::kSinusoidal;
  c.attention_options = Json{{"latte", {{"latents", 6}}}, {"abc_mlp", {{"slots", 3}}}};
  c.init_std = 0.4;
  c.embedding_std = 1, c.tie_embeddings = false;  // tied, it would repeat what it reads
  auto model = std::dynamic_pointer_cast<LanguageModel>(MakeModel(c, uint64_t(seed)));
  model->to(at::kDouble);
  model->eval();
  return model;
}

// log p of the next token after start and `tokens`, [V].
std::vector<double> NextLogprobs(LanguageModel& model, const at::Tensor& source,
                                 const std::vector<int32_t>& tokens) {
  const EvalScope scope(model);
  std::vector<int64_t> ids = {kEnd};
  ids.insert(ids.end(), tokens.begin(), tokens.end());
  NamedTensors batch;
  batch.Set("source", source);
  batch.Set("ids", at::tensor(ids, at::kLong).unsqueeze(0));
  const at::Tensor p =
      at::log_softmax(model.Logits(model.HiddenOfRows(batch))[0][int64_t(tokens.size())], 0)
          .contiguous();
  return {p.const_data_ptr<double>(), p.const_data_ptr<double>() + p.numel()};
}

Hypothesis Greedy(LanguageModel& model, const at::Tensor& source, int64_t most) {
  Hypothesis h;
  while (int64_t(h.tokens.size()) < most) {
    const std::vector<double> p = NextLogprobs(model, source, h.tokens);
    const auto best = std::max_element(p.begin(), p.end());
    h.logprob += *best;
    if (best - p.begin() == kEnd) {
      h.ended = true;
      break;
    }
    h.tokens.push_back(int32_t(best - p.begin()));
  }
  return h;
}

// The best of all sequences that end within `most` tokens.
void Exhaustive(LanguageModel& model, const at::Tensor& source, const Hypothesis& begun,
                int64_t most, double length_penalty, Hypothesis* best) {
  if (int64_t(begun.tokens.size()) == most) return;
  const std::vector<double> p = NextLogprobs(model, source, begun.tokens);
  for (size_t token = 0; token < p.size(); ++token) {
    Hypothesis h = begun;
    h.logprob += p[token];
    if (int32_t(token) != kEnd) {
      h.tokens.push_back(int32_t(token));
      Exhaustive(model, source, h, most, length_penalty, best);
      continue;
    }
    h.ended = true;
    if (!best->ended || h.Score(length_penalty) > best->Score(length_penalty)) *best = h;
  }
}

at::Tensor Source(int64_t rows, int64_t vocab) {
  at::manual_seed(5);
  return at::randint(0, vocab, {rows, 6}, at::kLong);
}

BeamOptions Options(int64_t beam, const std::vector<int64_t>& most, double length_penalty = 1) {
  return {beam, length_penalty, kEnd, kEnd, most};
}

std::vector<Hypothesis> Search(LanguageModel& model, const at::Tensor& source,
                               const BeamOptions& options) {
  const DecodeScope scope(model);
  return BeamSearch(model, model.Encode(source, {}), options);
}

TEST(BeamSearch, OneBeamTakesTheLikeliestTokens) {
  for (const std::string attention : {"softmax", "latte", "abc_mlp"}) {
    const auto model = Translator(attention, 11);
    const at::Tensor source = Source(4, 11);
    const std::vector<int64_t> most = {9, 1, 12, 5};
    const std::vector<Hypothesis> found = Search(*model, source, Options(1, most));
    ASSERT_EQ(found.size(), 4u);
    for (int64_t r = 0; r < 4; ++r) {
      const Hypothesis wanted = Greedy(*model, source.narrow(0, r, 1), most[size_t(r)]);
      EXPECT_EQ(found[size_t(r)].tokens, wanted.tokens) << attention << " row " << r;
      EXPECT_EQ(found[size_t(r)].ended, wanted.ended) << attention << " row " << r;
      EXPECT_NEAR(found[size_t(r)].logprob, wanted.logprob, 1e-9) << attention << " row " << r;
    }
  }
}

TEST(BeamSearch, BeamsForAllSequencesFindTheBest) {
  size_t longest = 0;
  for (const std::string attention : {"softmax", "latte", "abc_mlp"}) {
    for (const double penalty : {0.0, 0.6, 2.0}) {
      const auto model = Translator(attention, 4, 3);
      const at::Tensor source = Source(3, 4);
      const std::vector<Hypothesis> found =
          Search(*model, source, Options(120, {4, 3, 4}, penalty));
      for (int64_t r = 0; r < 3; ++r) {
        Hypothesis best;
        Exhaustive(*model, source.narrow(0, r, 1), {}, r == 1 ? 3 : 4, penalty, &best);
        EXPECT_EQ(found[size_t(r)].tokens, best.tokens) << attention << " " << penalty << " " << r;
        EXPECT_TRUE(found[size_t(r)].ended);
        EXPECT_NEAR(found[size_t(r)].logprob, best.logprob, 1e-9) << attention;
        longest = std::max(longest, best.tokens.size());
      }
    }
  }
  EXPECT_GE(longest, 2u);
}

// Beams change places, and rows end at different steps: states go with them.
TEST(BeamSearch, LogprobsAreThoseOfTheTokens) {
  bool ended = false, cut = false;  // both occur
  for (const std::string attention : {"softmax", "latte", "abc_mlp"}) {
    const auto model = Translator(attention, 17, 2);
    const at::Tensor source = Source(6, 17);
    const std::vector<Hypothesis> found =
        Search(*model, source, Options(3, {10, 4, 10, 7, 10, 2}, 0.6));
    for (int64_t r = 0; r < 6; ++r) {
      const Hypothesis& h = found[size_t(r)];
      double sum = 0;
      std::vector<int32_t> before;
      for (size_t t = 0; t < h.tokens.size() + (h.ended ? 1 : 0); ++t) {
        const int32_t token = t < h.tokens.size() ? h.tokens[t] : kEnd;
        sum += NextLogprobs(*model, source.narrow(0, r, 1), before)[size_t(token)];
        before.push_back(token);
      }
      EXPECT_NEAR(h.logprob, sum, 1e-9) << attention << " row " << r;
      const std::vector<Hypothesis> alone =
          Search(*model, source.narrow(0, r, 1),
                 Options(3, {std::vector<int64_t>{10, 4, 10, 7, 10, 2}[size_t(r)]}, 0.6));
      EXPECT_EQ(h.tokens, alone[0].tokens) << attention << " row " << r;
      ended = ended || h.ended, cut = cut || !h.ended;
    }
  }
  EXPECT_TRUE(ended && cut);
}

TEST(BeamSearch, WiderBeamsAreNoLessLikely) {
  const std::vector<int64_t> most(8, 8);
  int64_t compared = 0;
  double gained = 0;
  for (const int64_t seed : {1, 8}) {  // of few tokens, so that one beam comes to an end as well
    const auto model = Translator("softmax", 4, seed);
    const at::Tensor source = Source(8, 4);
    const auto narrow = Search(*model, source, Options(1, most, 0)),
               wide = Search(*model, source, Options(12, most, 0));
    for (size_t r = 0; r < 8; ++r) {
      if (!narrow[r].ended) continue;
      ++compared;
      EXPECT_TRUE(wide[r].ended) << "row " << r;
      EXPECT_GE(wide[r].logprob, narrow[r].logprob - 1e-9);
      gained += wide[r].logprob - narrow[r].logprob;
    }
  }
  EXPECT_GT(compared, 0);
  EXPECT_GT(gained, 0.1);  // one beam is not always the likeliest
}

TEST(BeamSearch, Refusals) {
  const auto model = Translator("softmax", 11);
  const at::Tensor source = Source(2, 11);
  const auto error = [&](const BeamOptions& o) {
    return ErrorMessage([&] { Search(*model, source, o); });
  };
  EXPECT_EQ(error(Options(0, {3, 3})), "beam must be 1 or above, got 0");
  EXPECT_NE(error(Options(1, {3})).find("the state has 2 rows"), std::string::npos);
  EXPECT_NE(error(Options(1, {3, 0})).find("at least one token a row"), std::string::npos);
  BeamOptions beyond = Options(1, {3, 3});
  beyond.end = 11;
  EXPECT_NE(error(beyond).find("among the model's 11 tokens"), std::string::npos);
  std::atomic<bool> stop = true;
  BeamOptions stopped = Options(2, {3, 3});
  stopped.interrupted = &stop;
  EXPECT_TRUE(Search(*model, source, stopped)[0].tokens.empty());
  const at::NoGradGuard guard;
  model->parameters()[0].fill_(NAN);
  EXPECT_NE(error(Options(1, {3, 3})).find("not finite"), std::string::npos);
}

}  // namespace
}  // namespace cistern

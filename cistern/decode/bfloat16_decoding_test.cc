#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <optional>

#include "cistern/attention/testing_mechanisms.h"
#include "cistern/decode/eval_scope.h"
#include "cistern/models/decoder_lm.h"
#include "cistern/ops/kept_weights.h"

namespace cistern {
namespace {

constexpr int64_t kVocab = 40, kPrompt = 30;

std::vector<ModelConfig> Configs() {
  std::vector<ModelConfig> all;
  const auto add = [&](const std::string& attention) -> ModelConfig& {
    ModelConfig c;
    c.vocab_size = kVocab, c.dim = 48, c.heads = 2, c.max_length = 64, c.layers = 2;
    c.attention = {attention};
    for (const MechanismInfo* info : Mechanisms()) c.attention_options[info->name] = info->cases[0];
    c.init_std = 0.2;
    all.push_back(c);
    return all.back();
  };
  for (const MechanismInfo* info : Mechanisms()) {
    if (info->verbs && info->Supports(Form::kCausal)) add(info->name);
  }
  add("softmax:1+latte:1").attention_options["latte"] = {{"latents", 3}};
  ModelConfig& own = add("latte");
  own.conv = 3, own.positions = PositionKind::kSinusoidal, own.tie_embeddings = false,
  own.bias = true;
  own.norm = NormPlace::kPost;
  return all;
}

std::shared_ptr<DecoderLm> Make(const ModelConfig& config, bool round) {
  auto model = std::dynamic_pointer_cast<DecoderLm>(MakeModel(config, 3));
  const at::NoGradGuard no_grad;
  for (at::Tensor& p : model->parameters()) {
    if (round) p.copy_(p.to(at::kBFloat16));
  }
  model->eval();
  return model;
}

at::Tensor Ids(int64_t length) {
  at::manual_seed(length);
  return at::randint(kVocab, {2, length}, at::kLong);
}

struct Decoded {
  at::Tensor prompt, tokens;  // logits [B,T,V]
  ModelState state;
};

// A prompt of more rows than the kernel of few rows takes, then single tokens.
Decoded Decode(DecoderLm& model, bool bfloat16, std::optional<ModelState> from = {}) {
  const DecodeScope scope(model);
  const BFloat16Decoding narrow(bfloat16, model);
  Decoded out{{}, {}, from ? from->Clone() : model.EmptyState(2)};
  if (!from) out.prompt = model.Logits(model.Hidden(Ids(kPrompt), out.state));
  std::vector<at::Tensor> tokens;
  for (int64_t i = 1; i <= 5; ++i)
    tokens.push_back(model.Extend(Ids(i).narrow(1, 0, 1), out.state));
  out.tokens = at::cat(tokens, 1);
  return out;
}

double Relative(const at::Tensor& got, const at::Tensor& want) {
  return ((got - want).abs().max() / want.abs().max()).item<double>();
}

bool Folds(const ModelConfig& c) { return c.attention[0] == "t2r"; }

TEST(BFloat16Decoding, IsNearFloatAndLeavesItsStates) {
  for (const ModelConfig& config : Configs()) {
    const auto model = Make(config, false);
    const Decoded narrow = Decode(*model, true), want = Decode(*model, false);
    const std::string what = config.attention[0];
    EXPECT_LT(Relative(narrow.prompt, want.prompt), 0.03) << what;
    EXPECT_LT(Relative(narrow.tokens, want.tokens), 0.03) << what;
    EXPECT_FALSE(at::equal(narrow.tokens, want.tokens.to(narrow.tokens.dtype()))) << what;
    ASSERT_EQ(narrow.state.layers.size(), want.state.layers.size()) << what;
    for (size_t i = 0; i < want.state.layers.size(); ++i) {
      const auto &got = narrow.state.layers[i].tensors, &expected = want.state.layers[i].tensors;
      ASSERT_EQ(got.size(), expected.size()) << what;
      for (size_t j = 0; j < got.size(); ++j) {
        const at::Tensor &a = got[j].value, &b = expected[j].value;
        ASSERT_EQ(a.defined(), b.defined()) << what << " " << got[j].name;
        if (!a.defined()) continue;
        EXPECT_EQ(a.scalar_type(), b.scalar_type()) << what << " " << got[j].name;
        EXPECT_EQ(a.sizes(), b.sizes()) << what << " " << got[j].name;
      }
    }
    // A text goes on in the other dtype.
    const at::Tensor on = Decode(*model, false, narrow.state).tokens;
    EXPECT_LT(Relative(on, Decode(*model, false, want.state).tokens), 0.03) << what;
    EXPECT_EQ(on.scalar_type(), at::kFloat) << what;
  }
}

// A token's rows are in float: weights that bfloat16 holds give what float gives, to the bit.
TEST(BFloat16Decoding, OfTokensRoundsWeightsAlone) {
  for (const ModelConfig& config : Configs()) {
    if (Folds(config)) continue;  // its folded weights are rounded again
    const auto model = Make(config, true);
    const ModelState state = Decode(*model, false).state;
    EXPECT_TRUE(at::equal(Decode(*model, true, state).tokens, Decode(*model, false, state).tokens))
        << config.attention[0];
  }
}

// What is kept is kept once: a text of any length takes the same memory.
TEST(BFloat16Decoding, KeepsAsMuchAtEveryToken) {
  std::vector<ModelConfig> configs = Configs();
  ModelConfig adaptive = configs.back();
  adaptive.own["decoder_lm"] = Json{{"embedding", "adaptive"}, {"cutoffs", {10, 20}}};
  adaptive.bias = adaptive.head_bias = false, adaptive.tie_embeddings = true;
  configs.push_back(adaptive);
  for (const ModelConfig& config : configs) {
    const auto model = Make(config, false);
    const DecodeScope scope(*model);
    const BFloat16Decoding narrow(true, *model);
    ModelState state = model->EmptyState(2);
    size_t kept = 0;
    for (int64_t i = 1; i <= 12; ++i) {
      model->Extend(Ids(i).narrow(1, 0, 1), state);
      if (i == 4) kept = ops::KeptWeights();
    }
    EXPECT_GT(kept, 0u) << config.Summary();
    EXPECT_EQ(ops::KeptWeights(), kept) << config.Summary();
  }
}

// Weights that were written to while a scope keeps them are rounded again.
TEST(BFloat16Decoding, SeesNewWeights) {
  const auto model = Make(Configs()[0], false);
  const ModelState state = Decode(*model, false).state;
  const auto decode = [&] { return Decode(*model, true, state).tokens; };
  std::optional<BFloat16Decoding> around(std::in_place, true, *model);
  const at::Tensor before = decode();
  {
    const at::NoGradGuard no_grad;
    for (at::Tensor& p : model->parameters()) p.mul_(0.7);
  }
  const at::Tensor kept = decode();
  around.reset();
  EXPECT_TRUE(at::equal(kept, decode()));
  EXPECT_FALSE(at::equal(kept, before));
}

}  // namespace
}  // namespace cistern

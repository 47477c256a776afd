// Parts of T5 in whole models: relative positions, RMSNorm, scores that are not scaled, embeddings
// that are, heads that together are not as wide as the model; with scores copied by reuse. Against
// a plain computation in double.
#include <cmath>
#include <functional>

#include "cistern/attention/testing_mechanisms.h"
#include "cistern/base/error.h"
#include "cistern/io/test_folder.h"
#include "cistern/models/encoder_decoder.h"
#include "cistern/models/model_state_file.h"
#include "cistern/models/testing_models.h"
#include "cistern/tensors/device.h"

namespace cistern {
namespace {

using namespace cistern::testing;
using ops::ImplName;
using ops::ImplScope;

constexpr int64_t kVocab = 23, kModel = 12, kLayerHeads = 3, kHeadWidth = 6;

ModelConfig T5(const std::string& mechanism, const Json& options = Json::object(),
               const std::string& kind = "decoder_lm") {
  ModelConfig c;
  c.kind = kind;
  if (kind == "encoder_classifier") c.classes = 4, c.head = HeadKind::kLinear;
  c.vocab_size = kVocab, c.dim = kModel, c.qkv_dim = kLayerHeads * kHeadWidth;
  c.heads = kLayerHeads, c.layers = 3, c.max_length = 300;
  c.attention = {mechanism};
  Json all = options;
  all["scale"] = "unit";
  c.attention_options = Json{{mechanism, all}};
  c.norm_kind = NormKind::kRms, c.activation = Activation::kRelu;
  c.positions = PositionKind::kRelative, c.norm_eps = 1e-6;
  if (kind != "encoder_classifier") c.scale_embeddings = c.scale_logits = true;
  return c;
}

int64_t Bucket(int64_t distance, bool causal) {  // key - query
  const int64_t buckets = causal ? 32 : 16, exact = buckets / 2;
  const int64_t offset = !causal && distance > 0 ? 16 : 0,
                n = causal ? std::max<int64_t>(0, -distance) : std::abs(distance);
  if (n < exact) return offset + n;
  const double steps = std::log(double(n) / double(exact)) / std::log(128.0 / double(exact));
  return offset + std::min(exact + int64_t(std::floor(steps * double(exact) + 1e-9)), buckets - 1);
}

at::Tensor Rms(const at::Tensor& x, const at::Tensor& weight) {
  return x / (x.square().mean(-1, true) + 1e-6).sqrt() * weight;
}

// The hidden states after the final norm of rows without padding; copied: heads that each layer
// takes over.
at::Tensor PlainHidden(const Model& m, const at::Tensor& ids, bool causal, bool scaled,
                       const std::vector<int64_t>& copied) {
  const auto all = m.named_parameters();
  const int64_t batch = ids.size(0), length = ids.size(1);
  const at::Tensor& table = all["layers.0.attention.core.relative_bias.weight"];
  const at::Tensor bucket = at::empty({length, length}, at::kLong);
  for (int64_t t = 0; t < length; ++t) {
    for (int64_t s = 0; s < length; ++s)
      bucket.mutable_data_ptr<int64_t>()[t * length + s] = Bucket(s - t, causal);
  }
  const at::Tensor bias = at::embedding(table, bucket).permute({2, 0, 1});
  at::Tensor x = at::embedding(all["embed_tokens.weight"], ids), list;
  if (scaled) x = x * std::sqrt(double(kModel));
  for (size_t i = 0; i < copied.size(); ++i) {
    const std::string layer = "layers." + std::to_string(i) + ".";
    const auto map = [&](const std::string& name, const at::Tensor& y) {
      return at::matmul(y, all[layer + name + ".weight"].t());
    };
    const auto heads = [&](const at::Tensor& y) {
      return y.view({batch, length, -1, kHeadWidth}).transpose(1, 2);
    };
    const at::Tensor h = Rms(x, all[layer + "attention_norm.weight"]);
    std::vector<at::Tensor> lists;
    if (const int64_t fresh = kLayerHeads - copied[i]; fresh > 0) {
      at::Tensor scores = at::matmul(heads(map("attention.q_proj", h)),
                                     heads(map("attention.k_proj", h)).transpose(2, 3)) +
                          bias.narrow(0, 0, fresh);
      if (causal) scores = scores.masked_fill(at::ones({length, length}, at::kBool).triu(1), -kInf);
      lists.push_back(at::softmax(scores, 3));
    }
    if (copied[i] > 0) lists.push_back(list.narrow(1, 0, copied[i]));
    list = at::cat(lists, 1);
    const at::Tensor y = at::matmul(list, heads(map("attention.v_proj", h)));
    x = x + map("attention.o_proj", y.transpose(1, 2).reshape({batch, length, -1}));
    x = x + map("ffn.down_proj",
                map("ffn.up_proj", Rms(x, all[layer + "ffn_norm.weight"])).clamp_min(0));
  }
  return Rms(x, all["norm.weight"]);
}

at::Tensor PlainLogits(const DecoderLm& m, const at::Tensor& ids,
                       const std::vector<int64_t>& copied) {
  return at::matmul(PlainHidden(m, ids, true, true, copied) / std::sqrt(double(kModel)),
                    m.named_parameters()["embed_tokens.weight"].t());
}

struct Case {
  ModelConfig config;
  std::vector<int64_t> copied;
};

std::vector<Case> Cases() {
  return {{T5("softmax"), {0, 0, 0}},
          {T5("reuse", {{"heads", 2}, {"placement", "partial"}}), {0, 2, 0}},
          {T5("reuse", {{"heads", 2}, {"placement", "partial"}, {"keep", "scores"}}), {0, 2, 0}},
          {T5("reuse", {{"placement", "full"}}), {0, 3, 3}}};
}

TEST(T5Parts, ADecoderIsItsFormulasWithItsGradients) {
  for (const Case& c : Cases()) {
    const auto m = Make<DecoderLm>(c.config);
    at::manual_seed(3);
    const at::Tensor ids = Ids(2, 150);
    const at::Tensor want = PlainLogits(*m, ids, c.copied);
    const auto want_g = Gradients(want.square().sum(), m->parameters());
    for (const ops::Impl impl : kImpls) {
      const ImplScope scope(impl);
      const std::string what = c.config.attention_options.dump() + " " + ImplName(impl);
      ModelState state = m->EmptyState(2);
      const at::Tensor got = m->Extend(ids, state);
      ExpectClose(got, want, 1e-11, what);
      {
        at::NoGradGuard guard;  // where the fused kernel is given the bias
        ModelState fresh = m->EmptyState(2);
        ExpectClose(m->Extend(ids, fresh), want, 1e-11, what + ", no gradients");
      }
      const auto g = Gradients(got.square().sum(), m->parameters());
      for (size_t i = 0; i < g.size(); ++i) {
        EXPECT_LE((g[i] - want_g[i]).norm().item<double>(),
                  1e-9 * want_g[i].norm().item<double>() + 1e-9)
            << what << " " << m->named_parameters().keys()[i];
      }
    }
  }
}

TEST(T5Parts, PiecesPaddedAndPackedRowsAreTheWhole) {
  at::NoGradGuard guard;
  for (const Case& c : Cases()) {
    const auto m = Make<DecoderLm>(c.config);
    const std::string what = c.config.attention_options.dump();
    at::manual_seed(3);
    const at::Tensor ids = Ids(2, 150), whole = PlainLogits(*m, ids, c.copied);
    std::vector<int64_t> each;
    for (int64_t t = 0; t <= 150; ++t) each.push_back(t);
    for (const std::vector<int64_t>& cuts : {std::vector<int64_t>{0, 70, 150}, each})
      ExpectClose(ExtendInPieces(*m, ids, cuts), whole, 1e-11, what);
    // Rows of 150 and 20 tokens, padded in the second piece; both go on afterwards.
    ModelState state;
    const ops::Mask mask = {Lengths({150, 20}), {}};
    const at::Tensor padded = ExtendInPieces(*m, ids, {0, 10, 150}, mask, &state);
    ExpectClose(padded[0], whole[0], 1e-11, what);
    ExpectClose(padded[1].narrow(0, 0, 20), whole[1].narrow(0, 0, 20), 1e-11, what);
    const at::Tensor more = Ids(2, 5), after = m->Extend(more, state);
    for (int64_t b = 0; b < 2; ++b) {
      const int64_t count = b == 0 ? 150 : 20;
      const at::Tensor row = at::cat({ids[b].narrow(0, 0, count), more[b]}).unsqueeze(0);
      ExpectClose(after[b], PlainLogits(*m, row, c.copied)[0].narrow(0, count, 5), 1e-11, what);
    }
    // Documents of 40, 90 and 20 tokens in one row, at once and cut within the second.
    const at::Tensor starts = at::zeros({1, 150}, at::kBool), row = ids.narrow(0, 0, 1);
    starts[0][40] = true, starts[0][130] = true;
    for (const std::vector<int64_t>& cuts :
         {std::vector<int64_t>{0, 150}, {0, 60, 150}, {0, 40, 41, 140, 150}}) {
      const at::Tensor got = ExtendInPieces(*m, row, cuts, {{}, starts});
      for (const auto& [begin, count] :
           std::vector<std::pair<int64_t, int64_t>>{{0, 40}, {40, 90}, {130, 20}}) {
        ExpectClose(got.narrow(1, begin, count),
                    PlainLogits(*m, row.narrow(1, begin, count), c.copied), 1e-11, what);
      }
    }
  }
}

TEST(T5Parts, AnEncoderSeesBothDirections) {
  at::NoGradGuard guard;
  for (Case& c : Cases()) {
    ModelConfig config =
        T5(c.config.attention[0], c.config.attention_options[c.config.attention[0]],
           "encoder_classifier");
    const auto m = Make<EncoderClassifier>(config);
    at::manual_seed(3);
    const at::Tensor ids = Ids(2, 150);
    const auto p = m->named_parameters();
    for (const ops::Impl impl : kImpls) {
      const ImplScope scope(impl);
      const at::Tensor got = m->Forward(ids, Lengths({150, 33}));
      for (int64_t b = 0; b < 2; ++b) {
        const at::Tensor row = ids.narrow(0, b, 1).narrow(1, 0, b == 0 ? 150 : 33);
        const at::Tensor pooled = PlainHidden(*m, row, false, false, c.copied).mean(1);
        ExpectClose(
            got.narrow(0, b, 1),
            at::linear(pooled, p["classifier.out_proj.weight"], p["classifier.out_proj.bias"]),
            1e-11, config.attention_options.dump() + ImplName(impl));
      }
    }
  }
}

TEST(T5Parts, OneTableIsTheFirstLayersAndSavedOnce) {
  const auto m = Make<DecoderLm>(T5("softmax"));
  int tables = 0;
  for (const auto& p : m->named_parameters())
    tables += p.key().find("relative_bias") != std::string::npos;
  EXPECT_EQ(tables, 1);
  EXPECT_TRUE(m->named_parameters().contains("layers.0.attention.core.relative_bias.weight"));
  at::NoGradGuard guard;
  const TestFolder folder;
  const auto single = Make<DecoderLm>(T5("softmax"), at::kFloat);
  SaveModel(*single, folder.path());
  const auto loaded = std::dynamic_pointer_cast<DecoderLm>(LoadModel(folder.path()));
  const at::Tensor ids = Ids(1, 40);
  ModelState a = single->EmptyState(1), b = loaded->EmptyState(1);
  EXPECT_TRUE(at::equal(single->Extend(ids, a), loaded->Extend(ids, b)));
  // The state of a cache goes through a file, and is cut back.
  SaveModelState(folder / "state", *loaded, {b, {}, {}});
  ModelState again = LoadModelState(folder / "state", *loaded).state;
  EXPECT_TRUE(at::equal(single->Extend(ids, a), loaded->Extend(ids, again)));
  loaded->Truncate(b, 15);
  ModelState begun = loaded->EmptyState(1);
  loaded->Extend(ids.narrow(1, 0, 15), begun);
  ExpectClose(loaded->Extend(ids, b), loaded->Extend(ids, begun), 1e-6, "cut back");
}

// Each stack has a table of its own; cross attention has none (T5).
TEST(T5Parts, ATranslatorHasOneTableInEachStack) {
  const ModelConfig c = T5("softmax", Json::object(), "encoder_decoder");
  const auto m = Make<EncoderDecoder>(c);
  std::vector<std::string> tables;
  for (const auto& p : m->named_parameters()) {
    if (p.key().find("relative_bias") != std::string::npos) tables.push_back(p.key());
  }
  EXPECT_EQ(tables,
            (std::vector<std::string>{"encoder.layers.0.attention.core.relative_bias.weight",
                                      "decoder.layers.0.attention.core.relative_bias.weight"}));
  at::NoGradGuard guard;
  at::manual_seed(3);
  const at::Tensor source = Ids(2, 30), ids = Ids(2, 40);
  ModelState whole = m->Encode(source, {Lengths({30, 11}), {}});
  const at::Tensor want = m->Extend(ids, whole);
  ModelState state = m->Encode(source, {Lengths({30, 11}), {}});
  for (int64_t t = 0; t < 40; ++t)
    ExpectClose(m->Extend(ids.narrow(1, t, 1), state), want.narrow(1, t, 1), 1e-11, "step");
}

// T5-base v1.0 without its embedding: 12 layers each, D 768, 12 heads of 64, FFN 3072, RMSNorm, no
// biases (Raffel et al. 2020; 222.9M with 32,128 tokens; spec 1.1's 223M).
TEST(T5Parts, ParametersOfT5Base) {
  ModelConfig c = T5("softmax", Json::object(), "encoder_decoder");
  c.vocab_size = 32128, c.dim = 768, c.qkv_dim = 0, c.heads = 12, c.layers = 12, c.ffn_dim = 3072;
  SetActiveDevice(at::kMeta);
  const auto m = MakeModel(c, 1);
  SetActiveDevice(at::kCPU);
  int64_t count = 0;
  for (const auto& p : m->parameters()) count += p.numel();
  const int64_t attention = 4 * 768 * 768, ffn = 2 * 768 * 3072, norm = 768;
  EXPECT_EQ(count, 32128 * 768 + 12 * (attention + ffn + 2 * norm) + norm +
                       12 * (2 * attention + ffn + 3 * norm) + norm + 2 * 32 * 12);
  EXPECT_EQ(count, 222903552);  // as transformers counts t5-base
}

TEST(T5Parts, WhatDoesNotFitIsRefused) {
  const auto text = [](const std::function<void(ModelConfig&)>& change) {
    ModelConfig c = T5("softmax");
    change(c);
    try {
      c.Validate();
    } catch (const UsageError& e) {
      return std::string(e.what());
    }
    return std::string("no UsageError");
  };
  ExpectContains(
      text([](ModelConfig& c) { c.attention = {"latte"}, c.attention_options = Json::object(); }),
      {"positions=relative", "latte", "none, learned, sinusoidal"});
  ExpectContains(text([](ModelConfig& c) {
                   c.attention = {"softmax:1+softmax:2"}, c.attention_options = Json::object();
                 }),
                 {"positions=relative"});
  ExpectContains(text([](ModelConfig& c) {
                   c.attention = {"softmax", "reuse", "softmax"};
                 }),
                 {"one table", "softmax", "reuse"});
  ExpectContains(text([](ModelConfig& c) { c.tie_embeddings = false; }),
                 {"scale_logits", "tie_embeddings"});
  ExpectContains(text([](ModelConfig& c) { c.qkv_dim = 20; }), {"qkv_dim=20", "heads=3"});
  ExpectContains(text([](ModelConfig& c) {
                   c.kind = "encoder_classifier", c.classes = 3, c.scale_logits = false;
                   c.positions = PositionKind::kNone;
                   c.attention = {"conv_luna"}, c.attention_options = Json::object();
                 }),
                 {"[conv_luna]", "memory", "qkv_dim=18", "dim=12"});
  ExpectContains(text([](ModelConfig& c) { c.head_dims = {3}; }), {"head_dims", "decoder_lm"});
}

}  // namespace
}  // namespace cistern

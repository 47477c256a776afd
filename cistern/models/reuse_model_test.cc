// Reuse attention in whole models: against a plain computation of the lists of scores, kept as
// handles or as probabilities, whole and piece by piece, with its state, its parameters and its
// gradients.
#include <cmath>

#include "cistern/attention/testing_mechanisms.h"
#include "cistern/base/error.h"
#include "cistern/io/test_folder.h"
#include "cistern/models/decoder_lm.h"
#include "cistern/models/encoder_classifier.h"
#include "cistern/models/model_state_file.h"
#include "cistern/models/testing_models.h"

namespace cistern {
namespace {

using namespace cistern::testing;

constexpr int64_t kVocab = 17, kModel = 16, kLayerHeads = 4, kHeadWidth = kModel / kLayerHeads;

ModelConfig Config(const Json& options, int64_t layers = 4,
                   const std::string& kind = "decoder_lm") {
  ModelConfig c;
  c.kind = kind, c.classes = kind == "encoder_classifier" ? 3 : 0;
  c.vocab_size = kVocab, c.dim = kModel, c.heads = kLayerHeads, c.layers = layers,
  c.max_length = 64;
  c.attention = {"reuse"};
  c.attention_options = Json{{"reuse", options}};
  return c;
}

ModelConfig Keeping(ModelConfig c, const std::string& keep) {
  c.attention_options["reuse"]["keep"] = keep;
  return c;
}

at::Tensor Ids(int64_t batch, int64_t length) {
  return at::randint(0, kVocab, {batch, length}, at::kLong);
}

// Every placement; K below and above H/2, and all.
std::vector<ModelConfig> Configs() {
  std::vector<ModelConfig> all;
  for (const Json& options :
       {Json{{"heads", 1}, {"placement", "partial"}}, Json{{"heads", 3}, {"placement", "partial"}},
        Json{{"placement", "full"}}, Json{{"placement", "alternate"}},
        Json{{"heads", 2}, {"placement", "all_end"}, {"layers", 1}},
        Json{{"placement", "skip"}, {"layers", 2}}}) {
    all.push_back(Config(options, 5));
  }
  all[1].positions = PositionKind::kRotary;
  all[2].norm = NormPlace::kPost, all[2].bias = true;
  all[3].conv = 3;
  all.push_back(Config({{"heads", 2}, {"placement", "partial"}}));
  all.back().attention = {"softmax", "reuse", "reuse",
                          "softmax"};  // the first list comes from softmax
  return all;
}

// The papers' words: lists of probabilities, new heads first, then the first of the layer before.
// Pre-norm, nothing added.
at::Tensor Plain(const DecoderLm& m, const at::Tensor& ids, const std::vector<int64_t>& copied) {
  const auto all = m.named_parameters();
  const int64_t batch = ids.size(0), length = ids.size(1);
  at::Tensor x = at::embedding(all["embed_tokens.weight"], ids), list;
  const at::Tensor future = at::ones({length, length}, at::kBool).triu(1);
  for (size_t i = 0; i < copied.size(); ++i) {
    const auto weight = [&](const std::string& name) {
      return all["layers." + std::to_string(i) + "." + name + ".weight"];
    };
    const auto norm = [&](const std::string& name) {
      return at::layer_norm(x, {kModel}, weight(name),
                            all["layers." + std::to_string(i) + "." + name + ".bias"], 1e-5);
    };
    const auto heads = [&](const at::Tensor& y) {
      return y.view({batch, length, -1, kHeadWidth}).transpose(1, 2);
    };
    if (copied[i] != AttentionDims::kSkipped) {
      const at::Tensor h = norm("attention_norm");
      std::vector<at::Tensor> lists;
      if (copied[i] < kLayerHeads) {
        const at::Tensor q = heads(at::linear(h, weight("attention.q_proj"))),
                         k = heads(at::linear(h, weight("attention.k_proj")));
        const at::Tensor scores = at::matmul(q, k.transpose(2, 3)) / std::sqrt(double(kHeadWidth));
        lists.push_back(at::softmax(scores.masked_fill(future, -kInf), 3));
      }
      if (copied[i] > 0) lists.push_back(list.narrow(1, 0, copied[i]));
      list = at::cat(lists, 1);
      const at::Tensor y = at::matmul(list, heads(at::linear(h, weight("attention.v_proj"))));
      x = x + at::linear(y.transpose(1, 2).reshape({batch, length, kModel}),
                         weight("attention.o_proj"));
    }
    x = x + at::linear(at::gelu(at::linear(norm("ffn_norm"), weight("ffn.up_proj"))),
                       weight("ffn.down_proj"));
  }
  x = at::layer_norm(x, {kModel}, all["norm.weight"], all["norm.bias"], 1e-5);
  return at::linear(x, all["embed_tokens.weight"]);
}

void ExpectSameGradients(const at::Tensor& got, const at::Tensor& want, const Model& a,
                         const Model& b, const std::string& what, double tolerance = 1e-10) {
  const auto names = a.named_parameters().keys();
  const auto g = Gradients(got, a.parameters()), w = Gradients(want, b.parameters());
  ASSERT_EQ(g.size(), w.size());
  for (size_t i = 0; i < g.size(); ++i) {
    EXPECT_LE((g[i] - w[i]).norm().item<double>(),
              tolerance * w[i].norm().item<double>() + tolerance)
        << what << " " << names[i];
  }
}

TEST(ReuseModel, EqualsListsOfScoresAndTheirGradients) {
  struct Case {
    Json options;
    std::vector<int64_t> copied;
  };
  const int64_t none = AttentionDims::kSkipped;
  for (const Case& c : {Case{{{"heads", 1}, {"placement", "partial"}}, {0, 1, 1, 0}},
                        Case{{{"heads", 3}, {"placement", "partial"}}, {0, 3, 3, 0}},
                        Case{{{"placement", "full"}}, {0, 4, 4, 4}},
                        Case{{{"placement", "alternate"}}, {0, 4, 0, 4}},
                        Case{{{"placement", "all_end"}, {"layers", 1}}, {0, 0, 4, 0}},
                        Case{{{"placement", "skip"}, {"layers", 1}}, {0, none, 0, 0}}}) {
    for (const std::string keep : {"handles", "scores"}) {
      const auto m = Make<DecoderLm>(Keeping(Config(c.options), keep));
      at::manual_seed(3);
      const at::Tensor ids = Ids(2, 11), g = Normal({2, 11, kVocab}),
                       want = Plain(*m, ids, c.copied);
      for (const ops::Impl impl : kImpls) {
        const ops::ImplScope scope(impl);
        const std::string what = c.options.dump() + " " + keep + " " + ops::ImplName(impl);
        const at::Tensor got = ExtendInPieces(*m, ids, {0, 11});
        ExpectClose(got, want, 1e-12, what);
        ExpectSameGradients((got * g).sum(), (want * g).sum(), *m, *m, what);
      }
    }
  }
}

TEST(ReuseModel, HandlesEqualScores) {
  for (const ModelConfig& config : Configs()) {
    const auto handles = Make<DecoderLm>(config),
               scores = Make<DecoderLm>(Keeping(config, "scores"));
    at::manual_seed(3);
    const int64_t T = 19;
    const at::Tensor ids = Ids(3, T), g = Normal({3, T, kVocab});
    const ops::Mask mask = {Lengths({T, 13, 0}), Starts(3, T, {{0, 0}, {0, 5}, {0, 6}, {1, 8}})};
    for (const ops::Impl impl : kImpls) {
      const ops::ImplScope scope(impl);
      for (const ops::Mask& m : {ops::Mask{}, mask}) {
        for (const std::vector<int64_t>& cuts :
             {std::vector<int64_t>{0, T}, {0, 6, T}, EachToken(T)}) {
          const std::string what = config.attention_options.dump() + " " + ops::ImplName(impl) +
                                   " " + std::to_string(cuts.size());
          const at::Tensor real =
              m.lengths ? (at::arange(T).unsqueeze(0) < m.lengths->unsqueeze(1)).unsqueeze(2)
                        : at::ones({1});
          const at::Tensor a = ExtendInPieces(*handles, ids, cuts, m) * real,
                           b = ExtendInPieces(*scores, ids, cuts, m) * real;
          ExpectClose(b, a, 1e-12, what);
          ExpectSameGradients((b * g).sum(), (a * g).sum(), *scores, *handles, what);
        }
      }
    }
  }
}

TEST(ReuseModel, EncoderPadsAndKeepsRowsApartWhateverIsKept) {
  for (const Json& options :
       {Json{{"heads", 3}, {"placement", "partial"}}, Json{{"placement", "alternate"}}}) {
    const ModelConfig config = Config(options, 4, "encoder_classifier");
    const auto handles = Make<EncoderClassifier>(config),
               scores = Make<EncoderClassifier>(Keeping(config, "scores"));
    at::manual_seed(3);
    const at::Tensor ids = Ids(3, 9), lengths = Lengths({9, 4, 1});
    for (const ops::Impl impl : kImpls) {
      const ops::ImplScope scope(impl);
      const at::Tensor want = handles->Forward(ids, lengths);
      ExpectClose(scores->Forward(ids, lengths), want, 1e-12, "scores");
      ExpectSameGradients(scores->Forward(ids, lengths).square().sum(), want.square().sum(),
                          *scores, *handles, "scores");
      for (const auto& m : {handles, scores}) {
        ExpectClose(m->Forward(at::cat({ids, Ids(3, 5)}, 1), lengths), want, 1e-12, "more padding");
        for (int64_t b = 0; b < 3; ++b) {
          const int64_t length = lengths[b].item<int64_t>();
          ExpectClose(m->Forward(ids.narrow(0, b, 1).narrow(1, 0, length), Lengths({length})),
                      want.narrow(0, b, 1), 1e-12, "row alone");
        }
      }
    }
  }
}

TEST(ReuseModel, NothingCopiedIsSoftmax) {
  for (const std::string kind : {"decoder_lm", "encoder_classifier"}) {
    for (const std::string keep : {"handles", "scores"}) {
      const ModelConfig none = Config({{"heads", 0}, {"keep", keep}}, 4, kind);
      ModelConfig softmax = none;
      softmax.attention = {"softmax"};
      const at::Tensor ids = Ids(2, 9);
      if (kind == "decoder_lm") {
        ExpectSameBits(ExtendInPieces(*Make<DecoderLm>(none), ids, {0, 9}),
                       ExtendInPieces(*Make<DecoderLm>(softmax), ids, {0, 9}), keep);
      } else {
        const at::Tensor lengths = Lengths({9, 5});
        ExpectClose(Make<EncoderClassifier>(none)->Forward(ids, lengths),
                    Make<EncoderClassifier>(softmax)->Forward(ids, lengths), 1e-13, keep);
      }
    }
  }
}

// Scores that the second layer takes over and would have formed itself: the same queries and keys
// of the same input, because the first layer adds nothing.
TEST(ReuseModel, CopiesOfTheSameScoresChangeNothing) {
  ModelConfig softmax = Config(Json::object(), 2);
  softmax.attention = {"softmax"};
  const auto copying = Make<DecoderLm>(Config({{"placement", "full"}}, 2)),
             exact = Make<DecoderLm>(softmax);
  at::NoGradGuard guard;
  const auto from = copying->named_parameters(), to = exact->named_parameters();
  for (const auto& m : {from, to}) {
    m["layers.0.attention.o_proj.weight"].zero_(), m["layers.0.ffn.down_proj.weight"].zero_();
  }
  for (const auto& p : from) to[p.key()].copy_(p.value());
  for (const std::string name : {"attention.q_proj.weight", "attention.k_proj.weight",
                                 "attention_norm.weight", "attention_norm.bias"}) {
    to["layers.1." + name].copy_(to["layers.0." + name]);
    if (name.starts_with("attention_norm")) from["layers.1." + name].copy_(to["layers.0." + name]);
  }
  const at::Tensor ids = Ids(2, 9);
  ExpectClose(ExtendInPieces(*copying, ids, {0, 9}), ExtendInPieces(*exact, ids, {0, 9}), 1e-13,
              "identical scores");
  to["layers.1.attention.q_proj.weight"].mul_(1.5);
  EXPECT_GT(RelRms(ExtendInPieces(*copying, ids, {0, 9}), ExtendInPieces(*exact, ids, {0, 9})),
            1e-3);
}

TEST(ReuseModel, PiecesPaddedAndPackedRowsAreTheWhole) {
  for (const ModelConfig& config : Configs()) {
    const auto m = Make<DecoderLm>(config);
    at::manual_seed(3);
    const int64_t T = 19;
    const at::Tensor ids = Ids(3, T);
    const std::string what = config.attention_options.dump();
    const at::Tensor whole = ExtendInPieces(*m, ids, {0, T});
    const auto want = Gradients(whole.square().sum(), m->parameters());
    for (const std::vector<int64_t>& cuts :
         {std::vector<int64_t>{0, 1, T}, {0, 10, 10, T}, EachToken(T)}) {
      const at::Tensor got = ExtendInPieces(*m, ids, cuts);
      ExpectClose(got, whole, 1e-11, what);
      ExpectSameGradients(got.square().sum(), whole.square().sum(), *m, *m, what);
      at::NoGradGuard guard;
      ExpectClose(ExtendInPieces(*m, ids, cuts), whole, 1e-11, what + " in place");
    }
    const ops::Mask mask = {Lengths({T, 13, 0}), Starts(3, T, {{0, 0}, {0, 5}, {0, 6}, {1, 8}})};
    const std::vector<Piece> documents = {{0, 0, 5}, {0, 5, 1}, {0, 6, 13}, {1, 0, 8}, {1, 8, 5}};
    for (const std::vector<int64_t>& cuts : {std::vector<int64_t>{0, T}, {0, 6, T}, EachToken(T)}) {
      const at::Tensor got = ExtendInPieces(*m, ids, cuts, mask);
      for (const Piece& d : documents) {
        const at::Tensor alone = ids.narrow(0, d.row, 1).narrow(1, d.begin, d.count);
        ExpectClose(got.narrow(0, d.row, 1).narrow(1, d.begin, d.count),
                    ExtendInPieces(*m, alone, {0, d.count}), 1e-11, what);
      }
    }
  }
}

// The first layer's queries are trained by every layer that copies their scores.
TEST(ReuseModel, GradientsFlowThroughTheCopies) {
  for (const std::string keep : {"handles", "scores"}) {
    const auto m = Make<DecoderLm>(
        Config({{"heads", 2}, {"placement", "partial"}, {"keep", keep}}, 5));  // P = 3
    at::manual_seed(3);
    const at::Tensor ids = Ids(2, 8), g = Normal({2, 8, kVocab});
    const auto loss = [&] { return (ExtendInPieces(*m, ids, {0, 8}) * g).sum(); };
    for (const std::string name :
         {"layers.0.attention.q_proj.weight", "layers.0.attention.k_proj.weight",
          "layers.1.attention.v_proj.weight", "layers.2.attention.q_proj.weight"}) {
      at::Tensor p = m->named_parameters()[name];
      const at::Tensor gradient = Gradients(loss(), {p})[0];
      at::NoGradGuard guard;
      for (int round = 0; round < 3; ++round) {
        const at::Tensor direction = at::randn_like(p), before = p.clone();
        const double step = 1e-5;
        p.copy_(before + step * direction);
        const double up = loss().item<double>();
        p.copy_(before - step * direction);
        const double down = loss().item<double>(), want = (up - down) / (2 * step);
        p.copy_(before);
        EXPECT_NEAR((gradient * direction).sum().item<double>(), want,
                    1e-6 * std::max(1.0, std::abs(want)))
            << keep << " " << name;
      }
    }
  }
}

// ---- state

TEST(ReuseModel, KeysAreCachedOnlyWhereTheyAreComputed) {
  const auto m = Make<DecoderLm>(Config({{"heads", 3}, {"placement", "partial"}}), at::kFloat);
  at::NoGradGuard guard;
  ModelState state;
  ExtendInPieces(*m, Ids(2, 40), {0, 40}, {}, &state);
  const std::vector<int64_t> keys = {4, 1, 1, 4};
  for (size_t i = 0; i < keys.size(); ++i) {
    EXPECT_EQ(state.layers[i]["k"].sizes(), at::IntArrayRef({2, keys[i], 40, kHeadWidth})) << i;
    EXPECT_EQ(state.layers[i]["v"].sizes(), at::IntArrayRef({2, 4, 40, kHeadWidth})) << i;
  }
  EXPECT_EQ(m->Compact(state).Bytes(), m->StateBytes(2, 40));
  EXPECT_EQ(m->StateBytes(2, 40), 2 * (40 * kHeadWidth * 4 * (10 + 16) + 5 * 8));
  const auto skipping = Make<DecoderLm>(Config({{"placement", "skip"}, {"layers", 2}}), at::kFloat);
  EXPECT_EQ(skipping->StateBytes(2, 40), 2 * (40 * kModel * 4 * 4 + 3 * 8));
}

TEST(ReuseModel, DecodesABatchOfNoRows) {
  at::NoGradGuard guard;
  const auto m = Make<DecoderLm>(Config({{"heads", 3}, {"placement", "partial"}}));
  ModelState state = m->EmptyState(0);
  EXPECT_EQ(m->Extend(Ids(0, 5), state).sizes(), at::IntArrayRef({0, 5, kVocab}));
  for (int i = 0; i < 100; ++i) m->Extend(Ids(0, 1), state);
  EXPECT_EQ(state.layers[0]["v"].sizes(), at::IntArrayRef({0, 4, 105, kHeadWidth}));
}

TEST(ReuseModel, StatesAreValues) {
  for (const ModelConfig& config : Configs()) {
    const auto m = Make<DecoderLm>(config);
    const std::string what = config.attention_options.dump();
    at::NoGradGuard guard;
    at::manual_seed(3);
    const at::Tensor ids = Ids(2, 12), next = Ids(4, 5), rows = at::tensor({1, 1, 0, 1}, at::kLong);
    ModelState state;
    ExtendInPieces(*m, ids, EachToken(12), {}, &state);
    const ModelState kept = state.Clone();
    ModelState beams = state.Reorder(rows);
    const at::Tensor whole = at::cat({ids.index_select(0, rows), next}, 1),
                     want = ExtendInPieces(*m, whole, {0, 17}).narrow(1, 12, 5);
    ExpectClose(m->Extend(next, beams), want, 1e-11, what + ", beams");
    m->Extend(next.narrow(0, 0, 2), state);  // must not reach the clone
    ModelState again = kept.Clone();
    ExpectClose(m->Extend(next.narrow(0, 1, 1).expand({2, 5}), again).narrow(0, 1, 1),
                want.narrow(0, 1, 1), 1e-11, what + ", clone");

    const TestFolder folder;
    SaveModelState(folder / "state", *m, {kept, {}, {}});
    ModelState loaded = LoadModelState(folder / "state", *m).state, same = kept.Clone();
    ExpectSameBits(m->Extend(next.narrow(0, 0, 2), loaded), m->Extend(next.narrow(0, 0, 2), same),
                   what + ", file");

    if (config.conv > 0) continue;
    ModelState cut = kept.Clone();
    m->Truncate(cut, 7);
    ExpectClose(m->Extend(ids.narrow(1, 7, 5), cut),
                ExtendInPieces(*m, ids, {0, 12}).narrow(1, 7, 5), 1e-11, what + ", cut back");
  }
}

// ---- sizes and refusals

// BERT-base (12 layers, 12 heads, 768 wide, 512 positions): the paper's .95 and .94 of its
// parameters, by the paper's formula.
TEST(ReuseModel, ParametersOfBertBase) {
  const int64_t vocab = 30'522, D = 768;
  // With what pretraining adds and Reuse leaves alone: segments, a norm of the embeddings, pooler,
  // the two heads.
  const int64_t others = 2 * D + 2 * D + (D + 1) * D + (D + 1) * D + 2 * D + vocab + 2 * D + 2;
  const auto count = [&](const std::string& attention, const Json& options) {
    ModelConfig c;
    c.kind = "encoder_classifier", c.classes = 2;
    c.vocab_size = 2, c.dim = D, c.layers = 12, c.heads = 12, c.max_length = 512,
    c.positions = PositionKind::kLearned;
    c.norm = NormPlace::kPost, c.final_norm = false, c.bias = true;
    c.attention = {attention}, c.attention_options = Json{{"reuse", options}};
    int64_t parameters = (vocab - 2) * D + others;
    for (const auto& p : MakeModel(c, 1)->named_parameters())
      parameters += p.key().starts_with("classifier.") ? 0 : p.value().numel();
    return parameters;
  };
  const int64_t whole = count("softmax", Json::object());
  EXPECT_EQ(whole, 110'106'428);
  const int64_t partial = count("reuse", {{"heads", 6}, {"placement", "partial"}});
  EXPECT_EQ(whole - partial, 6 * 10 * 2 * 64 * (D + 1));
  EXPECT_NEAR(double(partial) / double(whole), .946, .0005);
  const int64_t full = count("reuse", {{"placement", "full"}, {"layers", 6}});
  EXPECT_EQ(whole - full, 12 * 6 * 2 * 64 * (D + 1));
  EXPECT_NEAR(double(full) / double(whole), .936, .0005);
}

TEST(ReuseModel, SkippedLayersHaveOnlyTheirFeedForward) {
  const auto m = MakeModel(Config({{"placement", "skip"}, {"layers", 2}}), 1);
  for (const auto& p : m->named_parameters()) {
    const bool skipped = p.key().starts_with("layers.1.") || p.key().starts_with("layers.2.");
    EXPECT_FALSE(skipped && p.key().find("attention") != std::string::npos) << p.key();
  }
  ModelConfig softmax = Config(Json::object());
  softmax.attention = {"softmax"};
  EXPECT_EQ(MakeModel(softmax, 1)->ParameterCount() - m->ParameterCount(),
            2 * (4 * kModel * kModel + 2 * kModel));
}

TEST(ReuseModel, ConfigsThatCannotBeAreRefused) {
  const auto error = [](std::vector<std::string> attention, const Json& options = Json::object()) {
    ModelConfig c = Config(options, int64_t(attention.size()));
    c.attention = std::move(attention);
    return Thrown([&] { c.Validate(); });
  };
  EXPECT_EQ(error({"reuse", "reuse"}), "no error");
  EXPECT_EQ(error({"softmax", "reuse", "latte", "softmax"}), "no error");
  ExpectContains(error({"latte", "reuse"}),
                 {"layer 2 of 2 (reuse)", "layer 1", "latte leaves none", "softmax or reuse"});
  ExpectContains(error({"reuse", "latte", "reuse", "reuse"}, {{"placement", "partial"}}),
                 {"layer 3 of 4", "latte leaves none"});
  ExpectContains(error({"reuse", "softmax"}), {"attention", "no layer", "placement"});
  ExpectContains(error({"reuse"}), {"[reuse]", "one layer"});
  ExpectContains(error({"reuse:2+latte:2", "softmax"}), {"reuse", "layer of its own"});
  ExpectContains(error({"reuse", "reuse"}, {{"heads", 9}}), {"heads=9", "4 heads"});
  ExpectContains(error({"reuse", "reuse"}, {{"placement", "partial"}}),
                 {"partial", "none of 2", "alternate"});
}

TEST(ReuseModel, FoldersRoundTrip) {
  for (const ModelConfig& config : Configs()) {
    const TestFolder folder;
    const auto m = Make<DecoderLm>(config);
    SaveModel(*m, folder.path());
    const auto loaded = std::dynamic_pointer_cast<DecoderLm>(LoadModel(folder.path()));
    const at::Tensor ids = Ids(2, 9);
    ExpectSameBits(ExtendInPieces(*loaded, ids, {0, 9}), ExtendInPieces(*m, ids, {0, 9}),
                   config.attention_options.dump());
  }
}

}  // namespace
}  // namespace cistern

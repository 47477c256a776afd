#include <array>
#include <cmath>

#include "cistern/base/error.h"
#include "cistern/io/test_folder.h"
#include "cistern/models/testing_models.h"

namespace cistern {
namespace {

using namespace cistern::testing;
using ops::ImplName;
using ops::ImplScope;

// ---- sizes

// Counted from the paper's description: D = L = 516, 12 layers, 12 heads, feed-forward 4D with
// bias, untied head with bias, no other biases.
TEST(ParameterCount, LatteOfThePaper) {
  ModelConfig c;
  c.dim = 516, c.layers = 12, c.heads = 12, c.attention = {"latte"}, c.tie_embeddings = false,
  c.positions = PositionKind::kSinusoidal;
  c.ffn_bias = c.head_bias = true;
  c.init_std = 0.02;
  c.vocab_size = 205;
  const std::shared_ptr<Model> model = MakeModel(c, 0);
  EXPECT_EQ(model->ParameterCount(), 38'609'389);
  // The vocabulary alone sets the rest: an embedding row, a head row and a head bias for each
  // token.
  const int64_t a_token = 2 * 516 + 1;
  EXPECT_EQ(model->ParameterCount() + (208 - 205) * a_token, 38'612'488);
  EXPECT_EQ(model->ParameterCount() + (50'257 - 205) * a_token, 90'313'105);
}

// P003 says that the control of ABC_MLP is less than 1% of the parameters: in its language model
// (16 layers, D = 1024, FFN 4096, n = 64) and in its masked language model (12 layers, D = 768, FFN
// 3072, n = 128, 50,265 tokens). Counted at one and two layers, because the control is shared by
// all and each further layer adds the same.
TEST(ParameterCount, TheControlOfAbc) {
  auto control_and_total = [](int64_t dim, int64_t heads, int64_t layers, int64_t slots,
                              int64_t vocab) {
    auto count = [&](const char* mechanism, int64_t depth) {
      ModelConfig c;
      c.vocab_size = vocab, c.dim = dim, c.heads = heads, c.layers = depth, c.max_length = 512,
      c.bias = true, c.positions = PositionKind::kLearned;
      c.attention = {mechanism},
      c.attention_options = Json{{"abc_mlp", {{"slots", slots}, {"tied", true}}}};
      return MakeModel(c, 0)->ParameterCount();
    };
    const int64_t softmax = count("softmax", 1), control = count("abc_mlp", 1) - softmax,
                  layer = count("softmax", 2) - softmax;
    EXPECT_EQ(count("abc_mlp", 2) - count("softmax", 2), control);
    EXPECT_EQ(layer, 12 * dim * dim +
                         13 * dim);  // 4 D^2 of attention, 8 D^2 of feed-forward, biases, two norms
    return std::pair(control, softmax + (layers - 1) * layer + control);
  };
  const auto [lm, lm_total] = control_and_total(1024, 8, 16, 64, 1000);
  EXPECT_EQ(lm, 1024 * 8 * 64);  // no bias (P003 eq. 7)
  EXPECT_LT(double(lm) / double(lm_total),
            0.003);  // of the layers alone: the paper's adaptive input makes it 0.22%
  const auto [mlm, mlm_total] = control_and_total(768, 12, 12, 128, 50'265);
  EXPECT_EQ(mlm, 768 * 12 * 128);
  EXPECT_NEAR(double(mlm) / double(mlm_total), 0.0094, 0.0001);
}

TEST(ParameterCount, ATokenAndTheBiases) {
  auto count = [](auto&& change) {
    ModelConfig c = SmallLm({"latte"});
    c.tie_embeddings = false;
    change(c);
    return MakeModel(c, 0)->ParameterCount();
  };
  const int64_t plain = count([](ModelConfig&) {}), D = 12, L = 6, V = 23;
  EXPECT_EQ(plain, 2 * V * D + 2 * (2 * D * L + 2 * D * D + 8 * D * D + 4 * D) + 2 * D);
  EXPECT_EQ(count([](ModelConfig& c) { c.ffn_bias = true; }), plain + 2 * 5 * D);
  EXPECT_EQ(count([](ModelConfig& c) { c.head_bias = true; }), plain + V);
  EXPECT_EQ(count([](ModelConfig& c) { c.bias = true; }), plain + 2 * (5 * D + 2 * L + 2 * D) + V);
  EXPECT_EQ(count([](ModelConfig& c) { c.bias = c.ffn_bias = c.head_bias = true; }),
            plain + 2 * (5 * D + 2 * L + 2 * D) + V);
  EXPECT_EQ(count([](ModelConfig& c) { c.vocab_size = 24, c.head_bias = true; }),
            plain + V + 2 * D + 1);
  EXPECT_EQ(count([](ModelConfig& c) { c.tie_embeddings = true; }), plain - V * D);
  EXPECT_EQ(count([](ModelConfig& c) { c.tie_embeddings = c.head_bias = true; }),
            plain - V * D + V);
  EXPECT_EQ(count([](ModelConfig& c) { c.positions = PositionKind::kLearned; }), plain + 64 * D);
}

// ---- running

TEST(DecoderLm, PiecesWithCarriedStateEqualTheWhole) {
  for (const ModelConfig& config : Lms()) {
    const auto m = Make<DecoderLm>(config);
    at::manual_seed(3);
    const at::Tensor ids = Ids(2, 21), targets = Ids(2, 21);
    for (const ops::Impl impl : kImpls) {
      ImplScope scope(impl);
      const std::string what = config.Summary() + " " + ImplName(impl);
      ModelState end;
      const at::Tensor whole = ExtendInPieces(*m, ids, {0, 21}, {}, &end);
      const auto want = Gradients(NextTokenLoss(whole, targets), m->parameters());
      for (const std::vector<int64_t>& cuts : std::vector<std::vector<int64_t>>{
               {0, 1, 21}, {0, 10, 10, 21}, {0, 20, 21}, EachToken(21)}) {
        ModelState state;
        const at::Tensor got = ExtendInPieces(*m, ids, cuts, {}, &state);
        ExpectClose(got, whole, 1e-11, what);
        EXPECT_TRUE(at::equal(state.positions, end.positions)) << what;
        const auto g = Gradients(NextTokenLoss(got, targets), m->parameters());
        for (size_t i = 0; i < g.size(); ++i) {
          EXPECT_LE((g[i] - want[i]).norm().item<double>(),
                    1e-10 * want[i].norm().item<double>() + 1e-12)
              << what << " gradient " << i;
        }
        at::NoGradGuard guard;
        ExpectClose(ExtendInPieces(*m, ids, cuts), whole, 1e-11, what + " without gradient");
      }
    }
    const auto f = Make<DecoderLm>(config, at::kFloat);
    at::NoGradGuard guard;
    ExpectClose(ExtendInPieces(*f, ids, EachToken(21)), ExtendInPieces(*f, ids, {0, 21}), 1e-5,
                config.Summary() + " float");  // layers amplify 1e-6
  }
}

TEST(DecoderLm, PackedAndPaddedRowsAreEachDocumentAlone) {
  for (const ModelConfig& config : Lms()) {
    const auto m = Make<DecoderLm>(config);
    at::manual_seed(3);
    const int64_t T = 19;
    const at::Tensor ids = Ids(3, T), targets = Ids(3, T);
    const ops::Mask mask = {Lengths({T, 13, 0}), Starts(3, T, {{0, 0}, {0, 5}, {0, 6}, {1, 8}})};
    const std::vector<Piece> documents = {{0, 0, 5}, {0, 5, 1}, {0, 6, 13}, {1, 0, 8}, {1, 8, 5}};
    for (const ops::Impl impl : kImpls) {
      ImplScope scope(impl);
      for (const std::vector<int64_t>& cuts : std::vector<std::vector<int64_t>>{
               {0, T}, {0, 3, T}, {0, 6, T}, {0, 10, T}, EachToken(T)}) {
        ModelState state;
        const at::Tensor got = ExtendInPieces(*m, ids, cuts, mask, &state);
        for (const Piece& d : documents) {
          const at::Tensor alone = ids.narrow(0, d.row, 1).narrow(1, d.begin, d.count);
          ExpectClose(got.narrow(0, d.row, 1).narrow(1, d.begin, d.count),
                      ExtendInPieces(*m, alone, {0, d.count}), 1e-11,
                      config.Summary() + ImplName(impl));
        }
        EXPECT_TRUE(at::equal(state.positions, at::tensor({13, 5, 0}, at::kLong)))
            << config.Summary();
        // Every row goes on with its own last document, from its own position.
        const at::Tensor next = Ids(3, 4), more = m->Extend(next, state);
        for (const Piece& d : {Piece{0, 6, 13}, Piece{1, 8, 5}, Piece{2, 0, 0}}) {
          const at::Tensor row = at::cat(
              {ids.narrow(0, d.row, 1).narrow(1, d.begin, d.count), next.narrow(0, d.row, 1)}, 1);
          ExpectClose(more.narrow(0, d.row, 1),
                      ExtendInPieces(*m, row, {0, row.size(1)}).narrow(1, d.count, 4), 1e-11,
                      config.Summary() + " next");
        }
      }
    }
  }
}

TEST(DecoderLm, StatesAreReorderedClonedAndDetached) {
  const auto m = Make<DecoderLm>(SmallLm());
  at::manual_seed(3);
  const at::Tensor ids = Ids(3, 9), next = Ids(4, 3), rows = at::tensor({2, 2, 0, 1}, at::kLong);
  ModelState state;
  ExtendInPieces(*m, ids, {0, 4, 9}, {}, &state);
  EXPECT_FALSE(state.Detach().layers[0]["memory"].requires_grad());
  at::NoGradGuard guard;
  const ModelState kept = state.Clone();
  ModelState chosen = state.Reorder(rows);
  const at::Tensor want =
      ExtendInPieces(*m, at::cat({ids.index_select(0, rows), next}, 1), {0, 12}).narrow(1, 9, 3);
  ExpectClose(m->Extend(next, chosen), want, 1e-12, "reordered");
  for (int round = 0; round < 2; ++round) {
    ModelState branch = kept.Clone();
    ExpectClose(
        m->Extend(next.narrow(0, 0, 3), branch),
        ExtendInPieces(*m, at::cat({ids, next.narrow(0, 0, 3)}, 1), {0, 12}).narrow(1, 9, 3), 1e-12,
        "branch");
  }
}

TEST(DecoderLm, TiedMapsAreOneForAllLayers) {
  const auto m = Make<DecoderLm>(TiedLm(true)), untied = Make<DecoderLm>(TiedLm(false));
  EXPECT_EQ(untied->ParameterCount() - m->ParameterCount(), 12 * 2 * 3 + 20 * 5);
  for (const std::string name :
       {"layers.2.attention.control_proj.weight", "layers.4.attention.core.key.weight"}) {
    EXPECT_FALSE(m->named_parameters().contains(name));
    EXPECT_TRUE(untied->named_parameters().contains(name));
  }
  // With equal maps in the untied model, the same numbers; and the gradient of the tied map is the
  // sum.
  at::NoGradGuard guard;
  auto own = untied->named_parameters();
  for (const auto& p : m->named_parameters()) own[p.key()].copy_(p.value());
  own["layers.2.attention.control_proj.weight"].copy_(
      own["layers.0.attention.control_proj.weight"]);
  own["layers.4.attention.core.key.weight"].copy_(own["layers.3.attention.core.key.weight"]);
  const at::Tensor ids = Ids(2, 12), targets = Ids(2, 12);
  at::AutoGradMode enable(true);
  const at::Tensor loss = NextTokenLoss(ExtendInPieces(*m, ids, {0, 7, 12}), targets),
                   want = NextTokenLoss(ExtendInPieces(*untied, ids, {0, 7, 12}), targets);
  ExpectClose(loss, want, 1e-13, "loss");
  loss.backward();
  want.backward();
  const auto tied = m->named_parameters();
  for (const auto& [first, second] : std::vector<std::pair<std::string, std::string>>{
           {"layers.0.attention.control_proj.weight", "layers.2.attention.control_proj.weight"},
           {"layers.3.attention.core.key.weight", "layers.4.attention.core.key.weight"}}) {
    ExpectClose(tied[first].grad(), own[first].grad() + own[second].grad(), 1e-12, first);
  }
}

TEST(DecoderLm, NamesTheTokenIdOutsideOfItsVocabulary) {
  const auto m = Make<DecoderLm>(SmallLm());
  for (const int64_t id : {int64_t{23}, int64_t{-1}}) {
    for (const int64_t length : {1, 5}) {
      at::Tensor ids = Ids(2, length);
      ids[1][length - 1] = id;
      ModelState state = m->EmptyState(2);
      const std::string message = ErrorMessage([&] { m->Extend(ids, state); });
      ExpectContains(message, {StrCat("token id ", id), "vocabulary of 23", "0 to 22"});
      // Of a view, and of masked tokens, alike.
      const ops::Mask all = {std::nullopt, std::nullopt, at::ones({length, 2}, at::kBool)};
      ModelState of_view = m->EmptyState(length);
      EXPECT_EQ(ErrorMessage([&] { m->Extend(ids.t(), of_view, all); }), message);
    }
  }
  ModelState state = m->EmptyState(1);
  m->Extend(at::tensor({int64_t{0}, int64_t{22}}).unsqueeze(0), state);  // the first and the last
}

TEST(EncoderClassifier, NamesTheTokenIdOutsideOfItsVocabulary) {
  ModelConfig c = SmallLm({"softmax"});
  c.kind = "encoder_classifier", c.classes = 3;
  const auto m = Make<EncoderClassifier>(c);
  const NamedTensors batch = {{"ids", at::tensor({1, 2, 23}, at::kLong).unsqueeze(0)},
                              {"lengths", Lengths({3})}};
  ExpectContains(ErrorMessage([&] { m->Logits(batch); }), {"token id 23", "vocabulary of 23"});
}

TEST(DecoderLm, LossIgnoresMinus100) {
  at::manual_seed(3);
  const at::Tensor logits = Normal({2, 3, 5}),
                   targets = at::tensor({1, -100, 4, 0, 2, -100}, at::kLong).view({2, 3});
  const at::Tensor log_p = at::log_softmax(logits, -1);
  const at::Tensor want = -(log_p.index({0, 0, 1}) + log_p.index({0, 2, 4}) +
                            log_p.index({1, 0, 0}) + log_p.index({1, 1, 2})) /
                          4;
  ExpectClose(NextTokenLoss(logits, targets), want, 1e-14, "loss");
}

TEST(DecoderLm, ATiedOutputLayerMayHaveABias) {
  ModelConfig config = SmallLm({"latte"});
  config.head_bias = true;
  const auto m = Make<DecoderLm>(config);
  const at::Tensor ids = at::randint(0, 23, {2, 6}, at::kLong);
  const auto logits = [&] {
    ModelState state = m->EmptyState(2);
    return m->Extend(ids, state);
  };
  const at::Tensor bias = m->named_parameters()["lm_head.bias"];
  const auto set = [&](const at::Tensor& value) {
    const at::NoGradGuard guard;
    bias.copy_(value);
  };
  set(at::zeros_like(bias));
  const at::Tensor plain = logits().detach();
  set(at::randn_like(bias));
  ExpectClose(logits(), plain + bias, 1e-12, "logits");
  const at::Tensor loss = m->TrainingLoss({{"ids", ids}, {"targets", ids}}),
                   want = NextTokenLoss(logits(), ids);
  ExpectClose(loss, want, 1e-12, "loss");
  ExpectClose(torch::autograd::grad({loss}, {bias})[0], torch::autograd::grad({want}, {bias})[0],
              1e-10, "gradient");
}

TEST(DecoderLm, TheLossOfNoTargetIsZero) {
  const auto m = Make<DecoderLm>(SmallLm());
  const at::Tensor none = at::full({2, 3}, -100, at::kLong), logits = Leaf(Normal({2, 3, 23}));
  for (const double smoothing : {0.0, 0.1}) {
    const at::Tensor loss = NextTokenLoss(logits, none, smoothing);
    EXPECT_EQ(loss.item<double>(), 0);
    EXPECT_TRUE(Gradients(loss, {logits})[0].eq(0).all().item<bool>());
    EXPECT_EQ(m->Loss(Normal({2, 3, 12}), none, smoothing).item<double>(), 0);
  }
  EXPECT_EQ(NextTokenLoss(Normal({0, 3}), at::empty({0}, at::kLong)).item<double>(), 0);
}

TEST(EncoderClassifier, NamesTheTargetThatIsNoClass) {
  ModelConfig c = SmallLm({"softmax"});
  c.kind = "encoder_classifier", c.classes = 3;
  const auto m = Make<EncoderClassifier>(c);
  for (const int64_t target : {3, -1}) {
    const NamedTensors batch = {{"ids", Ids(2, 4)},
                                {"lengths", Lengths({4, 2})},
                                {"targets", at::tensor({int64_t{0}, target})}};
    ExpectContains(ErrorMessage([&] { m->TrainingLoss(batch); }),
                   {StrCat("target ", target), "3 classes", "0 to 2"});
  }
}

TEST(EncoderClassifier, PaddingOfValuesHasNoPartWhateverItHolds) {
  for (const PaddingKind padding : {PaddingKind::kMasked, PaddingKind::kZeros}) {
    ModelConfig c = SmallLm({"latte"});
    c.kind = "encoder_classifier", c.classes = 3, c.vocab_size = 0, c.padding = padding;
    c.own["encoder_classifier"] = Json{{"input", "values"}, {"channels", 2}};
    const auto m = Make<EncoderClassifier>(c);
    const at::Tensor values = Normal({2, 6, 2}), lengths = Lengths({6, 4});
    const auto gradients = [&](double held) {
      at::Tensor x = values.clone();
      x[1].narrow(0, 4, 2).fill_(held);
      return Gradients(m->Forward(x, lengths).square().sum(), m->parameters());
    };
    const auto got = gradients(NAN), want = gradients(0);
    for (size_t i = 0; i < got.size(); ++i) ExpectSameBits(got[i], want[i], "gradient");
  }
}

TEST(EncoderClassifier, PaddingChangesNothingAndRowsAreAlone) {
  for (const MechanismInfo* info : Mechanisms()) {
    if (!info->Supports(Form::kBidirectional)) continue;
    for (const std::string pooling : {"mean", "cls", "memory"}) {
      if (pooling == "memory" && !info->HandsOnMemory()) continue;
      if (pooling == "cls" && info->memory == MemoryUse::kLatents) continue;
      for (const std::string positions : {"learned", "sinusoidal"}) {
        ModelConfig c = SmallLm({info->name});
        c.kind = "encoder_classifier", c.classes = 5, c.pooling = ValueOf(pooling, PoolingKinds()),
        c.positions = ValueOf(positions, PositionKinds()),
        c.norm = pooling == "cls" ? NormPlace::kPre : NormPlace::kPost;
        const auto m = Make<EncoderClassifier>(c);
        at::manual_seed(3);
        const at::Tensor ids = Ids(3, 11), lengths = Lengths({11, 4, 1});
        for (const ops::Impl impl : kImpls) {
          ImplScope scope(impl);
          const std::string what =
              info->name + " " + pooling + " " + positions + " " + ImplName(impl);
          const at::Tensor got = m->Forward(ids, lengths);
          EXPECT_EQ(got.sizes(), at::IntArrayRef({3, 5}));
          ExpectClose(m->Forward(at::cat({ids, Ids(3, 7)}, 1), lengths), got, 1e-12,
                      what + ", more padding");
          const auto g = Gradients(m->Forward(at::cat({ids, Ids(3, 7)}, 1), lengths).square().sum(),
                                   m->parameters()),
                     want_g = Gradients(got.square().sum(), m->parameters());
          for (size_t i = 0; i < g.size(); ++i) {
            EXPECT_LE((g[i] - want_g[i]).norm().item<double>(),
                      1e-10 * want_g[i].norm().item<double>() + 1e-10)
                << what << " gradient " << i;
          }
          for (int64_t b = 0; b < 3; ++b) {
            const int64_t length = lengths.index({b}).item<int64_t>();
            const at::Tensor row = ids.narrow(0, b, 1).narrow(1, 0, length);
            ExpectClose(got.narrow(0, b, 1), m->Forward(row, Lengths({length})), 1e-12,
                        what + " row " + std::to_string(b));
          }
          at::Tensor changed = ids.clone();
          changed[1][3] = (changed[1][3] + 1) % 23;  // the last real token of row 1
          EXPECT_GT(RelRms(m->Forward(changed, lengths)[1], got[1]), 1e-6) << what;
        }
      }
    }
  }
}

TEST(EncoderClassifier, EveryParameterHasAGradient) {
  for (const MechanismInfo* info : Mechanisms()) {
    if (!info->Supports(Form::kBidirectional) || info->memory == MemoryUse::kNone) continue;
    for (const auto& [pooling, norm, head] :
         std::vector<std::array<std::string, 3>>{{"mean", "pre", "gelu"},
                                                 {"cls", "post", "relu"},
                                                 {"memory", "pre", "linear"},
                                                 {"memory", "post", "gelu"}}) {
      if (pooling == "memory" && !info->HandsOnMemory()) continue;
      if (pooling == "cls" && info->memory == MemoryUse::kLatents) continue;
      ModelConfig c = SmallLm({info->name, "latte", info->name});
      if (pooling == "memory") c.attention[1] = info->name;
      c.kind = "encoder_classifier", c.classes = 5, c.pooling = ValueOf(pooling, PoolingKinds()),
      c.norm = ValueOf(norm, NormPlaces()), c.head = ValueOf(head, HeadKinds());
      const auto m = Make<EncoderClassifier>(c);
      m->Forward(Ids(3, 11), Lengths({11, 4, 1})).square().sum().backward();
      const std::string what = info->name + " " + pooling + " " + norm;
      int memories = 0;
      for (const auto& p : m->named_parameters()) {
        memories += p.key().ends_with("core.memory") || p.key().ends_with("core.latents");
        ASSERT_TRUE(p.value().grad().defined()) << what << ": " << p.key();
        EXPECT_GT(p.value().grad().norm().item<double>(), 0) << what << ": " << p.key();
      }
      EXPECT_EQ(memories, 1) << what;
      const std::string name = info->memory == MemoryUse::kLatents ? "latents" : "memory";
      EXPECT_TRUE(m->named_parameters().contains("layers.0.attention.core." + name)) << what;
    }
  }
}

TEST(EncoderClassifier, HeadsByTheirFormulas) {
  for (const std::string pooled_from : {"mean", "memory", "latents"}) {
    for (const std::string head : {"relu", "gelu", "linear"}) {
      for (const bool after : {false, true}) {
        const bool latents = pooled_from == "latents";  // 64 of 7 tokens, the mean of all
        const std::string pooling = latents ? "mean" : pooled_from;
        ModelConfig c = SmallLm({latents ? "perceiver" : "luna"});
        c.kind = "encoder_classifier", c.classes = 5, c.pooling = ValueOf(pooling, PoolingKinds()),
        c.head = ValueOf(head, HeadKinds()), c.norm_pooled = after, c.layers = 1;
        const auto m = Make<EncoderClassifier>(c);
        auto p = m->named_parameters();
        at::NoGradGuard guard;
        const at::Tensor ids = Ids(2, 7);
        // The block again, outside the model.
        auto block = MakeBlock(c.Stack(Form::kBidirectional).Block(0));
        block->to(at::kDouble);
        for (const auto& q : block->named_parameters()) q.value().copy_(p["layers.0." + q.key()]);
        const Stream s =
            block->Bidirectional({at::embedding(p["embed_tokens.weight"], ids), {}, {}, {}});
        auto norm = [&](const at::Tensor& y) {
          return at::layer_norm(y, {12}, p["norm.weight"], p["norm.bias"], c.norm_eps);
        };
        at::Tensor pooled = pooling == "memory" ? s.memory : s.x;
        pooled = after ? norm(pooled.mean(1)) : norm(pooled).mean(1);
        if (head != "linear") {
          pooled = at::linear(pooled, p["classifier.dense.weight"], p["classifier.dense.bias"]);
          pooled = head == "relu" ? pooled.clamp_min(0) : at::gelu(pooled);
        }
        const at::Tensor want =
            at::linear(pooled, p["classifier.out_proj.weight"], p["classifier.out_proj.bias"]);
        ExpectClose(m->Forward(ids, Lengths({7, 7})), want, 1e-12, pooled_from + " " + head);
      }
    }
  }
}

ModelConfig SmallClassifier(const std::string& pooling) {
  ModelConfig c = SmallLm({"latte"});
  c.kind = "encoder_classifier", c.classes = 3, c.pooling = ValueOf(pooling, PoolingKinds());
  return c;
}

TEST(EncoderClassifier, NormsItsEmbeddings) {
  at::NoGradGuard guard;
  for (const std::string pooling : {"mean", "cls"}) {
    ModelConfig c = SmallClassifier(pooling);
    c.positions = PositionKind::kLearned;
    const auto plain = Make<EncoderClassifier>(c);
    c.embedding_norm = true;
    const auto normed = Make<EncoderClassifier>(c);
    auto from = normed->named_parameters(), to = plain->named_parameters();
    for (const auto& p : to) p.value().copy_(from[p.key()]);
    // One token at one place: the plain model sees what the norm makes of their sum when that is
    // its embedding and the position is 0.
    const at::Tensor ids = at::full({1, 1}, 5, at::kLong), weight = to["embed_tokens.weight"],
                     places = to["embed_positions.weight"];
    auto norm = [&](const at::Tensor& y) {
      const at::Tensor centred = y - y.mean(-1, true);
      return centred / (centred.square().mean(-1, true) + c.norm_eps).sqrt() *
                 from["embed_norm.weight"] +
             from["embed_norm.bias"];
    };
    const bool cls = pooling == "cls";
    weight[5] = norm(weight[5] + places[cls ? 1 : 0]);
    if (cls) to["cls_token"][0][0] = norm(to["cls_token"][0][0] + places[0]);
    places.zero_();
    ExpectClose(normed->Forward(ids, Lengths({1})), plain->Forward(ids, Lengths({1})), 1e-12,
                pooling);
  }
}

TEST(DecoderLm, NormsItsEmbeddings) {
  at::NoGradGuard guard;
  ModelConfig c = SmallLm({"latte"});
  c.tie_embeddings = false;
  const auto plain = Make<DecoderLm>(c);
  c.embedding_norm = true;
  const auto normed = Make<DecoderLm>(c);
  auto from = normed->named_parameters(), to = plain->named_parameters();
  for (const auto& p : to) p.value().copy_(from[p.key()]);
  to["embed_tokens.weight"].copy_(at::layer_norm(from["embed_tokens.weight"], {c.dim},
                                                 from["embed_norm.weight"], from["embed_norm.bias"],
                                                 c.norm_eps));
  const at::Tensor ids = Ids(2, 9);
  ExpectClose(ExtendInPieces(*normed, ids, {0, 9}), ExtendInPieces(*plain, ids, {0, 9}), 1e-12,
              "logits");
}

TEST(ModelConfig, FeedForwardDropoutReachesTheBlocks) {
  ModelConfig c = SmallClassifier("mean");
  c.ffn_dropout = 0.25;
  const auto m = Make<EncoderClassifier>(c);
  const at::Tensor ids = Ids(2, 9), lengths = Lengths({9, 9}), evaluated = m->Forward(ids, lengths);
  ExpectSameBits(m->Forward(ids, lengths), evaluated, "evaluation");
  m->train();
  EXPECT_GT(RelRms(m->Forward(ids, lengths), evaluated), 1e-3);
  EXPECT_EQ(c.Stack(Form::kBidirectional).Block(0).ffn_dropout, 0.25);
}

TEST(EncoderClassifier, OneMemoryGoesThroughTheLayers) {
  auto message = [](const std::vector<std::string>& attention, const std::string& pooling) {
    ModelConfig c = SmallLm(attention);
    c.kind = "encoder_classifier", c.classes = 3, c.pooling = ValueOf(pooling, PoolingKinds());
    return ErrorMessage([&] { MakeModel(c, 0); });
  };
  ExpectContains(message({"luna", "conv_luna"}, "mean"), {"luna", "conv_luna", "one memory"});
  ExpectContains(message({"latte"}, "memory"), {"pooling=memory", "latte", "pooling=mean"});
  ExpectContains(message({"luna", "latte"}, "memory"), {"pooling=memory", "latte"});
  ExpectContains(message({"set_transformer"}, "memory"), {"pooling=memory", "set_transformer"});
  ExpectContains(message({"perceiver", "softmax"}, "cls"),
                 {"pooling=cls", "latents", "pooling=mean"});
  EXPECT_EQ(message({"luna", "set_transformer", "latte", "luna"}, "memory"), "no error");
  // The first layer makes the memory that the last one reads; what the last makes of it reaches
  // nothing.
  ModelConfig c = SmallLm({"luna", "latte", "luna"});
  c.kind = "encoder_classifier", c.classes = 3, c.norm = NormPlace::kPost;
  const auto names = MakeModel(c, 0)->named_parameters();
  EXPECT_TRUE(names.contains("layers.0.memory_norm.weight"));
  EXPECT_FALSE(names.contains("layers.2.memory_norm.weight"));
}

}  // namespace
}  // namespace cistern

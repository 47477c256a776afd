// Ways of the sources that are options: each against plain loops in double, or a number by hand.
#include <algorithm>
#include <cmath>
#include <set>

#include "cistern/attention/mechanisms/nystrom.h"
#include "cistern/attention/testing_mechanisms.h"
#include "cistern/base/error.h"

namespace cistern {
namespace {

using namespace cistern::testing;

std::shared_ptr<Mechanism> Make(const std::string& name, const Json& options,
                                int64_t max_length = 64, int64_t layer = 0,
                                const Mechanism* first = nullptr) {
  AttentionDims dims;
  dims.dim = kDim, dims.heads = kHeads, dims.max_length = max_length, dims.layer = layer,
  dims.first = first;
  const auto m = FindMechanism(name).Make(options, dims);
  m->eval();
  m->to(at::kDouble);
  return m;
}

at::Tensor Cross(Mechanism& m, const std::vector<at::Tensor>& queries,
                 const std::vector<at::Tensor>& x, const ops::Mask& mask = {}) {
  State state = m.EmptyState(x[0].size(0), x[0].options());
  m.Write(x, state, mask);
  return m.Read(queries, state);
}

// softmax(q . k_s / sqrt(d)) v_s over the tokens `seen` of one row and head, and `zeros` more slots
// of logit and value 0: one token's output.
at::Tensor Attended(const std::vector<at::Tensor>& x, int64_t b, int64_t h, const at::Tensor& q,
                    const std::vector<int64_t>& seen, int64_t zeros) {
  double sum = double(zeros);
  at::Tensor out = at::zeros({kWidth}, at::kDouble);
  for (const int64_t s : seen) {
    const double w = std::exp((q * x[1][b][h][s]).sum().item<double>() / std::sqrt(double(kWidth)));
    sum += w;
    out += w * x[2][b][h][s];
  }
  return out / sum;
}

TEST(EmptySlots, OfAWindowTakePartWithLogitZero) {
  // P003 Table 8: queues of n = 32 slots, of zeros until they are written.
  at::manual_seed(1);
  const int64_t n = 4, T = 11;
  for (const int64_t g : {1, 2}) {
    const Json options = g == 1
                             ? Json{{"window", n}, {"empty_slots", "take_part"}}
                             : Json{{"window", n}, {"dilation", g}, {"empty_slots", "take_part"}};
    const auto m = Make(g == 1 ? "window" : "dilated", options);
    const auto x = Inputs(*m, 2, T);
    // The second row begins a document at token 5: its queue is empty again.
    const ops::Mask packed = {{}, Starts(2, T, {{1, 5}})};
    const at::Tensor want = at::zeros({2, kHeads, T, kWidth}, at::kDouble);
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t h = 0; h < kHeads; ++h) {
        for (int64_t t = 0; t < T; ++t) {
          std::vector<int64_t> seen;
          for (int64_t i = 0; i < n; ++i) {
            const int64_t s = t - i * g;
            if (s >= (b == 1 && t >= 5 ? 5 : 0)) seen.push_back(s);
          }
          want[b][h][t].copy_(Attended(x, b, h, x[0][b][h][t], seen, n - int64_t(seen.size())));
        }
      }
    }
    for (const ops::Impl impl : kImpls) {
      const ops::ImplScope scope(impl);
      for (const auto& cuts : {std::vector<int64_t>{0, T}, {0, 3, 7, T}, EachToken(T)})
        ExpectClose(ExtendPieces(*m, x, cuts, packed), want, 1e-12, ops::ImplName(impl));
      at::NoGradGuard guard;  // single tokens written in place
      ExpectClose(ExtendPieces(*m, Row(x, 0), EachToken(T)), want.narrow(0, 0, 1), 1e-12, "steps");
    }
    if (g == 2) continue;
    const auto queries = Inputs(*m, 2, 3);
    const at::Tensor got = Cross(*m, queries, x, {Lengths({T, 2}), {}});
    for (int64_t i = 0; i < 3; ++i) {
      const at::Tensor full =
                           Attended(x, 0, 1, queries[0][0][1][i], {T - 4, T - 3, T - 2, T - 1}, 0),
                       few = Attended(x, 1, 1, queries[0][1][1][i], {0, 1}, n - 2);
      ExpectClose(got[0][1][i], full, 1e-12, "cross, a full queue");
      ExpectClose(got[1][1][i], few, 1e-12, "cross, a source of two tokens");
    }
  }
  // One token of logit 0 in a queue of 4: a quarter of its value.
  const auto m = Make("window", Json{{"window", 4}, {"empty_slots", "take_part"}});
  std::vector<at::Tensor> one = Inputs(*m, 1, 1);
  one[0].zero_();
  ExpectClose(ExtendPieces(*m, one, {0, 1}), one[2] / 4, 1e-14, "by hand");
}

TEST(Sizes, ARowOfItsOwnLengthFillsTheSlots) {
  // A model of 1,024 positions and a row of 256: c = 1024 / 32 leaves 24 of 32 slots empty.
  at::manual_seed(2);
  const int64_t T = 256, n = 32;
  const auto written = [&](const Json& options) {
    const auto m = Make("abc_compressive", options, 1024);
    State state = m->EmptyState(1, at::kDouble);
    const auto x = Inputs(*m, 1, T);
    m->Write(x, state, {});
    return state["z"].exp().gt(0).sum().item<int64_t>() / kHeads;
  };
  EXPECT_EQ(written({{"slots", n}}), 8);
  EXPECT_EQ(written({{"slots", n}, {"length", "row"}}), n);
  EXPECT_EQ(written({{"slots", n}, {"ratio", T / n}}), n);

  // Rows of 11 and of 5 tokens in 4 slots: c = 3 and c = 2.
  for (const char* divisor : {"count", "ratio"}) {
    const auto m = Make("abc_compressive", {{"slots", 4}, {"length", "row"}, {"divisor", divisor}});
    const auto x = Inputs(*m, 2, 11), queries = Inputs(*m, 2, 11);
    const std::vector<int64_t> lengths = {11, 5};
    const ops::Mask mask = {Lengths(lengths), {}};
    const at::Tensor got = m->Bidirectional(x, mask), read = Cross(*m, queries, x, mask);
    for (int64_t b = 0; b < 2; ++b) {
      const int64_t c = b == 0 ? 3 : 2, N = lengths[size_t(b)];
      std::vector<at::Tensor> slots = {at::Tensor(), at::zeros({2, kHeads, 4, kWidth}, at::kDouble),
                                       at::zeros({2, kHeads, 4, kWidth}, at::kDouble)};
      std::vector<int64_t> used;
      for (int64_t l = 0; l * c < N; ++l) {
        const int64_t count = std::min(c, N - l * c);
        const double by = double(std::string(divisor) == "count" ? count : c);
        for (int i : {1, 2})
          slots[size_t(i)].select(2, l).copy_(x[size_t(i)].narrow(2, l * c, count).sum(2) / by);
        used.push_back(l);
      }
      for (int64_t h = 0; h < kHeads; ++h) {
        for (int64_t t = 0; t < N; ++t) {
          ExpectClose(got[b][h][t], Attended(slots, b, h, x[0][b][h][t], used, 0), 1e-12, divisor);
          ExpectClose(read[b][h][t], Attended(slots, b, h, queries[0][b][h][t], used, 0), 1e-12,
                      divisor);
        }
      }
    }
  }
  // Global tokens of rows of 11 and 5 tokens in 4 slots: every second, every one.
  const auto m = Make("local_to_global", {{"slots", 4}, {"stride", 0}, {"length", "row"}});
  const auto x = Inputs(*m, 2, 11);
  const at::Tensor got = m->Bidirectional(x, {Lengths({11, 5}), {}});
  ExpectClose(got[0][1][7], Attended(x, 0, 1, x[0][0][1][7], {0, 2, 4, 6}, 0), 1e-12, "11 tokens");
  ExpectClose(got[1][0][2], Attended(x, 1, 0, x[0][1][0][2], {0, 1, 2, 3}, 0), 1e-12, "5 tokens");
}

TEST(Sizes, WhatARowsLengthDoesNotFitIsRefused) {
  for (const char* name : {"abc_compressive", "local_to_global"}) {
    Json options = {{"slots", 4}, {"length", "row"}};
    if (std::string(name) == "local_to_global") options["stride"] = 0;
    const auto m = Make(name, options);
    const auto x = Inputs(*m, 1, 6);
    State state = m->EmptyState(1, at::kDouble);
    ExpectContains(Thrown([&] { m->Extend(x, state, {}); }), {name, "causal", "length=max_length"});
    m->Write(Narrow(x, 0, 3), state, {});
    ExpectContains(Thrown([&] { m->Write(Narrow(x, 3, 3), state, {}); }), {name, "pieces"});
  }
  ExpectContains(Thrown([] {
                   Make("abc_compressive", {{"ratio", 4}, {"length", "row"}});
                 }),
                 {"ratio=4", "length=row"});
  ExpectContains(Thrown([] {
                   Make("local_to_global", {{"length", "row"}});
                 }),
                 {"stride=1", "stride=0"});
}

TEST(Rfa, LayersShareOutTheBank) {
  const Json options = {{"features", 8}, {"bank", 6}, {"draws", "model"}};
  std::vector<std::shared_ptr<Mechanism>> layers;
  for (int64_t l = 0; l < 3; ++l)
    layers.push_back(Make("rfa", options, 64, l, l == 0 ? nullptr : layers[0].get()));
  const auto drawn = [&] {
    std::vector<int64_t> all;
    for (const auto& m : layers) {
      const at::Tensor row = m->EmptyState(2, at::kDouble)["draw"][1];
      for (int64_t h = 0; h < kHeads; ++h) all.push_back(row[h].item<int64_t>());
    }
    return all;
  };
  EXPECT_EQ(drawn(), (std::vector<int64_t>{0, 1, 0, 1, 0, 1})) << "evaluation: head h has matrix h";
  for (const auto& m : layers) m->train();
  at::manual_seed(3);
  const auto first = drawn();
  bool changes = false;
  for (int i = 0; i < 10; ++i) {
    const auto next = drawn();
    changes = changes || next != first;
    EXPECT_EQ(std::set<int64_t>(next.begin(), next.end()).size(), 6u) << "no matrix twice";
  }
  EXPECT_TRUE(changes);
  at::manual_seed(3);
  EXPECT_EQ(drawn(), first);
  ExpectContains(Thrown([&] { Make("rfa", options, 64, 3, layers[0].get()); }),
                 {"bank=6", "layer 3", "draws=layer"});
  ExpectContains(Thrown([] { Make("rfa", {{"bank", 0}, {"draws", "model"}}); }), {"draws=model"});
}

TEST(Rfa, TheForksGateWeighsKeys) {
  at::manual_seed(4);
  const auto m = Make("rfa", {{"features", 16}, {"input_gate", true}});
  at::Tensor bias = m->named_parameters()["input_gate.bias"];
  EXPECT_EQ(bias.numel(), kHeads);
  EXPECT_TRUE(at::equal(bias, at::full_like(bias, 3.0))) << "3 at first";
  EXPECT_EQ(m->Projections()[3].bias, std::optional<bool>(false)) << "it is input_gate.bias";
  // Two tokens whose gates are open and shut: the second alone is left.
  auto x = Inputs(*m, 1, 2);
  x[3].copy_(at::tensor({-40.0, 40.0}).view({1, 1, 2, 1}).expand({1, kHeads, 2, 1}));
  const at::Tensor got = m->Bidirectional(x, {});
  ExpectClose(got.select(2, 1), x[2].select(2, 1), 1e-9, "one open gate");
  // w . x = 0: sigmoid(3) for all keys, which divides out but for the rule of small denominators.
  x[3].zero_();
  at::Tensor open = Make("rfa", {{"features", 16}})->Bidirectional({x[0], x[1], x[2]}, {});
  ExpectClose(m->Bidirectional(x, {}), open, 1e-10, "equal gates");
}

TEST(Draws, PiecesOfARandomSequenceDrawWhatTheWholeDraws) {
  const auto m = Make("abc_random", {{"slots", 5}});
  m->train();
  at::manual_seed(5);
  const auto x = Inputs(*m, 2, 40);
  State whole = m->EmptyState(2, at::kDouble), pieces = whole.Clone(), other;
  const at::Tensor want = m->Extend(x, whole, {});
  std::vector<at::Tensor> outs;
  for (int64_t t = 0; t < 40; t += 8) {
    at::randn({t + 3});  // other draws meanwhile, dropout's for instance
    m->EmptyState(1, at::kDouble);
    outs.push_back(m->Extend(Narrow(x, t, 8), pieces, {}));
  }
  ExpectClose(at::cat(outs, 2), want, 1e-13, "pieces");
  ExpectClose(pieces["z"], whole["z"], 1e-13, "what was written to each slot");
  EXPECT_FALSE(at::equal(whole["z"][0], whole["z"][1])) << "rows draw apart";
  // Seeded alike, the whole sequence draws alike; otherwise not.
  at::manual_seed(6);
  const at::Tensor first = ExtendPieces(*m, x, {0, 40});
  EXPECT_FALSE(at::equal(ExtendPieces(*m, x, {0, 40}), first));
  at::manual_seed(6);
  ExpectSameBits(ExtendPieces(*m, x, {0, 40}), first, "again");
  // A document that begins at a position draws as one that begins a row.
  const at::Tensor key = m->EmptyState(1, at::kDouble)["draw"];
  State alone = m->EmptyState(1, at::kDouble), packed = m->EmptyState(1, at::kDouble);
  alone["draw"] = packed["draw"] = key;
  const auto row = Row(x, 0);
  const at::Tensor apart = m->Extend(Narrow(row, 13, 20), alone, {});
  ExpectClose(m->Extend(row, packed, {{}, Starts(1, 40, {{0, 13}})}).narrow(2, 13, 20), apart,
              1e-12, "a document in a row");
}

TEST(Linear, EpsOfTheMaps) {
  // Queries and keys of zeros have features 1 + e: d (1 + e)^2 over the same plus eps.
  const auto m = Make("linear", {{"map_eps", 0.5}, {"eps", 0.25}});
  auto x = Inputs(*m, 1, 1);
  x[0].zero_(), x[1].zero_();
  const double weight = kWidth * 1.5 * 1.5;
  ExpectClose(ExtendPieces(*m, x, {0, 1}), x[2] * (weight / (weight + 0.25)), 1e-14, "by hand");
}

TEST(Performer, EpsOfTheFeatures) {
  at::manual_seed(7);
  const double eps = 0.01;
  const auto m = Make("performer", {{"features", 6}, {"eps", eps}, {"redraw", 0}});
  at::Tensor w = m->named_buffers()["projection"];
  const auto x = Inputs(*m, 1, 9);
  const double scale = std::pow(double(kWidth), -0.25);
  const auto phi = [&](const at::Tensor& token, bool query) {
    std::vector<double> product, out;
    double square = 0;
    for (int64_t j = 0; j < kWidth; ++j) square += std::pow(token[j].item<double>() * scale, 2);
    for (int64_t i = 0; i < 6; ++i) product.push_back((w[i] * token * scale).sum().item<double>());
    const double most = *std::max_element(product.begin(), product.end());
    for (const double p : product)
      out.push_back(std::exp(p - square / 2 - (query ? most : 0)) + eps);
    return out;
  };
  const at::Tensor want = at::zeros({1, kHeads, 9, kWidth}, at::kDouble);
  for (int64_t h = 0; h < kHeads; ++h) {
    for (int64_t t = 0; t < 9; ++t) {
      const auto q = phi(x[0][0][h][t], true);
      double sum = 0;
      at::Tensor out = at::zeros({kWidth}, at::kDouble);
      for (int64_t s = 0; s <= t; ++s) {
        const auto k = phi(x[1][0][h][s], false);
        double weight = 0;
        for (size_t i = 0; i < 6; ++i) weight += q[i] * k[i];
        sum += weight;
        out += weight * x[2][0][h][s];
      }
      want[0][h][t].copy_(out / sum);
    }
  }
  ExpectClose(ExtendPieces(*m, x, {0, 4, 9}), want, 1e-11, "causal");
  // Keys so long that their features vanish weigh all alike: the mean.
  auto far = x;
  far[1] = x[1] * 1e3;
  ExpectClose(m->Bidirectional(far, {}), x[2].mean(2, true).expand_as(x[2]), 1e-9, "eps alone");
  ExpectContains(Thrown([] {
                   Make("performer", {{"kernel", "relu"}, {"eps", 1e-6}});
                 }),
                 {"eps=1e-06", "kernel=softmax"});
  for (const char* key : {"features", "scaling", "redraw", "seed"}) {
    ExpectContains(Thrown([&] {
                     Make("performer", {{"kernel", "relu"}, {key, 1}});
                   }),
                   {key, "kernel=relu"});
  }
}

TEST(Nystrom, TheBatchsStartIsOneDivisor) {
  // One iteration by hand: Z <- Z/4 (13 I - A Z (15 I - A Z (7 I - A Z))), Z0 = A^T / c.
  const at::Tensor A =
      at::tensor({0.9, 0.1, 0.5, 0.5, 0.2, 0.8, 0.6, 0.4}, at::kDouble).view({2, 2, 2});
  const at::Tensor I = at::eye(2, at::kDouble);
  const auto once = [&](const at::Tensor& a, double c) {
    const at::Tensor Z = a.t() / c, AZ = at::matmul(a, Z);
    return at::matmul(Z, 13 * I - at::matmul(AZ, 15 * I - at::matmul(AZ, 7 * I - AZ))) / 4;
  };
  // Column sums: 1.4, 0.6 and 0.8, 1.2.
  const at::Tensor apart = IterativePseudoInverse(A, 1),
                   together = IterativePseudoInverse(A, 1, true);
  ExpectClose(apart[0], once(A[0], 1.4), 1e-14, "of each");
  ExpectClose(apart[1], once(A[1], 1.2), 1e-14, "of each");
  ExpectClose(together[0], once(A[0], 1.4), 1e-14, "of the batch");
  ExpectClose(together[1], once(A[1], 1.4), 1e-14, "of the batch");
  ExpectContains(Thrown([] {
                   Make("nystrom", {{"start", "batch"}, {"inverse", "svd"}});
                 }),
                 {"start=batch", "inverse=iterative"});
}

TEST(Nystrom, PaddingAsZeroesInPlainMeans) {
  // 10 positions, 7 tokens in the second row, 4 landmarks: segments of 3, two zeros behind or in
  // front.
  at::manual_seed(8);
  const int64_t T = 10, m = 4, l = 3;
  const std::vector<int64_t> lengths = {T, 7};
  for (const char* padding : {"zeroes", "front"}) {
    const bool front = std::string(padding) == "front";
    const auto mechanism =
        Make("nystrom", {{"landmarks", m}, {"padding", padding}, {"inverse", "svd"}});
    const auto x = Inputs(*mechanism, 2, T);
    const at::Tensor got = mechanism->Bidirectional(x, {Lengths(lengths), {}});
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t h = 0; h < kHeads; ++h) {
        const int64_t n = lengths[size_t(b)];
        const auto landmarks = [&](const at::Tensor& y) {
          const at::Tensor sums = at::zeros({m, kWidth}, at::kDouble);
          for (int64_t t = 0; t < n; ++t) sums[(t + (front ? m * l - T : 0)) / l] += y[b][h][t];
          return sums / double(l);
        };
        const double root = std::sqrt(double(kWidth));
        const at::Tensor q = x[0][b][h].narrow(0, 0, n), k = x[1][b][h].narrow(0, 0, n),
                         v = x[2][b][h].narrow(0, 0, n), ql = landmarks(x[0]), kl = landmarks(x[1]);
        const auto softmax = [&](const at::Tensor& a, const at::Tensor& c) {
          return at::softmax(at::matmul(a, c.t()) / root, 1);
        };
        const at::Tensor want =
            at::matmul(at::matmul(softmax(q, kl), at::linalg_pinv(softmax(ql, kl), 1e-6)),
                       at::matmul(softmax(ql, k), v));
        ExpectClose(got[b][h].narrow(0, 0, n), want, 1e-9, padding);
        if (n < T) {  // padding reads
          EXPECT_GT(got[b][h].narrow(0, n, T - n).abs().min().item<double>(), 0);
        }
      }
    }
    ExpectContains(Thrown([&] {
                     ops::Mask holes;
                     holes.valid = at::ones({2, T}, at::kBool);
                     mechanism->Bidirectional(x, holes);
                   }),
                   {"[nystrom]", "padding=tokens"});
  }
}

TEST(Nystrom, RowsOfFewTokensMayBeExact) {
  at::manual_seed(9);
  const auto m = Make("nystrom", {{"landmarks", 8}, {"exact", true}}),
             plain = Make("nystrom", {{"landmarks", 8}}), softmax = Make("softmax", Json::object());
  const auto x = Inputs(*m, 3, 8);
  ExpectClose(m->Bidirectional(x, {}), softmax->Bidirectional(x, {}), 1e-13, "m = N");
  const auto longer = Inputs(*m, 3, 20);
  const ops::Mask mask = {Lengths({20, 8, 3}), {}};
  const at::Tensor got = m->Bidirectional(longer, mask);
  ExpectClose(got.narrow(0, 1, 2), softmax->Bidirectional(longer, mask).narrow(0, 1, 2), 1e-13,
              "rows of 8 and 3 tokens");
  ExpectSameBits(got[0], plain->Bidirectional(longer, mask)[0], "a row of 20 tokens");
}

TEST(Linformer, UnmaskedPaddingIsMixedIn) {
  at::manual_seed(10);
  const auto m = Make("linformer", {{"slots", 3}, {"mask", "none"}}),
             masked = Make("linformer", {{"slots", 3}});
  const auto x = Inputs(*m, 2, 9);
  const at::Tensor all = m->Bidirectional(x, {}), got = m->Bidirectional(x, {Lengths({9, 4}), {}});
  ExpectSameBits(got[0], all[0], "no padding");
  ExpectSameBits(got[1], all[1], "padding is read and reads");
  EXPECT_FALSE(m->FormRefusal(Form::kCausal).empty());
  EXPECT_FALSE(m->FormRefusal(Form::kCross).empty());
  EXPECT_TRUE(masked->FormRefusal(Form::kCausal).empty());
}

TEST(Linformer, MatricesOfTheSources) {
  // Nystromformer's: [H,k,N], for K and V and all layers.
  const Json shared = {{"slots", 3}, {"sharing", "layerwise_per_head"}, {"init", "normal"}};
  const auto first = Make("linformer", shared, 50),
             next = Make("linformer", shared, 50, 1, first.get());
  EXPECT_EQ(first->named_parameters()["key.weight"].sizes(), (at::IntArrayRef{50, kHeads, 3}));
  EXPECT_EQ(first->parameters().size(), 1u) << "E = F";
  EXPECT_EQ(next->parameters().size(), 0u) << "the first layer's";
  at::manual_seed(11);
  const auto x = Inputs(*first, 2, 9);
  ExpectSameBits(next->Bidirectional(x, {}), first->Bidirectional(x, {}), "the same matrices");
  // P004's code: variance 1 / (N H), cut at two deviations of the normal variable before it.
  const at::Tensor lecun =
      Make("linformer", {{"slots", 200}, {"sharing", "none"}, {"init", "lecun"}}, 300)
          ->named_parameters()["value.weight"];
  const double deviation = std::sqrt(1.0 / (300.0 * kHeads));
  EXPECT_NEAR(lecun.std().item<double>() / deviation, 1, 0.02);
  EXPECT_LE(lecun.abs().max().item<double>() / deviation, 2 / 0.8796 + 1e-3);
  EXPECT_GT(lecun.abs().max().item<double>() / deviation, 2.2);
  // N by itself.
  const auto sized = Make("linformer", {{"slots", 3}, {"length", 7}}, 50);
  EXPECT_EQ(sized->named_parameters()["key.weight"].size(0), 7);
  ExpectContains(Thrown([&] { sized->Bidirectional(x, {}); }), {"position 8", "length=7"});
}

TEST(SharedWorkspace, GatesOfAllTokensBehindEachOther) {
  const auto m = Make("shared_workspace", {{"slots", 2}, {"gate_input", "flattened"}}, 12);
  at::Tensor weight = m->named_parameters()["flattened_gate_proj.weight"];
  EXPECT_EQ(weight.sizes(), (at::IntArrayRef{2 * kDim, 12 * kDim}));
  at::manual_seed(12);
  const auto x = Inputs(*m, 1, 12);
  const at::Tensor before = m->Bidirectional(x, {});
  {
    at::NoGradGuard guard;
    weight.narrow(1, 7 * kDim, kDim).add_(1.0);  // of the eighth token
  }
  EXPECT_GT(RelRms(m->Bidirectional(x, {}), before), 1e-6);
  const at::Tensor short_row = m->Bidirectional(Narrow(x, 0, 7), {});
  {
    at::NoGradGuard guard;
    weight.narrow(1, 7 * kDim, kDim).add_(1.0);
  }
  ExpectSameBits(m->Bidirectional(Narrow(x, 0, 7), {}), short_row, "a row without that token");
  ExpectContains(Thrown([&] { m->Bidirectional(Inputs(*m, 1, 13), {}); }),
                 {"[shared_workspace]", "max_length=12"});
}

}  // namespace
}  // namespace cistern

// Window and dilated attention against softmax attention with a mask (spec 2.14, 2.18).
#include "cistern/attention/testing_mechanisms.h"
#include "cistern/base/error.h"

namespace cistern {
namespace {

using namespace cistern::testing;

std::shared_ptr<Mechanism> Make(const std::string& name, const Json& options) {
  AttentionDims dims;
  dims.dim = kDim, dims.heads = kHeads;
  const auto m = FindMechanism(name).make(options, dims);
  m->eval();
  return m;
}

// Softmax attention with a full [T,T] mask: token t sees s where |t - s|, or t - s in the causal
// form, is a multiple of g below n g.
at::Tensor Masked(const std::vector<at::Tensor>& x, int64_t n, int64_t g, bool causal) {
  const at::Tensor t = at::arange(x[0].size(2), at::kLong), back = t.unsqueeze(1) - t.unsqueeze(0);
  at::Tensor seen = (back.abs() < n * g).logical_and(back.remainder(g) == 0);
  if (causal) seen = seen.logical_and(back >= 0);
  const at::Tensor scores =
      at::matmul(x[0], x[1].transpose(2, 3)) / std::sqrt(double(x[0].size(3)));
  return at::matmul(at::softmax(scores.masked_fill(seen.logical_not(), -1e300), 3), x[2]);
}

struct Case {
  std::string name;
  Json options;
  int64_t n, g;
};
const std::vector<Case> kCases = {{"window", {{"window", 70}}, 70, 1},
                                  {"window", {{"window", 5}}, 5, 1},
                                  {"window", {{"window", 1000}}, 1000, 1},
                                  {"dilated", {{"window", 40}}, 40, 2},
                                  {"dilated", {{"window", 3}, {"dilation", 7}}, 3, 7}};

TEST(Window, IsMaskedSoftmaxWithItsGradients) {
  for (const Case& c : kCases) {
    const auto m = Make(c.name, c.options);
    for (const ops::Impl impl : kImpls) {
      ops::ImplScope scope(impl);
      at::manual_seed(5);
      for (const int64_t T : {64, 65, 301}) {
        const auto x = Leaves(Inputs(*m, 2, T, true));
        const at::Tensor g = Normal({2, kHeads, T, kWidth});
        for (const bool causal : {true, false}) {
          const std::string what =
              c.name + c.options.dump() + " " + ops::ImplName(impl) + " T=" + std::to_string(T);
          const at::Tensor got = causal ? ExtendPieces(*m, x, {0, T}) : m->Bidirectional(x, {}),
                           want = Masked(x, c.n, c.g, causal);
          ExpectClose(got, want, 1e-12, what);
          const auto got_g = Gradients((got * g).sum(), x), want_g = Gradients((want * g).sum(), x);
          for (size_t i = 0; i < x.size(); ++i)
            ExpectClose(got_g[i], want_g[i], 1e-11, what + " gradient");
        }
      }
    }
  }
}

TEST(Window, TheRingServesLongDecoding) {
  at::NoGradGuard guard;
  for (const Case& c : kCases) {
    at::manual_seed(6);
    const auto m = Make(c.name, c.options);
    const auto x = Inputs(*m, 2, 230);
    const at::Tensor want = Masked(x, c.n, c.g, true);
    State state;
    ExpectClose(ExtendPieces(*m, x, EachToken(230), {}, &state), want, 1e-12, c.name);
    ExpectClose(ExtendPieces(*m, x, {0, 1, 2, 90, 91, 150, 229, 230}), want, 1e-12,
                c.name + " pieces");
    EXPECT_EQ(state["k"].size(2), c.n * c.g);
  }
}

TEST(Window, AdjacentPiecesMerge) {
  at::NoGradGuard guard;
  for (const Case& c : kCases) {
    const auto m = Make(c.name, c.options);
    for (const auto& [a, b] : std::vector<std::pair<int64_t, int64_t>>{
             {3, 2}, {100, 1}, {1, 100}, {90, 95}, {0, 4}, {4, 0}}) {
      at::manual_seed(7);
      const auto x = Inputs(*m, 2, a + b + 8);
      State first, second;
      ExtendPieces(*m, Narrow(x, 0, a), {0, a}, {}, &first);
      ExtendPieces(*m, Narrow(x, a, b), {0, b}, {}, &second);
      State merged = m->Merge(first, second);
      const at::Tensor got = m->Extend(Narrow(x, a + b, 8), merged, {});
      ExpectClose(got, Masked(x, c.n, c.g, true).narrow(2, a + b, 8), 1e-12,
                  c.name + c.options.dump() + " " + std::to_string(a));
    }
  }
}

TEST(Window, AWindowOfEverythingIsSoftmax) {
  at::manual_seed(8);
  const auto window = Make("window", Json{{"window", 100}}),
             softmax = Make("softmax", Json::object());
  const auto x = Inputs(*window, 2, 100), queries = Inputs(*window, 2, 7);
  ExpectClose(ExtendPieces(*window, x, {0, 60, 100}), ExtendPieces(*softmax, x, {0, 60, 100}),
              1e-12, "causal");
  ExpectClose(window->Bidirectional(x, {}), softmax->Bidirectional(x, {}), 1e-12, "bidirectional");
  State a = window->EmptyState(2, x[0].options()), b = softmax->EmptyState(2, x[0].options());
  window->Write(x, a, {});
  softmax->Write(x, b, {});
  ExpectClose(window->Read(queries, a), softmax->Read(queries, b), 1e-12, "cross");
}

TEST(Window, NoSquareMaskIsFormed) {
  // 100,000 tokens: a [T,T] mask would take 10 GB, as floats 40.
  for (const std::string name : {"window", "dilated"}) {
    const auto m = Make(name, Json{{"window", 8}});
    const int64_t T = 100000;
    at::manual_seed(9);
    const auto x = To(Inputs(*m, 1, T), at::kFloat);
    const at::Tensor out = ExtendPieces(*m, x, {0, T});
    const auto tail = To(Narrow(x, T - 40, 40), at::kDouble);
    ExpectClose(out.narrow(2, T - 1, 1),
                Masked(tail, 8, name == "window" ? 1 : 2, true).narrow(2, 39, 1), 1e-6, name);
  }
}

TEST(Dilated, CrossAttentionIsRefused) {
  const auto m = Make("dilated", Json{{"window", 2}});
  const auto x = Inputs(*m, 1, 5);
  State state = m->EmptyState(1, x[0].options());
  m->Write(x, state, {});
  ExpectContains(Thrown([&] { m->Read(x, state); }), {"[dilated]", "cross", "use window"});
}

}  // namespace
}  // namespace cistern

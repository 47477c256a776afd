#include "cistern/kernels/short_conv.h"

#include <cstring>

#include "cistern/base/parallel.h"
#include "cistern/kernels/ref/short_conv_ref.h"
#include "cistern/kernels/slot_test.h"

namespace cistern::slot_test {
namespace {

// x, g = dy: [B,T,C]   w: [C,K]   state, dstate (of the state after): [B,K-1,C]
struct ConvProblem {
  ConvShape shape;
  std::vector<double> x, w, state, g, dstate;
  std::vector<uint8_t> starts;
  std::vector<int64_t> lengths;
  std::string name;
  SlotShape Tokens() const { return {shape.batch, 1, shape.length, 1, 1}; }
  RowMask Mask() const {
    return {starts.empty() ? nullptr : starts.data(), lengths.empty() ? nullptr : lengths.data()};
  }
};

ConvProblem MakeConv(uint64_t seed, const ConvShape& shape, bool masked) {
  Random random(seed);
  ConvProblem p;
  p.shape = shape;
  const auto [B, T, C, K, ahead] = shape;
  p.x = Normals(random, B * T * C);
  p.w = Normals(random, C * K);
  p.state = Normals(random, B * (K - 1) * C);
  p.g = Normals(random, B * T * C);
  p.dstate = Normals(random, B * (K - 1) * C);
  for (int64_t i = 0; masked && shape.ahead == 0 && i < B * T; ++i)
    p.starts.push_back(random.Below(6) == 0 ? 1 : 0);
  for (int64_t b = 0; masked && b < B; ++b) p.lengths.push_back(random.Below(T + 1));
  p.name = "seed " + std::to_string(seed) + " B" + std::to_string(B) + " T" + std::to_string(T) +
           " C" + std::to_string(C) + " K" + std::to_string(K) + " ahead " + std::to_string(ahead) +
           (masked ? " masked" : "") + " isa " + ActiveIsa();
  return p;
}

struct ConvResult {
  std::vector<double> y, state, dx, dw, dstate;
};

template <class T>
ConvResult RunKernels(const ConvProblem& p, Layout layout) {
  const int64_t C = p.shape.channels;
  const Array<T> x(p.Tokens(), C, layout, p.x), g(p.Tokens(), C, layout, p.g);
  Array<T> y(p.Tokens(), C, layout), dx(p.Tokens(), C, layout);
  const std::vector<T> w(p.w.begin(), p.w.end()), state(p.state.begin(), p.state.end()),
      dstate(p.dstate.begin(), p.dstate.end());
  std::vector<T> next = state, dw(w.size(), T(NAN)), dstate_in(state.size(), T(NAN));
  ShortConv<T>(p.shape, x.in(), w.data(), next.data(), p.Mask(), y.rows(), next.data());
  ShortConvBackward<T>(p.shape, g.in(), dstate.data(), x.in(), w.data(), state.data(), p.Mask(),
                       dx.rows(), dw.data(), dstate_in.data());
  return {y.Values(), ToDouble(next), dx.Values(), ToDouble(dw), ToDouble(dstate_in)};
}

ConvResult RunReference(const ConvProblem& p) {
  ConvResult r{std::vector<double>(p.x.size()), std::vector<double>(p.state.size()),
               std::vector<double>(p.x.size()), std::vector<double>(p.w.size()),
               std::vector<double>(p.state.size())};
  ref::ShortConv(p.shape, p.x.data(), p.w.data(), p.state.data(), p.Mask(), r.y.data(),
                 r.state.data());
  ref::ShortConvBackward(p.shape, p.g.data(), p.dstate.data(), p.x.data(), p.w.data(),
                         p.state.data(), p.Mask(), r.dx.data(), r.dw.data(), r.dstate.data());
  return r;
}

template <class T>
void ExpectDefinition(const ConvProblem& p, Layout layout) {
  ConvResult got = RunKernels<T>(p, layout), want = RunReference(p);
  const double tolerance = std::is_same_v<T, float> ? 1e-6 : 1e-14;
  EXPECT_LE(RelativeRms(got.y, want.y), tolerance) << p.name;
  EXPECT_EQ(got.state, want.state) << p.name;
  EXPECT_LE(RelativeRms(got.dx, want.dx), tolerance) << p.name;
  // Few numbers, each a sum over all tokens: the size such sums have stands beside them, in case
  // the few cancel.
  for (ConvResult* r : {&got, &want})
    r->dw.push_back(std::sqrt(double(p.shape.batch * p.shape.length)));
  EXPECT_LE(RelativeRms(got.dw, want.dw), 5 * tolerance) << p.name;
  EXPECT_LE(RelativeRms(got.dstate, want.dstate), tolerance) << p.name;
}

TEST(ShortConv, Definition) {
  ForEachIsa([] {
    uint64_t seed = 1;
    for (int64_t T : {0, 1, 2, 5, 33, 300}) {
      for (int64_t C : {1, 3, 16, 65}) {
        for (int64_t K : {1, 2, 4, 7, 12}) {
          for (int64_t ahead : {int64_t{0}, K / 2, K - 1}) {
            for (bool masked : {false, true}) {
              const ConvProblem p = MakeConv(seed++, {2, T, C, K, ahead}, masked);
              ExpectDefinition<float>(p, masked ? Layout::kBHTW : Layout::kBTHW);
              ExpectDefinition<double>(p, masked ? Layout::kBTHW : Layout::kBHTW);
            }
          }
        }
      }
    }
  });
}

TEST(ShortConv, LongRowsAndRareDocuments) {  // several blocks of tokens; a tile is cut where a
                                             // document starts, and whole elsewhere
  ForEachIsa([] {
    for (int64_t K : {1, 4, 9, 32}) {
      for (int64_t ahead : {int64_t{0}, K / 2}) {
        ConvProblem p = MakeConv(uint64_t(K), {2, 1100, 130, K, ahead}, false);
        if (ahead == 0) {
          p.starts.assign(2200, 0);
          for (const int64_t t : {0, 1, 40, 47, 56, 700, 1024, 1099, 1100 + 17})
            p.starts[size_t(t)] = 1;
        }
        p.lengths = {1100, 1051};
        ExpectDefinition<float>(p, Layout::kBTHW);
        ExpectDefinition<double>(p, Layout::kBTHW);
      }
    }
  });
}

TEST(ShortConv, HandExample) {  // y_t = 10 x_{t-1} + x_t; a document starts at t = 2
  const std::vector<double> x = {1, 2, 3, 4}, w = {10, 1}, state = {5};
  const std::vector<uint8_t> starts = {0, 0, 1, 0};
  std::vector<double> y(4), next(1);
  ref::ShortConv({1, 4, 1, 2}, x.data(), w.data(), state.data(), {starts.data(), nullptr}, y.data(),
                 next.data());
  EXPECT_EQ(y, (std::vector<double>{51, 12, 3, 34}));
  EXPECT_EQ(next[0], 4);
}

TEST(ShortConv, ReferenceFiniteDifferences) {  // the loss is linear in each of x, w and state, so
                                               // differences are exact
  for (uint64_t seed = 1; seed < 9; ++seed) {
    const int64_t K = 1 + int64_t(seed) % 5;
    ConvProblem p = MakeConv(seed, {2, 9, 2, K, seed > 4 ? K - 1 : 0}, seed % 2 == 0);
    const ConvResult d = RunReference(p);
    const auto loss = [&] {
      const ConvResult r = RunReference(p);
      double sum = 0;
      for (size_t i = 0; i < r.y.size(); ++i) sum += r.y[i] * p.g[i];
      for (size_t i = 0; i < r.state.size(); ++i) sum += r.state[i] * p.dstate[i];
      return sum;
    };
    const auto check = [&](std::vector<double>& x, const std::vector<double>& gradient) {
      for (size_t i = 0; i < x.size(); ++i) {
        const double kept = x[i], before = loss();
        x[i] = kept + 1;
        EXPECT_NEAR(loss() - before, gradient[i], 1e-11) << p.name;
        x[i] = kept;
      }
    };
    check(p.x, d.dx);
    check(p.w, d.dw);
    check(p.state, d.dstate);
  }
}

TEST(ShortConv, SplitAnywhereAndNoState) {
  const ConvProblem p = MakeConv(3, {1, 23, 5, 4}, false);
  const std::vector<float> x(p.x.begin(), p.x.end()), w(p.w.begin(), p.w.end());
  const auto rows = [](auto* data) {
    return Rows<std::remove_pointer_t<decltype(data)>>{data, 0, 0, 5};
  };
  std::vector<float> whole(x.size()), state(15);
  ShortConv<float>(p.shape, rows(x.data()), w.data(), nullptr, {}, rows(whole.data()),
                   state.data());
  for (int64_t split = 0; split <= 23; ++split) {
    std::vector<float> y(x.size(), NAN), carried(15, 0.f);
    ShortConv<float>({1, split, 5, 4}, rows(x.data()), w.data(), carried.data(), {}, rows(y.data()),
                     carried.data());
    ShortConv<float>({1, 23 - split, 5, 4}, rows(x.data() + split * 5), w.data(), carried.data(),
                     {}, rows(y.data() + split * 5), carried.data());
    EXPECT_EQ(std::memcmp(y.data(), whole.data(), y.size() * sizeof(float)), 0) << split;
    EXPECT_EQ(carried, state) << split;
  }
}

TEST(ShortConv, SameBitsForAnyThreadCountAndBlindToTheFuture) {
  const int threads = NumThreads();
  ConvProblem p = MakeConv(4, {3, 1100, 150, 4}, true);
  SetNumThreads(1);
  const ConvResult one = RunKernels<float>(p, Layout::kBTHW);
  SetNumThreads(2);
  const ConvResult two = RunKernels<float>(p, Layout::kBTHW);
  SetNumThreads(threads);
  EXPECT_TRUE(one.y == two.y && one.dx == two.dx && one.dw == two.dw && one.dstate == two.dstate);
  p.lengths.clear();
  p.starts.clear();
  for (const int64_t ahead : {0, 2}) {
    p.shape.ahead = ahead;
    ConvProblem other = p;
    const ConvResult before = RunKernels<float>(p, Layout::kBTHW);
    for (int64_t b = 0; b < 3; ++b)
      std::fill(other.x.begin() + (b * 1100 + 333) * 150, other.x.begin() + (b + 1) * 1100 * 150,
                NAN);
    const ConvResult after = RunKernels<float>(other, Layout::kBTHW);
    const size_t same = size_t(333 - ahead) * 150 * sizeof(double);
    for (int64_t b = 0; b < 3; ++b)
      EXPECT_EQ(std::memcmp(&before.y[size_t(b * 165000)], &after.y[size_t(b * 165000)], same), 0);
  }
}

}  // namespace
}  // namespace cistern::slot_test

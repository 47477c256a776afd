// FAVOR+ from queries and keys against its definition, forward and backward, on every instruction
// set. Its walk is that of slot_attention_test.cc.
#include "cistern/kernels/favor_attention.h"

#include "cistern/base/parallel.h"
#include "cistern/kernels/ref/slot_memory_ref.h"
#include "cistern/kernels/slot_test.h"

namespace cistern::slot_test {
namespace {

using Numbers = std::vector<double>;

// a and s of `of` are the logarithms of features of q and k.
struct FavorProblem {
  Problem of;
  int64_t width;  // of queries and keys
  double scale;
  Numbers q, k, matrix;
};

void FormFeatures(FavorProblem* p) {
  const int64_t n = p->of.shape.slots;
  for (int64_t i = 0; i < p->of.Tokens(); ++i) {
    for (int64_t l = 0; l < n; ++l) {
      double x = 0, s = 0;
      for (int64_t j = 0; j < p->width; ++j) {
        const size_t at = size_t(i * p->width + j);
        const double w = p->matrix[size_t(l * p->width + j)], k = p->scale * p->k[at];
        x += w * p->scale * p->q[at], s += w * k - k * k / 2;
      }
      p->of.a[size_t(i * n + l)] = x, p->of.s[size_t(i * n + l)] = s;
    }
  }
}

FavorProblem Make(uint64_t seed, const SlotShape& shape, int64_t width, double scale = 0.5,
                  const Options& options = {}) {
  FavorProblem p = {MakeProblem(seed, false, shape, options), width, scale, {}, {}, {}};
  Random random(seed + 1);
  p.q = Normals(random, p.of.Tokens() * width), p.k = Normals(random, p.of.Tokens() * width);
  p.matrix = Normals(random, shape.slots * width);
  FormFeatures(&p);
  return p;
}

// Outputs, the state after, gradients of q, k, v and the state before.
struct Results {
  Numbers out, memory, z, dq, dk, dv, dmemory, dz;
};

Results Definition(const FavorProblem& f) {
  const Problem& p = f.of;
  const int64_t tokens = p.Tokens(), n = p.shape.slots;
  Results r;
  r.out.resize(size_t(tokens * p.shape.width)), r.dv = r.out;
  r.memory = p.memory, r.z = p.z, r.dmemory.resize(p.memory.size()), r.dz.resize(p.z.size());
  r.dq.resize(f.q.size()), r.dk.resize(f.k.size());
  Numbers dx(size_t(tokens * n)), ds = dx;
  ref::FavorRead(p.shape, p.a.data(), p.s.data(), p.u.data(), p.Mask(), r.memory.data(), r.z.data(),
                 r.out.data());
  ref::FavorReadBackward(p.shape, p.a.data(), p.s.data(), p.u.data(), p.Mask(), p.memory.data(),
                         p.z.data(), p.g.data(), p.dmemory_T.data(), p.dz_T.data(), dx.data(),
                         ds.data(), r.dv.data(), r.dmemory.data(), r.dz.data());
  for (int64_t i = 0; i < tokens; ++i) {
    for (int64_t l = 0; l < n; ++l) {
      for (int64_t j = 0; j < f.width; ++j) {
        const double w = f.matrix[size_t(l * f.width + j)];
        const size_t at = size_t(i * f.width + j), slot = size_t(i * n + l);
        r.dq[at] += f.scale * w * dx[slot];
        r.dk[at] += f.scale * (w - f.scale * f.k[at]) * ds[slot];
      }
    }
  }
  return r;
}

template <class S>
Results Kernel(const FavorProblem& f, Layout layout) {
  using T = ComputeType<S>;
  const Problem& p = f.of;
  const int64_t d = p.shape.width, w = f.width;
  const Array<S> q(p.shape, w, layout, f.q), k(p.shape, w, layout, f.k), v(p.shape, d, layout, p.u),
      g(p.shape, d, layout, p.g);
  Array<S> out(p.shape, d, layout), dq(p.shape, w, layout), dk(p.shape, w, layout),
      dv(p.shape, d, layout);
  const std::vector<T> matrix(f.matrix.begin(), f.matrix.end());
  const FavorMap<T> map = {matrix.data(), w, f.scale};
  Results r;
  r.memory = p.memory, r.z = p.z;
  FavorQueriesForward<S>(p.shape, map, q.in(), k.in(), v.in(), p.Mask(), r.memory.data(),
                         r.z.data(), out.rows());
  // As SlotAdjoint has it: h = dM . M - dz in, and out that from which dz comes.
  std::vector<T> G(p.dmemory_T.begin(), p.dmemory_T.end()), h;
  for (size_t l = 0; l < p.z.size(); ++l)
    h.push_back(static_cast<T>(SlotDot(p.dmemory_T, r.memory, l, d) - p.dz_T[l]));
  FavorQueriesBackward<S>(p.shape, map, q.in(), k.in(), v.in(), g.in(), p.Mask(), p.memory.data(),
                          p.z.data(), G.data(), h.data(), dq.rows(), dk.rows(), dv.rows());
  r.out = out.Values(), r.dq = dq.Values(), r.dk = dk.Values(), r.dv = dv.Values();
  r.dmemory = ToDouble(G);
  for (size_t l = 0; l < p.z.size(); ++l) r.dz.push_back(SlotDot(G, p.memory, l, d) - double(h[l]));
  return r;
}

// As in slot_attention_test.cc, dq is measured beside dv: where one slot is read alone, rounding is
// all there is of it.
void ExpectNear(Results got, Results want, double tolerance, const std::string& name) {
  for (Results* r : {&got, &want}) r->dq.insert(r->dq.end(), r->dv.begin(), r->dv.end());
  EXPECT_LE(RelativeRms(got.out, want.out), tolerance) << name;
  EXPECT_LE(RelativeRms(got.memory, want.memory), tolerance) << name;
  EXPECT_LE(RelativeRms(got.z, want.z), tolerance) << name;
  EXPECT_LE(RelativeRms(got.dq, want.dq), tolerance) << name;
  EXPECT_LE(RelativeRms(got.dk, want.dk), tolerance) << name;
  EXPECT_LE(RelativeRms(got.dv, want.dv), tolerance) << name;
  EXPECT_LE(RelativeRms(got.dmemory, want.dmemory), tolerance) << name;
  EXPECT_LE(RelativeRms(got.dz, want.dz), tolerance) << name;
}

void ExpectDefinition(const FavorProblem& f, Layout layout = Layout::kBTHW) {
  const Results want = Definition(f);
  ExpectNear(Kernel<double>(f, layout), want, 1e-12, f.of.name + " double");
  // Logits of that size are rounded before their exponential is taken.
  double largest = 1;
  for (const double x : f.of.a) largest = std::max(largest, std::abs(x));
  for (const double s : f.of.s) largest = std::max(largest, std::abs(s));
  ExpectNear(Kernel<float>(f, layout), want, 2e-6 * largest, f.of.name + " float");
}

TEST(FavorQueries, LengthsAndWidths) {
  ForEachIsa([] {
    uint64_t seed = 1;
    for (const int64_t T : {0, 1, 2, 31, 33, 64, 150, 300}) {
      for (const int64_t width : {1, 5, 16, 33}) {
        ExpectDefinition(Make(seed++, {2, 2, T, 17, 5}, width),
                         T % 2 == 0 ? Layout::kBHTW : Layout::kBTHW);
      }
    }
    ExpectDefinition(Make(seed++, {1, 2, 140, 64, 32}, 32));
    ExpectDefinition(Make(seed++, {1, 1, 70, 110, 32}, 32));
    ExpectDefinition(Make(seed++, {1, 2, 70, 1, 1}, 1));
  });
}

// Log-weights so far apart that spans and chunks are cut.
TEST(FavorQueries, FarApart) {
  ForEachIsa([] {
    for (uint64_t seed = 100; seed < 108; ++seed)
      ExpectDefinition(Make(seed, {1, 2, 200, 19, 8}, 9, 4));
  });
}

TEST(FavorQueries, StartsAndLengths) {
  ForEachIsa([] {
    for (uint64_t seed = 200; seed < 212; ++seed) {
      for (const int64_t T : {1, 2, 90, 333}) {
        ExpectDefinition(
            Make(seed, {3, 2, T, 9, 20}, 7, 1, {.starts = true, .lengths = seed % 3 != 0}));
      }
    }
  });
}

TEST(FavorQueries, TokensInBFloat16) {
  ForEachIsa([] {
    FavorProblem f = Make(300, {2, 2, 200, 24, 16}, 16);
    for (Numbers* x : {&f.q, &f.k, &f.of.u, &f.of.g}) {
      for (double& v : *x) v = double(float(BFloat16(float(v))));
    }
    FormFeatures(&f);
    const Results want = Definition(f), got = Kernel<BFloat16>(f, Layout::kBTHW);
    EXPECT_LE(RelativeRms(got.out, want.out), 0.01);
    EXPECT_LE(RelativeRms(got.dq, want.dq), 0.02);
    EXPECT_LE(RelativeRms(got.dk, want.dk), 0.02);
    EXPECT_LE(RelativeRms(got.dv, want.dv), 0.01);
  });
}

// Threads that share heads too: three and seven for two of them.
TEST(FavorQueries, SameBitsForAnyThreads) {
  const FavorProblem f = Make(400, {1, 2, 2100, 24, 16}, 8);
  const int before = NumThreads();
  SetNumThreads(1);
  const Results want = Kernel<float>(f, Layout::kBTHW);
  for (const int threads : {2, 3, 7}) {
    SetNumThreads(threads);
    const Results got = Kernel<float>(f, Layout::kBTHW);
    EXPECT_EQ(got.out, want.out);
    EXPECT_EQ(got.memory, want.memory);
    EXPECT_EQ(got.dq, want.dq);
    EXPECT_EQ(got.dk, want.dk);
    EXPECT_EQ(got.dv, want.dv);
    EXPECT_EQ(got.dmemory, want.dmemory);
  }
  SetNumThreads(before);
}

}  // namespace
}  // namespace cistern::slot_test

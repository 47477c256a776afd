// Linear attention that forms Fourier features within its walk against its definition: the features
// (fourier_features_test.cc has theirs), then linear attention of them (linear_attention_test.cc),
// in double.
#include "cistern/base/parallel.h"
#include "cistern/kernels/linear_attention.h"
#include "cistern/kernels/ref/linear_attention_ref.h"
#include "cistern/kernels/slot_test.h"
#include "cistern/kernels/workspace.h"

namespace cistern::slot_test {
namespace {

using Numbers = std::vector<double>;

struct FourierProblem {
  SlotShape shape;  // slots: twice the features
  int64_t channels;
  bool normalise;
  LinearRule rule;
  Numbers q, k, v, memory, g, g_memory, scale, matrices;
  std::vector<uint8_t> starts;
  std::vector<int64_t> lengths;
  std::string name;
  RowMask Mask() const {
    return {starts.empty() ? nullptr : starts.data(), lengths.empty() ? nullptr : lengths.data()};
  }
  template <class T>
  FourierMap<T> Map(const std::vector<T>& scales, const std::vector<T>& given) const {
    return {scales.empty() ? nullptr : scales.data(),
            given.data(),
            channels,
            shape.slots / 2,
            normalise,
            0.25};
  }
};

struct Case {
  bool normalise = true, scaled = true, starts = false, lengths = false;
  LinearRule rule = {FeatureMap::kFourier, 0, DivisorRule::kSignSafe, 2};
};

FourierProblem Make(uint64_t seed, const SlotShape& shape, int64_t channels, const Case& c = {}) {
  FourierProblem p = {shape, channels, c.normalise, c.rule, {}, {}, {}, {},
                      {},    {},       {},          {},     {}, {}, {}};
  Random random(seed);
  const int64_t heads = shape.batch * shape.heads, tokens = heads * shape.length,
                memory = heads * shape.slots * c.rule.Columns(shape.width);
  p.q = Normals(random, tokens * channels), p.k = Normals(random, tokens * channels);
  p.v = Normals(random, tokens * shape.width), p.g = Normals(random, tokens * shape.width);
  p.memory = Normals(random, memory), p.g_memory = Normals(random, memory);
  if (c.scaled) p.scale = Normals(random, shape.heads * channels);
  p.matrices = Normals(random, shape.heads * (shape.slots / 2) * channels);
  for (int64_t i = 0; c.starts && i < shape.batch * shape.length; ++i)
    p.starts.push_back(random.Below(12) == 0 ? 1 : 0);
  for (int64_t b = 0; c.lengths && b < shape.batch; ++b)
    p.lengths.push_back(b == 0 ? shape.length : random.Below(shape.length + 1));
  p.name = "seed " + std::to_string(seed) + " T" + std::to_string(shape.length) + " n" +
           std::to_string(shape.slots) + " from " + std::to_string(channels) + " isa " +
           ActiveIsa();
  return p;
}

struct Results {
  Numbers out, memory, dq, dk, dv, dmemory, d_scale;
};
const std::pair<const char*, Numbers Results::*> kParts[] = {
    {"out", &Results::out},        {"memory", &Results::memory}, {"dq", &Results::dq},
    {"dk", &Results::dk},          {"dv", &Results::dv},         {"dmemory", &Results::dmemory},
    {"d_scale", &Results::d_scale}};

Results Definition(const FourierProblem& p) {
  const FourierShape shape = {p.shape.batch, p.shape.heads, p.shape.length};
  const FourierMap<double> map = p.Map(p.scale, p.matrices);
  LinearRule rule = p.rule;
  rule.map = FeatureMap::kNone;
  const auto rows = [&](auto* data, int64_t width) {
    return Rows<std::remove_pointer_t<decltype(data)>>{data, shape.heads * shape.length * width,
                                                       shape.length * width, width};
  };
  const auto features = [&](const Numbers& x) {
    Numbers y(x.size() / size_t(p.channels) * size_t(p.shape.slots));
    FourierFeatures<double>(shape, map, rows(x.data(), p.channels), rows(y.data(), p.shape.slots));
    return y;
  };
  const Numbers phi_q = features(p.q), phi_k = features(p.k);
  Numbers d_phi_q(phi_q.size()), d_phi_k(phi_k.size());
  Results r{p.g, p.memory, p.q, p.k, p.v, p.memory, Numbers(p.scale.size())};
  ref::LinearForward(p.shape, rule, phi_q.data(), phi_k.data(), p.v.data(), p.Mask(),
                     r.memory.data(), r.out.data());
  ref::LinearBackward(p.shape, rule, phi_q.data(), phi_k.data(), p.v.data(), p.Mask(),
                      p.memory.data(), p.g.data(), p.g_memory.data(), d_phi_q.data(),
                      d_phi_k.data(), r.dv.data(), r.dmemory.data());
  const auto back = [&](const Numbers& x, const Numbers& phi, const Numbers& d_phi, Numbers* dx) {
    Numbers d_scale(p.scale.size());
    FourierFeaturesBackward<double>(shape, map, rows(x.data(), p.channels),
                                    rows(phi.data(), p.shape.slots),
                                    rows(d_phi.data(), p.shape.slots), rows(dx->data(), p.channels),
                                    d_scale.empty() ? nullptr : d_scale.data());
    for (size_t j = 0; j < d_scale.size(); ++j) r.d_scale[j] += d_scale[j];
  };
  back(p.q, phi_q, d_phi_q, &r.dq), back(p.k, phi_k, d_phi_k, &r.dk);
  return r;
}

template <class S>
Results Kernels(const FourierProblem& p, Layout layout = Layout::kBTHW) {
  using T = ComputeType<S>;
  const int64_t d = p.shape.width, w = p.channels;
  const Array<S> q(p.shape, w, layout, p.q), k(p.shape, w, layout, p.k), v(p.shape, d, layout, p.v),
      g(p.shape, d, layout, p.g);
  Array<S> out(p.shape, d, layout), dq(p.shape, w, layout), dk(p.shape, w, layout),
      dv(p.shape, d, layout);
  Array<T> z(p.shape, 1, layout);
  const std::vector<T> scale(p.scale.begin(), p.scale.end()),
      matrices(p.matrices.begin(), p.matrices.end());
  const FourierMap<T> map = p.Map(scale, matrices);
  std::vector<T> d_scale(scale.size());
  Results r;
  r.memory = p.memory, r.dmemory = p.g_memory;
  LinearForward<S>(p.shape, p.rule, q.in(), k.in(), v.in(), p.Mask(), r.memory.data(), out.rows(),
                   z.rows(), &map);
  LinearBackward<S>(p.shape, p.rule, q.in(), k.in(), v.in(), std::as_const(out).rows(),
                    std::as_const(z).rows(), g.in(), p.Mask(), p.memory.data(), r.dmemory.data(),
                    dq.rows(), dk.rows(), dv.rows(), &map,
                    scale.empty() ? nullptr : d_scale.data());
  r.out = out.Values(), r.dq = dq.Values(), r.dk = dk.Values(), r.dv = dv.Values();
  r.d_scale.assign(d_scale.begin(), d_scale.end());
  return r;
}

void ExpectDefinition(const FourierProblem& p, Layout layout = Layout::kBTHW) {
  const Results want = Definition(p), fine = Kernels<double>(p, layout),
                plain = Kernels<float>(p, layout);
  for (const auto& [part, values] : kParts) {
    EXPECT_LE(RelativeRms(fine.*values, want.*values), 1e-11) << p.name << " double " << part;
    EXPECT_LE(RelativeRms(plain.*values, want.*values), 2e-5) << p.name << " float " << part;
  }
}

TEST(FourierAttention, LengthsAndWidths) {
  ForEachIsa([] {
    uint64_t seed = 1;
    for (const int64_t T : {0, 1, 2, 31, 33, 64, 150, 300}) {
      for (const int64_t channels : {1, 5, 16, 33}) {
        // A normalised token of one channel is a sign, whose slope is all rounding.
        ExpectDefinition(Make(seed++, {2, 2, T, 18, 5}, channels, {.normalise = channels > 1}),
                         T % 2 == 0 ? Layout::kBHTW : Layout::kBTHW);
      }
    }
    ExpectDefinition(Make(seed++, {1, 2, 140, 64, 32}, 32));
    ExpectDefinition(Make(seed++, {1, 1, 70, 110, 32}, 32));
    ExpectDefinition(Make(seed++, {1, 2, 70, 2, 1}, 1, {.normalise = false}));
  });
}

TEST(FourierAttention, EveryRuleAndMap) {
  ForEachIsa([] {
    uint64_t seed = 50;
    for (const DivisorRule divisor :
         {DivisorRule::kPlus, DivisorRule::kAtLeast, DivisorRule::kMagnitude,
          DivisorRule::kSignSafe, DivisorRule::kNone}) {
      for (const bool normalise : {false, true}) {
        for (const bool scaled : {false, true}) {
          // A floor that bounds what cancels in z; nothing does for a divisor z + 9.
          ExpectDefinition(Make(
              seed++, {2, 2, 90, 24, 16}, 16,
              {normalise,
               scaled,
               false,
               false,
               {FeatureMap::kFourier, 0, divisor, divisor == DivisorRule::kPlus ? 90.0 : 2.0}}));
        }
      }
    }
  });
}

TEST(FourierAttention, StartsAndLengths) {
  ForEachIsa([] {
    for (uint64_t seed = 200; seed < 206; ++seed) {
      for (const int64_t T : {1, 2, 90, 333})
        ExpectDefinition(Make(seed, {3, 2, T, 10, 20}, 7, {true, true, true, seed % 3 != 0}));
    }
  });
}

TEST(FourierAttention, TokensInBFloat16) {
  ForEachIsa([] {
    FourierProblem p = Make(300, {2, 2, 200, 48, 16}, 16);
    for (Numbers* x : {&p.q, &p.k, &p.v, &p.g}) {
      for (double& v : *x) v = double(float(BFloat16(float(v))));
    }
    const Results want = Definition(p), got = Kernels<BFloat16>(p);
    for (const auto& [part, values] : kParts)
      EXPECT_LE(RelativeRms(got.*values, want.*values), 0.02) << part << " " << ActiveIsa();
  });
}

// No number depends on what lies in a workspace.
TEST(FourierAttention, PoisonedWorkspaces) {
  ForEachIsa([] {
    for (const int64_t T : {1, 31, 70}) {
      const FourierProblem p = Make(350, {1, 2, T, 18, 5}, 33);
      const Results want = Kernels<float>(p);
      Workspace::PoisonAll(true);
      const Results got = Kernels<float>(p);
      Workspace::PoisonAll(false);
      for (const auto& [part, values] : kParts)
        EXPECT_EQ(got.*values, want.*values) << p.name << " " << part;
    }
  });
}

// Threads that share heads too: three and seven for two of them.
TEST(FourierAttention, SameBitsForAnyThreads) {
  const FourierProblem p = Make(400, {1, 2, 3100, 24, 16}, 8);
  const int before = NumThreads();
  SetNumThreads(1);
  const Results want = Kernels<float>(p);
  for (const int threads : {2, 3, 7}) {
    SetNumThreads(threads);
    const Results got = Kernels<float>(p);
    for (const auto& [part, values] : kParts) EXPECT_EQ(got.*values, want.*values) << part;
  }
  SetNumThreads(before);
}

}  // namespace
}  // namespace cistern::slot_test

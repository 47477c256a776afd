#include "cistern/kernels/vocab_loss.h"

#include "cistern/base/parallel.h"
#include "cistern/kernels/slot_test.h"

namespace cistern::slot_test {
namespace {

struct LossProblem {
  VocabLossShape shape;
  std::vector<double> logits;
  std::vector<int64_t> targets;
};

LossProblem MakeLoss(uint64_t seed, int64_t rows, int64_t vocabulary, double smoothing,
                     double scale) {
  Random random(seed);
  LossProblem p{{rows, vocabulary, smoothing, 1.0 / double(rows)},
                Normals(random, rows * vocabulary, scale),
                {}};
  for (int64_t r = 0; r < rows; ++r)
    p.targets.push_back(random.Below(5) == 0 ? -100 : random.Below(vocabulary));
  return p;
}

// The definition in double: plain loops, from the largest logit.
void Reference(const LossProblem& p, std::vector<double>* nats, std::vector<double>* gradient) {
  const int64_t n = p.shape.vocabulary;
  const double s = p.shape.smoothing;
  for (int64_t r = 0; r < p.shape.rows; ++r) {
    const double* x = p.logits.data() + r * n;
    const int64_t y = p.targets[size_t(r)];
    const double most = *std::max_element(x, x + n);
    double sum = 0, all = 0;
    for (int64_t v = 0; v < n; ++v) sum += std::exp(x[v] - most), all += x[v];
    nats->push_back(y < 0 ? 0 : most + std::log(sum) - (1 - s) * x[y] - s / double(n) * all);
    for (int64_t v = 0; v < n; ++v)
      gradient->push_back(y < 0 ? 0
                                : p.shape.share * (std::exp(x[v] - most) / sum - s / double(n) -
                                                   (1 - s) * (v == y)));
  }
}

template <class T>
void ExpectDefinition(const LossProblem& p) {
  std::vector<T> x(p.logits.begin(), p.logits.end());
  std::vector<double> nats(size_t(p.shape.rows), -1), want, gradient;
  VocabLoss<T>(p.shape, x.data(), p.targets.data(), nats.data());
  Reference(p, &want, &gradient);
  const double eps = std::is_same_v<T, float> ? 1e-6 : 1e-14;
  for (size_t r = 0; r < want.size(); ++r)
    EXPECT_NEAR(nats[r], want[r], eps * (1 + std::abs(want[r]))) << ActiveIsa();
  for (size_t i = 0; i < x.size(); ++i)
    EXPECT_NEAR(double(x[i]), gradient[i], eps * p.shape.share) << ActiveIsa();
  // Without a gradient: the same loss, to the bit, and the logits as they were.
  std::vector<T> kept(p.logits.begin(), p.logits.end());
  const std::vector<T> before = kept;
  std::vector<double> again(nats.size());
  VocabLossShape shape = p.shape;
  shape.gradient = false;
  VocabLoss<T>(shape, kept.data(), p.targets.data(), again.data());
  EXPECT_EQ(again, nats);
  EXPECT_EQ(kept, before);
}

TEST(VocabLoss, Definition) {
  ForEachIsa([] {
    uint64_t seed = 1;
    for (const int64_t vocabulary : {1, 2, 7, 16, 33, 256, 1000}) {
      for (const double smoothing : {0.0, 0.1}) {
        for (const double scale : {0.5, 20.0}) {
          const LossProblem p = MakeLoss(seed++, 9, vocabulary, smoothing, scale);
          ExpectDefinition<float>(p);
          ExpectDefinition<double>(p);
        }
      }
    }
  });
}

// What float gives of the same logits, rounded once; to the bit.
TEST(VocabLoss, BFloat16) {
  ForEachIsa([] {
    for (const int64_t vocabulary : {1, 7, 33, 256}) {
      for (const bool gradient : {true, false}) {
        LossProblem p = MakeLoss(3, 9, vocabulary, 0.1, 3);
        p.shape.gradient = gradient;
        std::vector<BFloat16> x;
        std::vector<float> wide;
        for (const double v : p.logits) x.emplace_back(float(v)), wide.push_back(float(x.back()));
        std::vector<double> nats(9), want(9);
        VocabLoss(p.shape, x.data(), p.targets.data(), nats.data());
        VocabLoss(p.shape, wide.data(), p.targets.data(), want.data());
        EXPECT_EQ(nats, want) << ActiveIsa();
        for (size_t i = 0; i < x.size(); ++i)
          EXPECT_EQ(x[i].bits, BFloat16(wide[i]).bits) << vocabulary << ActiveIsa();
      }
    }
  });
}

TEST(VocabLoss, ThreadsDoNotChangeARow) {
  const LossProblem p = MakeLoss(5, 300, 2048, 0, 2);
  std::vector<std::vector<float>> gradients;
  const int before = NumThreads();
  for (const int threads : {1, 3}) {
    SetNumThreads(threads);
    std::vector<float> x(p.logits.begin(), p.logits.end());
    std::vector<double> nats(300);
    VocabLoss<float>(p.shape, x.data(), p.targets.data(), nats.data());
    gradients.push_back(x);
  }
  SetNumThreads(before);
  EXPECT_EQ(gradients[0], gradients[1]);
}

TEST(VocabLoss, ExtremeLogits) {
  ForEachIsa([] {
    for (const int64_t n : {5, 40}) {
      const std::vector<int64_t> target = {1};
      double nats = 0;
      const auto loss = [&](std::vector<float>* x) {
        VocabLoss<float>({1, n, 0, 1}, x->data(), target.data(), &nats);
        return nats;
      };
      std::vector<float> far(size_t(n), -1e30f), minus(size_t(n), -INFINITY), broken(size_t(n), 0),
          infinite = broken;
      far[1] = 3e30f;
      EXPECT_EQ(loss(&far), 0);
      EXPECT_EQ(far[1], 0);
      minus[1] = 2, minus[3] = 2;  // logits of -infinity have no share
      EXPECT_NEAR(loss(&minus), std::log(2.0), 1e-7);
      EXPECT_EQ(minus[0], 0);
      EXPECT_EQ(minus[3], 0.5);
      broken[size_t(n - 1)] = NAN;
      EXPECT_TRUE(std::isnan(loss(&broken)));
      broken[0] = NAN;
      EXPECT_TRUE(std::isnan(loss(&broken)));
      infinite[0] = INFINITY;
      EXPECT_TRUE(std::isnan(loss(&infinite)));
    }
  });
}

}  // namespace
}  // namespace cistern::slot_test

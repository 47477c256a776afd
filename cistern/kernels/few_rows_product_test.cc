#include "cistern/kernels/few_rows_product.h"

#include "cistern/base/parallel.h"
#include "cistern/kernels/slot_test.h"

namespace cistern::slot_test {
namespace {

template <class T, class W = T>
struct Operands {
  FewRowsShape shape;
  std::vector<T> x;
  std::vector<W> w;
  std::vector<T> b;
  Operands(int64_t rows, int64_t in, int64_t out, bool bias) : shape{rows, in, out} {
    Random random(static_cast<uint64_t>(rows + 10 * in + 100 * out));
    const auto draw = [&]<class S>(int64_t count, std::vector<S>* to) {
      for (const double value : Normals(random, count)) to->push_back(S(T(value)));
    };
    draw(rows * in, &x), draw(out * in, &w);
    if (bias) draw(out, &b);
  }
  // What stands behind the end stays.
  std::vector<T> Product() const {
    std::vector<T> y(size_t(shape.rows * shape.out) + 1, T(5));
    FewRowsProduct<T, W>(shape, x.data(), w.data(), b.empty() ? nullptr : b.data(), y.data());
    EXPECT_EQ(y.back(), T(5));
    return y;
  }
};

template <class T, class W = T>
void ExpectDefinition(int64_t rows, int64_t in, int64_t out, bool bias) {
  const Operands<T, W> p(rows, in, out, bias);
  const std::vector<T> y = p.Product();
  const double eps = std::is_same_v<T, float> ? 6e-8 : 1.2e-16;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t o = 0; o < out; ++o) {
      double want = bias ? double(p.b[size_t(o)]) : 0, size = std::abs(want);
      for (int64_t i = 0; i < in; ++i) {
        const double term = double(p.x[size_t(r * in + i)]) * double(T(p.w[size_t(o * in + i)]));
        want += term, size += std::abs(term);
      }
      // Of each vector's lanes one sum after the other, and then their sum.
      EXPECT_NEAR(y[size_t(r * out + o)], want, 8 * eps * size)
          << rows << " x " << in << " -> " << out << " " << r << " " << o << ActiveIsa();
    }
  }
}

TEST(FewRowsProduct, Definition) {
  ForEachIsa([] {
    for (const int64_t in : {1, 3, 63, 64, 65, 1000}) {
      for (const int64_t out : {1, 3, 8, 63, 64, 65}) {
        for (const int64_t rows : {1, 3, 4, 13}) {
          ExpectDefinition<float>(rows, in, out, (in + out + rows) % 2 == 0);
          ExpectDefinition<double>(rows, in, out, (in + out + rows) % 2 == 1);
          ExpectDefinition<float, BFloat16>(rows, in, out, (in + out + rows) % 2 == 0);
        }
      }
    }
    ExpectDefinition<float>(3, 65, 1000, true);
    ExpectDefinition<float>(0, 7, 9, true);
    ExpectDefinition<float>(2, 0, 9, true);
    ExpectDefinition<float>(2, 7, 0, false);
    ExpectDefinition<float, BFloat16>(3, 65, 1000, true);
  });
}

template <class W>
void ExpectNoBitOfOthers(int64_t in) {
  const int threads = NumThreads();
  const Operands<float, W> all(7, in, 1003, true);
  const std::vector<float> y = all.Product();
  for (const int count : {1, 2, 3, 5}) {
    SetNumThreads(count);
    EXPECT_EQ(all.Product(), y) << count << ActiveIsa();
  }
  SetNumThreads(threads);
  for (int64_t r = 0; r < 7; ++r) {
    Operands<float, W> one = all;
    one.shape.rows = 1;
    one.x.assign(all.x.begin() + r * in, all.x.begin() + (r + 1) * in);
    const std::vector<float> alone = one.Product();
    for (size_t o = 0; o < 1003; ++o)
      ASSERT_EQ(alone[o], y[size_t(r) * 1003 + o]) << r << " " << o << ActiveIsa();
  }
}

// A row beside others is the row alone, with any number of threads, to the bit.
TEST(FewRowsProduct, NoBitDependsOnOtherRowsOrThreads) {
  ForEachIsa([] {
    for (const int64_t in : {65, 512, 1000}) {
      ExpectNoBitOfOthers<float>(in);
      ExpectNoBitOfOthers<BFloat16>(in);
    }
  });
}

// What is not finite stays in its row, and in its output.
TEST(FewRowsProduct, ValuesThatAreNotFinite) {
  ForEachIsa([] {
    Operands<float> p(5, 37, 20, false);
    const std::vector<float> before = p.Product();
    p.x[2 * 37 + 36] = NAN;
    p.w[7 * 37 + 1] = std::numeric_limits<float>::infinity();
    const std::vector<float> y = p.Product();
    for (size_t i = 0; i < 100; ++i) {
      if (i / 20 == 2 || i % 20 == 7) {
        EXPECT_FALSE(std::isfinite(y[i])) << i << ActiveIsa();
      } else {
        EXPECT_EQ(y[i], before[i]) << i << ActiveIsa();
      }
    }
  });
}

}  // namespace
}  // namespace cistern::slot_test

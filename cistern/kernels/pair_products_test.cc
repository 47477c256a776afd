// Products of pairs of bfloat16, by the instruction for pairs and by tiles, beside sums in double:
// any number of rows, vectors and pairs of depth, both orders of A, triangles, and results in float
// and rounded.
#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/pair_products_test.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "cistern/base/random.h"
#include "cistern/kernels/token_products-inl.h"

#if HWY_TARGET == HWY_AVX3
HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// A [rows, depth] and B [depth, columns] as PairFactors has them; depth: pairs.
struct PairOperands {
  PairOperands(size_t row_count, size_t column_count, size_t pairs, bool is_turned, Random& random)
      : rows(row_count), columns(column_count), depth(pairs), turned(is_turned) {
    // One number more than there are: what lies behind the last row is not A's.
    a.assign(2 * rows * depth + 1, BFloat16(NAN));
    b.resize(2 * depth * columns);
    for (size_t i = 0; i + 1 < a.size(); ++i) a[i] = BFloat16(float(random.Normal()));
    for (BFloat16& x : b) x = BFloat16(float(random.Normal()));
  }
  PairFactors Factors() const {
    const auto* pairs = reinterpret_cast<const uint32_t*>(b.data());
    if (depth == 0) return {};
    if (turned) return {a.data(), 2, 2 * rows, pairs, columns, depth};
    return {a.data(), 2 * depth, 2, pairs, columns, depth};
  }
  BFloat16& A(size_t i, size_t k) {
    return a[turned ? k / 2 * 2 * rows + 2 * i + k % 2 : i * 2 * depth + k];
  }
  void Add(size_t i, size_t j, double& sum, double& size) {
    for (size_t k = 0; k < 2 * depth; ++k) {
      const double x = double(static_cast<float>(A(i, k))) *
                       double(static_cast<float>(b[k / 2 * 2 * columns + 2 * j + k % 2]));
      sum += x, size += std::abs(x);
    }
  }
  size_t rows, columns, depth;
  bool turned;
  std::vector<BFloat16> a, b;
};

template <PairTriangle kTriangle, bool kAdd, class C>
void ExpectPairProduct(PairOperands full, PairOperands tri) {
  for (size_t i = 0; i < tri.rows; ++i) {
    for (size_t k = 0; k < 2 * tri.depth; ++k) {
      const bool outside = kTriangle == PairTriangle::kLower ? k > i : k < i;
      if (outside) tri.A(i, k) = BFloat16(0.0f);
    }
  }
  constexpr float kBefore = 0.75f;
  const size_t ldc = full.columns + 3;
  std::vector<C> c((full.rows + 1) * ldc, C(kBefore));
  PairProduct<kTriangle, kAdd>(full.rows, full.columns / kPairLanes, full.Factors(), tri.Factors(),
                               c.data(), ldc);
  const double rounding = sizeof(C) == 2 ? 0x1p-8 : 0;
  for (size_t i = 0; i <= full.rows; ++i) {
    for (size_t j = 0; j < ldc; ++j) {
      double want = kBefore, size = kBefore;
      if (i < full.rows && j < full.columns) {
        if (!kAdd) want = size = 0;
        full.Add(i, j, want, size);
        if (kTriangle != PairTriangle::kNone) tri.Add(i, j, want, size);
      }
      ASSERT_NEAR(static_cast<float>(c[i * ldc + j]), want,
                  1e-6 * size + rounding * std::abs(want) + 1e-30)
          << "row " << i << ", column " << j << " of " << full.rows << " x " << full.columns
          << ", depth " << full.depth << " and " << tri.depth << ", turned " << full.turned
          << tri.turned;
    }
  }
}

void ExpectPairProducts() {
  const AmxTiles tiles(UsesAmx());
  Random random(7);
  for (const size_t rows : {1, 15, 16, 20, 32, 33, 50, 64}) {
    for (const size_t vectors : {1, 2, 3, 4}) {
      const size_t columns = vectors * kPairLanes;
      for (const size_t depth : {1, 8, 16, 24, 40, 80}) {
        for (const bool turned : {false, true}) {
          const PairOperands full(rows, columns, depth, turned, random);
          const PairOperands none(rows, columns, 0, false, random);
          ExpectPairProduct<PairTriangle::kNone, false, float>(full, none);
          ExpectPairProduct<PairTriangle::kNone, true, float>(full, none);
          ExpectPairProduct<PairTriangle::kNone, false, BFloat16>(full, none);
          const PairOperands tri(rows, columns, (rows + 1) / 2, turned, random);
          ExpectPairProduct<PairTriangle::kLower, false, float>(full, tri);
          ExpectPairProduct<PairTriangle::kLower, false, BFloat16>(full, tri);
          ExpectPairProduct<PairTriangle::kUpper, true, float>(full, tri);
          if (testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();
#endif

#if HWY_ONCE
namespace cistern {
namespace {

TEST(PairProducts, AreSumsOfProducts) {
#if HWY_TARGETS & HWY_AVX3
  if (!HasBFloat16()) GTEST_SKIP() << "no products of bfloat16 on this processor";
  for (const std::string& isa : SupportedIsas()) {
    if (isa != "avx512_amx" && isa != "avx512") continue;
    ForceIsa(isa);
    SCOPED_TRACE(isa);
    N_AVX3::ExpectPairProducts();
    ForceIsa("");
  }
#else
  GTEST_SKIP() << "this build has no products of bfloat16";
#endif
}

}  // namespace
}  // namespace cistern
#endif

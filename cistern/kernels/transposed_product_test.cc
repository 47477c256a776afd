#include "cistern/kernels/transposed_product.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include "cistern/base/parallel.h"
#include "cistern/base/random.h"
#include "cistern/kernels/isa.h"

namespace cistern {
namespace {

constexpr float kBefore = 0.75f;  // what c holds

struct Operands {
  Operands(const TransposedShape& of, Random& random)
      : shape(of), step_a(of.left + 3), step_b(of.right + 5), step_c(of.right + 1) {
    // What lies between the rows, and behind the last of them, is none of the operands'.
    a.assign(size_t(of.rows * step_a + 1), BFloat16(NAN));
    b.assign(size_t(of.rows * step_b + 1), BFloat16(NAN));
    for (int64_t r = 0; r < of.rows; ++r) {
      for (int64_t i = 0; i < of.left; ++i) A(r, i) = BFloat16(float(random.Normal()));
      for (int64_t j = 0; j < of.right; ++j) B(r, j) = BFloat16(float(random.Normal()));
    }
  }
  BFloat16& A(int64_t r, int64_t i) { return a[size_t(r * step_a + i)]; }
  BFloat16& B(int64_t r, int64_t j) { return b[size_t(r * step_b + j)]; }

  std::vector<float> Product(bool add) const {
    std::vector<float> c(size_t((shape.left + 1) * step_c), kBefore);
    TransposedProduct(shape, {a.data(), step_a}, {b.data(), step_b}, add, c.data(), step_c);
    return c;
  }

  TransposedShape shape;
  int64_t step_a, step_b, step_c;
  std::vector<BFloat16> a, b;
};

void ExpectProduct(const TransposedShape& shape, bool add) {
  Random random(7);
  Operands x(shape, random);
  const std::vector<float> c = x.Product(add);
  for (int64_t i = 0; i <= shape.left; ++i) {
    for (int64_t j = 0; j < x.step_c; ++j) {
      double want = kBefore, size = kBefore;
      if (i < shape.left && j < shape.right) {
        if (!add) want = size = 0;
        for (int64_t r = 0; r < shape.rows; ++r) {
          const double term =
              double(static_cast<float>(x.A(r, i))) * double(static_cast<float>(x.B(r, j)));
          want += term, size += std::abs(term);
        }
      }
      ASSERT_NEAR(c[size_t(i * x.step_c + j)], want, 1e-6 * size)
          << "c[" << i << ", " << j << "] of " << shape.rows << " rows, " << shape.left << " x "
          << shape.right << (add ? ", added" : "");
    }
  }
}

class TransposedProductTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!CanMultiplyTransposed()) GTEST_SKIP() << "no products of bfloat16 that gain";
  }
};

TEST_F(TransposedProductTest, IsTheDefinition) {
  for (const bool add : {false, true}) {
    for (const int64_t rows : {0, 1, 2, 31, 32, 33, 255, 256, 257, 600})
      ExpectProduct({rows, 32, 32}, add);
    for (const int64_t columns : {0, 1, 15, 16, 17, 31, 33, 64, 70}) {
      ExpectProduct({65, columns, 40}, add);
      ExpectProduct({65, 40, columns}, add);
    }
    // More than a part on either side, and on both.
    ExpectProduct({100, 290, 300}, add);
    ExpectProduct({300, 290, 65}, add);
    ExpectProduct({300, 65, 1100}, add);
  }
}

// Threads divide c in another way for each number of them.
TEST_F(TransposedProductTest, HasTheSameBitsForAnyNumberOfThreads) {
  Random random(11);
  const Operands x({520, 260, 700}, random);
  const int threads = NumThreads();
  SetNumThreads(1);
  const std::vector<float> want = x.Product(false);
  for (const int n : {2, 3, 7}) {
    SetNumThreads(n);
    EXPECT_EQ(x.Product(false), want) << n << " threads";
  }
  SetNumThreads(threads);
}

// What is not finite stays in its row and column of c.
TEST_F(TransposedProductTest, KeepsWhatIsNotFinite) {
  Random random(13);
  Operands x({70, 40, 50}, random);
  const std::vector<float> before = x.Product(false);
  x.A(69, 3) = BFloat16(INFINITY), x.B(1, 45) = BFloat16(NAN);
  const std::vector<float> c = x.Product(false);
  for (int64_t i = 0; i < 40; ++i) {
    for (int64_t j = 0; j < 50; ++j) {
      const float got = c[size_t(i * x.step_c + j)];
      if (j == 45) {
        EXPECT_TRUE(std::isnan(got)) << i;
      } else if (i == 3) {
        EXPECT_TRUE(std::isinf(got)) << j;
      } else {
        EXPECT_EQ(got, before[size_t(i * x.step_c + j)]) << i << ", " << j;
      }
    }
  }
}

// An operand whose last value is the last one of its page, with no page behind it.
class AtTheEndOfAPage {
 public:
  AtTheEndOfAPage(int64_t count, Random& random) {
    data_ = static_cast<std::byte*>(
        ::mmap(nullptr, 2 * kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT_EQ(::mprotect(data_ + kBytes, kBytes, PROT_NONE), 0);
    values_ = reinterpret_cast<BFloat16*>(data_ + kBytes) - count;
    for (int64_t i = 0; i < count; ++i) values_[i] = BFloat16(float(random.Normal()));
  }
  ~AtTheEndOfAPage() { ::munmap(data_, 2 * kBytes); }
  const BFloat16* values() const { return values_; }

 private:
  static constexpr size_t kBytes = 1 << 16;
  std::byte* data_;
  BFloat16* values_;
};

TEST_F(TransposedProductTest, ReadsNothingBehindTheOperands) {
  Random random(17);
  for (const auto& [rows, left, right] :
       {std::array<int64_t, 3>{1, 1, 1}, {33, 17, 40}, {64, 33, 65}, {31, 70, 3}}) {
    const AtTheEndOfAPage a(rows * left, random), b(rows * right, random);
    std::vector<float> c(size_t(left * right));
    TransposedProduct({rows, left, right}, {a.values(), left}, {b.values(), right}, false, c.data(),
                      right);
    double want = 0;
    for (int64_t r = 0; r < rows; ++r)
      want += double(static_cast<float>(a.values()[(r + 1) * left - 1])) *
              double(static_cast<float>(b.values()[(r + 1) * right - 1]));
    EXPECT_NEAR(c.back(), want, 1e-5);
  }
}

}  // namespace
}  // namespace cistern

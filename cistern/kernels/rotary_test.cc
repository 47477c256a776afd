#include "cistern/kernels/rotary.h"

#include "cistern/kernels/slot_test.h"

namespace cistern::slot_test {
namespace {

// Values at [B,T,H,d] memory, wider rows than the heads: strides are honoured.
template <class T>
struct Tokens {
  Tokens(const RotaryShape& s, int64_t room) : width(s.heads * 2 * s.half + room) {
    data.assign(size_t(s.batch * s.time * width), T(-77));
  }
  Rows<T> rows(const RotaryShape& s) { return {data.data(), s.time * width, 2 * s.half, width}; }
  Rows<const T> values(const RotaryShape& s) const {
    return {data.data(), s.time * width, 2 * s.half, width};
  }
  int64_t width;
  std::vector<T> data;
};

template <class T>
void CheckRotary(const RotaryShape& s, bool back, double tolerance) {
  Random random(7);
  Tokens<T> x(s, 3), y(s, 5);
  for (T& value : x.data) value = T(random.Normal());
  std::vector<double> angles(size_t((s.one_table ? 1 : s.batch) * s.time * s.half));
  for (double& angle : angles) angle = 5 * random.Normal();
  std::vector<T> table(2 * angles.size());
  for (size_t i = 0; i < angles.size(); ++i) {
    const size_t half = size_t(s.half), row = i / half * 2 * half, j = i % half;
    table[row + j] = T(std::cos(angles[i])), table[row + half + j] = T(std::sin(angles[i]));
  }
  Rotary<T>(s, x.values(s), table.data(), back, y.rows(s));
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t t = 0; t < s.time; ++t) {
      for (int64_t h = 0; h < s.heads; ++h) {
        const T *const from = x.values(s).At(b, h, t), *const to = y.values(s).At(b, h, t);
        for (int64_t j = 0; j < s.half; ++j) {
          const double angle =
              (back ? -1 : 1) * angles[size_t(((s.one_table ? 0 : b) * s.time + t) * s.half + j)];
          const double first = double(from[j]), second = double(from[s.half + j]);
          EXPECT_NEAR(to[j], first * std::cos(angle) - second * std::sin(angle), tolerance);
          EXPECT_NEAR(to[s.half + j], second * std::cos(angle) + first * std::sin(angle),
                      tolerance);
        }
      }
      // What lies beside the heads is left alone.
      for (int64_t j = s.heads * 2 * s.half; j < y.width; ++j)
        EXPECT_EQ(y.data[size_t((b * s.time + t) * y.width + j)], T(-77));
    }
  }
}

TEST(Rotary, Definition) {
  ForEachIsa([] {
    for (const bool back : {false, true}) {
      for (const int64_t half : {0, 1, 3, 16, 32, 33}) {
        CheckRotary<float>({2, 3, 65, half, false}, back, 2e-6);
        CheckRotary<float>({2, 1, 7, half, true}, back, 2e-6);
        CheckRotary<double>({2, 3, 65, half, true}, back, 1e-14);
      }
      CheckRotary<float>({0, 2, 5, 4, true}, back, 0);
      CheckRotary<float>({2, 2, 0, 4, true}, back, 0);
    }
  });
}

}  // namespace
}  // namespace cistern::slot_test

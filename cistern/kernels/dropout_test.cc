#include "cistern/kernels/dropout.h"

#include "cistern/kernels/slot_test.h"

namespace cistern::slot_test {
namespace {

template <class T>
std::vector<T> Values(int64_t count) {
  std::vector<T> x;
  for (int64_t i = 0; i < count; ++i) x.push_back(static_cast<T>(float(i % 251) - 125));
  return x;
}

// Every value is what KeepsValue says, times the factor.
template <class T>
void CheckDefinition(const DropoutDraw& draw, int64_t rows, int64_t width,
                     const std::vector<int64_t>& numbers) {
  const std::vector<T> x = Values<T>(rows * width);
  std::vector<T> y(x.size()), in_place = x;
  const int64_t* const of = numbers.empty() ? nullptr : numbers.data();
  Dropout(draw, rows, width, of, x.data(), y.data());
  Dropout(draw, rows, width, of, in_place.data(), in_place.data());
  using C = ComputeType<T>;
  for (int64_t r = 0; r < rows; ++r) {
    const auto number = uint64_t(draw.first_row + (numbers.empty() ? r : numbers[size_t(r)]));
    for (int64_t i = 0; i < width; ++i) {
      const size_t at = size_t(r * width + i);
      const C factor = draw.KeepsValue(number, uint64_t(i)) ? C(draw.KeptValueFactor()) : C(0);
      ASSERT_EQ(C(y[at]), C(T(C(x[at]) * factor))) << r << " " << i << ActiveIsa();
      ASSERT_EQ(C(in_place[at]), C(y[at]));
    }
  }
}

TEST(Dropout, Definition) {
  ForEachIsa([] {
    for (const int64_t width : {1, 3, 16, 63, 64, 127, 128, 129, 200, 1000}) {
      const DropoutDraw draw = {0.3, uint64_t{7} << 40 | uint64_t(width), 5};
      CheckDefinition<float>(draw, 7, width, {});
      CheckDefinition<double>(draw, 7, width, {});
      CheckDefinition<BFloat16>(draw, 7, width, {});
      CheckDefinition<float>(draw, 3, width, {2, 0, int64_t{1} << 40});
    }
  });
}

TEST(Dropout, OfNothingAndOfEverything) {
  ForEachIsa([] {
    CheckDefinition<float>({0, 3}, 3, 70, {});
    CheckDefinition<float>({1e-6, 3}, 3, 70, {});  // less than one in 2^16
    CheckDefinition<double>({1, 3}, 3, 70, {});
  });
}

// Values far into a row, whose counter has more than 32 bits, are drawn apart from the first ones.
TEST(Dropout, CountersGoOnBeyond32Bits) {
  const DropoutDraw draw = {0.5, 11};
  constexpr uint64_t kFar = uint64_t{1} << 35;
  int same = 0;
  for (uint64_t i = 0; i < 256; ++i) same += draw.KeepsValue(0, i) == draw.KeepsValue(0, i + kFar);
  EXPECT_NEAR(same, 128, 40);
}

TEST(Dropout, TakesItsShareOfEachRowAndPlace) {
  constexpr int64_t kRows = 400, kWidth = 300;
  const std::vector<float> x(kRows * kWidth, 1);
  std::vector<float> y(x.size());
  for (const double rate : {0.1, 0.5}) {
    Dropout<float>({rate, 9}, kRows, kWidth, nullptr, x.data(), y.data());
    std::vector<double> of_row(kRows), of_place(kWidth);
    double all = 0;
    for (int64_t i = 0; i < kRows * kWidth; ++i) {
      const double dropped = y[size_t(i)] == 0 ? 1 : 0;
      of_row[size_t(i / kWidth)] += dropped, of_place[size_t(i % kWidth)] += dropped;
      all += dropped;
    }
    const double sd = std::sqrt(rate * (1 - rate));
    EXPECT_NEAR(all / double(kRows * kWidth), rate, 4 * sd / std::sqrt(double(kRows * kWidth)));
    for (const double count : of_row)
      EXPECT_NEAR(count / kWidth, rate, 5 * sd / std::sqrt(double(kWidth)));
    for (const double count : of_place)
      EXPECT_NEAR(count / kRows, rate, 5 * sd / std::sqrt(double(kRows)));
  }
}

// Rows of a part of a batch are those rows of the whole.
TEST(Dropout, PartsAreRowsOfTheWhole) {
  constexpr int64_t kRows = 9, kWidth = 130;
  const std::vector<float> x = Values<float>(kRows * kWidth);
  std::vector<float> whole(x.size()), parts(x.size());
  Dropout<float>({0.4, 21}, kRows, kWidth, nullptr, x.data(), whole.data());
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 4}, {4, 5}, {5, 9}})
    Dropout<float>({0.4, 21, begin}, end - begin, kWidth, nullptr, x.data() + begin * kWidth,
                   parts.data() + begin * kWidth);
  EXPECT_EQ(parts, whole);
}

// A range of values, wherever it begins and ends in a row and in a group, and the values beside
// them, have what the whole has, and nothing around them is touched.
TEST(Dropout, RangesAreValuesOfTheWhole) {
  ForEachIsa([] {
    for (const int64_t width : {1, 7, 128, 200, 300}) {
      const int64_t rows = 1000 / width + 2, all = rows * width;
      const DropoutDraw draw = {0.4, uint64_t(width), 3};
      const std::vector<float> x = Values<float>(all);
      std::vector<float> whole(x.size());
      Dropout<float>(draw, rows, width, nullptr, x.data(), whole.data());
      for (const auto& [begin, count] : {std::pair<int64_t, int64_t>{0, all},
                                         {0, 0},
                                         {width, 0},
                                         {0, 1},
                                         {5, 90},
                                         {128, 128},
                                         {width, width},
                                         {129, 600},
                                         {all - 1, 1},
                                         {all - 140, 140}}) {
        if (begin + count > all) continue;
        for (const bool two : {false, true}) {
          std::vector<float> got = x, beside = x, want = x;
          DropoutOfPart(draw, width, begin, count, got.data() + begin,
                        two ? beside.data() + begin : nullptr);
          std::copy_n(whole.begin() + begin, count, want.begin() + begin);
          ASSERT_EQ(got, want) << width << " " << begin << " " << count << ActiveIsa();
          ASSERT_EQ(beside, two ? want : x) << width << " " << begin << " " << count;
        }
      }
    }
  });
}

TEST(Dropout, WhatIsNotFiniteStays) {
  ForEachIsa([] {
    const std::vector<float> x(130, NAN);
    std::vector<float> y(x.size(), 0);
    Dropout<float>({0.5, 2}, 1, 130, nullptr, x.data(), y.data());
    for (const float value : y) EXPECT_TRUE(std::isnan(value));
  });
}

}  // namespace
}  // namespace cistern::slot_test

#include "cistern/kernels/rows_ahead.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

namespace cistern {
namespace {

TEST(RowsAhead, AsksOnceForEveryNotedLineAndSpreadsThemOverTheCalls) {
  std::vector<float> x(size_t{64} * 32);
  RowsAhead ahead;
  for (size_t chunk = 0; chunk < 3; ++chunk) {
    ahead.Clear();
    ahead.Note(x.data(), 64 * sizeof(float), 32, 64 * sizeof(float));  // 32 rows of 4 lines
    ahead.Note(x.data(), 64 * sizeof(float), 16, 10);                  // 16 rows of 1
    std::vector<size_t> lines;
    for (size_t i = 0; i < 12; ++i) lines.push_back(ahead.Ask());
    size_t sum = 0;
    for (const size_t n : lines) sum += n;
    EXPECT_EQ(sum, size_t{32 * 4 + 16});
    if (chunk == 0) continue;  // the number of calls is not known before
    EXPECT_LE(lines.front(), size_t{144 / 12 + 4});
    EXPECT_GE(lines[9], size_t{1});
  }
}

TEST(RowsAhead, ForgetsWhatAChunkDidNotAskFor) {
  std::vector<float> x(1024);
  RowsAhead ahead;
  ahead.Note(x.data(), 64, 16, 64);
  ahead.Clear();
  EXPECT_EQ(ahead.Ask(), size_t{0});
}

TEST(RowsAhead, TakesNoEmptyRowsAndNoMoreThanItHasRoomFor) {
  std::vector<float> x(1024);
  RowsAhead ahead;
  ahead.Note(x.data(), 64, 0, 64);
  ahead.Note(x.data(), 64, 4, 0);
  EXPECT_EQ(ahead.Ask(), size_t{0});
  for (size_t i = 0; i < 100; ++i) ahead.Note(x.data(), 64, 1, 64);
  size_t sum = 0;
  for (size_t i = 0; i < 100; ++i) sum += ahead.Ask();
  EXPECT_GE(sum, size_t{8});
  EXPECT_LE(sum, size_t{100});
}

}  // namespace
}  // namespace cistern

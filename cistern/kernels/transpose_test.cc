#include "cistern/kernels/transpose.h"

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "cistern/kernels/slot_test.h"

namespace cistern::slot_test {
namespace {

TEST(Transpose, EachNumberIsInItsPlace) {
  ForEachIsa([] {
    for (const auto& [rows, columns, stride] :
         {std::array<int64_t, 3>{16, 16, 16}, {48, 16, 17}, {512, 128, 200}, {0, 16, 16}}) {
      std::vector<float> from(size_t(rows * stride) + 1);
      for (size_t i = 0; i < from.size(); ++i) from[i] = float(i);
      const size_t count = size_t(rows * columns);
      const std::unique_ptr<float, decltype(&std::free)> to(
          static_cast<float*>(std::aligned_alloc(64, count * sizeof(float) + 64)), &std::free);
      std::fill_n(to.get(), count + 16, -1.0f);
      Transpose(rows, columns, from.data(), stride, to.get());
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c)
          ASSERT_EQ(to.get()[c * rows + r], from[size_t(r * stride + c)]) << r << " " << c;
      }
      for (size_t i = 0; i < 16; ++i) EXPECT_EQ(to.get()[count + i], -1.0f) << ActiveIsa();
    }
  });
}

}  // namespace
}  // namespace cistern::slot_test

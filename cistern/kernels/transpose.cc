#include "cistern/kernels/transpose.h"

#include "cistern/base/parallel.h"
#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/transpose.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/gemm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// Blocks of columns [first, last).
void TransposeBlocks(int64_t first, int64_t last, int64_t rows, const float* from, int64_t stride,
                     float* to) {
  for (int64_t block = first; block < last; ++block) {
    const int64_t column = block * kTransposeBlock;
    Transpose<float>(static_cast<size_t>(rows), kTransposeBlock, from + column,
                     static_cast<size_t>(stride), to + column * rows, static_cast<size_t>(rows));
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {

HWY_EXPORT(TransposeBlocks);

void Transpose(int64_t rows, int64_t columns, const float* from, int64_t stride, float* to) {
  constexpr int64_t kNumbers = 1 << 15;  // of a thread at least
  const int64_t of_block = rows * kTransposeBlock + 1;
  ParallelFor(columns / kTransposeBlock, (kNumbers + of_block - 1) / of_block,
              [&](int64_t first, int64_t last) {
                CISTERN_DISPATCH(TransposeBlocks)(first, last, rows, from, stride, to);
              });
}

}  // namespace cistern
#endif  // HWY_ONCE

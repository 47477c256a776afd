// The two directions as in exact_attention.cc and exact_attention_backward.cc, which say what is
// computed. Here products are those of bfloat16, by pairs or by tiles of pairs.
#include "cistern/kernels/exact_attention_bfloat16.h"

#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "cistern/base/error.h"
#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/exact_attention_bfloat16.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "hwy/highway.h"

// AVX512-BF16 and AMX are no targets of Highway's: these headers add them by attributes.
#if HWY_TARGET == HWY_AVX3
#include "cistern/kernels/exact_attention_amx-inl.h"
#include "cistern/kernels/exact_attention_pairs-inl.h"
#endif

#if HWY_ONCE
namespace cistern {

CallMemory HeapMemory() {
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  const auto blocks = std::make_shared<std::vector<std::unique_ptr<std::byte, Free>>>();
  return [blocks](size_t bytes) {
    blocks->emplace_back(static_cast<std::byte*>(std::aligned_alloc(64, bytes / 64 * 64 + 64)));
    if (blocks->back() == nullptr) throw std::bad_alloc();
    return blocks->back().get();
  };
}

#if HWY_TARGETS & HWY_AVX3

bool CanAttendBFloat16() { return HasBFloat16() && ActiveIsa().starts_with("avx512"); }

void AttentionForward(const AttentionShape& shape, double scale, Rows<const BFloat16> q,
                      Rows<const BFloat16> k, Rows<const BFloat16> v, const AttentionMask& mask,
                      Rows<BFloat16> out, float* stats, const CallMemory& memory) {
  if (UsesAmx() && scale > 0) {
    N_AVX3::AttendByAmx(shape, scale, q, k, v, mask, out, stats, memory);
  } else {
    N_AVX3::AttendByPairs(shape, scale, q, k, v, mask, out, stats);
  }
}

void AttentionBackward(const AttentionShape& shape, double scale, Rows<const BFloat16> q,
                       Rows<const BFloat16> k, Rows<const BFloat16> v, Rows<const BFloat16> out,
                       Rows<const BFloat16> d_out, const AttentionMask& mask, const float* stats,
                       Rows<BFloat16> dq, Rows<BFloat16> dk, Rows<BFloat16> dv,
                       const CallMemory& memory) {
  if (UsesAmx() && scale > 0) {
    N_AVX3::GradientsByAmx(shape, scale, q, k, v, out, d_out, mask, stats, {dq, dk, dv}, memory);
  } else {
    N_AVX3::GradientsByPairs(shape, scale, q, k, v, out, d_out, mask, stats, {dq, dk, dv}, memory);
  }
}

#else

bool CanAttendBFloat16() { return false; }

void AttentionForward(const AttentionShape&, double, Rows<const BFloat16>, Rows<const BFloat16>,
                      Rows<const BFloat16>, const AttentionMask&, Rows<BFloat16>, float*,
                      const CallMemory&) {
  Fail("this build has no attention of bfloat16 products");
}

void AttentionBackward(const AttentionShape&, double, Rows<const BFloat16>, Rows<const BFloat16>,
                       Rows<const BFloat16>, Rows<const BFloat16>, Rows<const BFloat16>,
                       const AttentionMask&, const float*, Rows<BFloat16>, Rows<BFloat16>,
                       Rows<BFloat16>, const CallMemory&) {
  Fail("this build has no attention of bfloat16 products");
}

#endif

}  // namespace cistern
#endif  // HWY_ONCE

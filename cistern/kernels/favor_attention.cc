#include "cistern/kernels/favor_attention.h"

#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/favor_attention.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/favor_tokens-inl.h"
#include "cistern/kernels/latte_reverse-inl.h"
#include "cistern/kernels/latte_walk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

template <class S>
void FavorAll(const SlotShape& shape, const FavorMap<ComputeType<S>>& map, const Rows<const S>& q,
              const Rows<const S>& k, const Rows<const S>& v, const RowMask& mask, double* memory,
              double* z, const Rows<S>& out) {
  using T = ComputeType<S>;
  ForLatteHeads<T>(
      shape, mask, memory, z, [&](const ForwardHead<T>& head, double* of_memory, double* of_z) {
        const int64_t b = head.b, h = head.h;
        const FavorTokens<S> tokens = {map, {q, b, h}, {k, b, h}, {nullptr, 0}, {nullptr, 0}};
        const Sequence<const S> of_v(v, b, h);
        const Sequence<S> of_out(out, b, h);
        LatteHead<FavorWeights<T>>(head, tokens, of_v, of_out, of_memory, of_z);
      });
}

#define CISTERN_FAVOR_FORWARD(T)                                                                \
  const SlotShape &shape, const FavorMap<ComputeType<T>>&map, Rows<const T> q, Rows<const T> k, \
      Rows<const T> v, const RowMask &mask, double *memory, double *z, Rows<T> out
#define CISTERN_FAVOR_BACKWARD(T)                                                               \
  const SlotShape &shape, const FavorMap<ComputeType<T>>&map, Rows<const T> q, Rows<const T> k, \
      Rows<const T> v, Rows<const T> g, const RowMask &mask, const double *memory,              \
      const double *z, ComputeType<T>*G, ComputeType<T>*h, Rows<T> dq, Rows<T> dk, Rows<T> dv
#define CISTERN_FAVOR(T, Name)                                                                    \
  void Forward##Name(CISTERN_FAVOR_FORWARD(T)) {                                                  \
    FavorAll<T>(shape, map, q, k, v, mask, memory, z, out);                                       \
  }                                                                                               \
  void Backward##Name(CISTERN_FAVOR_BACKWARD(T)) {                                                \
    const auto source = [&](int64_t b, int64_t y) -> FavorTokens<T> {                             \
      return {map, {q, b, y}, {k, b, y}, {dq, b, y}, {dk, b, y}};                                 \
    };                                                                                            \
    LatteBackwardAll<FavorWeights<ComputeType<T>>, T>(shape, source, v, g, mask, memory, z, G, h, \
                                                      dv);                                        \
  }
CISTERN_FAVOR(float, Float)
CISTERN_FAVOR(double, Double)
CISTERN_FAVOR(BFloat16, BFloat16)
#undef CISTERN_FAVOR

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {

HWY_EXPORT(ForwardFloat);
HWY_EXPORT(ForwardDouble);
HWY_EXPORT(ForwardBFloat16);
HWY_EXPORT(BackwardFloat);
HWY_EXPORT(BackwardDouble);
HWY_EXPORT(BackwardBFloat16);

#define CISTERN_FAVOR(T, Name)                                                  \
  template <>                                                                   \
  void FavorQueriesForward(CISTERN_FAVOR_FORWARD(T)) {                          \
    CISTERN_DISPATCH(Forward##Name)(shape, map, q, k, v, mask, memory, z, out); \
  }                                                                             \
  template <>                                                                   \
  void FavorQueriesBackward(CISTERN_FAVOR_BACKWARD(T)) {                        \
    CISTERN_DISPATCH(Backward##Name)                                            \
    (shape, map, q, k, v, g, mask, memory, z, G, h, dq, dk, dv);                \
  }
CISTERN_FAVOR(float, Float)
CISTERN_FAVOR(double, Double)
CISTERN_FAVOR(BFloat16, BFloat16)
#undef CISTERN_FAVOR

}  // namespace cistern
#endif  // HWY_ONCE

// One token of a head of Latte, FAVOR+ or ABC, with its state in double; included once per Highway
// target.
#if defined(CISTERN_KERNELS_SLOT_TOKEN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_SLOT_TOKEN_INL_H_
#undef CISTERN_KERNELS_SLOT_TOKEN_INL_H_
#else
#define CISTERN_KERNELS_SLOT_TOKEN_INL_H_
#endif

#include <limits>

#include "cistern/kernels/slot_step-inl.h"
#include "cistern/kernels/slot_weights-inl.h"
#include "cistern/kernels/staged_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

template <class S>
struct LatteTensors {
  Sequence<const S> q, s, v;
  Sequence<S> out;
};

template <class S>
struct AbcTensors {
  Sequence<const S> q, k, v, s;
  Sequence<S> out;
  Sequence<ComputeType<S>> x;
};

// One token of a head.
template <class Weights, class S, class T = ComputeType<S>>
HWY_NOINLINE void LatteToken(const ForwardHead<T>& head, const LatteTensors<S>& x, double* memory,
                             double* z) {
  const size_t n = head.n, width = head.width, np = Padded<T>(n);
  if (!StepBegin(head, z, {memory})) return ZeroRows(0, 1, width, x.out);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(StepScratch::Bytes(n, width) + (2 * np + width) * sizeof(T),
                  StepScratch::kPieces + 3);
  const StepScratch scratch(n, width, workspace);
  T *const r = workspace.Take<T>(np), *const slots = workspace.Take<T>(n),
           *const row = workspace.Take<T>(width);
  StepWeights(n, FirstRow(x.s, n, slots), z, scratch.w);
  Weights::OfToken(n, FirstRow(x.q, n, slots), z, r);
  T* const out = RoomForRow(x.out, row);
  StepRead(n, width, r, scratch.w, FirstRow(x.v, width, row), scratch.wide, memory, out);
  PutRow(out, width, x.out);
}

template <class S, class T = ComputeType<S>>
HWY_NOINLINE void AbcToken(const ForwardHead<T>& head, T scale, bool masked, const AbcTensors<S>& a,
                           double* keys, double* values, double* z) {
  const size_t n = head.n, width = head.width, np = Padded<T>(n);
  if (!StepBegin(head, z, {keys, values})) {
    ZeroRows(0, 1, width, a.out);
    if (a.x.data != nullptr) ZeroRows(0, 1, n, a.x);
    return;
  }
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(StepScratch::Bytes(n, width) + (np + n + 2 * width) * sizeof(T),
                  StepScratch::kPieces + 4);
  const StepScratch scratch(n, width, workspace);
  T *const X = workspace.Take<T>(np), *const slots = workspace.Take<T>(n),
           *const row = workspace.Take<T>(width), *const query = workspace.Take<T>(width);
  StepWeights(n, FirstRow(a.s, n, slots), z, scratch.w);
  StepMatch(n, width, FirstRow(a.q, width, query), scratch.w, FirstRow(a.k, width, row),
            scratch.wide, keys, X);
  for (size_t l = 0; l < n; ++l)
    X[l] = masked && z[l] == kEmpty ? std::numeric_limits<T>::lowest() : X[l] * scale;
  if (a.x.data != nullptr) std::memcpy(a.x.At(0), X, n * sizeof(T));
  for (size_t l = n; l < np; ++l) X[l] = kMinusInfinity<T>;
  SoftmaxRows(1, np, X, X);
  T* const out = RoomForRow(a.out, row);
  StepRead(n, width, X, scratch.w, FirstRow(a.v, width, row), scratch.wide, values, out);
  PutRow(out, width, a.out);
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard

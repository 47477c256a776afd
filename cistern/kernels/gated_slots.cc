#include "cistern/kernels/gated_slots.h"

#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/gated_slots.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/gated_token-inl.h"
#include "cistern/kernels/head_parts.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// Of one head's walk, the share that goes into the memories alone (head_parts.h).
constexpr double kGatedStateShare = 0.5;

template <class S>
HWY_NOINLINE void GatedSlotsOfHead(const GatedForwardHead<S>& head, double* keys, double* values) {
  using T = ComputeType<S>;
  using Chunks = GatedChunks<S, T>;
  using Keys = SumCore<true, Gating::kSlots, T>;
  using Values = SumCore<false, Gating::kSlots, T>;
  const size_t n = head.n, width = head.width, np = Padded<T>(n), dp = Padded<T>(width);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(Chunks::Bytes(n) + Keys::Bytes(n, width) + Values::Bytes(n, width) +
                      sizeof(T) * kChunkRows * (3 * dp + np),
                  Chunks::kPieces + Keys::kPieces + Values::kPieces + 4);
  Chunks chunks(n, head.rate, head.x, head.tokens, workspace);
  Keys key_core(n, width, workspace);
  Values value_core(n, width, workspace);
  T* const q = workspace.Take<T>(kChunkRows * dp);  // then out
  T* const k = workspace.Take<T>(kChunkRows * dp);
  T* const v = workspace.Take<T>(kChunkRows * dp);
  T* const P = workspace.Take<T>(kChunkRows * np);
  const auto& chunk = chunks.chunk;
  const Tag<T> d;

  // The chunk's rows of out.
  const auto read = [&](size_t t) HWY_ATTR {
    PackRows(head.q, t, chunk.rows, width, dp, T{0}, q);
    key_core.Read(chunk, q, k, chunk.E, P);
    const Vec<T> scale = hn::Set(d, head.scale);
    for (size_t i = 0; i < chunk.rows * np; i += kLanes<T>) {
      const Vec<T> x = hn::Mul(hn::Load(d, P + i), hn::Load(d, chunk.F + i));
      hn::Store(hn::Mul(scale, x), d, P + i);
    }
    if (head.y.data != nullptr) UnpackRows(P, t, chunk.rows, n, np, head.y);
    FillPadding(chunk.rows, n, np, kMinusInfinity<T>, P);
    SoftmaxRows(chunk.rows, np, P, np, chunk.F, P);
    value_core.Read(chunk, P, chunk.E, v, q);
    UnpackRows(q, t, chunk.rows, width, dp, head.out);
  };

  key_core.Load(keys);
  value_core.Load(values);
  for (size_t t = 0; t < head.stop; t += chunk.rows) {
    if (head.tokens.StartsAt(t)) key_core.Clear(), value_core.Clear();
    chunks.Begin(t, head.tokens.length);
    const size_t next = t + chunk.rows, end = std::min(next + kChunkRows, head.tokens.length);
    RowsAhead::OfThisThread().Clear();
    chunks.NoteAfter(t);
    for (const auto* x : {&head.k, &head.v, &head.q}) NoteRows(*x, next, end, width);
    PackRows(head.k, t, chunk.rows, width, dp, T{0}, k);
    PackRows(head.v, t, chunk.rows, width, dp, T{0}, v);
    if (t >= head.from) read(t);
    key_core.Write(chunk, k, chunk.E);
    value_core.Write(chunk, chunk.E, v);
  }
  key_core.Store(keys);
  value_core.Store(values);
  if (!head.last) return;
  ZeroRows(head.tokens.length, head.total, width, head.out);
  if (head.y.data != nullptr) ZeroRows(head.tokens.length, head.total, n, head.y);
}

template <class S>
void GatedSlotsAll(const SlotShape& shape, const GatedSlotsOptions& options,
                   const GatedSlotsInputs<S>& in, const RowMask& mask, double* keys, double* values,
                   const Rows<S>& out, const Rows<ComputeType<S>>& y) {
  const int64_t heads = shape.batch * shape.heads, size = shape.slots * shape.width;
  const HeadParts parts(shape, kGatedStateShare);
  PartStates<double> key_states(parts, heads, size, keys), value_states(parts, heads, size, values);
  ForParts(heads, HeadsPerThread(shape), parts, [&](int64_t index, int64_t part) {
    const GatedForwardHead<S> head(shape, options, in, out, y, mask, index, parts, part);
    double *const k = key_states.Of(index, part), *const v = value_states.Of(index, part);
    shape.length == 1 ? GatedSlotsOfToken(head, k, v) : GatedSlotsOfHead(head, k, v);
  });
  key_states.Finish();
  value_states.Finish();
}

#define CISTERN_GATED_SLOTS_ARGUMENTS(T)                                                  \
  const SlotShape &shape, const GatedSlotsOptions &options, const GatedSlotsInputs<T>&in, \
      const RowMask &mask, double *keys, double *values, Rows<T> out, Rows<ComputeType<T>> y
#define CISTERN_GATED_SLOTS(T, Name)                                  \
  void GatedSlotsForward##Name(CISTERN_GATED_SLOTS_ARGUMENTS(T)) {    \
    GatedSlotsAll<T>(shape, options, in, mask, keys, values, out, y); \
  }
CISTERN_GATED_SLOTS(float, Float)
CISTERN_GATED_SLOTS(double, Double)
CISTERN_GATED_SLOTS(BFloat16, BFloat16)
#undef CISTERN_GATED_SLOTS

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {

HWY_EXPORT(GatedSlotsForwardFloat);
HWY_EXPORT(GatedSlotsForwardDouble);
HWY_EXPORT(GatedSlotsForwardBFloat16);

#define CISTERN_GATED_SLOTS(T, Name)                                                           \
  template <>                                                                                  \
  void GatedSlotsForward(CISTERN_GATED_SLOTS_ARGUMENTS(T)) {                                   \
    CISTERN_DISPATCH(GatedSlotsForward##Name)(shape, options, in, mask, keys, values, out, y); \
  }
CISTERN_GATED_SLOTS(float, Float)
CISTERN_GATED_SLOTS(double, Double)
CISTERN_GATED_SLOTS(BFloat16, BFloat16)
#undef CISTERN_GATED_SLOTS

}  // namespace cistern
#endif  // HWY_ONCE

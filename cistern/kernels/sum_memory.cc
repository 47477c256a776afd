#include "cistern/kernels/sum_memory.h"

#include <type_traits>

#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/sum_memory.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/head_parts.h"
#include "cistern/kernels/staged_rows-inl.h"
#include "cistern/kernels/sum_core-inl.h"
#include "cistern/kernels/sum_step-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// Of one head's walk, the share that goes into the memory alone (head_parts.h).
constexpr double kSumStateShare = 0.5;

// One part of a head of a read (a = r, u = v) or a match (a = q, u = k): the chunks that begin at
// from .. stop - 1, after those before them for the memory alone.
template <bool kMatch, class S>
struct SumHead {
  using T = ComputeType<S>;
  Sequence<const std::conditional_t<kMatch, S, T>> a;
  Sequence<const T> w;
  Sequence<const S> u;
  Sequence<const T> log_gate;
  Sequence<std::conditional_t<kMatch, T, S>> out;
  Tokens tokens;
  size_t n, width, total, gates, from, stop;
  bool last;
};

template <bool kMatch, Gating kGating, class S, class T = ComputeType<S>>
HWY_NOINLINE void SumOfHead(const SumHead<kMatch, S>& head, double* memory) {
  using Core = SumCore<kMatch, kGating, T>;
  constexpr bool kGated = kGating != Gating::kNone;
  const size_t n = head.n, width = head.width, dp = Padded<T>(width);
  const size_t height = kMatch ? width : n, across = kMatch ? n : width;
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(SumChunk<kGating, T>::Bytes(n) + Core::Bytes(n, width) +
                      sizeof(T) * kChunkRows * (Padded<T>(height) + dp + Padded<T>(across)),
                  SumChunk<kGating, T>::kPieces + Core::kPieces + 3);
  SumChunk<kGating, T> chunk(n, workspace);
  Core core(n, width, workspace);
  T* const a = workspace.Take<T>(kChunkRows * core.hp());
  T* const u = workspace.Take<T>(kChunkRows * dp);
  T* const out = workspace.Take<T>(kChunkRows * core.ap());

  core.Load(memory);
  for (size_t t = 0; t < head.stop; t += chunk.rows) {
    if (head.tokens.StartsAt(t)) core.Clear();
    chunk.Begin(head.log_gate, head.tokens, t, head.tokens.length);
    const size_t next = t + chunk.rows, end = std::min(next + kChunkRows, head.tokens.length);
    RowsAhead::OfThisThread().Clear();
    NoteRows(head.w, next, end, n);
    NoteRows(head.u, next, end, width);
    NoteRows(head.a, next, end, height);
    chunk.Weights(head.w, t);
    PackRows(head.u, t, chunk.rows, width, dp, T{0}, u);
    const T *const b = kMatch ? u : chunk.E, *const x = kMatch ? chunk.E : u;
    if (t >= head.from) {
      PackRows(head.a, t, chunk.rows, height, core.hp(), T{0}, a);
      if constexpr (kGated && !kMatch) chunk.TimesF(a);
      core.Read(chunk, a, b, x, out);
      if constexpr (kGated && kMatch) chunk.TimesF(out);
      UnpackRows(out, t, chunk.rows, across, core.ap(), head.out);
    }
    core.Write(chunk, b, x);
  }
  core.Store(memory);
  if (head.last) ZeroRows(head.tokens.length, head.total, across, head.out);
}

template <bool kMatch, class S, class T = ComputeType<S>>
HWY_NOINLINE void SumOfToken(const SumHead<kMatch, S>& head, double* memory) {
  const size_t n = head.n, width = head.width;
  if (head.tokens.length == 0) return ZeroRows(0, 1, kMatch ? n : width, head.out);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(sizeof(double) * Padded<double>(n) + sizeof(T) * 3 * width, 4);
  double* const gate = workspace.Take<double>(Padded<double>(n));
  T *const row = workspace.Take<T>(width), *const query = workspace.Take<T>(width),
           *const read = workspace.Take<T>(width);
  StepGates(n, head.gates, head.gates > 0 ? head.log_gate.At(0) : nullptr, head.tokens.StartsAt(0),
            gate);
  const T* const u = FirstRow(head.u, width, row);
  if constexpr (kMatch) {
    StepSumMatch(n, width, FirstRow(head.a, width, query), head.w.At(0), u, gate, memory,
                 head.out.At(0));
  } else {
    T* const out = RoomForRow(head.out, read);
    StepSumRead(n, width, head.a.At(0), head.w.At(0), u, gate, memory, out);
    PutRow(out, width, head.out);
  }
}

template <bool kMatch, class S, class A, class Out>
void SumOfAll(const SlotShape& shape, const A& a, const Rows<const ComputeType<S>>& w,
              const Rows<const S>& u, const LogGates<ComputeType<S>>& log_gate, const RowMask& mask,
              double* memory, const Out& out) {
  const int64_t heads = shape.batch * shape.heads;
  const HeadParts parts(shape, kSumStateShare);
  PartStates<double> memories(parts, heads, shape.slots * shape.width, memory);
  ForParts(heads, HeadsPerThread(shape), parts, [&](int64_t index, int64_t part) {
    const int64_t x = index / shape.heads, y = index % shape.heads;
    const Tokens tokens(shape, mask, x);
    const SumHead<kMatch, S> head{{a, x, y},
                                  {w, x, y},
                                  {u, x, y},
                                  {log_gate.rows, x, y},
                                  {out, x, y},
                                  tokens,
                                  static_cast<size_t>(shape.slots),
                                  static_cast<size_t>(shape.width),
                                  static_cast<size_t>(shape.length),
                                  static_cast<size_t>(log_gate.width),
                                  parts.Begin(part, tokens.length),
                                  parts.Begin(part + 1, tokens.length),
                                  part + 1 == parts.count};
    double* const m = memories.Of(index, part);
    if (shape.length == 1) {
      SumOfToken<kMatch>(head, m);
    } else if (log_gate.width == 0) {
      SumOfHead<kMatch, Gating::kNone>(head, m);
    } else if (log_gate.width == 1) {
      SumOfHead<kMatch, Gating::kShared>(head, m);
    } else {
      SumOfHead<kMatch, Gating::kSlots>(head, m);
    }
  });
  memories.Finish();
}

#define CISTERN_SUM_FORWARD(S, Name)                                                           \
  void SumRead##Name(const SlotShape& shape, Rows<const ComputeType<S>> r,                     \
                     Rows<const ComputeType<S>> w, Rows<const S> v,                            \
                     LogGates<ComputeType<S>> log_gate, const RowMask& mask, double* memory,   \
                     Rows<S> out) {                                                            \
    SumOfAll<false, S>(shape, r, w, v, log_gate, mask, memory, out);                           \
  }                                                                                            \
  void SumMatch##Name(const SlotShape& shape, Rows<const S> q, Rows<const ComputeType<S>> w,   \
                      Rows<const S> k, LogGates<ComputeType<S>> log_gate, const RowMask& mask, \
                      double* memory, Rows<ComputeType<S>> out) {                              \
    SumOfAll<true, S>(shape, q, w, k, log_gate, mask, memory, out);                            \
  }
CISTERN_SUM_FORWARD(float, Float)
CISTERN_SUM_FORWARD(double, Double)
CISTERN_SUM_FORWARD(BFloat16, BFloat16)
#undef CISTERN_SUM_FORWARD

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {

HWY_EXPORT(SumReadFloat);
HWY_EXPORT(SumReadDouble);
HWY_EXPORT(SumReadBFloat16);
HWY_EXPORT(SumMatchFloat);
HWY_EXPORT(SumMatchDouble);
HWY_EXPORT(SumMatchBFloat16);

#define CISTERN_SUM_FORWARD(S, Name)                                                        \
  template <>                                                                               \
  void SumRead<S>(const SlotShape& shape, Rows<const ComputeType<S>> r,                     \
                  Rows<const ComputeType<S>> w, Rows<const S> v,                            \
                  LogGates<ComputeType<S>> log_gate, const RowMask& mask, double* memory,   \
                  Rows<S> out) {                                                            \
    CISTERN_DISPATCH(SumRead##Name)(shape, r, w, v, log_gate, mask, memory, out);           \
  }                                                                                         \
  template <>                                                                               \
  void SumMatch<S>(const SlotShape& shape, Rows<const S> q, Rows<const ComputeType<S>> w,   \
                   Rows<const S> k, LogGates<ComputeType<S>> log_gate, const RowMask& mask, \
                   double* memory, Rows<ComputeType<S>> out) {                              \
    CISTERN_DISPATCH(SumMatch##Name)(shape, q, w, k, log_gate, mask, memory, out);          \
  }
CISTERN_SUM_FORWARD(float, Float)
CISTERN_SUM_FORWARD(double, Double)
CISTERN_SUM_FORWARD(BFloat16, BFloat16)
#undef CISTERN_SUM_FORWARD

}  // namespace cistern
#endif  // HWY_ONCE

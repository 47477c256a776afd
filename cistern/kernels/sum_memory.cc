#include "cistern/kernels/sum_memory.h"

#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/sum_memory.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/head_parts.h"
#include "cistern/kernels/sum_core-inl.h"
#include "cistern/kernels/sum_step-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// Of one head's walk, the share that goes into the memory alone (head_parts.h).
constexpr double kSumStateShare = 0.5;

// One part of a head of a read (a = r, u = v) or a match (a = q, u = k): the chunks that begin at
// from .. stop - 1, after those before them for the memory alone.
template <class T>
struct SumHead {
  Sequence<const T> a, w, u, log_gate;
  Sequence<T> out;
  Tokens tokens;
  size_t n, width, total, gates, from, stop;
  bool last;
};

template <bool kMatch, Gating kGating, class T>
HWY_NOINLINE void SumOfHead(const SumHead<T>& head, double* memory) {
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

template <bool kMatch, class T>
HWY_NOINLINE void SumOfToken(const SumHead<T>& head, double* memory) {
  if (head.tokens.length == 0) return ZeroRows(0, 1, kMatch ? head.n : head.width, head.out);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(sizeof(double) * Padded<double>(head.n), 1);
  double* const gate = workspace.Take<double>(Padded<double>(head.n));
  StepGates(head.n, head.gates, head.gates > 0 ? head.log_gate.At(0) : nullptr,
            head.tokens.StartsAt(0), gate);
  if constexpr (kMatch) {
    StepSumMatch(head.n, head.width, head.a.At(0), head.w.At(0), head.u.At(0), gate, memory,
                 head.out.At(0));
  } else {
    StepSumRead(head.n, head.width, head.a.At(0), head.w.At(0), head.u.At(0), gate, memory,
                head.out.At(0));
  }
}

template <bool kMatch, class T>
void SumOfAll(const SlotShape& shape, const Rows<const T>& a, const Rows<const T>& w,
              const Rows<const T>& u, const LogGates<T>& log_gate, const RowMask& mask,
              double* memory, const Rows<T>& out) {
  const int64_t heads = shape.batch * shape.heads;
  const HeadParts parts(shape, kSumStateShare);
  PartStates<double> memories(parts, heads, shape.slots * shape.width, memory);
  ForParts(heads, HeadsPerThread(shape), parts, [&](int64_t index, int64_t part) {
    const int64_t x = index / shape.heads, y = index % shape.heads;
    const Tokens tokens(shape, mask, x);
    const SumHead<T> head{{a, x, y},
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

#define CISTERN_SUM_FORWARD(name, match, T)                                            \
  void name(const SlotShape& shape, Rows<const T> a, Rows<const T> w, Rows<const T> u, \
            LogGates<T> log_gate, const RowMask& mask, double* memory, Rows<T> out) {  \
    SumOfAll<match, T>(shape, a, w, u, log_gate, mask, memory, out);                   \
  }
CISTERN_SUM_FORWARD(SumReadFloat, false, float)
CISTERN_SUM_FORWARD(SumReadDouble, false, double)
CISTERN_SUM_FORWARD(SumMatchFloat, true, float)
CISTERN_SUM_FORWARD(SumMatchDouble, true, double)
#undef CISTERN_SUM_FORWARD

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {

HWY_EXPORT(SumReadFloat);
HWY_EXPORT(SumReadDouble);
HWY_EXPORT(SumMatchFloat);
HWY_EXPORT(SumMatchDouble);

template <>
void SumRead(const SlotShape& shape, Rows<const float> r, Rows<const float> w, Rows<const float> v,
             LogGates<float> log_gate, const RowMask& mask, double* memory, Rows<float> out) {
  CISTERN_DISPATCH(SumReadFloat)(shape, r, w, v, log_gate, mask, memory, out);
}
template <>
void SumRead(const SlotShape& shape, Rows<const double> r, Rows<const double> w,
             Rows<const double> v, LogGates<double> log_gate, const RowMask& mask, double* memory,
             Rows<double> out) {
  CISTERN_DISPATCH(SumReadDouble)(shape, r, w, v, log_gate, mask, memory, out);
}
template <>
void SumMatch(const SlotShape& shape, Rows<const float> q, Rows<const float> w, Rows<const float> k,
              LogGates<float> log_gate, const RowMask& mask, double* memory, Rows<float> out) {
  CISTERN_DISPATCH(SumMatchFloat)(shape, q, w, k, log_gate, mask, memory, out);
}
template <>
void SumMatch(const SlotShape& shape, Rows<const double> q, Rows<const double> w,
              Rows<const double> k, LogGates<double> log_gate, const RowMask& mask, double* memory,
              Rows<double> out) {
  CISTERN_DISPATCH(SumMatchDouble)(shape, q, w, k, log_gate, mask, memory, out);
}

}  // namespace cistern
#endif  // HWY_ONCE

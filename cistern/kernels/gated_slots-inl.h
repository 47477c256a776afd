// The gates of gated slots and the chunks that they cut; included once per Highway target.
#if defined(CISTERN_KERNELS_GATED_SLOTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_GATED_SLOTS_INL_H_
#undef CISTERN_KERNELS_GATED_SLOTS_INL_H_
#else
#define CISTERN_KERNELS_GATED_SLOTS_INL_H_
#endif

#include <algorithm>
#include <limits>

#include "cistern/kernels/slot_softmax-inl.h"
#include "cistern/kernels/staged_rows-inl.h"
#include "cistern/kernels/sum_core-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// log(1 + e) for 0 <= e <= 1, to 2 ulps: 2 atanh(e / (2 + e)) by its series.
HWY_INLINE Vec<float> Log1pOfShare(Vec<float> e) {
  const Tag<float> d;
  const Vec<float> s = hn::Div(e, hn::Add(hn::Set(d, 2.0f), e)), s2 = hn::Mul(s, s);
  Vec<float> sum = hn::Set(d, 2.0f / 13);
  for (const float term : {2.0f / 11, 2.0f / 9, 2.0f / 7, 2.0f / 5, 2.0f / 3})
    sum = hn::MulAdd(sum, s2, hn::Set(d, term));
  return hn::MulAdd(hn::Mul(sum, s2), s, hn::Add(s, s));
}
HWY_INLINE Vec<double> Log1pOfShare(Vec<double> e) { return hn::Log1p(Tag<double>(), e); }

// 1 - e^x for x <= 0, to 2 ulps also where that is small.
HWY_INLINE Vec<float> OneMinusExp(Vec<float> x) {
  const Tag<float> d;
  const Vec<float> one = hn::Set(d, 1.0f);
  const Vec<float> least = hn::Max(x, hn::Set(d, -86.0f));  // e^-86 is nothing beside 1
  const ExpParts<1> parts(&least);
  Vec<float> minus_1;
  parts.OfR<false>(&minus_1);
  return hn::NegMulAdd(parts.power[0], minus_1, hn::Sub(one, parts.power[0]));
}
HWY_INLINE Vec<double> OneMinusExp(Vec<double> x) { return hn::Neg(hn::Expm1(Tag<double>(), x)); }

// log g = log sigmoid(x) / temperature, and 1 - g, exact where g is near 1; rate: 1 / temperature.
template <class T>
HWY_INLINE void GateOf(Vec<T> x, Vec<T> rate, Vec<T>& log_gate, Vec<T>& write) {
  const Tag<T> d;
  const Vec<T> e = hn::Exp(d, hn::Neg(hn::Abs(x)));
  const Vec<T> log_sigmoid = hn::Sub(hn::Min(x, hn::Zero(d)), Log1pOfShare(e));
  const auto nan = hn::IsNaN(x);  // some of these functions turn it into ordinary numbers
  log_gate = hn::IfThenElse(nan, x, hn::Mul(log_sigmoid, rate));
  write = hn::IfThenElse(nan, x, OneMinusExp(log_gate));
}

// d(log g) / dx = sigmoid(-x) / temperature.
template <class T>
HWY_INLINE Vec<T> GateSlope(Vec<T> x, Vec<T> rate) {
  const Tag<T> d;
  const Vec<T> e = hn::Exp(d, hn::Neg(hn::Abs(x))), one = hn::Set(d, T{1});
  const Vec<T> least = hn::Div(hn::Mul(rate, e), hn::Add(one, e));
  const Vec<T> slope = hn::IfThenElse(hn::Lt(x, hn::Zero(d)), hn::Sub(rate, least), least);
  return hn::IfThenElse(hn::IsNaN(x), x, slope);
}

// The chunks of one head's tokens, with log-gates and write weights of the kRows tokens around the
// one at hand. No chunk goes on into the next kRows.
template <class S, class T>
class GatedChunks {
 public:
  using Chunk = SumChunk<Gating::kSlots, T>;
  static constexpr size_t kRows = 2 * kChunkRows;

  static size_t Bytes(size_t slots) {
    return Chunk::Bytes(slots) + sizeof(T) * 2 * kRows * Padded<T>(slots);
  }
  static constexpr size_t kPieces = Chunk::kPieces + 2;

  GatedChunks(size_t slots, T rate, const Sequence<const S>& x, const Tokens& tokens,
              Workspace& workspace)
      : chunk(slots, workspace), rate_(rate), x_(x), tokens_(tokens) {
    for (T** piece : {&log_gates_, &writes_}) *piece = workspace.Take<T>(kRows * chunk.np);
  }

  // Settles the chunk that begins at t, at most up to `end`: as SumChunk::Begin and Weights.
  void Begin(size_t t, size_t end) {
    const size_t block = t / kRows * kRows;
    if (block != block_) Load(block);
    Tokens here = tokens_;
    if (here.starts != nullptr) here.starts += block;
    chunk.Begin({log_gates_, chunk.np}, here, t - block, std::min(end - block, kRows));
    chunk.Weights({writes_, chunk.np}, t - block);
  }

  // Notes rows of the logits (rows_ahead.h), which are read a block at once: after the rows at t
  // those of the coming block, or, in reverse, of the one before.
  void NoteAfter(size_t t) const { NoteRows(x_, t + kRows, EndOf(t + kRows), chunk.n); }
  void NoteBefore(size_t t) const {
    if (t >= kRows) NoteRows(x_, t - kRows, EndOf(t - kRows), chunk.n);
  }

  // Row t of the block at hand.
  const T* LogGates(size_t t) const { return log_gates_ + t % kRows * chunk.np; }

  Chunk chunk;

 private:
  size_t EndOf(size_t t) const { return std::min(t + kChunkRows, tokens_.length); }

  HWY_NOINLINE void Load(size_t block) {
    const Tag<T> d;
    const size_t rows = std::min(kRows, tokens_.length - block), np = chunk.np;
    block_ = block;
    // Slots of the padding keep all and are never written.
    PackRows(x_, block, rows, chunk.n, np, std::numeric_limits<T>::infinity(), writes_);
    const Vec<T> rate = hn::Set(d, rate_);
    for (size_t i = 0; i < rows * np; i += kLanes<T>) {
      Vec<T> log_gate, write;
      GateOf<T>(hn::Load(d, writes_ + i), rate, log_gate, write);
      hn::Store(log_gate, d, log_gates_ + i);
      hn::Store(write, d, writes_ + i);
    }
  }

  const T rate_;
  const Sequence<const S> x_;
  const Tokens tokens_;
  T *log_gates_, *writes_;
  size_t block_ = std::numeric_limits<size_t>::max();
};

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard

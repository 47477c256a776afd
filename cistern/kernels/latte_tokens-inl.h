// What Latte's walks read and write of a head's tokens; included once per Highway target.
#if defined(CISTERN_KERNELS_LATTE_TOKENS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_LATTE_TOKENS_INL_H_
#undef CISTERN_KERNELS_LATTE_TOKENS_INL_H_
#else
#define CISTERN_KERNELS_LATTE_TOKENS_INL_H_
#endif

#include "cistern/kernels/head_parts.h"
#include "cistern/kernels/slot_chunk-inl.h"
#include "cistern/kernels/staged_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// Each head goes twice over its tokens: forward for the gradients of the read weights, which need
// the memory of every position, then in reverse for those of what was written. What the first walk
// leaves for the second one lies where the second one's results go. It has rows of its own where
// results are rounded, and where threads share a head (head_parts.h), because one thread still
// reads it for the state alone where another one has its results.
template <class S, class T>
Sequence<T> RowsBetweenWalks(const HeadParts& parts, const Sequence<S>& result, size_t total,
                             size_t n, Workspace& workspace) {
  if constexpr (std::is_same_v<S, T>) {
    if (parts.count == 1) return result;
  }
  workspace.Start(total * n * sizeof(T), 1);
  return {workspace.Take<T>(total * n), n};
}

// Logits of read weights q and log-weights s [T, n] as they lie in memory, and their gradients.
// Beside these there are tokens that form them where they are read (favor_tokens-inl.h).
template <class S>
struct GivenTokens {
  using T = ComputeType<S>;
  Sequence<const S> q, s;
  Sequence<S> dq, ds;

  // The rows of the gradients of the read weights between the walks.
  Sequence<T> RowsBetween(const HeadParts& parts, size_t total, size_t slots,
                          Workspace& workspace) const {
    return RowsBetweenWalks<S, T>(parts, dq, total, slots, workspace);
  }

  // One thread's reading of them.
  class Reader {
   public:
    static size_t Bytes(const GivenTokens&, size_t) { return 0; }
    static constexpr size_t kPieces = 0;
    Reader(const GivenTokens& x, size_t slots, Workspace&) : x_(x), n_(slots) {}

    // Rows [t, t + count), count at most kSpanRows; until the next call.
    TokenRows<S> Queries(size_t t, size_t) const { return {x_.q, t}; }
    TokenRows<S> LogWeights(size_t t, size_t) const { return {x_.s, t}; }
    // The rows that will be asked for next.
    void NoteQueries(size_t t, size_t end) const { NoteRows(x_.q, t, end, n_); }
    void NoteLogWeights(size_t t, size_t end) const { NoteRows(x_.s, t, end, n_); }
    // Takes their gradients, panels [count, n] of leading dimension ld or Padded(n); those of
    // queries may be rows of RowsBetween.
    void PutQueries(const T* panel, size_t ld, size_t t, size_t count) const {
      if constexpr (std::is_same_v<S, T>) {
        if (panel == x_.dq.At(t)) return;  // there already
      }
      UnpackRows(panel, t, count, n_, ld, x_.dq);
    }
    void PutLogWeights(const T* panel, size_t t, size_t count) const {
      UnpackRows(panel, t, count, n_, Padded<T>(n_), x_.ds);
    }
    // Those of padding.
    void ZeroGradients(size_t t, size_t end) const {
      for (const auto* y : {&x_.dq, &x_.ds}) ZeroRows(t, end, n_, *y);
    }

   private:
    const GivenTokens& x_;
    const size_t n_;
  };
};

// A reader's log-weights, for WalkChunks and ReverseWalk.
template <class Reader>
struct LogWeightsOf {
  Reader& reader;
};
template <class Reader>
auto RowsAt(const LogWeightsOf<Reader>& x, size_t t, size_t count) {
  return x.reader.LogWeights(t, count);
}
template <class Reader>
void NoteRows(const LogWeightsOf<Reader>& x, size_t t, size_t end, size_t) {
  x.reader.NoteLogWeights(t, end);
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard

// The online softmax of a block of queries, and the order of blocks that threads take; included
// once per Highway target.
#if defined(CISTERN_KERNELS_ATTENTION_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_ATTENTION_SOFTMAX_INL_H_
#undef CISTERN_KERNELS_ATTENTION_SOFTMAX_INL_H_
#else
#define CISTERN_KERNELS_ATTENTION_SOFTMAX_INL_H_
#endif

#include "cistern/base/parallel.h"
#include "cistern/kernels/attention_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// Goes on to the largest score of a vector of queries, `most`; high, sum, factor: as below. The
// reference of its weights and, in total, the sum of those before beside it.
template <class T>
HWY_INLINE Vec<T> NextReference(Vec<T> most, T* high, const T* sum, T* factor, Vec<T>& total) {
  const Tag<T> d;
  const Vec<T> before = hn::Load(d, high);
  hn::Store(most, d, high);
  // What has seen nothing yet has the weights e^-inf = 0, not e^(inf - inf).
  most = hn::IfThenZeroElse(hn::Eq(most, hn::Set(d, kNoScore<T>)), most);
  const Vec<T> less = RescaleOf(before, most);
  hn::Store(less, d, factor);
  total = hn::Mul(less, hn::Load(d, sum));
  return ReferenceOf(hn::Sub(most, FarScore(most)));
}

// Scores X[keys, queries] become weights e^(x - high): high is the maximum over this tile and those
// before; sum, factor: what e^-high of before has to be multiplied by.
template <int kVectors, class T>
HWY_INLINE void Weigh(size_t keys, T* X, T* high, T* sum, T* factor) {
  const Tag<T> d;
  constexpr size_t kN = kLanes<T>;
  Vec<T> most[kVectors], total[kVectors], far[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) most[v] = hn::Load(d, high + v * kN);
  for (size_t j = 0; j < keys; ++j) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      most[v] = hn::Max(most[v], hn::Load(d, X + j * kBlockQueries + v * kN));
  }
  bool any_far = false;
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const size_t at = v * kN;
    far[v] = FarScore(most[v]), any_far = any_far || !IsZero(far[v]);
    most[v] = NextReference(most[v], high + at, sum + at, factor + at, total[v]);
  }
  for (size_t j = 0; j < keys; ++j) {
    T* const x = X + j * kBlockQueries;
    Vec<T> e[kVectors];
    ForVectors<kVectors>([&](int v) HWY_ATTR { e[v] = hn::Load(d, x + v * kN); });
    if (HWY_UNLIKELY(any_far))
      ForVectors<kVectors>([&](int v) HWY_ATTR { e[v] = hn::Sub(e[v], far[v]); });
    WeightsOf<kVectors>(e, most);
    ForVectors<kVectors>([&](int v) HWY_ATTR {
      total[v] = hn::Add(total[v], e[v]);
      hn::Store(e[v], d, x + v * kN);
    });
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) hn::Store(total[v], d, sum + v * kN);
}

template <class T>
HWY_NOINLINE void WeighAll(size_t keys, size_t vectors, T* X, T* high, T* sum, T* factor) {
  const auto some = [&]<int kVectors>(std::integral_constant<int, kVectors>) HWY_ATTR {
    for (; vectors >= size_t{kVectors}; vectors -= kVectors) {
      Weigh<kVectors>(keys, X, high, sum, factor);
      constexpr size_t kStep = kVectors * kLanes<T>;
      X += kStep, high += kStep, sum += kStep, factor += kStep;
    }
  };
  some(std::integral_constant<int, 4>());
  some(std::integral_constant<int, 2>());
  some(std::integral_constant<int, 1>());
}

// The largest score of each query of a block and the sum of its weights, from tile to tile.
template <class T>
class OnlineSoftmax {
 public:
  static constexpr size_t kValues = 3 * kBlockQueries, kPieces = 3;
  OnlineSoftmax(const QueryBlock<T>& queries, Workspace& workspace) : block_(queries) {
    high = workspace.Take<T>(kBlockQueries);
    sum = workspace.Take<T>(kBlockQueries);
    factor = workspace.Take<T>(kBlockQueries);
    for (size_t i = 0; i < kBlockQueries; ++i) {
      const int64_t empty = block_.ranges[i].empty;
      high[i] = empty > 0 ? T{0} : kNoScore<T>, sum[i] = static_cast<T>(empty);
    }
  }
  // X[keys, queries]: scores become weights.
  void Weigh(size_t keys, T* X) { Weigh(keys, 0, block_.vectors(), X); }
  // X[keys, queries from `lane` on], `vectors` vectors of them.
  void Weigh(size_t keys, size_t lane, size_t vectors, T* X) {
    WeighAll(keys, vectors, X, high + lane, sum + lane, factor + lane);
  }
  // factor: what the sums of weighted values have to be multiplied by; stats: as AttentionForward's
  // or null.
  void Finish(T* stats) {
    const bool drops = block_.view.dropout().Any();
    for (size_t i = 0; i < block_.count; ++i) {
      // Scores of -inf alone have no softmax; no scores have the result 0.
      const bool nothing = sum[i] == T{0} && block_.SeesNothing(i);
      factor[i] = nothing ? T{0} : T{1} / sum[i];
      if (stats != nullptr) {
        T* const of = block_.view.Stats(stats, block_.t + i);
        of[0] = high[i] == kNoScore<T> ? T{0} : high[i], of[1] = factor[i];
      }
      if (drops) factor[i] *= static_cast<T>(block_.view.dropout().KeptFactor());
    }
  }

  // Of each query: the largest score, the sum of weights, and the factor of what was summed before
  // the last tile.
  T *high, *sum, *factor;

 private:
  const QueryBlock<T>& block_;
};

// visit(view, begin, end): the queries [begin, end) of each view, whole blocks, by threads. A
// thread takes blocks of a view from both ends, so that parts of it have about the same work,
// causal or not.
template <class Visit>
void ForQueryBlocks(const AttentionShape& shape, const AttentionMask& mask, Visit&& visit) {
  const int64_t longest = (shape.queries + shape.dilation - 1) / shape.dilation;
  const int64_t blocks = (longest + int64_t{kBlockQueries} - 1) / int64_t{kBlockQueries};
  const int64_t work = shape.keys / shape.dilation * (shape.key_width + shape.value_width);
  ParallelFor(AttentionView::Number(shape) * blocks, work > 4096 ? 1 : 4096 / (work + 1) + 1,
              [&](int64_t begin, int64_t end) {
                for (int64_t i = begin; i < end;) {
                  const AttentionView view(shape, mask, i / blocks);
                  const auto some = [&](int64_t first, int64_t last) {
                    if (first < last)
                      visit(view, size_t(first) * kBlockQueries,
                            std::min(size_t(last) * kBlockQueries, view.queries));
                  };
                  const int64_t a = i % blocks, b = std::min(blocks, a + end - i);
                  some((a + 1) / 2, (b + 1) / 2);
                  some(blocks - b / 2, blocks - a / 2);
                  i += b - a;
                }
              });
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard

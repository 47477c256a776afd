// What the gradients of exact attention share, whatever their tokens' type: which queries meet
// which keys, and when; D; included once per Highway target.
#if defined(CISTERN_KERNELS_ATTENTION_ROUNDS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_ATTENTION_ROUNDS_INL_H_
#undef CISTERN_KERNELS_ATTENTION_ROUNDS_INL_H_
#else
#define CISTERN_KERNELS_ATTENTION_ROUNDS_INL_H_
#endif

#include <vector>

#include "cistern/base/parallel.h"
#include "cistern/kernels/attention_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// sum_c x[c] y[c]. In double: where values are alike, dx is a small difference of D and what it was
// summed from, and an error of D, which all keys of a query share, is not averaged away in dq.
template <class T>
HWY_INLINE double DotInDouble(size_t count, const T* x, const T* y) {
  const Tag<double> d;
  constexpr size_t kN = kLanes<double>;
  Double sum = hn::Zero(d);
  size_t c = 0;
  for (; c + kN <= count; c += kN)
    sum = hn::MulAdd(LoadAsDoubleU(x + c), LoadAsDoubleU(y + c), sum);
  double total = hn::GetLane(hn::SumOfLanes(d, sum));
  for (; c < count; ++c) total += static_cast<double>(x[c]) * static_cast<double>(y[c]);
  return total;
}

constexpr size_t kSegmentKeys = 64;  // segments have a multiple of them, but for the last

// How a view's queries and keys are cut into groups and segments. In each of `groups` rounds every
// group meets another segment, so rounds write to disjoint places, and each place is added to in
// an order that follows from the shape alone, whatever the number of threads.
struct Rounds {
  // cells: as many in a round as is worth it, for threads.
  Rounds(const AttentionShape& shape, int64_t views, int64_t cells) {
    blocks = ((shape.queries + shape.dilation - 1) / shape.dilation + int64_t{kBlockQueries} - 1) /
             int64_t{kBlockQueries};
    keys = (shape.keys + shape.dilation - 1) / shape.dilation;
    while (groups < 16 && views * groups < cells && blocks >= 4 * groups &&
           keys >= int64_t{4 * kTileKeys} * groups)
      groups *= 2;
  }
  size_t FirstQuery(int64_t group) const { return size_t(blocks * group / groups) * kBlockQueries; }
  size_t FirstKey(int64_t segment) const {
    return segment == groups ? size_t(keys)
                             : size_t(keys * segment / groups) / kSegmentKeys * kSegmentKeys;
  }
  int64_t blocks, keys, groups = 1;
};

struct Cell {
  int64_t view, group, segment;
};

// The cells of a round in which some query may see some key; all where there is one round.
inline std::vector<Cell> CellsOf(const Rounds& rounds, const AttentionShape& shape,
                                 const AttentionMask& mask, int64_t round) {
  std::vector<Cell> cells;
  for (int64_t i = 0; i < AttentionView::Number(shape); ++i) {
    if (rounds.groups == 1) {
      cells.push_back({i, 0, 0});
      continue;
    }
    const AttentionView view(shape, mask, i);
    for (int64_t g = 0; g < rounds.groups; ++g) {
      const int64_t s = (g + rounds.groups - round) % rounds.groups;
      const size_t first = rounds.FirstQuery(g),
                   last = std::min(view.queries, rounds.FirstQuery(g + 1));
      const int64_t begin = int64_t(rounds.FirstKey(s)), end = int64_t(rounds.FirstKey(s + 1));
      for (size_t t = first; t < last; ++t) {
        const KeyRange range = view.Range(t);
        if (range.begin < std::min(range.end, end) && range.end > begin) {
          cells.push_back({i, g, s});
          break;
        }
      }
    }
  }
  return cells;
}

// visit(view): each view, by threads; for work of the size of its tokens.
template <class Visit>
void ForViews(const AttentionShape& shape, const AttentionMask& mask, Visit&& visit) {
  const int64_t tokens = std::max(shape.queries, shape.keys) / shape.dilation + 1;
  ParallelFor(AttentionView::Number(shape),
              32768 / (tokens * (shape.key_width + shape.value_width) + 1) + 1,
              [&](int64_t begin, int64_t end) {
                for (int64_t i = begin; i < end; ++i) visit(AttentionView(shape, mask, i));
              });
}

constexpr int64_t kMostCells = 32;

// visit(view, first, last, begin, end): each group of queries [first, last), whole blocks, with
// each segment of keys [begin, end), by threads, in rounds.
template <class Visit>
void ForCells(const AttentionShape& shape, const AttentionMask& mask, Visit&& visit,
              int64_t most_cells = kMostCells) {
  const Rounds rounds(shape, AttentionView::Number(shape), most_cells);
  const int64_t work = shape.queries * shape.keys / (shape.dilation * shape.dilation) /
                       (rounds.groups * rounds.groups) * (shape.key_width + shape.value_width);
  for (int64_t round = 0; round < rounds.groups; ++round) {
    const std::vector<Cell> cells = CellsOf(rounds, shape, mask, round);
    ParallelFor(int64_t(cells.size()), work > 65536 ? 1 : 65536 / (work + 1) + 1,
                [&](int64_t first, int64_t last) {
                  for (int64_t i = first; i < last; ++i) {
                    const Cell& cell = cells[size_t(i)];
                    const AttentionView view(shape, mask, cell.view);
                    visit(view, rounds.FirstQuery(cell.group),
                          std::min(view.queries, rounds.FirstQuery(cell.group + 1)),
                          rounds.FirstKey(cell.segment),
                          std::min(view.keys, rounds.FirstKey(cell.segment + 1)));
                  }
                });
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard

// The reverse pass over one head's spans and chunks, for the adjoints of reads and matches;
// included once per Highway target.
//
// With W = a F, and Gs, hs the gradients at the span's reference, where rows t are of the chunk:
//   du_i = sum_{t>=i} (W_t . E_i) g_t + E_i Gs
//   ds_i = E_i (sum_{t>=i} (g_t . u_i) W_t + Gs u_i - sum_{t>=i} (W_t b_t - F_t dz_t) - hs)
//   Gs += W^T g,      hs += sum_t (W_t b_t - F_t dz_t)    after each chunk
//   Gs = F_last G,    hs = F_last h                       where the span ends
//   G  = carry Gs,    h  = carry hs                       where it begins
#if defined(CISTERN_KERNELS_SLOT_REVERSE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_SLOT_REVERSE_INL_H_
#undef CISTERN_KERNELS_SLOT_REVERSE_INL_H_
#else
#define CISTERN_KERNELS_SLOT_REVERSE_INL_H_
#endif

#include <algorithm>
#include <vector>

#include "cistern/kernels/slot_core-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// Where the spans of a head begin, and each slot's z there.
struct SpanList {
  std::vector<size_t> begins;
  std::vector<double> z;
  template <class T>
  void Add(size_t t, const SlotChunk<T>& chunk) {
    begins.push_back(t);
    z.insert(z.end(), chunk.z, chunk.z + chunk.n);
  }
  // The first span that does not begin before token t.
  size_t From(size_t t) const {
    return static_cast<size_t>(std::lower_bound(begins.begin(), begins.end(), t) - begins.begin());
  }
};

// Finds the spans and computes nothing else.
template <class T>
struct SpanVisit {
  void Empty() {}
  void Begin(size_t t) { spans.Add(t, chunk); }
  void Note(size_t, size_t) {}
  void Rows(size_t) {}
  void Close() {}
  SlotChunk<T>& chunk;
  SpanList& spans;
};

// x = x * f, and 0 where f is 0 whatever x is: an empty slot has no gradient.
template <class T>
HWY_INLINE Vec<T> Scaled(Vec<T> x, Vec<T> f) {
  const Tag<T> d;
  return hn::IfThenZeroElse(hn::Eq(f, hn::Zero(d)), hn::Mul(f, x));
}

// The gradient G of one memory [n, width] in float or double, and what a chunk adds to it.
template <class S>
class ReverseCore {
  using T = ComputeType<S>;

 public:
  static size_t Bytes(size_t n, size_t width) {
    const size_t np = Padded<T>(n), dp = Padded<T>(width);
    return sizeof(T) *
               (kChunkRows * (3 * dp + 2 * kChunkPadded<T>)+dp * kChunkPadded<T> + 2 * np * dp) +
           ChunkPairsFor<S>::Bytes(n, width);
  }
  static constexpr size_t kPieces = 8 + ChunkPairsFor<S>::kPieces;

  ReverseCore(size_t slots, size_t columns, Workspace& workspace)
      : pairs_(slots, columns, workspace),
        n_(slots),
        width_(columns),
        np_(Padded<T>(slots)),
        dp_(Padded<T>(columns)) {
    g_ = workspace.Take<T>(kChunkRows * dp_);
    u_ = workspace.Take<T>(kChunkRows * dp_);
    D_ = workspace.Take<T>(kChunkRows * dp_);
    A_ = workspace.Take<T>(kChunkRows * kChunkPadded<T>);
    B_ = workspace.Take<T>(kChunkRows * kChunkPadded<T>);
    UT_ = workspace.Take<T>(dp_ * kChunkPadded<T>);
    G_ = workspace.Take<T>(np_ * dp_);
    GT_ = workspace.Take<T>(dp_ * np_);
  }
  size_t width() const { return width_; }

  void Load(const T* grad) {
    std::memset(G_, 0, np_ * dp_ * sizeof(T));
    PackRows(Sequence<const T>(grad, width_), 0, n_, width_, dp_, T{0}, G_);
  }
  void Store(T* grad) const { UnpackRows(G_, 0, n_, width_, dp_, Sequence<T>(grad, width_)); }

  // G times a factor for each slot.
  HWY_NOINLINE void Scale(const T* factor) {
    const Tag<T> d;
    for (size_t l = 0; l < n_; ++l) {
      if (factor[l] == 1) continue;
      const Vec<T> f = hn::Set(d, factor[l]);
      for (size_t j = l * dp_; j < (l + 1) * dp_; j += kLanes<T>)
        hn::Store(Scaled<T>(hn::Load(d, G_ + j), f), d, G_ + j);
    }
  }

  // One chunk: du, and Y = sum_{t>=i} (g_t . u_i) W_t + Gs u_i [rows, np], added to Y where kAdd.
  template <bool kAdd>
  void Rows(size_t rows, const T* E, const T* ET, const T* W, const Sequence<const S>& g_rows,
            const Sequence<const S>& u_rows, size_t t, const Sequence<S>& du, T* Y) {
    constexpr size_t kCp = kChunkPadded<T>;
    const RowsOut<S, T> D(du, t, rows, width_, D_);
    const PanelRows<T> w = {W, np_};
    const TokenRows<S> of_g = {g_rows, t};
    if (pairs_.Take(rows, w, of_g) == rows) {
      const PanelRows<T> e = {E, np_};
      const TokenRows<S> of_u = {u_rows, t};
      if (width_ % kLanes<T> == 0) {
        pairs_.ReverseRead(w, e, G_, dp_, du.At(t), static_cast<size_t>(du.time));
      } else {
        pairs_.ReverseRead(w, e, G_, dp_, D.data, D.ld);
        D.Finish();
      }
      pairs_.template ReverseMatch<kAdd>(of_g, of_u, G_, dp_, Y, np_);
      return pairs_.Add(G_, dp_);
    }
    const T* const g = PanelOf(g_rows, t, rows, width_, g_);
    const T* const u = PanelOf(u_rows, t, rows, width_, u_);
    Transpose(np_, dp_, G_, dp_, GT_, np_);

    LowerProduct<T>(rows, {W, np_, 1, ET, kCp, n_}, A_, kCp);
    Product<Triangle::kUpper, T>(rows, width_, {E, np_, 1, G_, dp_, n_}, {A_, 1, kCp, g, dp_, rows},
                                 D.data, D.ld);
    D.Finish();

    Transpose(rows, width_, u, dp_, UT_, kCp);
    LowerProduct<T>(rows, {g, dp_, 1, UT_, kCp, width_}, B_, kCp);
    Product<Triangle::kUpper, kAdd, T>(rows, n_, {u, dp_, 1, GT_, np_, width_},
                                       {B_, 1, kCp, W, np_, rows}, Y, np_);
    AddProduct<T>(n_, width_, {W, 1, np_, g, dp_, rows}, G_, dp_);
  }
  // What the chunk adds to G, as Rows does, and nothing else.
  void Add(size_t rows, const T* W, const Sequence<const S>& g_rows, size_t t) {
    if (pairs_.Take(rows, PanelRows<T>{W, np_}, TokenRows<S>{g_rows, t}) == rows)
      return pairs_.Add(G_, dp_);
    const T* const g = PanelOf(g_rows, t, rows, width_, g_);
    AddProduct<T>(n_, width_, {W, 1, np_, g, dp_, rows}, G_, dp_);
  }

 private:
  ChunkPairsFor<S> pairs_;
  const size_t n_, width_, np_, dp_;
  T *g_, *u_, *D_, *A_, *B_, *UT_, *G_, *GT_;
};

// What reverse passes share: the walk, E and F of a whole span, and h.
template <class T>
class ReverseWalk {
 public:
  static size_t Bytes(size_t n) {
    const size_t np = Padded<T>(n);
    return SlotChunk<T>::Bytes(n) + sizeof(T) * (2 * kSpanRows * np + np * kChunkPadded<T> + np);
  }
  static constexpr size_t kPieces = SlotChunk<T>::kPieces + 4;

  ReverseWalk(size_t slots, Workspace& workspace) : chunk(slots, workspace) {
    E_ = workspace.Take<T>(kSpanRows * chunk.np);
    F_ = workspace.Take<T>(kSpanRows * chunk.np);
    ET = workspace.Take<T>(chunk.np * kChunkPadded<T>);
    h = workspace.Take<T>(chunk.np);
  }

  // Over spans [first, last), from the last one on. visit: Scale(factors) and Rows(t), which uses
  // chunk and ET.
  template <class LogWeights, class Visit>
  HWY_INLINE void Run(const LogWeights& s, const Tokens& tokens, const SpanList& spans,
                      size_t first, size_t last, Visit& visit) {
    constexpr size_t kMost = kSpanRows / kChunkRows;
    const size_t np = chunk.np;
    size_t begins[kMost], rows[kMost];
    for (size_t i = last; i-- > first;) {
      const size_t end = i + 1 < spans.begins.size() ? spans.begins[i + 1] : tokens.length;
      size_t t = spans.begins[i], count = 0;
      chunk.LoadZ(spans.z.data() + i * chunk.n);
      auto rows_at = RowsAt(s, t, end - t);  // of the whole span
      chunk.Begin(rows_at);
      for (; t < end; t += chunk.rows, rows_at.t += chunk.rows) {
        chunk.E = E_ + count * kChunkRows * np;
        chunk.F = F_ + count * kChunkRows * np;
        chunk.Take(rows_at, tokens, t, end);
        chunk.Pass();
        begins[count] = t;
        rows[count++] = chunk.rows;
      }
      Scale(chunk.F + (chunk.rows - 1) * np, visit);
      while (count-- > 0) {
        chunk.E = E_ + count * kChunkRows * np;
        chunk.F = F_ + count * kChunkRows * np;
        chunk.rows = rows[count];
        Transpose(chunk.rows, chunk.n, chunk.E, np, ET, kChunkPadded<T>);
        t = begins[count];
        RowsAhead::OfThisThread().Clear();
        visit.Note(t < kChunkRows ? 0 : t - kChunkRows, t);
        // The log-weights of a whole span are read at once, where it begins.
        if (t >= kSpanRows) NoteRows(s, t - kSpanRows, t - kSpanRows + chunk.rows, chunk.n);
        visit.Rows(t);
      }
      Scale(chunk.carry, visit);
    }
  }

  // ds = E (Y - sum_{t>=i} (ab_t - F_t dz_t) - hs) in place of Y; ab = W b, dz [rows, np] or null.
  HWY_NOINLINE void Gradients(T* Y, const T* ab, const T* dz) {
    const Tag<T> d;
    const Vec<T> zero = hn::Zero(d);
    for (size_t l = 0; l < chunk.np; l += kLanes<T>) {
      Vec<T> sum = hn::Load(d, h + l);
      for (size_t i = chunk.rows; i-- > 0;) {
        const size_t at = i * chunk.np + l;
        sum = WithTerm(sum, ab, dz, at);
        const Vec<T> e = hn::Load(d, chunk.E + at);
        const Vec<T> y = hn::Mul(e, hn::Sub(hn::Load(d, Y + at), sum));
        hn::Store(hn::IfThenZeroElse(hn::Eq(e, zero), y), d, Y + at);
      }
      hn::Store(sum, d, h + l);
    }
  }

  // h as Gradients leaves it.
  HWY_NOINLINE void AddTerms(const T* ab, const T* dz = nullptr) {
    const Tag<T> d;
    for (size_t l = 0; l < chunk.np; l += kLanes<T>) {
      Vec<T> sum = hn::Load(d, h + l);
      for (size_t i = chunk.rows; i-- > 0;) sum = WithTerm(sum, ab, dz, i * chunk.np + l);
      hn::Store(sum, d, h + l);
    }
  }

  SlotChunk<T> chunk;
  T *ET, *h;  // E^T [np, kChunkPadded]; h [np]

 private:
  template <class Visit>
  HWY_INLINE void Scale(const T* factor, Visit& visit) {
    const Tag<T> d;
    visit.Scale(factor);
    for (size_t l = 0; l < chunk.np; l += kLanes<T>)
      hn::Store(Scaled<T>(hn::Load(d, h + l), hn::Load(d, factor + l)), d, h + l);
  }

  // sum + ab - F dz, at one place of the panels.
  HWY_INLINE Vec<T> WithTerm(Vec<T> sum, const T* ab, const T* dz, size_t at) const {
    const Tag<T> d;
    sum = hn::Add(sum, hn::Load(d, ab + at));
    if (dz == nullptr) return sum;
    return hn::Sub(sum, Scaled<T>(hn::Load(d, dz + at), hn::Load(d, chunk.F + at)));
  }

  T *E_, *F_;
};

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard

// Products of tokens with a vector of each slot, and their gradients: logits of a read by content,
// log-weights of a write by queries; included once per Highway target.
#if defined(CISTERN_KERNELS_SLOT_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_SLOT_PRODUCTS_INL_H_
#undef CISTERN_KERNELS_SLOT_PRODUCTS_INL_H_
#else
#define CISTERN_KERNELS_SLOT_PRODUCTS_INL_H_
#endif

#include "cistern/kernels/segments-inl.h"
#include "cistern/kernels/slot_bidirectional.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// factor * memory, [n, width], as a panel of T [np, dp], zeros in the padding.
template <class T>
void PackMemory(const double* memory, double factor, size_t n, size_t width, T* panel) {
  const size_t dp = Padded<T>(width);
  std::memset(panel, 0, Padded<T>(n) * dp * sizeof(T));
  for (size_t l = 0; l < n; ++l) {
    for (size_t j = 0; j < width; ++j)
      panel[l * dp + j] = static_cast<T>(factor * memory[l * width + j]);
  }
}

// to [n, width] = factor * the sums [np, dp] of all parts, which lie `step` apart.
template <class T>
void AddParts(size_t n, size_t width, size_t parts, const double* sums, size_t step, double factor,
              double* to) {
  std::fill_n(to, n * width, 0.0);
  for (size_t part = 0; part < parts; ++part, sums += step) {
    for (size_t l = 0; l < n; ++l) {
      for (size_t j = 0; j < width; ++j)
        to[l * width + j] += factor * sums[l * Padded<T>(width) + j];
    }
  }
}

// X[t, l] = scale x_t . K[l] of a segment's tokens, K [B,H,n,width].
template <class S>
class SlotProducts {
 public:
  using T = ComputeType<S>;
  using Pairs = PanelPairsFor<S>;
  static size_t Bytes(size_t n, size_t width) {
    const size_t np = Padded<T>(n), dp = Padded<T>(width);
    return SpanProduct<S>::Bytes(n, width) + Pairs::Bytes(kBlockRows, n, width) +
           Pairs::Bytes(kBlockRows, width, n) + sizeof(T) * (2 * np * dp + 2 * kBlockRows * dp);
  }
  static constexpr size_t kPieces = SpanProduct<S>::kPieces + 2 * Pairs::kPieces + 4;
  static size_t Sums(size_t n, size_t width) { return Padded<T>(n) * Padded<T>(width); }

  // sums [np, dp] of dX (x) x, zeros; null where there is no backward.
  SlotProducts(const SlotVectors& vectors, const Segment& segment, const SlotShape& shape,
               const Rows<const S>& x, const Rows<S>& dx, double* sums, Workspace& workspace)
      : n_(static_cast<size_t>(shape.slots)),
        width_(static_cast<size_t>(vectors.width)),
        np_(Padded<T>(n_)),
        dp_(Padded<T>(width_)),
        x_(x, segment.b, segment.h),
        dx_(dx, segment.b, segment.h),
        d_K_(n_, width_, sums, workspace),
        of_K_(kBlockRows, n_, width_, workspace),
        of_KT_(kBlockRows, width_, n_, workspace) {
    K_ = workspace.Take<T>(np_ * dp_);
    KT_ = workspace.Take<T>(dp_ * np_);
    X_panel_ = workspace.Take<T>(kBlockRows * dp_);
    D_panel_ = workspace.Take<T>(kBlockRows * dp_);
    const auto head = static_cast<size_t>(segment.b * shape.heads + segment.h);
    PackMemory(vectors.data + head * n_ * width_, vectors.scale, n_, width_, K_);
    Transpose(np_, dp_, K_, dp_, KT_, np_);
    of_K_.Set(K_, dp_);
    of_KT_.Set(KT_, np_);
  }

  // X [rows, np] of rows t..; padding in whole vectors is zeros, any beyond stays as it was.
  void Form(size_t t, size_t rows, T* X) {
    const TokenRows<S> x = {x_, t};
    if (of_KT_.template Times<false>(rows, x, X, np_)) return;
    panel_ = AsPanel(x, rows, width_, X_panel_);
    Product<T>(rows, n_, {panel_, dp_, 1, KT_, np_, width_}, X, np_);
  }
  // From dX [rows, np], after Form of the same rows.
  void Gradients(size_t t, size_t rows, const T* D) {
    if (of_K_.TimesTo(rows, PanelRows<T>{D, np_}, dx_, t, D_panel_)) {
      d_K_.Add(rows, D, TokenRows<S>{x_, t}, X_panel_);
      return;
    }
    const RowsOut<S> dx(dx_, t, rows, width_, D_panel_);
    Product<T>(rows, width_, {D, np_, 1, K_, dp_, n_}, dx.data, dx.ld);
    dx.Finish();
    d_K_.Add(rows, D, PanelRows<T>{panel_, dp_});
  }
  void Note(size_t t, size_t end) const { NoteRows(x_, t, end, width_); }
  void ZeroGradients(size_t t, size_t end) const { ZeroRows(t, end, width_, dx_); }
  void Close() { d_K_.Close(); }
  void CloseIfFull() {
    if (d_K_.full()) d_K_.Close();
  }

 private:
  const size_t n_, width_, np_, dp_;
  const Sequence<const S> x_;
  const Sequence<S> dx_;
  SpanProduct<S> d_K_;
  Pairs of_K_, of_KT_;
  T *K_, *KT_, *X_panel_, *D_panel_;
  const T* panel_ = nullptr;
};

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard

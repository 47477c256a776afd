#include "cistern/ops/exact_attention.h"

#include "cistern/kernels/exact_attention_bfloat16.h"
#include "cistern/kernels/isa.h"
#include "cistern/kernels/ref/exact_attention_ref.h"
#include "cistern/ops/primitive.h"
#include "cistern/ops/softmax_parts.h"

namespace cistern::ops {
namespace exact_attention {

struct Arguments {
  at::Tensor q, k, v;
  OptionalTensor ranges, valid;
  double scale = 1;
  int64_t dilation = 1;
  double dropout = 0;
  int64_t seed = 0, first_row = 0;  // of what is dropped
  bool save = false;
  Mask mask = {};  // of no use: the ranges say it all
};

// The mask for the kernels; keeps what it points to alive.
struct View {
  explicit View(const Arguments& x) {
    mask.dropout = {x.dropout, uint64_t(x.seed), x.first_row};
    if (x.ranges) {
      ranges = x.ranges->contiguous();
      static_assert(sizeof(KeyRange) == 3 * sizeof(int64_t));
      mask.ranges = reinterpret_cast<const KeyRange*>(ranges.const_data_ptr<int64_t>());
      mask.range_batch = ranges.size(0) == 1 ? 0 : ranges.size(1);
      const int64_t keys = x.k.size(2), count = ranges.numel() / 3;
      for (int64_t i = 0; i < count; ++i) {
        const KeyRange& range = mask.ranges[i];
        TORCH_CHECK(range.begin >= 0 && range.end <= keys && range.empty >= 0,
                    "[exact_attention] expected ranges within 0..S = ", keys, ", got ", range.begin,
                    "..", range.end, " and ", range.empty, " empty keys");
      }
    }
    if (x.valid) {
      valid = x.valid->contiguous();
      mask.valid = reinterpret_cast<const uint8_t*>(valid.const_data_ptr<bool>());
    }
  }
  at::Tensor ranges, valid;
  AttentionMask mask;
};

AttentionShape ShapeOf(const Arguments& x) {
  return {x.q.size(0), x.q.size(1), x.q.size(2), x.k.size(2), x.q.size(3), x.v.size(3), x.dilation};
}

Arguments InFloat(Arguments x) {
  for (at::Tensor* t : {&x.q, &x.k, &x.v}) *t = t->to(at::kFloat);
  return x;
}

// Whether tokens in bfloat16 go into products as they are; else they are computed in float.
bool InBFloat16(const Arguments& x) {
  const bool of_few = !x.save && x.q.size(2) <= kFewQueries && x.dropout == 0;
  return MultipliesBFloat16() && !of_few;
}

// Memory of a call as outputs have it: used again by the next one.
CallMemory OutputMemory() {
  const auto blocks = std::make_shared<std::vector<at::DataPtr>>();
  return [blocks](size_t bytes) {
    blocks->push_back(OutputAllocator().allocate(bytes));
    return static_cast<std::byte*>(blocks->back().mutable_get());
  };
}

struct Exact {
  static constexpr const char* kSchema =
      "exact_attention(Tensor q, Tensor k, Tensor v, Tensor? ranges=None, Tensor? valid=None, "
      "float scale=1, int dilation=1, float dropout=0, int seed=0, int first_row=0, "
      "bool save=False) -> (Tensor, Tensor)";
  using Arguments = exact_attention::Arguments;
  static constexpr auto kFields = [](auto& x) {
    return std::tie(x.q, x.k, x.v, x.ranges, x.valid, x.scale, x.dilation, x.dropout, x.seed,
                    x.first_row, x.save);
  };
  static bool IsConstant(const Arguments& x, const OptionalTensor* field) {
    return field == &x.ranges || field == &x.valid;
  }
  static constexpr size_t kOutputs = 2, kDifferentiable = 1;
  enum { kOut, kStats };  // what the backward needs of each query's scores
  static constexpr int64_t kTime = 2;
  static constexpr bool kBFloat16 = true;
  static const at::Tensor& Tokens(const Arguments& x) { return x.q; }

  static void Check(const Arguments& x) {
    TORCH_CHECK(x.q.dim() == 4 && x.k.dim() == 4 && x.v.dim() == 4 &&
                    x.k.sym_size(0) == x.q.sym_size(0) && x.k.sym_size(1) == x.q.sym_size(1) &&
                    x.k.sym_size(3) == x.q.sym_size(3) &&
                    x.v.sym_sizes().slice(0, 3) == x.k.sym_sizes().slice(0, 3),
                "[exact_attention] expected q [B,H,T,d], k [B,H,S,d], v [B,H,S,e], got ",
                x.q.sym_sizes(), ", ", x.k.sym_sizes(), ", ", x.v.sym_sizes());
    TORCH_CHECK(x.k.scalar_type() == x.q.scalar_type() && x.v.scalar_type() == x.q.scalar_type(),
                "[exact_attention] expected one dtype, got q ", x.q.scalar_type(), ", k ",
                x.k.scalar_type(), ", v ", x.v.scalar_type());
    if (x.ranges) {
      TORCH_CHECK(x.ranges->dim() == 3 && x.ranges->scalar_type() == at::kLong &&
                      (x.ranges->sym_size(0) == 1 || x.ranges->sym_size(0) == x.q.sym_size(0)) &&
                      x.ranges->sym_size(1) == x.q.sym_size(2) && x.ranges->sym_size(2) == 3,
                  "[exact_attention] expected ranges [B or 1,T,3] of int64, got ",
                  x.ranges->sym_sizes(), " of ", x.ranges->scalar_type());
    }
    if (x.valid) {
      TORCH_CHECK(x.valid->dim() == 2 && x.valid->scalar_type() == at::kBool &&
                      x.valid->sym_size(0) == x.q.sym_size(0) &&
                      x.valid->sym_size(1) == x.k.sym_size(2),
                  "[exact_attention] expected valid [B,S] of bool, got ", x.valid->sym_sizes(),
                  " of ", x.valid->scalar_type());
    }
    TORCH_CHECK(x.dropout >= 0 && x.dropout <= 1,
                "[exact_attention] expected dropout from 0 to 1, got ", x.dropout);
    TORCH_CHECK(x.dilation == 1 || (x.dilation > 1 && x.k.sym_size(2) >= x.q.sym_size(2) &&
                                    (x.k.sym_size(2) - x.q.sym_size(2)) % x.dilation == 0),
                "[exact_attention] expected a dilation that divides S - T, got ", x.dilation,
                " with T=", x.q.sym_size(2), " and S=", x.k.sym_size(2));
  }

  static Tensors Compose(const Arguments& x) {
    if (x.q.scalar_type() == at::kBFloat16) return {Compose(InFloat(x))[kOut].to(at::kBFloat16)};
    const int64_t T = x.q.size(2), S = x.k.size(2);
    const auto index = x.q.options().dtype(at::kLong).requires_grad(false);
    const at::Tensor key = at::arange(S, index);
    at::Tensor visible = at::ones({1, 1, T, S}, index.dtype(at::kBool));
    at::Tensor k = x.k;
    if (x.valid) visible = visible.logical_and(x.valid->unsqueeze(1).unsqueeze(1));
    if (x.dilation > 1) {
      visible =
          visible.logical_and((key - at::arange(T, index).unsqueeze(1)).remainder(x.dilation) == 0);
    }
    if (x.ranges) {
      const auto column = [&](int64_t i) {
        return x.ranges->select(2, i).unsqueeze(1).unsqueeze(3);
      };
      visible = visible.logical_and(key >= column(0)).logical_and(key < column(1));
      const int64_t most =
          x.ranges->numel() == 0 ? 0 : x.ranges->select(2, 2).max().item<int64_t>();
      if (most > 0) {  // rows of zeros behind the keys
        const at::Tensor empty = at::arange(most, index) < column(2);
        std::vector<int64_t> shape = empty.sizes().vec();
        shape[0] = std::max(shape[0], visible.size(0));
        visible = visible.expand({shape[0], -1, -1, -1});
        visible = at::cat({visible, empty.expand(shape)}, 3);
        k = at::constant_pad_nd(k, {0, 0, 0, most}, 0);
      }
    }
    const at::Tensor p = softmax_attention::Probabilities(x.q, k, visible, x.scale, {});
    const DropoutDraw dropout = {x.dropout, uint64_t(x.seed), x.first_row};
    return {at::matmul(softmax_attention::Dropped(p.narrow(3, 0, S), dropout), x.v)};
  }

  static Tensors Empty(const Arguments& x) {
    const c10::SymInt sizes[] = {x.q.sym_size(0), x.q.sym_size(1), x.q.sym_size(2),
                                 x.v.sym_size(3)};
    const c10::SymInt stats[] = {x.q.sym_size(0), x.q.sym_size(1), x.q.sym_size(2), 2};
    return {EmptyHeads(sizes, x.q.options()),
            x.save ? at::empty_symint(stats, x.q.options().dtype(ComputeTypeOf(x.q)))
                   : at::empty({0}, x.q.options())};
  }
  static Tensors EmptyGradients(const Arguments& x) {
    return {LikeHeads(x.q), LikeHeads(x.k), LikeHeads(x.v)};
  }

  static void Forward(const Arguments& x, const RowMask&, const Tensors& y) {
    const at::Tensor q = UnitStride(x.q), k = UnitStride(x.k), v = UnitStride(x.v);
    const View view(x);
    DispatchStored(q, [&]<class S>(S) {
      using T = ComputeType<S>;
      T* const stats = x.save ? y[kStats].mutable_data_ptr<T>() : nullptr;
      if constexpr (std::is_same_v<S, BFloat16>) {
        if (InBFloat16(x))
          return AttentionForward(ShapeOf(x), x.scale, InputRows<S>(q), InputRows<S>(k),
                                  InputRows<S>(v), view.mask, OutputRows<S>(y[kOut]), stats,
                                  OutputMemory());
      }
      AttentionForward<S>(ShapeOf(x), x.scale, InputRows<S>(q), InputRows<S>(k), InputRows<S>(v),
                          view.mask, OutputRows<S>(y[kOut]), stats);
    });
  }
  static Tensors Backward(const Arguments& x, const RowMask&, const Tensors& g,
                          const Tensors& kept) {
    const at::Tensor q = UnitStride(x.q), k = UnitStride(x.k), v = UnitStride(x.v),
                     out = UnitStride(kept[kOut]), d_out = UnitStride(OrZeros(g[kOut], out));
    const View view(x);
    const bool rounds = q.scalar_type() == at::kBFloat16 && InBFloat16(x);
    Tensors dx;
    for (const at::Tensor* t : {&x.q, &x.k, &x.v})
      dx.push_back(EmptyHeads(t->sym_sizes(),
                              t->options().dtype(rounds ? at::kBFloat16 : ComputeTypeOf(*t))));
    DispatchStored(q, [&]<class S>(S) {
      using T = ComputeType<S>;
      const T* const stats = kept[kStats].const_data_ptr<T>();
      if constexpr (std::is_same_v<S, BFloat16>) {
        if (rounds)
          return AttentionBackward(ShapeOf(x), x.scale, InputRows<S>(q), InputRows<S>(k),
                                   InputRows<S>(v), InputRows<S>(out), InputRows<S>(d_out),
                                   view.mask, stats, OutputRows<S>(dx[0]), OutputRows<S>(dx[1]),
                                   OutputRows<S>(dx[2]), OutputMemory());
      }
      AttentionBackward<S>(ShapeOf(x), x.scale, InputRows<S>(q), InputRows<S>(k), InputRows<S>(v),
                           InputRows<S>(out), InputRows<S>(d_out), view.mask, stats,
                           OutputRows<T>(dx[0]), OutputRows<T>(dx[1]), OutputRows<T>(dx[2]));
    });
    for (at::Tensor& t : dx) t = t.to(x.q.scalar_type());
    return dx;
  }

  static Tensors ForwardReference(const Arguments& x, const RowMask&) {
    const at::Tensor q = AsDouble(x.q), k = AsDouble(x.k), v = AsDouble(x.v);
    const at::Tensor out = at::empty({q.size(0), q.size(1), q.size(2), v.size(3)}, q.options());
    ref::AttentionForward(ShapeOf(x), x.scale, q.const_data_ptr<double>(),
                          k.const_data_ptr<double>(), v.const_data_ptr<double>(), View(x).mask,
                          out.mutable_data_ptr<double>());
    return {out.to(x.q.scalar_type()), at::empty({0}, x.q.options())};
  }
  static Tensors BackwardReference(const Arguments& x, const RowMask&, const Tensors& g,
                                   const Tensors& kept) {
    const at::Tensor q = AsDouble(x.q), k = AsDouble(x.k), v = AsDouble(x.v),
                     d_out = AsDouble(OrZeros(g[kOut], kept[kOut]));
    const Tensors dx = {at::empty_like(q), at::empty_like(k), at::empty_like(v)};
    const View view(x);
    ref::AttentionBackward(ShapeOf(x), x.scale, q.const_data_ptr<double>(),
                           k.const_data_ptr<double>(), v.const_data_ptr<double>(),
                           d_out.const_data_ptr<double>(), view.mask,
                           dx[0].mutable_data_ptr<double>(), dx[1].mutable_data_ptr<double>(),
                           dx[2].mutable_data_ptr<double>());
    const auto type = x.q.scalar_type();
    return {dx[0].to(type), dx[1].to(type), dx[2].to(type)};
  }
};

}  // namespace exact_attention

CISTERN_PRIMITIVE(exact_attention::Exact)

at::Tensor ExactAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          double scale, const SeenKeys& seen, const DropoutDraw& dropout) {
  return std::get<0>(OpPair<exact_attention::Exact>::Call(
      {q, k, v, Given(seen.ranges), Given(seen.valid), scale, seen.dilation, dropout.rate,
       int64_t(dropout.seed), dropout.first_row}));
}

bool HasExactKernel(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const bool bfloat16 = q.scalar_type() == at::kBFloat16 && q.device().is_cpu();
  return ActiveImpl() == Impl::kKernel && (bfloat16 || UsesKernel(q)) &&
         k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type() &&
         !HaveTangents({q, k, v});
}

bool AttendsToBFloat16() { return ActiveImpl() == Impl::kKernel; }

bool MultipliesBFloat16() {
  return CanAttendBFloat16() && GainsByBFloat16() && AttendsToBFloat16();
}

at::ScalarType ProductTypeOf(const at::Tensor& tokens) {
  const at::ScalarType type = tokens.scalar_type();
  const bool slow = type == at::kBFloat16 && tokens.device().is_cpu() && !MultipliesBFloat16();
  return slow ? at::kFloat : type;
}

}  // namespace cistern::ops

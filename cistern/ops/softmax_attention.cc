#include "cistern/ops/softmax_attention.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>
#include <vector>

#include "cistern/base/parallel.h"
#include "cistern/kernels/exact_attention.h"
#include "cistern/ops/blockwise_attention.h"
#include "cistern/ops/draws.h"
#include "cistern/ops/exact_attention.h"
#include "cistern/ops/finite.h"
#include "cistern/ops/flash_attention.h"
#include "cistern/ops/impl.h"
#include "cistern/ops/primitive.h"
#include "cistern/ops/slot_attention.h"
#include "cistern/ops/softmax_parts.h"

namespace cistern::ops {

double LowestOf(at::ScalarType type) {
  if (type == at::kHalf) return std::numeric_limits<at::Half>::lowest();
  if (type == at::kBFloat16) return std::numeric_limits<at::BFloat16>::lowest();
  return std::numeric_limits<float>::lowest();
}

namespace softmax_attention {

// [B or 1, 1, T, S] bool, true where a query sees a key; undefined when every query sees every key.
at::Tensor Visible(const at::Tensor& q, const at::Tensor& k, const SoftmaxOptions& options,
                   const Mask& mask, const at::Tensor& key_valid) {
  const int64_t rows = q.size(2), keys = k.size(2);
  const auto index = q.options().dtype(at::kLong).requires_grad(false);
  at::Tensor visible;
  auto restrict_to = [&](const at::Tensor& condition) {
    visible = visible.defined() ? visible.logical_and(condition) : condition;
  };
  const at::Tensor key = at::arange(keys, index);
  if (options.causal) {
    const at::Tensor last = at::arange(rows, index).unsqueeze(1) + options.query_offset;
    restrict_to((key.unsqueeze(0) <= last).unsqueeze(0).unsqueeze(0));
  }
  const at::Tensor real = mask.Real(keys);
  if (real.defined()) restrict_to(real.unsqueeze(1).unsqueeze(1));
  if (mask.starts) {
    const at::Tensor document = mask.starts->to(at::kLong).cumsum(1);
    const at::Tensor key_document =
        at::cat({at::zeros({q.size(0), keys - rows}, document.options()), document}, 1);
    restrict_to((document.unsqueeze(2) == key_document.unsqueeze(1)).unsqueeze(1));
  }
  if (key_valid.defined()) restrict_to(key_valid.unsqueeze(1).unsqueeze(1));
  return visible;
}

at::Tensor Probabilities(const at::Tensor& q, const at::Tensor& k, const at::Tensor& visible,
                         double scale, const at::Tensor& bias) {
  at::Tensor scores = at::matmul(q, k.transpose(2, 3)) * scale;
  if (bias.defined()) scores = scores + bias;
  if (visible.defined()) {
    // Finite instead of -inf, so that a fully masked row has finite gradients; its probabilities
    // are set to 0 below.
    scores = scores.masked_fill(visible.logical_not(), LowestOf(scores.scalar_type()));
  }
  const at::Tensor p = at::softmax(scores, -1);
  return visible.defined() ? p.masked_fill(visible.logical_not(), 0.0) : p;
}

at::Tensor Dropped(const at::Tensor& p, const DropoutDraw& dropout, int64_t first) {
  if (!dropout.Any()) return p;
  if (!p.device().is_cpu()) return at::dropout(p, dropout.rate, true);
  const at::Tensor factors = at::empty(
      p.sizes(), at::TensorOptions(p.scalar_type() == at::kDouble ? at::kDouble : at::kFloat));
  const int64_t rows = p.size(2), keys = p.size(3), first_head = dropout.first_row * p.size(1);
  DispatchType(factors, [&]<class T>(T) {
    T* const of = factors.mutable_data_ptr<T>();
    ParallelFor(
        p.size(0) * p.size(1) * rows, 4096 / (keys + 1) + 1, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            dropout.Factors(uint64_t(first_head + i / rows), first + i % rows, keys, of + i * keys);
          }
        });
  });
  return p * factors.to(p.scalar_type());
}

at::Tensor Explicit(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const at::Tensor& visible, double scale, const DropoutDraw& dropout,
                    const at::Tensor& bias) {
  return at::matmul(Dropped(Probabilities(q, k, visible, scale, bias), dropout), v);
}

at::Tensor FiniteOrZero(const at::Tensor& x) {
  return x.masked_fill(x.detach().isfinite().logical_not(), 0.0);
}

// NaN is added, not put in: so it passes on to gradients, too.
at::Tensor WithNan(const at::Tensor& out, const at::Tensor& where) {
  return out + at::zeros(where.sizes(), out.options().requires_grad(false))
                   .masked_fill(where, std::numeric_limits<double>::quiet_NaN());
}

// run(q, k, v), but what is not finite reaches the queries that see it and no others: it is zero in
// `run`, whose products would take 0 times NaN from keys that are masked, and torch's flash
// attention takes a row of NaN scores for one that sees nothing. The queries that hold it or see it
// are NaN. seen(keys): for each query whether it sees one of these [B,H,S] keys, [B,H,T,1].
// `all`: every query sees every key, so that NaN of some keys is where it belongs.
template <class Run, class Seen>
at::Tensor KeepNonFinite(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool all,
                         Run&& run, Seen&& seen) {
  const bool finite =
      AllFinite(q) && (all ? AllFinite(k.narrow(2, 0, std::min<int64_t>(1, k.size(2))))
                           : AllFinite(k) && AllFinite(v));
  if (finite) return run(q, k, v);
  const auto broken = [](const at::Tensor& x) {
    return x.detach().isfinite().all(-1).logical_not();
  };
  const at::Tensor any_key = seen(at::ones(k.sizes().slice(0, 3), k.options().dtype(at::kBool)));
  const at::Tensor lost = seen(broken(k).logical_or(broken(v)))
                              .logical_or(broken(q).unsqueeze(-1).logical_and(any_key));
  return WithNan(run(FiniteOrZero(q), FiniteOrZero(k), FiniteOrZero(v)), lost);
}

// [B,H,T,1]: whether a query sees one of the keys [B,H,S]; visible as in Visible.
at::Tensor SeesOneOf(const at::Tensor& keys, const at::Tensor& visible, int64_t queries) {
  if (!visible.defined()) return keys.any(-1, true).unsqueeze(-1).expand({-1, -1, queries, -1});
  return at::matmul(visible.to(at::kFloat), keys.to(at::kFloat).unsqueeze(-1)) > 0;
}

// Which keys each query sees; undefined when every query sees every key.
at::Tensor VisibleOrAll(const at::Tensor& q, const at::Tensor& k, const SoftmaxOptions& options,
                        const Mask& mask, const at::Tensor& key_valid) {
  const bool sees_all =
      !options.causal || (q.size(2) == 1 && options.query_offset == k.size(2) - 1);
  if (sees_all && !mask && !key_valid.defined()) return {};
  return Visible(q, k, options, mask, key_valid);
}

// The keys that each query sees, as ranges: as Visible, for tensors on the CPU.
SeenKeys SeenBy(const at::Tensor& q, const at::Tensor& k, const SoftmaxOptions& options,
                const Mask& mask, const at::Tensor& key_valid) {
  const int64_t T = q.size(2), S = k.size(2), cached = S - T;
  SeenKeys seen;
  if (mask.valid) seen.valid = mask.Real(S);
  if (key_valid.defined())
    seen.valid = seen.valid.defined() ? seen.valid.logical_and(key_valid) : key_valid;
  const bool to_last = !options.causal || (T == 1 && options.query_offset >= S - 1);
  if (to_last && !mask.lengths && !mask.starts) return seen;
  const int64_t rows = mask.lengths || mask.starts ? q.size(0) : 1;
  seen.ranges = at::zeros({rows, T, 3}, q.options().dtype(at::kLong).requires_grad(false));
  const at::Tensor lengths = mask.lengths ? mask.lengths->contiguous() : at::Tensor(),
                   starts = mask.starts ? mask.starts->contiguous() : at::Tensor();
  int64_t* range = seen.ranges.mutable_data_ptr<int64_t>();
  for (int64_t b = 0; b < rows; ++b) {
    const int64_t length =
        lengths.defined() ? std::clamp<int64_t>(lengths.const_data_ptr<int64_t>()[b], 0, S) : S;
    const bool* start = starts.defined() ? starts.const_data_ptr<bool>() + b * T : nullptr;
    int64_t begin = 0, next = 0;  // of the query's document; the next start after it
    for (int64_t t = 0; t < T; ++t, range += 3) {
      int64_t end = options.causal ? std::min(S, options.query_offset + t + 1) : S;
      if (start != nullptr) {
        if (start[t]) begin = cached + t;
        if (next <= t) {
          for (next = t + 1; next < T && !start[next];) ++next;
        }
        end = std::min(end, cached + next);
      }
      range[0] = begin, range[1] = std::min(end, length);
    }
  }
  return seen;
}

at::Tensor InDouble(const at::Tensor& x) { return x.defined() ? x.to(at::kDouble) : x; }

double ScaleOf(const SoftmaxOptions& options, const at::Tensor& q) {
  return options.scale > 0 ? options.scale : 1.0 / std::sqrt(double(q.size(3)));
}

// Keys that are few beside the queries, and queries that are few beside the keys, are slots, which
// tokens read by content or which attend to the tokens: their kernels take rows of tokens as they
// lie, and ask memory for them ahead. That pays where tokens are many, beside what is done for each
// slot, and give each thread enough to do (docs/notes/kernels-2026-11.md).
bool AreSlots(const at::Tensor& few, const at::Tensor& many) {
  const int64_t length = many.size(2), heads = many.size(0) * many.size(1);
  return length >= 1024 && length >= 32 * few.size(2) && heads * length >= 32768;
}

// Attention to few keys. valid [B,S] bool, the keys that all queries see; undefined: all.
at::Tensor ToSlots(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale,
                   const at::Tensor& valid) {
  at::Tensor keys = k.to(at::kDouble), values = v.to(at::kDouble), z;
  if (valid.defined()) {
    const at::Tensor hidden = valid.logical_not().unsqueeze(1);  // [B,1,S]
    // Where all are hidden, the read is of zeros.
    keys = keys.masked_fill(hidden.unsqueeze(-1), 0.0);
    values = values.masked_fill(hidden.unsqueeze(-1), 0.0);
    z = at::zeros(k.sizes().slice(0, 3), keys.options().requires_grad(false))
            .masked_fill(hidden, -std::numeric_limits<double>::infinity());
  }
  return AbcRead(q, keys, values, z, scale);
}

// Attention of few queries; the mask has lengths alone.
at::Tensor OfSlots(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale,
                   const Mask& mask) {
  const SlotState empty = EmptySlots(q.size(0), q.size(1), q.size(2), v.size(3), q.options());
  return SlotPack(q.to(at::kDouble), k, v, scale, empty, mask).memory.to(q.scalar_type());
}

// Attention of slots, where there are some; undefined where there are none.
at::Tensor BySlots(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale,
                   const Mask& mask, const at::Tensor& key_valid) {
  if (mask.starts) return {};
  if (AreSlots(k, q) && v.size(3) == k.size(3)) {
    at::Tensor valid = mask.Real(k.size(2));
    if (key_valid.defined()) valid = valid.defined() ? valid.logical_and(key_valid) : key_valid;
    return ToSlots(q, k, v, scale, valid);
  }
  if (AreSlots(q, k) && q.size(2) > kFewQueries && !key_valid.defined() && !mask.valid)
    return OfSlots(q, k, v, scale, mask);
  return {};
}

}  // namespace softmax_attention

at::Tensor SoftmaxAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const SoftmaxOptions& options, const Mask& mask,
                            const at::Tensor& key_valid) {
  TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && q.size(0) == k.size(0) &&
                  q.size(1) == k.size(1) && q.size(3) == k.size(3) &&
                  k.sizes().slice(0, 3) == v.sizes().slice(0, 3),
              "[softmax_attention] expected q [B,H,T,d], k [B,H,S,d], v [B,H,S,e], got ", q.sizes(),
              ", ", k.sizes(), ", ", v.sizes());
  TORCH_CHECK(!mask.starts || q.size(2) <= k.size(2),
              "[softmax_attention] document starts need self attention, got T=", q.size(2),
              " queries and S=", k.size(2), " keys");
  TORCH_CHECK(!mask.starts || !mask.valid,
              "[softmax_attention] expected document starts without masked tokens; ToFront "
              "(ops/mask.h) makes one mask of both");
  const double scale = softmax_attention::ScaleOf(options, q);
  if (q.size(2) == 0 || k.size(2) == 0)
    return at::zeros({q.size(0), q.size(1), q.size(2), v.size(3)}, q.options()) +
           q.narrow(3, 0, 0).sum();
  const bool own = !options.bias.defined() && HasExactKernel(q, k, v);
  if (own && !options.causal && options.dropout == 0) {
    const at::Tensor out = softmax_attention::BySlots(q, k, v, scale, mask, key_valid);
    if (out.defined()) return out;
  }
  if (own)
    return ExactAttention(q, k, v, scale, softmax_attention::SeenBy(q, k, options, mask, key_valid),
                          DrawDropout(options.dropout));
  return MaskedAttention(q, k, v, softmax_attention::VisibleOrAll(q, k, options, mask, key_valid),
                         scale, options.dropout, options.bias);
}

at::Tensor AttentionProbabilities(const at::Tensor& q, const at::Tensor& k,
                                  const SoftmaxOptions& options, const Mask& mask,
                                  const at::Tensor& key_valid) {
  TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && q.size(0) == k.size(0) && q.size(1) == k.size(1) &&
                  q.size(3) == k.size(3),
              "[attention_probabilities] expected q [B,H,T,d], k [B,H,S,d], got ", q.sizes(), ", ",
              k.sizes());
  const at::Tensor visible = softmax_attention::VisibleOrAll(q, k, options, mask, key_valid);
  if (ActiveImpl() != Impl::kReference)
    return softmax_attention::Probabilities(q, k, visible, softmax_attention::ScaleOf(options, q),
                                            options.bias);
  return softmax_attention::Probabilities(q.to(at::kDouble), k.to(at::kDouble), visible,
                                          softmax_attention::ScaleOf(options, q),
                                          softmax_attention::InDouble(options.bias))
      .to(q.scalar_type());
}

at::Tensor ApplyProbabilities(const at::Tensor& p, const at::Tensor& v_in, double dropout) {
  const at::Tensor kept = softmax_attention::Dropped(p, DrawDropout(dropout));
  const auto run = [&](const at::Tensor& v) {
    if (ActiveImpl() != Impl::kReference) return at::matmul(kept, v);
    return at::matmul(kept.to(at::kDouble), v.to(at::kDouble)).to(v.scalar_type());
  };
  if (AllFinite(v_in)) return run(v_in);
  const at::Tensor lost = softmax_attention::SeesOneOf(
      v_in.detach().isfinite().all(-1).logical_not(), p.detach() != 0, p.size(2));
  return softmax_attention::WithNan(run(softmax_attention::FiniteOrZero(v_in)), lost);
}

namespace softmax_attention {

// MaskedAttention of finite numbers.
at::Tensor OfFinite(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const at::Tensor& visible, double scale, const DropoutDraw& dropout,
                    const at::Tensor& bias) {
  const Impl impl = ActiveImpl();
  if (impl == Impl::kReference) {
    return Explicit(q.to(at::kDouble), k.to(at::kDouble), v.to(at::kDouble), visible, scale,
                    dropout, InDouble(bias))
        .to(q.scalar_type());
  }
  // Torch's flash attention has no forward-mode derivative, and none in the bias.
  const bool learned = bias.defined() && at::GradMode::is_enabled() && bias.requires_grad();
  if (impl == Impl::kKernel && (dropout.Any() || learned) && WorthBlocks(q, k) &&
      !HaveTangents({q, k, v, bias.defined() ? bias : q}))
    return BlockwiseAttention(q, k, v, visible, bias, scale, dropout);
  if (impl == Impl::kComposite || dropout.Any() || learned ||
      HaveTangents({q, k, v, bias.defined() ? bias : q}))
    return Explicit(q, k, v, visible, scale, dropout, bias);
  const std::vector<int64_t> all = {q.size(0), q.size(1), q.size(2), k.size(2)};
  if (!visible.defined()) {
    return FlashAttention(q, k, v, bias.defined() ? bias.expand(all).contiguous() : bias, false,
                          scale);
  }
  // Rows that see nothing are let see everything and then set to zero: finite numbers, zero
  // gradient.
  const at::Tensor any = visible.any(-1, true);
  const at::Tensor usable = visible.logical_or(any.logical_not());
  // Made additive before it is spread over the queries: torch would make it so afterwards, at full
  // size.
  const double minus_inf = -std::numeric_limits<double>::infinity();
  const at::Tensor added = bias.defined()
                               ? bias.expand(all).masked_fill(usable.logical_not(), minus_inf)
                               : at::zeros(usable.sizes(), q.options().requires_grad(false))
                                     .masked_fill_(usable.logical_not(), minus_inf)
                                     .expand({q.size(0), 1, q.size(2), k.size(2)});
  const at::Tensor out = FlashAttention(q, k, v, added, false, scale);
  return out.masked_fill(any.logical_not(), 0.0);
}

}  // namespace softmax_attention

at::Tensor MaskedAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const at::Tensor& visible, double scale, double dropout,
                           const at::Tensor& bias) {
  const DropoutDraw dropped = DrawDropout(dropout);
  // What all queries see is a matter of the keys; anything else is torch's.
  const bool of_keys =
      !visible.defined() || (visible.dim() == 4 && visible.size(1) == 1 && visible.size(2) == 1);
  if (of_keys && !bias.defined() && q.numel() > 0 && k.size(2) > 0 && HasExactKernel(q, k, v)) {
    const at::Tensor valid =
        visible.defined() ? visible.squeeze(2).squeeze(1).expand({q.size(0), k.size(2)}) : visible;
    if (!dropped.Any()) {
      const at::Tensor out = softmax_attention::BySlots(q, k, v, scale, {}, valid);
      if (out.defined()) return out;
    }
    return ExactAttention(q, k, v, scale, {.valid = valid}, dropped);
  }
  return softmax_attention::KeepNonFinite(
      q, k, v, !visible.defined(),
      [&](const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
        return softmax_attention::OfFinite(a, b, c, visible, scale, dropped, bias);
      },
      [&](const at::Tensor& keys) {
        return softmax_attention::SeesOneOf(keys, visible, q.size(2));
      });
}

}  // namespace cistern::ops

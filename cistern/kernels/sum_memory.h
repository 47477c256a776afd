#pragma once
// The slot memory in raw and gated mode (spec 2.19): slots that hold sums of what was written,
// optionally with a decay per step.
//
//   M_t = e^{lg_t} M_{t-1} + w_t (x) u_t
//
// for each batch row, head and slot.
//
// w: write weights of any sign. lg: log-gates <= 0, for every slot, one for all slots of a head, or
// none (raw mode); -inf empties the slot before the write. Before the first token of a document the
// memory is emptied, and that token's gate is ignored. Each token is written, then reads (causal).
// The memory is double, because a float sum of ones stops growing at 2^24 tokens; products inside a
// chunk of rows are in T, float or double. Tokens are stored as S: as T, or in bfloat16 with T
// float (ComputeType); what belongs to slots is in T. Time O(T n d), memory O(n d) beyond inputs
// and outputs; a chunk ends where the gates of some slot multiply to less than e^-30, so gates near
// 0 at most tokens cost as much as single tokens. Causality is bitwise: outputs up to t depend on
// no bit of later tokens; results do not depend on the number of threads.
#include "cistern/kernels/bfloat16.h"
#include "cistern/kernels/slot_memory.h"

namespace cistern {

// rows: [B,H,T,width], width = n or 1; width = 0 is raw mode.
template <class T>
struct LogGates {
  Rows<const T> rows;
  int64_t width = 0;
};

// out[t] = sum_l r[t,l] M_t[l].
//   r, w      [B,H,T,n]
//   v, out    [B,H,T,d]
//   memory    [B,H,n,d], contiguous: before the sequence; replaced by that after it
template <class S>
void SumRead(const SlotShape& shape, Rows<const ComputeType<S>> r, Rows<const ComputeType<S>> w,
             Rows<const S> v, LogGates<ComputeType<S>> log_gate, const RowMask& mask,
             double* memory, Rows<S> out);

// out[t,l] = q[t] . M_t[l], with keys in place of values.
//   q, k      [B,H,T,d]
//   w, out    [B,H,T,n]
template <class S>
void SumMatch(const SlotShape& shape, Rows<const S> q, Rows<const ComputeType<S>> w,
              Rows<const S> k, LogGates<ComputeType<S>> log_gate, const RowMask& mask,
              double* memory, Rows<ComputeType<S>> out);

// The reverse pass that both backwards share:
//
//   read backward:   b = dr = SumMatch(q := g, w, k := v, initial memory)
//                    SumAdjoint(a := r, g, w, u := v, b := dr)
//   match backward:  dq = SumRead(r := dx, w, v := k, initial memory)
//                    SumAdjoint(a := dx, g := q, w, u := k, b := x)
//
// with g = d(out) of the read and dx = d(out) of the match. For each slot, in reverse:
//
//   G_t      = e^{lg_{t+1}} G_{t+1} + a_t (x) g_t
//   du_t     = sum_l w_t[l] G_t[l]
//   dw_t[l]  = G_t[l] . u_t
//   dlg_t[l] = G_t[l] . e^{lg_t} M_{t-1}[l] = dlg_{t+1}[l] + a_t[l] b_t[l] - w_t[l] dw_t[l]
//
// dlg is 0 where a gate is 0 or a document starts. Its error is what rounding the terms a b and
// w dw adds up to: about sqrt(T) ulps of one, also where strong gates make dlg small.
//
//   a, b, w, dw [B,H,T,n]
//   g, u, du    [B,H,T,d]
//   dlog_gate   as log_gate
//   G           [B,H,n,d], in: gradient of the final memory; out: of the initial memory
//   h           [B,H,n], in: G[l] . M_T[l]; scratch
//
// Raw mode uses neither h nor b nor dlog_gate.
template <class S>
void SumAdjoint(const SlotShape& shape, Rows<const ComputeType<S>> a, Rows<const S> g,
                Rows<const ComputeType<S>> w, Rows<const S> u, Rows<const ComputeType<S>> b,
                LogGates<ComputeType<S>> log_gate, const RowMask& mask, double* G, double* h,
                Rows<S> du, Rows<ComputeType<S>> dw, Rows<ComputeType<S>> dlog_gate);

}  // namespace cistern

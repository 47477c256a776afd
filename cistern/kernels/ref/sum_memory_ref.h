#pragma once
// The summing slot memory by its definition: plain loops over contiguous double arrays, the oracle
// of the fast kernels and CISTERN_IMPL=reference. Shapes: r, w, log_gate, x [B,H,T,n]; q, k, v
// [B,H,T,d]; memory [B,H,n,d]; gradients have the same shapes. log_gate is null in raw mode. The
// backwards keep the memory of every position of one head when there are gates.
#include "cistern/kernels/sum_memory.h"

namespace cistern::ref {

// out [B,H,T,d]; memory: before, replaced by that after.
void SumRead(const SlotShape& shape, const double* r, const double* w, const double* v,
             const double* log_gate, const RowMask& mask, double* memory, double* out);

// out [B,H,T,n].
void SumMatch(const SlotShape& shape, const double* q, const double* w, const double* k,
              const double* log_gate, const RowMask& mask, double* memory, double* out);

// memory0: before the sequence. dmemory_T, the gradient of the memory after it, may be null;
// dlog_gate is null in raw mode.
void SumReadBackward(const SlotShape& shape, const double* r, const double* w, const double* v,
                     const double* log_gate, const RowMask& mask, const double* memory0,
                     const double* dout, const double* dmemory_T, double* dr, double* dw,
                     double* dv, double* dlog_gate, double* dmemory0);

void SumMatchBackward(const SlotShape& shape, const double* q, const double* w, const double* k,
                      const double* log_gate, const RowMask& mask, const double* memory0,
                      const double* dout, const double* dmemory_T, double* dq, double* dw,
                      double* dk, double* dlog_gate, double* dmemory0);

}  // namespace cistern::ref

#pragma once
// The slot memory by its definition: plain loops over contiguous double arrays, the oracle of the
// fast kernels and CISTERN_IMPL=reference. Shapes: r, s, x, z_out [B,H,T,n]; q, k, v [B,H,T,d];
// memory [B,H,n,d]; z [B,H,n]. Their gradients have the same shapes.
#include "cistern/kernels/slot_memory.h"

namespace cistern::ref {

// out [B,H,T,d]; memory and z: the state before, replaced by the state after; z_out may be null.
void SlotRead(const SlotShape& shape, const double* r, const double* s, const double* v,
              const RowMask& mask, double* memory, double* z, double* out, double* z_out);

// out [B,H,T,n].
void SlotMatch(const SlotShape& shape, const double* q, const double* s, const double* k,
               const RowMask& mask, double* memory, double* z, double* out, double* z_out);

// memory0 and z0: the state before. dz_out, dmemory_T and dz_T (gradients of the z of every
// position and of the state after) may be null. The initial memory of a slot with z0 = -inf counts
// as zero: dmemory0 and dz0 are 0 there. dmemory0 and dz0 may be null.
void SlotReadBackward(const SlotShape& shape, const double* r, const double* s, const double* v,
                      const RowMask& mask, const double* memory0, const double* z0,
                      const double* dout, const double* dz_out, const double* dmemory_T,
                      const double* dz_T, double* dr, double* ds, double* dv, double* dmemory0,
                      double* dz0);

void SlotMatchBackward(const SlotShape& shape, const double* q, const double* s, const double* k,
                       const RowMask& mask, const double* memory0, const double* z0,
                       const double* dout, const double* dz_out, const double* dmemory_T,
                       const double* dz_T, double* dq, double* ds, double* dk, double* dmemory0,
                       double* dz0);

// FAVOR+ (kernels/slot_attention.h): read weights softmax_l(x_t + z_t) over the slots that hold
// something. x [B,H,T,n], v and out [B,H,T,d]; the rest as for SlotRead.
void FavorRead(const SlotShape& shape, const double* x, const double* s, const double* v,
               const RowMask& mask, double* memory, double* z, double* out);
void FavorReadBackward(const SlotShape& shape, const double* x, const double* s, const double* v,
                       const RowMask& mask, const double* memory0, const double* z0,
                       const double* dout, const double* dmemory_T, const double* dz_T, double* dx,
                       double* ds, double* dv, double* dmemory0, double* dz0);

}  // namespace cistern::ref

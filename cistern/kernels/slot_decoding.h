#pragma once
// Latte, ABC, gated slots and FAVOR+ of float tokens, one after another, with writes put off: what
// a token writes is kept beside the memory and joins it with that of others, every kDeferredTokens
// tokens. A token then reads half of a memory in double and writes almost nothing of it.
//
// A slot is held as sums that count log-weights from a number c of its own,
//
//   U_t = U_0 + sum_j e^(s_j - c) v_j,   W_t = W_0 + sum_j e^(s_j - c),   M_t = U_t / W_t,
//   z_t = c + log W_t
//
// over the tokens j since U_0 was last changed (slot_memory.h has M and z). U_0 is the sum of two
// floats, of which reads take the first: 48 bits, so that what is below the last bit of a float is
// not lost. Where W grows, U, W and c are changed by powers of two, exactly.
//
// Gated slots (gated_slots.h) are such sums as well, with the product of the inverse gates for W:
//
//   U_t = U_0 + sum_j W_j (1 - g_j) v_j,   W_t = W_{t-1} / g_t,   M_t = U_t / W_t
//
// FAVOR+ reads by r = softmax(x + z), so that its sum over the slots needs no logarithm:
//
//   out_t = sum_l e^(x_l + c_l) U_l / sum_l e^(x_l + c_l) W_l
//
// linear_decoding.h has the sums of linear attention in the same form.
//
// What slot_memory.h, slot_attention.h and gated_slots.h say of the result holds here: a token
// whose log-weights, keys or values are not finite goes through double and those kernels.
#include <cstddef>
#include <cstdint>

#include "cistern/kernels/bfloat16.h"
#include "cistern/kernels/gated_slots.h"
#include "cistern/kernels/slot_memory.h"

namespace cistern {

constexpr int64_t kDeferredTokens = 8;

// Bytes of one head, a multiple of 64. keys: it holds a memory of keys as well, as ABC's.
int64_t DecodingBytes(int64_t slots, int64_t width, bool keys);
// What a head that was begun is of; its bytes do not tell, because rows are padded.
struct DecodingSizes {
  int64_t slots, width;
};
DecodingSizes SizesOfDecoding(const std::byte* head);

//   keys, values [B,H,n,d], z [B,H,n]: as in slot_attention.h; keys is null for Latte, z for gated
//                slots
//   decoding     [B,H,DecodingBytes], aligned to 64 bytes; the same on every instruction set. Files
//                hold it (models/model_state_file.h): another layout is another version of those
// The second does not change `decoding`.
void BeginDecoding(const SlotShape& shape, const double* keys, const double* values,
                   const double* z, std::byte* decoding);
void EndDecoding(const SlotShape& shape, const std::byte* decoding, double* keys, double* values,
                 double* z);

// As LatteForward, AbcForward and GatedSlotsForward, for shape.length 1. O(n d) a head, exactly as
// much for any number of earlier tokens, but for every kDeferredTokens-th, which joins those before
// it to the memory. T: float or BFloat16.
template <class T>
void LatteDecode(const SlotShape& shape, Rows<const T> q, Rows<const T> s, Rows<const T> v,
                 const RowMask& mask, std::byte* decoding, Rows<T> out);
// As FavorForward (slot_attention.h) with x = scale q_products and s = scale k_products -
// |scale k|^2 / 2, the products [B,H,1,n] of queries and keys with the rows of features.
//   k [B,H,1,key_width]
struct FavorTokenMap {
  double scale;
  int64_t key_width;
};
template <class T>
void FavorDecode(const SlotShape& shape, const FavorTokenMap& map, Rows<const float> q_products,
                 Rows<const float> k_products, Rows<const T> k, Rows<const T> v,
                 const RowMask& mask, std::byte* decoding, Rows<T> out);
template <class T>
void AbcDecode(const SlotShape& shape, double scale, Rows<const T> q, Rows<const T> k,
               Rows<const T> v, Rows<const T> s, const RowMask& mask, std::byte* decoding,
               Rows<T> out);
template <class T>
void GatedSlotsDecode(const SlotShape& shape, const GatedSlotsOptions& options,
                      const GatedSlotsInputs<T>& in, const RowMask& mask, std::byte* decoding,
                      Rows<T> out);

}  // namespace cistern

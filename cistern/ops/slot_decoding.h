#pragma once
// States of Latte, ABC, gated slots, FAVOR+ and linear attention that go on. Where tokens come one
// by one, in float or bfloat16 on the CPU and without a gradient, writes are put off
// (kernels/slot_decoding.h and linear_decoding.h have the algebra).
#include "cistern/ops/fourier_attention.h"
#include "cistern/ops/gated_slots.h"
#include "cistern/ops/slot_attention.h"

namespace cistern::ops {

// A mechanism's tensors of such a state: memories and z as in SlotState and AbcState, or, while
// tokens come one by one, `decoding` [B,H,bytes] of kByte in their place, and they are undefined.
struct SlotHandles {
  at::Tensor* keys;  // null: Latte, FAVOR+, linear attention
  at::Tensor& values;
  at::Tensor* z;         // null: gated slots, linear attention
  at::Tensor* decoding;  // null: writes are never put off

  // values is the memory [B,H,n,d+1] of linear attention (linear_attention.h).
  bool IsLinear() const { return !keys && !z; }
  bool IsDecoding() const { return decoding && decoding->defined(); }
};

// As the functions without Extend in their names, for a state that goes on: it becomes the one
// after. What nobody else holds is written in place where no gradient is recorded (in_place.h).
// Which of both forms it has after it depends on these tokens alone.
at::Tensor LatteExtend(const at::Tensor& q, const at::Tensor& s, const at::Tensor& v,
                       const SlotHandles& state, const Mask& mask = {});
at::Tensor AbcExtend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const at::Tensor& s, const SlotHandles& state, double scale,
                     const Mask& mask = {});
at::Tensor GatedSlotsExtend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& logits, const SlotHandles& state, double scale,
                            double temperature, const Mask& mask = {});
at::Tensor FavorQueriesExtend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const at::Tensor& matrix, double scale, const SlotHandles& state,
                              const Mask& mask = {});
// `decoding` is null where the rule divides by nothing.
at::Tensor LinearExtend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const SlotHandles& state, const LinearRule& rule, const Mask& mask = {});
at::Tensor FourierExtend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const SlotHandles& state, const FourierFeatureMap& map,
                         const LinearRule& rule, const Mask& mask = {});

// While one lives, this thread puts nothing off: for callers that need the memories after each
// token, where going from one form to the other and back would cost more than it saves.
class WriteAtOnceScope {
 public:
  WriteAtOnceScope();
  ~WriteAtOnceScope();
  WriteAtOnceScope(const WriteAtOnceScope&) = delete;
  WriteAtOnceScope& operator=(const WriteAtOnceScope&) = delete;

 private:
  bool before_;
};

// Memories and z are defined again, `decoding` is not; where it was not, nothing is done.
void EndDecoding(const SlotHandles& state, int64_t slots, int64_t width);

// Bytes of a whole state while it decodes tokens of this type on this device; 0: it does not put
// off writes there.
int64_t DecodingStateBytes(int64_t batch, int64_t heads, int64_t slots, int64_t width, bool keys,
                           const at::TensorOptions& options);
// `decoding`, not filled.
at::Tensor EmptyDecoding(int64_t batch, int64_t heads, int64_t slots, int64_t width, bool keys);

}  // namespace cistern::ops

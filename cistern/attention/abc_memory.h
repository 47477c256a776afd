#pragma once
// What all ABC mechanisms share (P003 sec. 2-3; spec 2.12): tokens write keys and values into n
// slots, weighted by a control; a query attends to the slots by softmax. Slot memory: match over
// keys, softmax over slots, read over values. Mechanisms differ in the log-weights alone.
#include "cistern/attention/mechanism.h"

namespace cistern {

class AbcMechanism : public Mechanism {
 public:
  enum class EmptySlots { kMasked, kTakePart };
  struct MemoryOptions {
    int64_t slots = 32;  // n, per head
    EmptySlots empty_slots = EmptySlots::kMasked;
  };

  // key_memory, value_memory [B,H,n,d], z [B,H,n]; count [B] int64 (tokens of the document so far)
  // where weights depend on the position.
  State EmptyState(int64_t batch, const at::TensorOptions& options) const override;
  at::Tensor DoExtend(const std::vector<at::Tensor>& x, State& state,
                      const ops::Mask& mask) override;
  void DoWrite(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) override;
  at::Tensor Read(const std::vector<at::Tensor>& x, const State& state) override;
  at::Tensor Definition(Form form, const std::vector<at::Tensor>& queries,
                        const std::vector<at::Tensor>& x) const override;
  State Merge(const State& first,
              const State& second) const override;  // where weights do not depend on the position

 protected:
  enum class Weights {
    kEverySlot,   // each token writes all slots, but those whose log-weight is -inf
    kSomeSlots,   // of the token alone
    kByPosition,  // of its position in the document too
  };
  // Declares the projections q, k and v.
  AbcMechanism(const MechanismInfo& info, const MemoryOptions& memory, Weights weights,
               const AttentionDims& dims);
  static void DescribeMemory(Fields& fields, MemoryOptions& memory);

  // Log-weights [B,H,T,n] of a piece with x in declared order (no queries), -inf: not written.
  // positions [B,T], only kByPosition.
  virtual at::Tensor LogWeights(const std::vector<at::Tensor>& x,
                                const at::Tensor& positions) const = 0;
  // Slots that hold sums and not means: the factor for a slot in which `count` tokens of weight 1
  // lie.
  virtual bool HoldsSums() const { return false; }
  virtual double SumDivisor() const { return 1; }

  // The weights [B,H,n,S] by which slots hold the tokens `seen` in the definition, of one document
  // from its beginning.
  virtual at::Tensor DefinedWeights(Form form, const std::vector<at::Tensor>& seen) const = 0;

  void WriteWith(const at::Tensor& s, const std::vector<at::Tensor>& x, State& state,
                 const ops::Mask& mask) const;
  int64_t slots() const { return slots_; }

  ProjectionId q_, k_, v_;

 private:
  at::Tensor Positions(const at::Tensor& x, State& state, const ops::Mask& mask) const;
  at::Tensor ReadWeights(const at::Tensor& matched, const at::Tensor& z) const;

  int64_t slots_;
  bool masked_;
  Weights weights_;
  StateId key_memory_, value_memory_, z_, count_;
};

// 0 where slot == 0..n-1, -inf elsewhere: slot [..] int64 -> [..,n]; none where slot lies outside.
at::Tensor OneHotLogWeights(const at::Tensor& slot, int64_t slots,
                            const at::TensorOptions& options);

}  // namespace cistern

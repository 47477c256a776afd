#pragma once
// What all ABC mechanisms share (P003 sec. 2-3; spec 2.12): tokens write keys and values into n
// slots, weighted by a control; a query attends to the slots by softmax. Slot memory: match over
// keys, softmax over slots, read over values. Mechanisms differ in the log-weights alone.
#include <cmath>

#include "cistern/attention/decay.h"

namespace cistern {

class AbcMechanism : public Mechanism {
 public:
  enum class EmptySlots { kMasked, kTakePart };
  struct MemoryOptions {
    int64_t slots = 32;  // n, per head
    EmptySlots empty_slots = EmptySlots::kMasked;
  };

  // key_memory, value_memory [B,H,n,d], z [B,H,n]; count [B] int64 (tokens of the document so far)
  // where weights depend on the position; decay [B,H,n or 1] in double, the sum of the gates'
  // logarithms over the document so far, with a gate; `decoding` in place of the first three while
  // it decodes (ops/slot_decoding.h).
  State EmptyState(int64_t batch, const at::TensorOptions& options) const override;
  at::Tensor DoExtend(const std::vector<at::Tensor>& x, State& state,
                      const ops::Mask& mask) override;
  void DoWrite(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) override;
  at::Tensor Read(const std::vector<at::Tensor>& x, const State& state) override;
  at::Tensor Definition(Form form, const std::vector<at::Tensor>& queries,
                        const std::vector<at::Tensor>& x) const override;
  State Merge(const State& first,
              const State& second) const override;  // where weights do not depend on the position
  bool TakesBFloat16(Form form) const override;

 protected:
  bool PutsOffWrites() const override { return Fused() && !gated(); }

  enum class Weights {
    kEverySlot,   // each token writes all slots, but those whose log-weight is -inf
    kSomeSlots,   // of the token alone
    kByPosition,  // of its position in the document too
    kByLength,    // and of the document's length, which a causal pass does not know
  };
  // Declares the projections q, k and v; with a gate its own is declared last, by DeclareGate.
  AbcMechanism(const MechanismInfo& info, const MemoryOptions& memory, Weights weights,
               const AttentionDims& dims, const DecayOptions& decay = {});
  void DeclareGate();
  static void DescribeMemory(Fields& fields, MemoryOptions& memory);

  // What else a piece's log-weights may depend on.
  struct Piece {
    const State& state;    // before the piece
    at::Tensor positions;  // [B,T], only kByPosition and kByLength
    at::Tensor lengths;    // [B], only kByLength
  };
  // Log-weights [B,H,T,n] of a piece with x in declared order (no queries), -inf: not written.
  virtual at::Tensor LogWeights(const std::vector<at::Tensor>& x, const Piece& piece) const = 0;
  // Slots that hold sums and not means: what a slot's sum is divided by, [] or [B,1,1,1] for the
  // tokens [B] that the rows have seen.
  virtual bool HoldsSums() const { return false; }
  // Whether matching and reading are one op.
  bool Fused() const;
  bool gated() const { return decay_options_.gated(); }
  virtual at::Tensor SumDivisor(const at::Tensor&) const { return {}; }

  // The weights [B,H,n,S] by which slots hold the tokens `seen` in the definition, of one document
  // from its beginning.
  virtual at::Tensor DefinedWeights(Form form, const std::vector<at::Tensor>& seen) const = 0;

  void WriteWith(const at::Tensor& s, const std::vector<at::Tensor>& x, State& state,
                 const ops::Mask& mask) const;
  int64_t slots() const { return slots_; }
  // log(weight) [B,H,S,n or 1] by which each of the tokens `seen` has faded for the last of them;
  // undefined without a gate.
  at::Tensor DefinedFadingOf(const std::vector<at::Tensor>& seen) const;
  // Causal: UsageError of kByLength. Cross: a second Write is one, too (WritesAtOnce).
  std::string FormRefusal(Form form) const override;
  bool WritesAtOnce() const override { return weights_ == Weights::kByLength; }

  ProjectionId q_, k_, v_;

 private:
  bool ByPosition() const { return weights_ >= Weights::kByPosition; }
  at::Tensor PieceWeights(const std::vector<at::Tensor>& x, State& state,
                          const ops::Mask& mask) const;
  bool Drops() const { return is_training() && dims().dropout > 0; }
  at::Tensor SumFactor(const at::Tensor& z, const at::Tensor& tokens) const;
  double Scale() const { return 1 / std::sqrt(double(dims().dim) / double(dims().heads)); }
  at::Tensor ReadWeights(const at::Tensor& matched, const at::Tensor& z,
                         const at::Tensor& tokens) const;

  // Log-weights s - G of a gated piece with x in double, and what the state after it has faded by.
  struct Gated {
    std::vector<at::Tensor> x;
    at::Tensor s;
    Decay decay;
  };
  Gated Fade(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) const;
  void FadeState(const Decay& decay, State& state) const;
  at::Tensor ExtendWith(const at::Tensor& s, const std::vector<at::Tensor>& x, State& state,
                        const ops::Mask& mask);

  int64_t slots_;
  bool masked_;
  Weights weights_;
  DecayOptions decay_options_;
  ProjectionId gate_;
  StateId key_memory_, value_memory_, z_, count_, decay_;
};

const EnumNames<AbcMechanism::EmptySlots>& EmptySlotNames();  // masked, take_part

// 0 where slot == 0..n-1, -inf elsewhere: slot [..] int64 -> [..,n]; none where slot lies outside.
at::Tensor OneHotLogWeights(const at::Tensor& slot, int64_t slots,
                            const at::TensorOptions& options);

}  // namespace cistern

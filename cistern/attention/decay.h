#pragma once
// Gates for slot memories that hold softmax-weighted means (P003 sec. 4 remarks that a gate fits
// every ABC; spec 2.14): every log-weight s_i fades by the gates of the tokens after it,
//   M_t = sum_{i<=t} w_ti v_i / sum_{i<=t} w_ti,   w_ti = exp(s_i + sum_{i<j<=t} log g_j),
//   g_j = sigmoid(W_g x_j)^(1/temperature).
// With G_i = sum_{j<=i} log g_j the factor exp(G_t) is common to all of them and cancels in the
// mean: M_t is the mean that the exp mode keeps of the log-weights s_i - G_i. So no kernel knows of
// gates. A state keeps log-weights as they have faded up to its last token, which bounds them.
//
// G grows with the piece, and a float of 1,000 has no digits left for a tolerance of 1e-6: a gated
// piece is computed in double, which takes more time and memory than float,
// plus O(T n) for G and, in packed rows, O(T n) for each document of the fullest row. All forms but
// the causal one are refused: what has no order has nothing that fades.
#include "cistern/attention/mechanism.h"

namespace cistern {

enum class GateKind { kNone, kHead, kSlot };  // none; one for all slots of a head; one for each

struct DecayOptions {
  GateKind gate = GateKind::kNone;
  double temperature = 8;  // as of gated_slots

  bool gated() const { return gate != GateKind::kNone; }
};
// The options gate and gate_temperature.
void DescribeDecay(Fields& fields, DecayOptions& options);
// UsageError where the temperature has no gate.
void CheckDecay(const MechanismInfo& info, const DecayOptions& options);
// The projection of the gates' logits, of `slots` slots a head.
Projection GateProjection(const DecayOptions& options, int64_t heads, int64_t slots);
// To follow "has no "; empty where the form is there.
std::string DecayRefusal(const DecayOptions& options, Form form);

// Of a piece, in double.
struct Decay {
  at::Tensor sum;    // [B,H,T,n or 1] G of each token, from the beginning of the piece or, after
                     // it, of the document
  at::Tensor total;  // [B,H,n or 1] G of each row's last real token
  // The sum of a state's gates since its document began, after the piece.
  at::Tensor After(const at::Tensor& before) const;
  at::Tensor begun;  // [B] bool: a document began in the piece; undefined: in none
};
// logits [B,H,T,n or 1]; padding fades nothing.
Decay DecayOf(const at::Tensor& logits, const DecayOptions& options, const ops::Mask& mask);

// For definitions, by a plain loop: sum_{i<j<=T} log g_j of tokens 0..T, [B,H,T,n or 1], in double.
at::Tensor DefinedFading(const at::Tensor& logits, const DecayOptions& options);

}  // namespace cistern

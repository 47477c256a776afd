#pragma once
// Where what attention layers compute can be looked at: while an observer is active in a thread,
// every attention layer that runs there shows it what its core was given and what it gave. Without
// one a layer only asks whether there is one. Nothing is copied, and no result changes.
#include <vector>

#include "cistern/attention/memory_mechanism.h"
#include "cistern/nn/attention_layer.h"

namespace cistern {

// One call of a layer's core. References are valid only during the call; tensors are in the
// mechanism's declared order, each [B,H,T,width/H].
struct AttentionCall {
  const AttentionLayer* layer;
  const AttentionLayerOptions& options;  // as the layer was made, with the mechanism's own options
  Mechanism& core;                       // that ran: the mechanism, or what follows folded maps
  Form form;
  const std::vector<at::Tensor>& x;  // of the tokens, then of a learned memory
  const ops::Mask& mask;
  const Handles& handles;  // of the layer before, as they were
  // [B,H,T,d], before the output projection; undefined where the tokens end here (of a layer with a
  // memory stream, tokens_out=false).
  at::Tensor y;
  // Of a layer with a memory stream (memory_attention.h): what the tokens read, tensors of the
  // packed memory; what was packed [B,M,D], before its map. Else null, undefined.
  const std::vector<at::Tensor>* read = nullptr;
  at::Tensor packed = {};
  at::Tensor memory = {};  // [B or 1,M,D] that the layer was given; undefined: the learned one
};

class AttentionObserver {
 public:
  AttentionObserver();  // active in this thread until it goes; one at a time
  virtual ~AttentionObserver();
  AttentionObserver(const AttentionObserver&) = delete;
  AttentionObserver& operator=(const AttentionObserver&) = delete;

  static AttentionObserver* Active();  // null: none

  virtual void Attended(const AttentionCall& call) = 0;
  // Cross attention: the tokens of a source that a layer wrote into its state.
  virtual void Written(const AttentionLayer& layer, Mechanism& core,
                       const std::vector<at::Tensor>& x, const ops::Mask& mask) = 0;
};

}  // namespace cistern

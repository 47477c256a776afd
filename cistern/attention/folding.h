#pragma once
// A mechanism that begins with a linear map of the heads of some of its projections, with nothing
// in between: the product of the two maps can be made once and take the place of the projection (so
// its projections are not rotary). In evaluation the attention layer then skips the mechanism's own
// map at every token (nn/attention_layer.h).
#include "cistern/attention/mechanism.h"

namespace cistern {

class FoldingMechanism : public Mechanism {
 public:
  using Mechanism::Mechanism;
  const FoldingMechanism* folding() const override { return this; }

  // Why the maps cannot or should not be folded into the projections; empty where they are.
  virtual std::string FoldRefusal() const = 0;

  // The map of each head of the projection of that index: y = x weight^T + bias, weight [H,w',w],
  // bias [H,w']. Undefined where there is none.
  struct HeadMap {
    at::Tensor weight, bias;
  };
  virtual HeadMap FirstMap(size_t projection) const = 0;

  // What comes after the maps, a mechanism without weights and with the same states; its
  // Projections() have the widths of the maps' outputs.
  virtual std::shared_ptr<Mechanism> AfterMaps() const = 0;
};

}  // namespace cistern

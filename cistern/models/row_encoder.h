#pragma once
// A bidirectional trunk and its pooling: rows of embeddings to one vector each.
#include "cistern/models/heads.h"

namespace cistern {

class RowEncoder {
 public:
  // Registers the parts of both in `owner`.
  RowEncoder(torch::nn::Module& owner, const ModelConfig& config)
      : pooling_(owner, config), trunk_(owner, config, Form::kBidirectional, pooling_.extra()) {}
  // embedded [B,T,D] -> [B,D], what `pooling` makes of each row. mask: with lengths, without
  // starts; what it calls padding or masked is never seen. positions [B,T] int64 of the tokens,
  // undefined: 0, 1, 2, ...
  at::Tensor Forward(const at::Tensor& embedded, const ops::Mask& mask,
                     const at::Tensor& positions = {}) const;
  // Which setting makes the amount of padding count; empty: none does.
  std::string SeesPadding() const { return pooling_.SeesPadding(trunk_); }

 private:
  Pooling pooling_;
  Trunk trunk_;
};

}  // namespace cistern

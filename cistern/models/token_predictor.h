#pragma once
// A bidirectional encoder that says something of each token, whatever its kind.
#include "cistern/models/heads.h"
#include "cistern/models/model.h"

namespace cistern {

class TokenPredictor : public Model {
 public:
  using Model::Model;
  // ids [B,T] int64 -> hidden states [B,T,D], as the output layer takes them. What the mask calls
  // padding or masked is never seen. Without starts: a row is one document.
  virtual at::Tensor Hidden(const at::Tensor& ids, const ops::Mask& mask = {}) = 0;
  // [...,D] -> [...,C]: of each of the C things that the kind tells of a token.
  virtual at::Tensor Logits(const at::Tensor& hidden) const = 0;
  // Which setting makes the amount of padding count; empty: none does.
  virtual std::string SeesPadding() const = 0;

 protected:
  // UsageError where a layer leaves latents in place of the tokens.
  static void CheckTokens(const ModelConfig& config);
  // Error unless ids are [B,T] and the mask is one of theirs, without starts.
  void CheckInputs(const at::Tensor& ids, const ops::Mask& mask) const;
};

}  // namespace cistern

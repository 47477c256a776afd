#pragma once
// A transformer block: attention and feed-forward, each with a residual and a norm before (pre) or
// after (post) it. The block of a decoder that has a source attends to it in between. Attention
// that is left out (AttentionLayer::attends) has neither norm nor residual. A memory stream has a
// residual and a norm as the tokens have around attention, and no feed-forward: mem' = LN(mem +
// packed) (post), as in Luna and P000. A block of a mechanism with latents puts these in the place
// of the tokens, which become the stream's source.
#include <memory>
#include <optional>

#include "cistern/nn/attention_layer.h"
#include "cistern/nn/linear.h"

namespace cistern {

struct BlockOptions {
  AttentionLayerOptions attention;
  std::optional<AttentionLayerOptions> cross;
  std::string norm = "pre";         // pre | post
  std::string activation = "gelu";  // gelu (erf) | gelu_tanh | relu
  int64_t ffn_dim = 0;              // 0: 4 D
  bool ffn_bias = false;
  double dropout = 0;      // of what attention and feed-forward add
  double ffn_dropout = 0;  // in the feed-forward, after its activation
  double norm_eps = 1e-5;
  bool memory_out = true;  // false: the memory after this block is not used. attention.tokens_out:
                           // the same of the tokens
};

class FeedForward : public torch::nn::Module {
 public:
  // `dropout` comes after the activation, in training: Long Range Arena's reference, P000's code,
  // fairseq's activation dropout.
  FeedForward(int64_t dim, int64_t hidden, const std::string& activation, bool bias, double std,
              double out_std, double dropout = 0);
  at::Tensor Forward(const at::Tensor& x) const;

 private:
  std::string activation_;
  double dropout_;
  std::shared_ptr<Linear> up_, down_;
};

class Block : public torch::nn::Module {
 public:
  explicit Block(const BlockOptions& options);
  State EmptyState(int64_t batch, const at::TensorOptions& options) const {
    return attention_->EmptyState(batch, options);
  }
  // Causal. `source`: the state of cross(), written before.
  Stream Extend(Stream stream, State& state, State* source = nullptr);
  Stream Bidirectional(
      Stream stream);  // without attention.tokens_out only the memory is left in it
  const AttentionLayer& attention() const { return *attention_; }
  bool has_cross() const { return cross_ != nullptr; }
  AttentionLayer& cross() const { return *cross_; }  // where there is one

 private:
  template <class Attend>
  Stream Run(Stream stream, Attend&& attend, State* source);
  Stream ToLatents(Stream stream);
  // x + y, and a norm after it (post) where it was not before.
  at::Tensor Add(const at::Tensor& x, const at::Tensor& y, const LayerNorm* norm) const;

  BlockOptions options_;
  std::shared_ptr<AttentionLayer> attention_, cross_;
  std::shared_ptr<FeedForward> ffn_;  // null without tokens_out
  std::shared_ptr<LayerNorm> attention_norm_, cross_norm_, ffn_norm_, memory_norm_,
      source_norm_;  // null where not needed
  MemoryUse memory_ = MemoryUse::kNone;
};

}  // namespace cistern

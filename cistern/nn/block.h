#pragma once
// A transformer block: attention and feed-forward, each with a residual and a norm before (pre) or after (post) it. The block of a decoder
// that has a source attends to it in between. Attention that is left out (AttentionLayer::attends) has neither norm nor residual.
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
  double dropout = 0;
  double norm_eps = 1e-5;
};

class FeedForward : public torch::nn::Module {
 public:
  FeedForward(int64_t dim, int64_t hidden, const std::string& activation, bool bias, double std, double out_std);
  at::Tensor Forward(const at::Tensor& x) const;

 private:
  std::string activation_;
  std::shared_ptr<Linear> up_, down_;
};

class Block : public torch::nn::Module {
 public:
  explicit Block(const BlockOptions& options);
  State EmptyState(int64_t batch, const at::TensorOptions& options) const { return attention_->EmptyState(batch, options); }
  // Causal. `source`: the state of cross(), written before.
  Stream Extend(Stream stream, State& state, State* source = nullptr);
  Stream Bidirectional(Stream stream);
  const AttentionLayer& attention() const { return *attention_; }
  AttentionLayer& cross() const { return *cross_; }  // of blocks with options.cross

 private:
  template <class Attend>
  Stream Run(Stream stream, Attend&& attend, State* source);
  // x + f(norm(x)), or norm(x + f(x)).
  template <class F>
  at::Tensor Residual(const at::Tensor& x, const LayerNorm& norm, F&& f) const;

  BlockOptions options_;
  std::shared_ptr<AttentionLayer> attention_, cross_;
  std::shared_ptr<FeedForward> ffn_;
  std::shared_ptr<LayerNorm> attention_norm_, cross_norm_, ffn_norm_;
};

}  // namespace cistern

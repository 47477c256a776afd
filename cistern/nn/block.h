#pragma once
// A transformer block: attention and feed-forward, each with a residual and a norm before (pre) or
// after (post) it. The block of a decoder that has a source attends to it in between. Attention
// that is left out (AttentionLayer::attends) has neither norm nor residual. Mechanisms with a
// memory stream or latents have blocks of their own (memory_block.h, latent_block.h).
#include <memory>
#include <optional>

#include "cistern/nn/attention_layer.h"
#include "cistern/nn/linear.h"

namespace cistern {

enum class NormPlace { kPre, kPost };
// kGelu: with erf. kGeglu: a map of its own times gelu of another (Shazeer 2020), so that the first
// map of the feed-forward has twice as many rows: those of the values, then those of the gates.
enum class Activation { kGelu, kGeluTanh, kRelu, kGeglu };
const EnumNames<NormPlace>& NormPlaces();    // pre, post
const EnumNames<NormKind>& NormKinds();      // layer, rms
const EnumNames<Activation>& Activations();  // gelu, gelu_tanh, relu, geglu

struct BlockOptions {
  AttentionLayerOptions attention;
  std::optional<AttentionLayerOptions> cross;
  NormPlace norm = NormPlace::kPre;
  Activation activation = Activation::kGelu;
  int64_t ffn_dim = 0;  // 0: 4 D
  bool ffn_bias = false;
  double dropout = 0;           // of what attention and feed-forward add
  double ffn_dropout = 0;       // in the feed-forward, after its activation
  double ffn_out_dropout = -1;  // of what the feed-forward adds, where it is another; -1: dropout
  double norm_eps = 1e-5;
  NormKind norm_kind = NormKind::kLayer;
  bool memory_out = true;  // false: the memory after this block is not used. attention.tokens_out:
                           // the same of the tokens
  bool source_memory = false;  // cross attention hands a memory from block to block (WriteSource)
};

class FeedForward : public torch::nn::Module {
 public:
  // `dropout` comes after the activation, in training: Long Range Arena's reference, P000's code,
  // fairseq's activation dropout.
  FeedForward(int64_t dim, int64_t hidden, Activation activation, bool bias, double std,
              double out_std, double dropout = 0);
  at::Tensor Forward(const at::Tensor& x) const;

 private:
  Activation activation_;
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
  // Writes a source into the state of cross attention. With options.source_memory it packs
  // source.memory [1 or B,M,D], which is also that of self attention where that has none of its own
  // (AttentionDims::memory_given; of the rows of its empty state), and the result is the memory of
  // the next block: with a residual and a norm as the tokens have (Luna's static_context);
  // undefined without memory_out.
  at::Tensor WriteSource(Stream source, State& self, State& written);
  // Without attention.tokens_out only the memory is left in it.
  virtual Stream Bidirectional(Stream stream);
  const AttentionLayer& attention() const { return *attention_; }
  bool has_cross() const { return cross_ != nullptr; }
  AttentionLayer& cross() const { return *cross_; }  // where there is one

 protected:
  bool pre() const { return options_.norm == NormPlace::kPre; }
  std::shared_ptr<LayerNorm> AddNorm(const std::string& name);
  at::Tensor Before(const at::Tensor& x, const LayerNorm* norm) const {
    return pre() ? norm->Forward(x) : x;
  }
  // The same for what linear maps alone read.
  at::Tensor BeforeMaps(const at::Tensor& x, const LayerNorm* norm) const {
    return pre() ? norm->ForMaps(x) : x;
  }
  at::Tensor BeforeAttention(const at::Tensor& x) const {
    return attention_->ReadsByMaps() ? BeforeMaps(x, attention_norm_.get())
                                     : Before(x, attention_norm_.get());
  }
  // x + y, and a norm after it (post) where it was not before. `dropout` of y; -1: the options'.
  at::Tensor Add(const at::Tensor& x, const at::Tensor& y, const LayerNorm* norm,
                 double dropout = -1) const;
  // The stream after attention: attend(stream) is given the normed tokens and returns what is added
  // to them.
  template <class F>
  Stream Attend(Stream stream, F&& attend) const {
    if (!attention_->attends()) return stream;
    const at::Tensor x = stream.x;
    stream.x = BeforeAttention(x);
    stream.x = Add(x, attend(stream), attention_norm_.get());
    return stream;
  }
  // What comes after attention: cross attention and feed-forward.
  Stream Rest(Stream stream, State* source) const;

  BlockOptions options_;
  std::shared_ptr<AttentionLayer> attention_, cross_;
  std::shared_ptr<FeedForward> ffn_;  // null without tokens_out
  // Null where not needed.
  std::shared_ptr<LayerNorm> attention_norm_, cross_norm_, cross_memory_norm_, ffn_norm_;
};

// The block that the options' mechanism asks for (MemoryUse).
std::shared_ptr<Block> MakeBlock(const BlockOptions& options);

}  // namespace cistern

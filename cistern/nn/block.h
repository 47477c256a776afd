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
  // residual + the feed-forward of x, of which training drops a share of `out_dropout`.
  at::Tensor Forward(const at::Tensor& x, const at::Tensor& residual, double out_dropout = 0) const;

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
  // A residual stream: x + added, where something is to be added to x.
  struct Residual {
    at::Tensor x, added;
  };
  // Before a part of the block: the sum, and what the part reads, its norm (pre) or itself (post).
  ops::SumAndNorm Before(const Residual& r, const LayerNorm* norm) const {
    return pre() ? norm->Add(r.x, r.added) : ops::SumAndNorm{r.x, r.x};
  }
  // The same for what linear maps alone read.
  ops::SumAndNorm BeforeMaps(const Residual& r, const LayerNorm* norm) const {
    return pre() ? norm->AddForMaps(r.x, r.added) : ops::SumAndNorm{r.x, r.x};
  }
  ops::SumAndNorm BeforeAttention(const at::Tensor& x) const {
    return attention_->ReadsByMaps() ? BeforeMaps({x, {}}, attention_norm_.get())
                                     : Before({x, {}}, attention_norm_.get());
  }
  // After a part that gave y, of which training drops some: the sum of both is left to the next
  // norm (pre), or is normed (post).
  Residual After(const at::Tensor& x, const at::Tensor& y, const LayerNorm* norm) const;
  // The same at the end of the block.
  at::Tensor Add(const at::Tensor& x, const at::Tensor& y, const LayerNorm* norm) const;
  // The block from attention on: attend(stream) is given the normed tokens and returns what is
  // added to them.
  template <class F>
  Stream AttendAndRest(Stream stream, State* source, F&& attend) const {
    if (!attention_->attends()) return Rest(std::move(stream), {}, source);
    const ops::SumAndNorm in = BeforeAttention(stream.x);
    stream.x = in.norm;
    const at::Tensor added = attend(stream);
    stream.x = in.sum;
    return Rest(std::move(stream), added, source);
  }
  // What comes after attention, which gave `added` (undefined: nothing) to the tokens: cross
  // attention and feed-forward.
  Stream Rest(Stream stream, const at::Tensor& added, State* source) const;

  BlockOptions options_;
  std::shared_ptr<AttentionLayer> attention_, cross_;
  std::shared_ptr<FeedForward> ffn_;  // null without tokens_out
  // Null where not needed.
  std::shared_ptr<LayerNorm> attention_norm_, cross_norm_, cross_memory_norm_, ffn_norm_;
};

// The block that the options' mechanism asks for (MemoryUse).
std::shared_ptr<Block> MakeBlock(const BlockOptions& options);

}  // namespace cistern

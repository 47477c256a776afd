#pragma once
// What every attention layer of a model was given and gave in one pass, kept so that the layer's
// core can be run again (implied_weights.h).
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cistern/nn/attention_observer.h"
#include "cistern/tasks/batch.h"

namespace cistern {

// One attention layer of one pass of a batch. Tensors as in AttentionCall.
struct CapturedLayer {
  std::string name;    // "layer 1", "cross layer 2": layers count from 1
  int64_t number = 0;  // the same, of those of its form
  const AttentionLayer* layer = nullptr;
  AttentionLayerOptions options;
  Mechanism* core = nullptr;
  Form form = Form::kCausal;
  std::vector<at::Tensor> x, written, read;  // written: of the source, where form is kCross
  ops::Mask mask, written_mask;
  Handles handles;
  at::Tensor y, packed, memory;
  int64_t first_head = 0;  // heads of the layer before these, where they are a group of its heads

  bool reads() const { return y.defined(); }  // false: the tokens end in this layer
  int64_t rows() const { return reads() ? y.size(0) : packed.size(0); }
  int64_t heads() const { return y.size(1); }
  int64_t queries() const { return y.size(2); }
  int64_t sources() const;  // tokens that are attended to
  // Real tokens of a row among the queries and among the sources: those before its padding.
  int64_t RealQueries(int64_t row) const;
  int64_t RealSources(int64_t row) const;
  // Of a batch with ids: how many learned tokens the layer has before those of the text, 0 or 1;
  // none where its queries are not that text's tokens, such as latents or masked tokens that moved.
  std::optional<int64_t> TokensBeforeText(const Batch& batch) const;
};

// Those whose tokens read; UsageError that begins with `analysis`: there are none.
std::vector<CapturedLayer> ThatRead(const std::vector<CapturedLayer>& layers,
                                    const std::string& analysis);

// The groups of heads of a layer, each as a layer of its own mechanism, named "layer 1, latte"; a
// layer without groups as it is.
std::vector<CapturedLayer> ByHeadGroup(const CapturedLayer& layer);
std::vector<CapturedLayer> ByHeadGroup(const std::vector<CapturedLayer>& layers);

// Row `row` of tensors of a batch, [1,...]; those of a learned memory may have one row for all.
at::Tensor RowOf(const at::Tensor& x, int64_t row);
std::vector<at::Tensor> RowOf(const std::vector<at::Tensor>& x, int64_t row);
ops::Mask RowOf(const ops::Mask& mask, int64_t row);

// Captures the layers of all passes of this thread while it lives.
class LayerCapture : public AttentionObserver {
 public:
  void Attended(const AttentionCall& call) override;
  void Written(const AttentionLayer& layer, Mechanism& core, const std::vector<at::Tensor>& x,
               const ops::Mask& mask) override;
  // The layers in the order in which they ran, named; leaves none behind.
  std::vector<CapturedLayer> Take();

 private:
  struct Source {
    std::vector<at::Tensor> x;
    ops::Mask mask;
  };
  std::vector<CapturedLayer> layers_;
  std::map<const AttentionLayer*, Source> sources_;
};

}  // namespace cistern

#pragma once
// Adaptive input embeddings (Baevski & Auli 2019) and the adaptive softmax (Grave et al. 2017): the
// embedding and the output layer of P003's language models (spec 4.8). Token ids are cut into
// bands, in their order: band 0 are the ids below the first cutoff, which have vectors as wide as
// the model; band i has the width D / factor^i. So ids have to come with the frequent tokens first.
//
//   input    x = E_i[id] P_i                      E_i [V_i,D_i], P_i [D_i,D] for every band
//   output   of band 0: softmax over its V_0 words and one entry for each other band
//            of band i: that entry times softmax over its V_i words
//            logits   [E_0; C] h   and   E_i (P_i h)
//
// Tied, E_i and P_i are those of the input; band 0 has no map in the output (fairseq's layout, of
// which torch's AdaptiveLogSoftmaxWithLoss is the output half). No part has a bias.
#include <memory>
#include <vector>

#include "cistern/io/fields.h"
#include "cistern/models/config.h"
#include "cistern/nn/linear.h"

namespace cistern {

enum class EmbeddingKind { kTable, kAdaptive };

// Options that a language model has of its own.
struct EmbeddingOptions {
  EmbeddingKind embedding = EmbeddingKind::kTable;
  std::vector<int64_t> cutoffs;
  int64_t embedding_factor = 4;
  bool tie_projections = true;
  double adaptive_dropout = 0;

  Fields Describe();
  // UsageError where an option has no effect, or the bands do not fit the model.
  void Check(const ModelConfig& config, int64_t dim) const;
  bool adaptive() const { return embedding == EmbeddingKind::kAdaptive; }
};

// One band of token ids: those from begin up to end, with vectors of `width`.
struct TokenBand {
  int64_t begin = 0, end = 0, width = 0;
  int64_t size() const { return end - begin; }
};

// In the order of the ids; the last one ends at `vocab`.
std::vector<TokenBand> TokenBands(const EmbeddingOptions& options, int64_t vocab, int64_t dim);

// Numbers of the embedding and of the output layer.
double CountAdaptive(const EmbeddingOptions& options, int64_t vocab, int64_t dim, bool tied);

// Parameters: bands.I.weight [V_i,D_i], projections.I.weight [D,D_i].
class AdaptiveEmbedding : public torch::nn::Module {
 public:
  AdaptiveEmbedding(const EmbeddingOptions& options, const ModelConfig& config, int64_t dim);
  // ids [...] int64 -> [...,D]. O(D sum of D_i) for each token: every band's map is applied to all
  // tokens, with zeros where they are not the band's. Error where an id is outside of the
  // vocabulary.
  at::Tensor Forward(const at::Tensor& ids) const;
  const at::Tensor& table(size_t band) const { return tables_[band]->weight; }
  const at::Tensor& projection(size_t band) const { return projections_[band]->weight; }

 private:
  std::vector<TokenBand> bands_;
  std::vector<std::shared_ptr<Embedding>> tables_;
  std::vector<std::shared_ptr<Linear>> projections_;
};

// Parameters: clusters.weight [bands - 1,D]; bands.I.weight [V_i,D_i] where the tables are not the
// input's; projections.I.weight [D_i,D], I from 1, where the maps are not.
class AdaptiveSoftmax : public torch::nn::Module {
 public:
  AdaptiveSoftmax(const EmbeddingOptions& options, const ModelConfig& config,
                  std::shared_ptr<AdaptiveEmbedding> input, int64_t dim);
  // [...,D] -> log-probabilities [...,V] of all ids; as logits they give the same distribution.
  at::Tensor LogProbabilities(const at::Tensor& hidden) const;
  static constexpr const char* kWhyNoSmoothing =
      "does not go with embedding=adaptive: it would need every word of every band for every token";
  // Mean cross-entropy in nats of hidden [...,D] against targets [...] int64, over targets != -100.
  // A band's words are looked at for its own targets alone, and logits are formed for some rows at
  // a time (nn/head_loss.h). In training adaptive_dropout falls on the input and on what the maps
  // of bands 1, 2, ... make of it, as in fairseq. On meta every band takes all rows.
  at::Tensor Loss(const at::Tensor& hidden, const at::Tensor& targets,
                  double label_smoothing = 0) const;

 private:
  at::Tensor Head() const;  // [V_0 + bands - 1,D]
  const at::Tensor& Table(size_t band) const;
  at::Tensor Projected(const at::Tensor& hidden, size_t band) const;  // [N,D] -> [N,D_i]

  std::vector<TokenBand> bands_;
  double dropout_;
  std::shared_ptr<AdaptiveEmbedding> input_;  // not a child: the model owns it
  std::shared_ptr<Linear> clusters_;
  std::vector<std::shared_ptr<Embedding>> tables_;    // of its own; else empty
  std::vector<std::shared_ptr<Linear>> projections_;  // of its own, from band 1 on; else empty
};

}  // namespace cistern

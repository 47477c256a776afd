#pragma once
// One bidirectional encoder for two texts, and a head that says whether they match (Long Range
// Arena's Retrieval; spec 1.3). Each text is encoded alone, so an encoded text could be kept and
// compared with any other.
#include <memory>

#include "cistern/models/classifier.h"
#include "cistern/models/row_encoder.h"

namespace cistern {

// Two pooled vectors a, b [B,D] to logits [B,classes]:
//   lra        [a; b] -> ffn_dim, relu -> ffn_dim/2, relu -> classes
//   nli        the same of [a; b; a*b; a-b]
//   conv_luna  [a; b] -> ffn_dim, gelu -> ffn_dim/2, gelu -> classes (P000's code)
//   latte      [a; b; a-b; a*b] -> D, gelu (tanh, as flax computes it) -> classes
//   luna       [a; b; a*b; a-b], dropout (head_dropout) -> classes, without bias
//   nystrom    [a; b; a*b; a-b] -> ffn_dim, relu -> classes (Nystromformer's code)
enum class MatchKind { kLra, kNli, kConvLuna, kLatte, kLuna, kNystrom };
const EnumNames<MatchKind>& MatchKinds();

class MatchHead : public torch::nn::Module {
 public:
  MatchHead(const ModelConfig& config, MatchKind kind);
  at::Tensor Forward(const at::Tensor& a, const at::Tensor& b) const;
  // Numbers of its maps.
  static double Numbers(MatchKind kind, int64_t dim, int64_t hidden, int64_t classes);

 private:
  MatchKind kind_;
  double dropout_;
  std::shared_ptr<Linear> dense_, second_, out_;  // null where it has none
};

class TwoTower : public Classifier {
 public:
  struct Options {
    MatchKind match = MatchKind::kLra;
  };
  static Fields Describe(Options& options);
  static void Check(const ModelConfig& config);
  explicit TwoTower(const ModelConfig& config);
  // ids [B,T] int64 of one text of each row -> [B,D]; mask: as in RowEncoder::Forward.
  at::Tensor Encode(const at::Tensor& ids, const ops::Mask& mask);
  std::string SeesPadding() const override { return rows_.SeesPadding(); }
  // ids, lengths, second_ids, second_lengths; the texts may be padded to different lengths. valid,
  // second_valid [B,T] where tokens are masked.
  at::Tensor Logits(const NamedTensors& inputs) override;

 private:
  at::Tensor embedding_;  // [V,D]
  RowEncoder rows_;
  std::shared_ptr<MatchHead> head_;
};

}  // namespace cistern

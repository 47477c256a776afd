#pragma once
// What a model is made of: config.json of a model folder, the [model] table of an experiment file.
#include <map>
#include <string>
#include <vector>

#include "cistern/io/fields.h"
#include "cistern/models/initial_weights.h"
#include "cistern/models/model_info.h"
#include "cistern/models/stack.h"
#include "cistern/models/stack_options.h"

namespace cistern {

inline constexpr int64_t kConfigVersion = 2;

// Of a classifier (models/heads.h).
enum class PoolingKind { kMean, kCls, kMemory, kFirst, kMeanAll, kMeanZeros };
enum class HeadKind { kRelu, kGelu, kLinear, kTanh };
// How padding takes part in a classifier (models/trunk.h).
enum class PaddingKind { kMasked, kReads, kSeen, kZeros };
enum class ClsPlace { kBefore, kAfter };       // of the learned token: before or after positions
const EnumNames<PoolingKind>& PoolingKinds();  // mean, cls, memory, first, mean_all, mean_zeros
const EnumNames<HeadKind>& HeadKinds();        // relu, gelu, linear, tanh
const EnumNames<PaddingKind>& PaddingKinds();  // masked, reads, seen, zeros
const EnumNames<ClsPlace>& ClsPlaces();        // before, after

// The keys outside the groups hold for all stacks of the model, unless the group of a stack says
// otherwise; LayerStack puts both together.
struct ModelConfig {
  std::string kind = "decoder_lm";  // of models.def
  int64_t version = kConfigVersion;
  int64_t vocab_size = 0;         // set by the task
  int64_t target_vocab_size = 0;  // of the target where it is another; 0: vocab_size
  int64_t classes = 0;            // of a classifier: set by the task
  int64_t dim = 128, layers = 2, heads = 4, ffn_dim = 0, max_length = 1024;
  std::vector<std::string> attention = {"latte"};  // one mechanism for all layers, or one per layer
  Json attention_options =
      Json::object();  // options of the mechanisms, by name: {"latte": {"latents": 64}}
  Json layer_options = Json::object();  // the same for single layers: {"2": {"latte": {...}}}
  int64_t conv = 0;
  NormPlace norm = NormPlace::kPre;
  Activation activation = Activation::kGelu;
  PositionKind positions = PositionKind::kNone;
  PoolingKind pooling = PoolingKind::kMean;
  HeadKind head = HeadKind::kRelu;
  bool embedding_norm = false, final_norm = true, norm_pooled = false, tie_embeddings = true;
  std::vector<int64_t> tied_layers =
      {};  // the layer whose parameters each layer has, by number from 0; none: each has its own
  bool bias = false, ffn_bias = false,
       head_bias = false;  // bias: all of them; Latte's paper has the other two alone
  double dropout = 0, attention_dropout = 0, ffn_dropout = 0, init_std = 0.02, embedding_std = 0,
         position_std = -1, norm_eps = 1e-5;
  double ffn_out_dropout = -1;           // of what the feed-forward adds; -1: dropout
  double layer_drop = 0;                 // share of the blocks that each training pass leaves out
  InitOptions init;                      // schemes of the initial weights
  StackOptions encoder, decoder, cross;  // groups of the stacks
  // Parts as single sources have them.
  int64_t qkv_dim = 0;    // width of queries, keys and values; 0: dim
  int64_t input_dim = 0;  // width of the tokens that a perceiver's latents attend to; 0: dim
  NormKind norm_kind = NormKind::kLayer;
  bool scale_embeddings = false, scale_logits = false;
  PaddingKind padding = PaddingKind::kMasked;
  ClsPlace cls_place = ClsPlace::kBefore;
  std::vector<int64_t> head_dims = {};  // hidden layers of a classifier's head; none: one
  double head_dropout = -1;
  std::map<std::string, Json> own = {};  // options that only one kind has, by kind

  Fields Describe();
  // Checks the fields and what single ones cannot: divisibility, mechanisms, options; UsageError
  // names the key.
  void Validate() const;
  const ModelInfo& info() const { return FindModel(kind); }
  LayerStack Stack(Form form) const { return {*this, form}; }
  // Tokens that the stack's positions reach: max_length where they are learned, else any count.
  int64_t PositionLimit(Form form) const;
  // The same, or fewer where a mechanism has weights for each position; cross attention reads the
  // tokens of the encoder.
  int64_t LengthLimit(Form form) const;
  // Raises max_length to that of `what` ("the row at a.tsv:3"), of so many tokens. UsageError where
  // a group or a mechanism's own option still ends before.
  void Reach(Form form, int64_t tokens, const std::string& what);
  // UsageError where `what` ("a row", "a source") of so many tokens goes beyond that.
  void CheckPositions(Form form, int64_t tokens, const char* what) const;
  const StackOptions& Group(Form form) const;
  Json Own() const;  // the options of this kind's own that were given
  double PositionStd() const { return position_std >= 0 ? position_std : EmbeddingStd(); }
  double EmbeddingStd() const { return embedding_std > 0 ? embedding_std : init_std; }
  int64_t TargetVocabSize() const { return target_vocab_size > 0 ? target_vocab_size : vocab_size; }
  bool PoolsMemory() const { return info().classifies && pooling == PoolingKind::kMemory; }
  std::string Summary() const;  // "latte, 2 layers x 128, 4 heads"
};

// The name of a form's group: encoder, decoder, cross.
std::string GroupName(Form form);

// Reads a config of any version up to kConfigVersion, and validates it.
ModelConfig ReadModelConfig(const Json& json, const std::string& where);

// A config of an earlier version as one of kConfigVersion. Without a version it is one already, but
// for keys that have moved; a later version is a UsageError.
Json ConvertModelConfig(Json config);

}  // namespace cistern

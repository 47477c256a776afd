// The rows of `cistern bench papers` that are whole models, as data (spec 6;
// models: 1.1, 4.4, 4.10, 4.11; figures: 7).
#include "cistern/bench/papers.h"

namespace cistern::bench {
namespace {

using Kind = Claim::Kind;

Json Reuse(const char* placement, int64_t heads, int64_t layers) {
  Json options = {{"placement", placement}};
  if (heads > 0) options["heads"] = heads;
  options["layers"] = layers;
  return options;
}

// LRA's text classifier.
Protocol ReuseTable6() {
  Protocol p;
  p.name = "reuse-table6";
  p.source = "P001 Table 6";
  p.setup =
      "Training steps of Long Range Arena's text classifier, batch 32 on 16 TPUs, GB of one of "
      "them: 2 rows here. Its layers have four heads (the table's label says 8), so K = 4 copies "
      "all. Copied heads are computed again from the queries and keys of the layer before "
      "(keep=handles), which is faster here than to keep T x T scores.";
  p.minutes = 3;
  p.batch = 2;
  p.lengths = {1000, 2000, 3000, 4000};
  p.whole = WholeModel{};
  p.whole->model = {{"kind", "encoder_classifier"},
                    {"vocab_size", 257},
                    {"classes", 2},
                    {"dim", 256},
                    {"layers", 4},
                    {"heads", 4},
                    {"ffn_dim", 1024},
                    {"norm", "pre"},
                    {"norm_eps", 1e-6},
                    {"activation", "gelu_tanh"},
                    {"positions", "sinusoidal"},
                    {"pooling", "cls"},
                    {"head", "relu"},
                    {"head_dropout", 0.0},
                    {"bias", false},
                    {"ffn_bias", true},
                    {"dropout", 0.1},
                    {"attention_dropout", 0.1},
                    {"ffn_dropout", 0.1},
                    {"init",
                     {{"linear", "xavier_uniform"},
                      {"head", "lecun_normal"},
                      {"ffn_bias", "normal(1e-6)"},
                      {"embedding", "normal(1)"}}}};
  OptimizerOptions& optimizer = p.whole->optimizer;
  optimizer.eps = 1e-9, optimizer.weight_decay = 0.1, optimizer.decay = DecayOf::kAll;
  p.arms = {{"base", "softmax"},
            {"K=4 P=2", "reuse", Reuse("partial", 4, 2)},
            {"K=4 P=3", "reuse", Reuse("full", 0, 3)}};
  const double steps[3][4] = {
      {7.80, 5.47, 3.86, 2.84}, {8.25, 5.83, 4.37, 3.24}, {8.52, 5.72, 4.41, 3.28}};
  const double gigabytes[3][4] = {{.7, 2, 4.3, 7.5}, {.57, 1.7, 3.6, 6.2}, {.47, 1.62, 3.52, 6.17}};
  for (size_t arm = 1; arm < 3; ++arm) {
    const std::string& name = p.arms[arm].name;
    for (size_t i = 0; i < p.lengths.size(); ++i) {
      p.claims.push_back({Kind::kFaster, name, "base", p.lengths[i], steps[arm][i] / steps[0][i]});
      p.claims.push_back(
          {Kind::kMemory, name, "base", p.lengths[i], gigabytes[arm][i] / gigabytes[0][i]});
    }
  }
  return p;
}

// T5 1.0, whose encoder, decoder and cross attention all copy.
Protocol ReuseTable2(bool large) {
  const char* const size = large ? "large" : "base";
  Protocol p;
  p.name = StrCat("reuse-table2-", size);
  p.source = StrCat("P001 Table 2, T5-", size);
  p.setup = StrCat(
      "Training steps of T5 1.0 with Adafactor, sources of 512 tokens and targets of 114, batch "
      "128 on ",
      large ? 64 : 32, " TPUs (", large ? 2 : 4,
      " rows each): 1 row here. All three attentions copy, and the copied scores are kept "
      "(keep=scores). The ",
      large ? "26 layers have K = 16, P = 12" : "13 layers have K = 12, P = 6",
      ", as those of BERT in Table 1. Dropout 0.1. tokens/s are of the targets.");
  p.minutes = large ? 7 : 3;
  p.lengths = {512};
  p.whole = WholeModel{};
  p.whole->target_length = 114;
  p.whole->model = {{"kind", "encoder_decoder"},
                    {"vocab_size", 32128},
                    {"dim", large ? 1024 : 768},
                    {"layers", large ? 24 : 12},
                    {"heads", large ? 16 : 12},
                    {"ffn_dim", large ? 4096 : 3072},
                    {"norm", "pre"},
                    {"norm_kind", "rms"},
                    {"norm_eps", 1e-6},
                    {"activation", "relu"},
                    {"positions", "relative"},
                    {"scale_logits", true},
                    {"dropout", 0.1},
                    {"attention_dropout", 0.1},
                    {"ffn_dropout", 0.1}};
  OptimizerOptions& optimizer = p.whole->optimizer;
  optimizer.kind = OptimizerKind::kAdafactor, optimizer.weight_decay = 0;
  const auto arm = [&](const char* name, double steps, double base, const Json& options,
                       const Json& model = Json::object()) {
    p.arms.push_back({name, options.empty() ? "softmax" : "reuse", options, model});
    if (!options.empty()) p.arms.back().options["keep"] = "scores";
    p.arms.back().options["scale"] = "unit";
    if (steps > 0) p.claims.push_back({Kind::kFaster, name, "base", 512, steps / base});
  };
  arm("base", 0, 0, Json::object());
  if (large) {
    arm("K=16 P=12", 6.65, 5.68, Reuse("full", 0, 12));
    arm("26 layers, K=16 P=12", 6.16, 5.68, Reuse("full", 0, 12), {{"layers", 26}});
  } else {
    arm("K=6 P=10", 13.7, 12.85, Reuse("partial", 6, 10));
    arm("K=12 P=6", 15.18, 12.85, Reuse("full", 0, 6));
    arm("13 layers, K=12 P=6", 14.12, 12.85, Reuse("full", 0, 6), {{"layers", 13}});
  }
  return p;
}

Protocol ReuseTable3() {
  Protocol p;
  p.name = "reuse-table3";
  p.source = "P001 Table 3";
  p.setup =
      "Training steps of ViT-B/16 at 384 pixels, SGD with momentum; batch 512, the number of TPUs "
      "is not said: 1 row here. 576 patches, and the learned token. 13 layers are a little slower "
      "than the base in the table (3.96 steps/s for 4.02): no claim.";
  p.minutes = 3;
  p.lengths = {576};
  p.whole = WholeModel{};
  p.whole->model = {{"kind", "encoder_classifier"},
                    {"classes", 1000},
                    {"dim", 768},
                    {"layers", 12},
                    {"heads", 12},
                    {"ffn_dim", 3072},
                    {"max_length", 576},
                    {"norm", "pre"},
                    {"norm_eps", 1e-6},
                    {"activation", "gelu"},
                    {"positions", "learned"},
                    {"pooling", "cls"},
                    {"head", "linear"},
                    {"bias", true},
                    {"encoder_classifier", {{"input", "values"}, {"channels", 768}}}};
  p.whole->optimizer.kind = OptimizerKind::kSgd, p.whole->optimizer.weight_decay = 0;
  p.whole->clip = 1;
  p.arms = {{"base", "softmax"},
            {"K=6 P=10", "reuse", Reuse("partial", 6, 10)},
            {"K=12 P=6", "reuse", Reuse("full", 0, 6)},
            {"13 layers, K=6 P=10", "reuse", Reuse("partial", 6, 10), {{"layers", 13}}}};
  p.claims = {{Kind::kFaster, "K=6 P=10", "base", 576, 4.28 / 4.02},
              {Kind::kFaster, "K=12 P=6", "base", 576, 4.51 / 4.02}};
  return p;
}

Protocol AbcTable6Model() {
  Protocol p;
  p.name = "abc-table6-model";
  p.source = "P003 Table 6, whole model";
  p.setup =
      "Inference of a RoBERTa-base encoder, 512 tokens, batch 16, V100: 4 rows here. The first "
      "token goes into a head of two classes. Memory is that of the weights too.";
  p.minutes = 2;
  p.batch = 4;
  p.lengths = {512};
  p.whole = WholeModel{};
  p.whole->work = ModelWork::kInference;
  p.whole->model = {{"kind", "encoder_classifier"},
                    {"vocab_size", 50265},
                    {"classes", 2},
                    {"dim", 768},
                    {"layers", 12},
                    {"heads", 12},
                    {"ffn_dim", 3072},
                    {"max_length", 512},
                    {"norm", "post"},
                    {"norm_eps", 1e-5},
                    {"embedding_norm", true},
                    {"final_norm", false},
                    {"activation", "gelu"},
                    {"positions", "learned"},
                    {"pooling", "first"},
                    {"head", "tanh"},
                    {"head_dropout", 0.0},
                    {"bias", true},
                    {"dropout", 0.1}};
  p.arms = {{"base", "softmax", Json::object(), {{"attention_dropout", 0.1}}}};
  for (const int64_t slots : {64, 128}) {
    p.arms.push_back({StrCat("Linformer ", slots),
                      "linformer",
                      {{"slots", slots}, {"sharing", "layerwise"}, {"init", "xavier_normal"}}});
  }
  for (const int64_t slots : {64, 128}) {
    p.arms.push_back({StrCat("ABC ", slots),
                      "abc_mlp",
                      {{"slots", slots}, {"empty_slots", "take_part"}, {"tied", true}}});
  }
  p.claims = {{Kind::kFaster, "Linformer 64", "base", 512, 1.7},
              {Kind::kFaster, "Linformer 128", "base", 512, 1.5},
              {Kind::kFaster, "ABC 64", "base", 512, 1.5},
              {Kind::kFaster, "ABC 128", "base", 512, 1.3},
              {Kind::kFaster, "Linformer 64", "ABC 64", 512, 1.7 / 1.5},
              {Kind::kMemory, "Linformer 64", "base", 512, 0.5},
              {Kind::kMemory, "Linformer 128", "base", 512, 0.6},
              {Kind::kMemory, "ABC 64", "base", 512, 0.5},
              {Kind::kMemory, "ABC 128", "base", 512, 0.6}};
  return p;
}

// Slots and features of the attention to the source, and of the decoder's own; the encoder has
// softmax.
Protocol AbcFig1Model() {
  Protocol p;
  p.name = "abc-fig1-model";
  p.source = "P003 Fig. 1, whole model";
  p.setup =
      "Translation by a transformer-base, random sources of 16 rows and as many tokens decoded "
      "greedily, reading the sources included; lengths of ours, the paper prints none. The first "
      "number is of the attention to the source, the second of the decoder's own; RFA's are sines "
      "and cosines of half as many rows. Memory is that of the weights too.";
  p.minutes = 6;
  p.batch = 16;
  p.lengths = {64, 256, 1024};
  p.whole = WholeModel{};
  p.whole->work = ModelWork::kTranslation;
  p.whole->model = {{"kind", "encoder_decoder"},
                    {"vocab_size", 32769},
                    {"dim", 512},
                    {"layers", 6},
                    {"heads", 8},
                    {"ffn_dim", 2048},
                    {"max_length", 257},
                    {"norm", "post"},
                    {"final_norm", false},
                    {"bias", true},
                    {"activation", "relu"},
                    {"positions", "sinusoidal_halves"},
                    {"scale_embeddings", true},
                    {"tie_embeddings", true},
                    {"dropout", 0.1},
                    {"init",
                     {{"linear", "xavier_uniform"},
                      {"query_key", "xavier_uniform(0.70710678)"},
                      {"value", "xavier_uniform(0.70710678)"},
                      {"ffn_up", "torch"},
                      {"ffn_down", "torch"},
                      {"bias", "torch"},
                      {"attention_out_bias", "zeros"},
                      {"embedding", "width_normal"}}}};
  p.arms = {{"softmax", "softmax"}};
  const auto arm = [&](const char* name, const char* mechanism, const char* size, int64_t cross,
                       int64_t own, const Json& shared = Json::object()) {
    Json options = shared;
    options[size] = own;
    const auto stack = [&](int64_t of) {
      return Json{{"attention", mechanism}, {"attention_options", {{mechanism, {{size, of}}}}}};
    };
    Json model = {{"attention", "softmax"}, {"decoder", stack(own)}, {"cross", stack(cross)}};
    if (!shared.empty()) model["attention_options"] = {{mechanism, shared}};
    p.arms.push_back({name, mechanism, options, model});
  };
  arm("RFA 256/128", "rfa", "features", 128, 64);
  arm("T2R 32/4", "t2r", "features", 32, 4);
  arm("ABC 32/8", "abc_mlp", "slots", 32, 8, {{"empty_slots", "take_part"}, {"tied", true}});
  for (const char* bounded : {"RFA 256/128", "T2R 32/4", "ABC 32/8"}) {
    p.claims.push_back({Kind::kSlope, bounded, "", 0, 1});
    p.claims.push_back({Kind::kFaster, bounded, "softmax", 1024, 0});
  }
  p.claims.push_back({Kind::kFaster, "ABC 32/8", "RFA 256/128", 1024, 1.25});
  p.claims.push_back({Kind::kFaster, "T2R 32/4", "ABC 32/8", 1024, 1.2});
  return p;
}

}  // namespace

std::vector<Protocol> WholeModelProtocols() {
  return {ReuseTable6(), ReuseTable2(false), ReuseTable2(true),
          ReuseTable3(), AbcTable6Model(),   AbcFig1Model()};
}

}  // namespace cistern::bench

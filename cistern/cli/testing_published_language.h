#pragma once
// The published settings of language models and of what is finetuned from them: spec 4.8, 4.10
// (P003 Tables 10, 12), 4.11 (P001 Tables 1, 2, 3, 7).
#include <string>

#include "cistern/base/error.h"
#include "cistern/cli/testing_published.h"

namespace cistern::testing {

inline std::vector<Family> LanguageModels() {
  const Settings lm = {{"task.kind", "lm"},
                       {"task.tokenizer", "words"},
                       {"task.length", 512.},
                       {"model.heads", 8.},
                       {"model.dim", 1024.},
                       {"model.ffn_dim", 4096.},
                       {"model.vocab_size", 267'744.},
                       {"model.dropout", .3},
                       {"model.ffn_dropout", .1},
                       {"model.final_norm", "false"},
                       {"model.tie_embeddings", "true"},
                       {"model.init.linear", "xavier_uniform"},  // adaptive projections
                       {"model.init.ffn_up", "torch"},           // fairseq: nn.Linear as it is
                       {"model.init.ffn_down", "torch"},
                       {"model.init.bias", "torch"},
                       {"model.init.attention_out_bias", "zeros"},
                       {"model.decoder_lm.embedding", "adaptive"},
                       {"model.decoder_lm.embedding_factor", 4.},
                       {"model.decoder_lm.adaptive_dropout", .2},
                       {"train.optimizer", "nag"},
                       {"train.weight_decay", 0.},
                       {"train.batch", 64.},
                       {"train.steps", 286'000.},
                       {"train.lr", 1.},
                       {"train.schedule", "cosine_restarts"},
                       {"train.schedule_from", 0.},
                       {"train.warmup", 16'000.},
                       {"train.warmup_init", 1e-7},
                       {"train.schedule_period", 270'000.},
                       {"train.schedule_growth", 2.},
                       {"train.schedule_shrink", .75},
                       {"train.min_lr", 1e-4},
                       {"train.clip", .1}};
  // fairseq: its adam decays all parameters, and its schedules count from 0.
  const Settings roberta =
      Sizes(12, 12, 768, 3072) + Adam("adamw", .9, .98, 1e-6) +
      Settings{
          {"model.dropout", .1},  {"model.norm", "post"},           {"task.length", 512.},
          {"train.decay", "all"}, {"train.schedule", "polynomial"}, {"train.schedule_from", 0.},
          {"train.clip", 0.}};
  const Settings shuffled = {{"task.group_by_length", "false"}};
  const Settings finetuned =
      roberta + shuffled +
      Settings{{"task.kind", "classify"}, {"model.head_dropout", 0.}};  // pooler_dropout
  std::vector<Family> families = {
      {"P003/lm/", lm + Settings{{"model.layers", 16.}}},
      {"P003/lm32/",
       lm + Settings{{"model.layers", 32.}, {"model.layer_drop", .2}, {"task.context", 256.}}},
      {"P003/lm/base", {{"model.attention_dropout", .1}}},
      {"P003/lm32/base", {{"model.attention_dropout", .1}}},
      // 4.10 leaves steps, warm-up and batch to fairseq's README: 2,048 rows, here in 128 parts.
      {"P003/mlm/",
       roberta + Training(16, 125'000, 5e-4, 10'000, .01) +
           Settings{{"task.kind", "mlm"}, {"model.head_bias", "true"}, {"train.accumulate", 128.}}},
      {"P003/sst2/", finetuned + Training(32, 20'935, 1e-5, 1256, .1)},
      {"P001/bert/", Settings{{"task.kind", "mlm"},
                              {"model.head_bias", "true"},
                              {"task.length", 512.},
                              {"model.dropout", .1},
                              {"model.attention_dropout", .1},
                              {"model.norm_eps", 1e-12},
                              {"train.optimizer", "adamw"},
                              {"train.weight_decay", .01},
                              {"train.decay", "matrices"},
                              {"train.lr", 1e-4},
                              {"train.warmup", 10'000.},
                              {"train.schedule", "linear"},
                              {"train.batch", 512.},
                              {"train.steps", 1e6}}}};
  const auto slots = [&](const std::string& file, const std::string& mechanism, double number) {
    families.push_back({file,
                        {{"model.attention", mechanism},
                         {"model.attention_options." + mechanism +
                              (mechanism == "rfa" || mechanism == "t2r" ? ".features" : ".slots"),
                          number}}});
  };
  slots("P003/lm/abc_mlp-32", "abc_mlp", 32), slots("P003/lm/abc_mlp-64", "abc_mlp", 64);
  slots("P003/lm/linformer-64", "linformer", 64), slots("P003/lm/abc_random-64", "abc_random", 64);
  slots("P003/lm32/abc_mlp-32", "abc_mlp", 32), slots("P003/lm32/rfa-32", "rfa", 16);
  slots("P003/lm32/t2r-32", "t2r", 32);
  // 2.5: each step draws without replacement, over all layers and heads.
  families.push_back({"P003/lm32/rfa-32", {{"model.attention_options.rfa.draws", "model"}}});
  const auto glue = [&](const char* name, double classes, double steps, double warmup) {
    families.push_back({StrCat("P003/", name, "/"),
                        finetuned + Training(32, steps, 1e-5, warmup, .1) +
                            Settings{{"model.classes", classes}, {"task.header", "yes"}}});
  };
  glue("mnli", 3, 123'873, 7432), glue("qnli", 2, 33'112, 1986), glue("qqp", 2, 113'272, 28'318);
  for (const char* folder : {"mlm", "sst2", "mnli", "qnli", "qqp"}) {
    for (const double n : {64., 128.}) {
      for (const char* mechanism : {"abc_mlp", "linformer"})
        slots(StrCat("P003/", folder, "/", mechanism, "-", int64_t(n)), mechanism, n);
    }
  }
  families.push_back({"P001/bert/base.toml", Sizes(12, 12, 768, 0)});
  families.push_back({"P001/bert/base-k", Sizes(12, 12, 768, 0)});
  families.push_back({"P001/bert/base-13", Sizes(13, 12, 768, 0)});
  families.push_back({"P001/bert/large.toml", Sizes(24, 16, 1024, 0)});
  for (const char* row : {"k", "a", "s"})
    families.push_back({StrCat("P001/bert/large-", row), Sizes(24, 16, 1024, 0)});
  families.push_back({"P001/bert/large-26", Sizes(26, 16, 1024, 0)});
  // P001 Table 2: T5 v1.0, 512 tokens and 114.
  const Settings t5_model = {{"model.kind", "encoder_decoder"},
                             {"model.norm", "pre"},
                             {"model.norm_kind", "rms"},
                             {"model.activation", "relu"},
                             {"model.bias", "false"},
                             {"model.positions", "relative"},
                             {"model.dropout", .1},
                             {"train.optimizer", "adafactor"},
                             {"train.weight_decay", 0.},
                             {"train.batch", 128.}};
  families.push_back({"P001/t5/", t5_model + Settings{{"task.kind", "span_corruption"},
                                                      {"task.length", 568.},
                                                      {"train.lr", 1.},  // .01 at the peak
                                                      {"train.schedule", "rsqrt"},
                                                      {"train.warmup", 10'000.},
                                                      {"train.steps", 524'288.}}});
  families.push_back({"P001/t5-finetune/", t5_model + Settings{{"task.kind", "translation"},
                                                               {"task.metric", "exact_match"},
                                                               {"train.schedule", "constant"},
                                                               {"train.warmup", 0.},
                                                               {"train.lr", 1e-3},
                                                               {"train.steps", 262'144.}}});
  const auto t5 = [&](const char* row, const Settings& sizes, double heads, double layers) {
    Settings own = sizes;
    if (heads > 0) {
      for (const char* stack : {"model.attention", "model.cross.attention"})
        own.push_back({stack, "reuse"});
      const bool all = heads == std::get<double>(sizes[1].second);
      own.push_back({"model.attention_options.reuse.placement", all ? "full" : "partial"});
      if (!all) own.push_back({"model.attention_options.reuse.heads", heads});
      own.push_back({"model.attention_options.reuse.layers", layers});
    }
    own.push_back(
        {StrCat("model.attention_options.", heads > 0 ? "reuse" : "softmax", ".scale"), "unit"});
    for (const char* folder : {"t5", "t5-finetune"})
      families.push_back({StrCat("P001/", folder, "/", row, ".toml"), own});
  };
  t5("base", Sizes(12, 12, 768, 3072), 0, 0), t5("large", Sizes(24, 16, 1024, 4096), 0, 0);
  t5("base-k6-p10", Sizes(12, 12, 768, 3072), 6, 10);
  t5("base-k12-p6", Sizes(12, 12, 768, 3072), 12, 6);
  t5("base-13-layers", Sizes(13, 12, 768, 3072), 12, 6);
  t5("large-k16-p12", Sizes(24, 16, 1024, 4096), 16, 12);
  t5("large-26-layers", Sizes(26, 16, 1024, 4096), 16, 12);
  // P001 Table 7, finetuned, and Table 2. 3,699 steps of 48 are two epochs of SQuAD 1.1, 9,204 of
  // 128 three of MNLI.
  const Settings bert = {{"model.dropout", .1},        {"model.attention_dropout", .1},
                         {"model.norm", "post"},       {"model.norm_eps", 1e-12},
                         {"train.optimizer", "adamw"}, {"train.decay", "matrices"},
                         {"train.schedule", "linear"}};
  const Settings squad =
      bert + shuffled +
      Settings{
          {"task.kind", "question_answering"}, {"task.length", 384.},       {"task.stride", 128.},
          {"task.question_length", 64.},       {"task.answer_length", 30.}, {"task.n_best", 20.}};
  families.push_back({"P001/squad/", squad + Training(48, 3699, 8e-5, 370, .01)});
  families.push_back({"P001/squad2/", squad + Training(48, 5498, 8e-5, 550, .01)});
  families.push_back(
      {"P001/mnli/", bert + shuffled + Training(128, 9204, 3e-5, 920, .01) +
                         Settings{{"task.kind", "classify"}, {"model.classes", 3.}}});
  for (const char* folder : {"squad", "squad2", "mnli"}) {
    families.push_back({StrCat("P001/", folder, "/large"), Sizes(24, 16, 1024, 0)});
    families.push_back({StrCat("P001/", folder, "/large.toml"), {{"model.attention", "softmax"}}});
    for (const char* placement : {"alternate", "skip", "all_end", "full"}) {
      const std::string row = placement == std::string("full")      ? "k16-p12"
                              : placement == std::string("all_end") ? "all-end"
                                                                    : placement;
      families.push_back({StrCat("P001/", folder, "/large-", row),
                          {{"model.attention_options.reuse.placement", placement}}});
    }
  }
  // P001 Table 3: ViT-B/16, 8 epochs of ImageNet in batches of 512 at 384 pixels.
  families.push_back({"P001/vit/", Settings{{"task.kind", "image"},
                                            {"task.patch", 16.},
                                            {"train.optimizer", "sgd"},
                                            {"train.schedule", "cosine"},
                                            {"train.min_lr", 3e-4}} +
                                       Training(512, 20018, 3e-2, 500, 0)});
  for (const char* row : {"base", "k"})
    families.push_back({StrCat("P001/vit/", row), Sizes(12, 12, 768, 3072)});
  families.push_back({"P001/vit/13", Sizes(13, 12, 768, 3072)});
  return families;
}

}  // namespace cistern::testing

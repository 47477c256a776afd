#pragma once
// The published settings of translation: spec 4.9 (P003 Tables 4, 7, 8, 11), 1.1; P001 Appendix
// A.4.
#include <algorithm>
#include <cmath>

#include "cistern/base/error.h"
#include "cistern/cli/testing_published.h"

namespace cistern::testing {

inline std::vector<Family> Translators() {
  const Settings mt = Sizes(6, 8, 512, 2048) + Settings{{"task.kind", "translation"},
                                                        {"task.tokenizer", "bpe"},
                                                        {"model.kind", "encoder_decoder"},
                                                        {"model.attention", "softmax"},
                                                        {"model.activation", "relu"},
                                                        {"model.dropout", .1},
                                                        {"model.tie_embeddings", "true"},
                                                        {"train.optimizer", "adam"},
                                                        {"train.label_smoothing", .1},
                                                        {"train.weight_decay", 0.},
                                                        {"train.clip", 0.}};
  const Settings p003 = {{"model.norm", "post"},
                         {"train.schedule", "inverse_sqrt"},
                         {"train.schedule_from", 0.},     // 4.9: fairseq's, which counts from 0
                         {"model.init.ffn_up", "torch"},  // fairseq: nn.Linear as it is
                         {"model.init.ffn_down", "torch"},
                         {"model.init.bias", "torch"},
                         {"model.init.attention_out_bias", "zeros"},
                         {"train.beta1", .9},
                         {"train.beta2", .98},
                         {"train.average_last", 5.},
                         {"task.beam", 5.},
                         {"task.length_penalty", .6}};
  // No source has the rate, the batch and the steps of P003: the files say so.
  Settings wmt14 =
      mt + p003 + Training(32, 100'000, 5e-4, 6000, 0) + Settings{{"task.vocab_size", 32'768.}};
  Settings all_abc = wmt14;  // its encoder is another one
  std::erase_if(all_abc, [](const auto& setting) { return setting.first == "model.attention"; });
  Settings iwslt14 =
      mt + p003 + Training(32, 50'000, 5e-4, 4000, 0) + Settings{{"task.vocab_size", 30'000.}};
  for (auto& [key, value] : iwslt14) {
    if (key == "model.ffn_dim") value = 1024.;
    if (key == "model.dropout") value = .3;
  }
  std::vector<Family> families = {{"P003/wmt14/base", wmt14}, {"P003/iwslt14/base", iwslt14}};
  const auto row = [&](const std::string& file, const Settings& all, const std::string& mechanism,
                       double cross, double causal, const Settings& more = {}) {
    const std::string size = mechanism == "window" ? ".window" : ".slots";
    const auto stack = [&](const char* name) {
      return StrCat("model.", name, ".attention_options.", mechanism, size);
    };
    Settings own = {{"model.cross.attention", mechanism},
                    {stack("cross"), cross},
                    {"model.decoder.attention", mechanism},
                    {stack("decoder"), causal}};
    for (const auto& [key, value] : more)
      own.push_back({StrCat("model.attention_options.", mechanism, ".", key), value});
    families.push_back({file + ".toml", all + own});
  };
  for (const double n : {32., 64.}) {
    const std::string sizes = StrCat(int64_t(n), "-", int64_t(n));
    row("P003/wmt14/abc_random-" + sizes, wmt14, "abc_random", n, n);
    row("P003/wmt14/linformer-" + sizes, wmt14, "linformer", n, n);
  }
  const Settings tied = {{"tied", "true"}, {"empty_slots", "take_part"}};
  row("P003/wmt14/abc_mlp-32-8", wmt14, "abc_mlp", 32, 8, tied);
  row("P003/wmt14/abc_mlp-32-32", wmt14, "abc_mlp", 32, 32, tied);
  row("P003/wmt14/window-32-32", wmt14, "window", 32, 32);
  row("P003/wmt14/abc_cluster-32-32", wmt14, "abc_cluster", 32, 32);
  row("P003/wmt14/abc_mlp-relu-32-32", wmt14, "abc_mlp", 32, 32, {{"activation", "relu"}});
  for (const double causal : {8., 32.})
    row(StrCat("P003/wmt14/abc_mlp-sigmoid-32-", int64_t(causal)), wmt14, "abc_mlp", 32, causal,
        {{"activation", "sigmoid"}});
  row("P003/wmt14/abc_mlp-all-32-32-32", all_abc, "abc_mlp", 32, 32, tied);
  families.push_back(
      {"P003/wmt14/abc_mlp-all-32-32-32",
       {{"model.attention", "abc_mlp"}, {"model.encoder.attention_options.abc_mlp.slots", 32.}}});
  for (const double causal : {8., 16., 32., 64.}) {
    for (const double cross : {8., 16., 32., 64.}) {
      if (cross >= causal)
        row(StrCat("P003/wmt14-dev/abc_mlp-", int64_t(cross), "-", int64_t(causal)), wmt14,
            "abc_mlp", cross, causal, tied);
    }
  }
  row("P003/iwslt14/abc_random-128-64", iwslt14, "abc_random", 128, 64);
  row("P003/iwslt14/abc_mlp-128-64", iwslt14, "abc_mlp", 128, 64, tied);
  Settings wmt18 = mt + Settings{{"task.batch_tokens", 4096.0},
                                 {"model.norm", "pre"},
                                 {"train.schedule", "rsqrt"},
                                 {"train.warmup", 8000.},
                                 {"train.steps", 300'000.},  // not printed
                                 {"~train.lr", 2 / std::sqrt(512.)},
                                 {"train.beta2", .997},
                                 {"train.eps", 1e-9},
                                 {"model.attention_dropout", .1},
                                 {"model.ffn_dropout", .1},
                                 {"task.length", 256.}};
  families.push_back({"P001/wmt18/base", wmt18});
  std::erase_if(wmt18, [](const auto& setting) { return setting.first == "model.attention"; });
  for (const double k : {2., 4.})
    families.push_back({StrCat("P001/wmt18/k", int64_t(k), "-p4.toml"),
                        wmt18 + Settings{{"model.attention", "reuse"},
                                         {"model.cross.attention", "reuse"},
                                         {"model.attention_options.reuse.heads", k},
                                         {"model.attention_options.reuse.layers", 4.}}});
  return families;
}

}  // namespace cistern::testing

// Folders as transformers saves them, with random weights, against their forward passes written
// down here.
#include "cistern/models/hugging_face.h"

#include <ATen/ATen.h>

#include <filesystem>
#include <functional>
#include <map>

#include "cistern/base/testing_messages.h"
#include "cistern/io/atomic_file.h"
#include "cistern/models/masked_lm.h"
#include "cistern/models/testing_models.h"
#include "cistern/tensors/tensor_file.h"

namespace cistern {
namespace {

using namespace cistern::testing;
using Tensors = std::map<std::string, at::Tensor>;

constexpr int64_t kVocabulary = 19, kDim = 12, kHeads = 3, kLayers = 2, kHidden = 20, kPlaces = 10;

class Folder : public TestFolder {
 public:
  Json config;
  Tensors tensors;
  // A tensor of random numbers under this name.
  void Add(const std::string& name, at::IntArrayRef shape) {
    tensors[name] = at::randn(shape) * 0.3;
  }
  void AddBoth(const std::string& name, at::IntArrayRef shape, int64_t out) {
    Add(name + ".weight", shape), Add(name + ".bias", {out});
  }
  void Save() const {
    WriteFileAtomically(*this / "config.json", config.dump());
    TensorFile file;
    for (const auto& [name, value] : tensors) file.tensors.push_back({name, value});
    SaveTensors(*this / "model.safetensors", file);
  }
};

void MakeGpt2(Folder& f) {
  at::manual_seed(1);
  f.config = {{"model_type", "gpt2"}, {"vocab_size", kVocabulary}, {"n_positions", kPlaces},
              {"n_embd", kDim},       {"n_layer", kLayers},        {"n_head", kHeads},
              {"n_inner", kHidden},   {"layer_norm_epsilon", 1e-3}};
  f.Add("transformer.wte.weight", {kVocabulary, kDim});
  f.Add("transformer.wpe.weight", {kPlaces, kDim});
  f.AddBoth("transformer.ln_f", {kDim}, kDim);
  for (int64_t i = 0; i < kLayers; ++i) {
    const std::string h = StrCat("transformer.h.", i, ".");
    f.AddBoth(h + "ln_1", {kDim}, kDim), f.AddBoth(h + "ln_2", {kDim}, kDim);
    f.AddBoth(h + "attn.c_attn", {kDim, 3 * kDim}, 3 * kDim);
    f.AddBoth(h + "attn.c_proj", {kDim, kDim}, kDim);
    f.AddBoth(h + "mlp.c_fc", {kDim, kHidden}, kHidden);
    f.AddBoth(h + "mlp.c_proj", {kHidden, kDim}, kDim);
    f.Add(h + "attn.bias", {1, 1, kPlaces, kPlaces});  // a mask that old versions saved
  }
}

void MakeRoberta(Folder& f) {
  at::manual_seed(2);
  f.config = {{"model_type", "roberta"},
              {"vocab_size", kVocabulary},
              {"max_position_embeddings", kPlaces},
              {"hidden_size", kDim},
              {"num_hidden_layers", kLayers},
              {"num_attention_heads", kHeads},
              {"intermediate_size", kHidden},
              {"type_vocab_size", 1},
              {"layer_norm_eps", 1e-3},
              {"pad_token_id", 1}};
  const std::string e = "roberta.embeddings.";
  f.Add(e + "word_embeddings.weight", {kVocabulary, kDim});
  f.Add(e + "position_embeddings.weight", {kPlaces, kDim});
  f.Add(e + "token_type_embeddings.weight", {1, kDim});
  f.AddBoth(e + "LayerNorm", {kDim}, kDim);
  for (int64_t i = 0; i < kLayers; ++i) {
    const std::string h = StrCat("roberta.encoder.layer.", i, ".");
    for (const char* of : {"query", "key", "value"})
      f.AddBoth(h + "attention.self." + of, {kDim, kDim}, kDim);
    f.AddBoth(h + "attention.output.dense", {kDim, kDim}, kDim);
    f.AddBoth(h + "attention.output.LayerNorm", {kDim}, kDim);
    f.AddBoth(h + "intermediate.dense", {kHidden, kDim}, kHidden);
    f.AddBoth(h + "output.dense", {kDim, kHidden}, kDim);
    f.AddBoth(h + "output.LayerNorm", {kDim}, kDim);
  }
  f.AddBoth("lm_head.dense", {kDim, kDim}, kDim);
  f.AddBoth("lm_head.layer_norm", {kDim}, kDim);
  f.Add("lm_head.bias", {kVocabulary});
}

// What a pass needs, by the names of the file.
struct Pass {
  const Tensors& t;
  const at::Tensor& operator[](const std::string& name) const { return t.at(name); }
  at::Tensor Norm(const at::Tensor& x, const std::string& name) const {
    return at::layer_norm(x, {kDim}, t.at(name + ".weight"), t.at(name + ".bias"), 1e-3);
  }
  at::Tensor Linear(const at::Tensor& x, const std::string& name) const {
    return at::linear(x, t.at(name + ".weight"), t.at(name + ".bias"));
  }
  at::Tensor Conv1d(const at::Tensor& x, const std::string& name) const {  // GPT-2's [in, out]
    return at::matmul(x, t.at(name + ".weight")) + t.at(name + ".bias");
  }
};

// q, k, v [B,T,D]
at::Tensor Attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal) {
  const auto heads = [](const at::Tensor& x) {
    return x.view({x.size(0), x.size(1), kHeads, kDim / kHeads}).transpose(1, 2);
  };
  at::Tensor scores =
      at::matmul(heads(q), heads(k).transpose(2, 3)) / std::sqrt(double(kDim / kHeads));
  if (causal) {
    const int64_t T = q.size(1);
    scores = scores.masked_fill(at::ones({T, T}, at::kBool).triu(1), -1e9);
  }
  return at::matmul(scores.softmax(-1), heads(v)).transpose(1, 2).reshape(q.sizes());
}

at::Tensor Gpt2Logits(const Tensors& tensors, const at::Tensor& ids) {
  const Pass p{tensors};
  at::Tensor x = at::embedding(p["transformer.wte.weight"], ids) +
                 p["transformer.wpe.weight"].narrow(0, 0, ids.size(1));
  for (int64_t i = 0; i < kLayers; ++i) {
    const std::string h = StrCat("transformer.h.", i, ".");
    const auto qkv = p.Conv1d(p.Norm(x, h + "ln_1"), h + "attn.c_attn").split(kDim, 2);
    x = x + p.Conv1d(Attention(qkv[0], qkv[1], qkv[2], true), h + "attn.c_proj");
    x = x + p.Conv1d(at::gelu(p.Conv1d(p.Norm(x, h + "ln_2"), h + "mlp.c_fc"), "tanh"),
                     h + "mlp.c_proj");
  }
  return at::matmul(p.Norm(x, "transformer.ln_f"), p["transformer.wte.weight"].t());
}

at::Tensor RobertaLogits(const Tensors& tensors, const at::Tensor& ids) {
  const Pass p{tensors};
  const std::string e = "roberta.embeddings.";
  at::Tensor x = at::embedding(p[e + "word_embeddings.weight"], ids) +
                 p[e + "position_embeddings.weight"].narrow(0, 2, ids.size(1)) +
                 p[e + "token_type_embeddings.weight"][0];
  x = p.Norm(x, e + "LayerNorm");
  for (int64_t i = 0; i < kLayers; ++i) {
    const std::string h = StrCat("roberta.encoder.layer.", i, "."), a = h + "attention.self.";
    const at::Tensor y = Attention(p.Linear(x, a + "query"), p.Linear(x, a + "key"),
                                   p.Linear(x, a + "value"), false);
    x = p.Norm(x + p.Linear(y, h + "attention.output.dense"), h + "attention.output.LayerNorm");
    x = p.Norm(x + p.Linear(at::gelu(p.Linear(x, h + "intermediate.dense")), h + "output.dense"),
               h + "output.LayerNorm");
  }
  x = p.Norm(at::gelu(p.Linear(x, "lm_head.dense")), "lm_head.layer_norm");
  return at::matmul(x, p[e + "word_embeddings.weight"].t()) + p["lm_head.bias"];
}

at::Tensor Ids() {
  at::manual_seed(3);
  return at::randint(0, kVocabulary, {2, 7}, at::kLong);
}

TEST(HuggingFace, Gpt2GivesTheSameLogits) {
  const at::NoGradGuard guard;
  Folder f;
  MakeGpt2(f);
  f.Save();
  ASSERT_EQ(HuggingFaceKind(f.path()), "decoder_lm");
  const ForeignModel read = ReadHuggingFace(f.path(), -1);
  read.model->eval();
  EXPECT_TRUE(read.notes.empty()) << read.notes[0];
  auto& lm = dynamic_cast<LanguageModel&>(*read.model);
  ModelState state = lm.EmptyState(2);
  const at::Tensor ids = Ids();
  ExpectClose(lm.Extend(ids, state), Gpt2Logits(f.tensors, ids), 1e-5, "logits");
}

TEST(HuggingFace, RobertaGivesTheSameLogitsAndItsMask) {
  const at::NoGradGuard guard;
  Folder f;
  MakeRoberta(f);
  f.Save();
  ASSERT_EQ(HuggingFaceKind(f.path()), "masked_lm");
  const int64_t mask = 5;
  const ForeignModel read = ReadHuggingFace(f.path(), mask);
  read.model->eval();
  EXPECT_TRUE(read.notes.empty()) << read.notes[0];
  auto& lm = dynamic_cast<MaskedLm&>(*read.model);
  at::Tensor ids = Ids(), hidden = ids.clone();
  ids[0][2] = mask, hidden[0][2] = lm.mask_id();
  ExpectClose(lm.Logits(lm.Hidden(hidden)), RobertaLogits(f.tensors, ids), 1e-5, "logits");
  EXPECT_EQ(lm.config().max_length, kPlaces - 2);
  EXPECT_EQ(lm.config().embedding_std, 0);  // beside init.embedding it would be said twice
}

TEST(HuggingFace, WeightsOfHalfPrecisionAndNamesWithoutThePrefix) {
  const at::NoGradGuard guard;
  Folder f;
  MakeGpt2(f);
  Tensors short_names;
  for (auto& [name, value] : f.tensors) {
    value = value.to(at::kHalf).to(at::kFloat);
    short_names[name.substr(std::string("transformer.").size())] = value.to(at::kHalf);
  }
  Folder g;
  g.config = f.config, g.tensors = short_names;
  g.tensors["lm_head.weight"] = short_names["wte.weight"];  // saved again, though tied
  g.Save();
  const ForeignModel read = ReadHuggingFace(g.path(), -1);
  read.model->eval();
  auto& lm = dynamic_cast<LanguageModel&>(*read.model);
  ModelState state = lm.EmptyState(2);
  ExpectClose(lm.Extend(Ids(), state), Gpt2Logits(f.tensors, Ids()), 1e-5, "logits");
}

TEST(HuggingFace, WhatWouldBeComputedOtherwiseIsRefused) {
  const auto message = [](auto make, const std::function<void(Folder&)>& change) {
    Folder f;
    make(f);
    change(f);
    f.Save();
    return ErrorMessage([&] { ReadHuggingFace(f.path(), 0); });
  };
  const auto gpt2 = [&](const std::function<void(Folder&)>& c) { return message(MakeGpt2, c); };
  const auto roberta = [&](const std::function<void(Folder&)>& c) {
    return message(MakeRoberta, c);
  };
  EXPECT_EQ(gpt2([](Folder&) {}), "no error");
  ExpectContains(gpt2([](Folder& f) { f.config["scale_attn_by_inverse_layer_idx"] = true; }),
                 {"config.json", "scale_attn_by_inverse_layer_idx=true"});
  ExpectContains(gpt2([](Folder& f) { f.config["activation_function"] = "swish"; }),
                 {"activation_function=swish", "gelu_new"});
  ExpectContains(gpt2([](Folder& f) { f.config["model_type"] = "llama"; }),
                 {"model_type=llama", "gpt2 and roberta"});
  ExpectContains(gpt2([](Folder& f) { f.config["n_embd"] = "wide"; }), {"n_embd", "wide"});
  ExpectContains(gpt2([](Folder& f) { f.config["n_inner"] = -4; }), {"config.json: n_inner=-4"});
  ExpectContains(gpt2([](Folder& f) { f.config["n_positions"] = 1 << 24; }), {"'wpe.weight'"});
  ExpectContains(gpt2([](Folder& f) { f.config["n_inner"] = 1 << 24; }), {"'h.0.mlp.c_fc.weight'"});
  ExpectContains(gpt2([](Folder& f) { f.config["layer_norm_epsilon"] = -1; }),
                 {"config.json does not make a model here", "norm_eps"});
  ExpectContains(gpt2([](Folder& f) { f.tensors.erase("transformer.h.1.ln_2.bias"); }),
                 {"model.safetensors", "'h.1.ln_2.bias' is missing"});
  ExpectContains(gpt2([](Folder& f) {
                   f.Add("transformer.wpe.weight", {kPlaces + 1, kDim});
                 }),
                 {"'wpe.weight'", "[11, 12]", "[10, 12]"});
  ExpectContains(gpt2([](Folder& f) {
                   f.Add("lm_head.weight", {kVocabulary, kDim});
                 }),
                 {"'lm_head.weight'", "tied"});
  ExpectContains(gpt2([](Folder& f) {
                   f.Add("wte.weight", {kVocabulary, kDim});
                 }),
                 {"'wte.weight'", "with and without"});
  ExpectContains(roberta([](Folder& f) { f.config["position_embedding_type"] = "relative_key"; }),
                 {"position_embedding_type", "absolute"});
  ExpectContains(roberta([](Folder& f) { f.config["num_attention_heads"] = 0; }),
                 {"config.json: num_attention_heads=0"});
  ExpectContains(roberta([](Folder& f) { f.config["max_position_embeddings"] = 2; }),
                 {"max_position_embeddings"});
  ExpectContains(roberta([](Folder& f) { f.tensors.erase("lm_head.dense.weight"); }),
                 {"RobertaForMaskedLM"});
  Folder f;
  MakeGpt2(f);
  f.Save();
  std::filesystem::rename(f / "model.safetensors", f / "pytorch_model.bin");
  ExpectContains(ErrorMessage([&] { ReadHuggingFace(f.path(), -1); }),
                 {"no " + (f / "model.safetensors"), "pickle", "save_pretrained"});
  ExpectContains(ErrorMessage([&] { HuggingFaceKind(f / "nowhere"); }), {"nowhere/config.json"});
}

TEST(HuggingFace, WhatHasNoPlaceIsNamed) {
  Folder f;
  MakeRoberta(f);
  f.config["type_vocab_size"] = 2;
  f.Add("roberta.embeddings.token_type_embeddings.weight", {2, kDim});
  f.AddBoth("roberta.pooler.dense", {kDim, kDim}, kDim);
  f.Save();
  const std::vector<std::string> notes = ReadHuggingFace(f.path(), 0).notes;
  ASSERT_EQ(notes.size(), 3u);
  ExpectContains(notes[0], {"segments"});
  EXPECT_EQ(notes[2], "left: pooler.dense.weight");
}

}  // namespace
}  // namespace cistern

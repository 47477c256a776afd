// Luna's decoder (cross.memory): the memory goes from the encoder, or from a learned beginning,
// through the decoder's layers, each of which packs the source into it. Against plain loops over
// one row at a time, written from the released code (fairseq-apollo, luna_layer.py,
// luna_attention.py).
#include <cmath>
#include <map>

#include "cistern/attention/testing_mechanisms.h"
#include "cistern/models/encoder_decoder.h"
#include "cistern/models/testing_models.h"

namespace cistern {
namespace {

using namespace cistern::testing;

constexpr int64_t kVocab = 19, kModel = 12, kOf = 2, kSlots = 4;

ModelConfig Luna(SourceMemory memory) {
  ModelConfig c;
  c.kind = "encoder_decoder";
  c.vocab_size = kVocab, c.dim = kModel, c.heads = kOf, c.max_length = 64, c.layers = 2,
  c.decoder.layers = 3, c.ffn_dim = 16, c.bias = true, c.activation = Activation::kRelu;
  c.attention = {"luna"}, c.decoder.attention = {"luna_causal"}, c.cross.attention = {"luna"};
  c.attention_options = Json{{"luna", {{"slots", kSlots}}}, {"luna_causal", {{"slots", kSlots}}}};
  c.cross.memory = memory;
  return c;
}

// The released code for one row, in double; all of it [T,D] or [M,D].
class Plain {
 public:
  Plain(EncoderDecoder& model, const ModelConfig& config) : c_(config) {
    for (auto& p : model.named_parameters()) weights_[p.key()] = p.value().detach();
  }

  // Logits [T,V] of the target's tokens.
  at::Tensor Logits(const at::Tensor& source, const at::Tensor& target) const {
    at::Tensor x = weights_.at("embed_tokens.weight").index_select(0, source), memory;
    const bool of_encoder = c_.cross.memory == SourceMemory::kEncoder;
    memory = weights_.at("encoder.layers.0.attention.core.memory")[0];
    for (int64_t l = 0; l < 2; ++l) {
      const std::string at = StrCat("encoder.layers.", l, ".");
      const at::Tensor h = Before(x, at + "attention_norm"), p = Before(memory, at + "memory_norm");
      const at::Tensor packed = Pack(p, h, at + "attention.");
      x = Add(x, Unpack(h, packed, source.size(0), at + "attention."), at + "attention_norm");
      if (of_encoder || l == 0) memory = Add(memory, packed, at + "memory_norm");
      x = FeedForward(x, at);
    }
    x = Final(x, "encoder.norm");
    memory = of_encoder ? Final(memory, "encoder.memory_norm")
                        : weights_.at("decoder.layers.0.cross_attention.core.memory")[0];
    at::Tensor y = weights_.at("embed_tokens.weight").index_select(0, target);
    for (int64_t l = 0; l < 3; ++l) {
      const std::string at = StrCat("decoder.layers.", l, ".");
      y = Add(y,
              Causal(Before(y, at + "attention_norm"), memory, source.size(0), at + "attention."),
              at + "attention_norm");
      const at::Tensor packed =
          Pack(Before(memory, at + "cross_memory_norm"), x, at + "cross_attention.");
      y = Add(y,
              Unpack(Before(y, at + "cross_attention_norm"), packed, source.size(0),
                     at + "cross_attention."),
              at + "cross_attention_norm");
      if (l < 2) memory = Add(memory, packed, at + "cross_memory_norm");
      y = FeedForward(y, at);
    }
    return at::matmul(Final(y, "decoder.norm"), weights_.at("embed_tokens.weight").t());
  }

 private:
  static constexpr int64_t kWide = kModel / kOf;
  at::Tensor Map(const at::Tensor& x, const std::string& name) const {
    return at::matmul(x, weights_.at(name + ".weight").t()) + weights_.at(name + ".bias");
  }
  at::Tensor Norm(const at::Tensor& x, const std::string& name) const {
    const at::Tensor centred = x - x.mean(1, true);
    return centred / (centred.square().mean(1, true) + 1e-5).sqrt() *
               weights_.at(name + ".weight") +
           weights_.at(name + ".bias");
  }
  at::Tensor Before(const at::Tensor& x, const std::string& norm) const {
    return c_.norm == NormPlace::kPre ? Norm(x, norm) : x;
  }
  at::Tensor Add(const at::Tensor& x, const at::Tensor& y, const std::string& norm) const {
    return c_.norm == NormPlace::kPre ? x + y : Norm(x + y, norm);
  }
  at::Tensor Final(const at::Tensor& x, const std::string& norm) const {
    return c_.final_norm ? Norm(x, norm) : x;
  }
  at::Tensor FeedForward(const at::Tensor& x, const std::string& at) const {
    const at::Tensor h = at::relu(Map(Before(x, at + "ffn_norm"), at + "ffn.up_proj"));
    return Add(x, Map(h, at + "ffn.down_proj"), at + "ffn_norm");
  }
  static at::Tensor Head(const at::Tensor& x, int64_t h) { return x.narrow(1, h * kWide, kWide); }
  // How many slots are read: dynamic_projection never more than the source has tokens.
  int64_t Slots(int64_t tokens) const {
    return c_.attention_options["luna"].value("dynamic_projection", false)
               ? std::min(kSlots, tokens)
               : kSlots;
  }
  at::Tensor Pack(const at::Tensor& memory, const at::Tensor& x, const std::string& at) const {
    const at::Tensor q = Map(memory, at + "pq_proj"), c = Map(x, at + "pc_proj");
    std::vector<at::Tensor> heads;
    for (int64_t h = 0; h < kOf; ++h) {
      const at::Tensor a =
          at::softmax(at::matmul(Head(q, h), Head(c, h).t()) / std::sqrt(double(kWide)), 1);
      heads.push_back(at::matmul(a, Head(c, h)));
    }
    return at::cat(heads, 1);
  }
  at::Tensor Unpack(const at::Tensor& x, const at::Tensor& packed, int64_t tokens,
                    const std::string& at) const {
    const at::Tensor q = Map(x, at + "q_proj"),
                     c = Map(packed, at + "c_proj").narrow(0, 0, Slots(tokens));
    std::vector<at::Tensor> heads;
    for (int64_t h = 0; h < kOf; ++h) {
      const at::Tensor a =
          at::softmax(at::matmul(Head(q, h), Head(c, h).t()) / std::sqrt(double(kWide)), 1);
      heads.push_back(at::matmul(a, Head(c, h)));
    }
    return Map(at::cat(heads, 1), at + "o_proj");
  }
  at::Tensor Causal(const at::Tensor& x, const at::Tensor& memory, int64_t tokens,
                    const std::string& at) const {
    const at::Tensor q = Map(x, at + "q_proj"), fit = Map(x, at + "pc_proj"),
                     c = Map(x, at + "c_proj"), p = Map(memory, at + "pq_proj");
    std::vector<at::Tensor> rows;
    for (int64_t t = 0; t < x.size(0); ++t) {
      std::vector<at::Tensor> heads;
      for (int64_t h = 0; h < kOf; ++h) {
        at::Tensor sums = at::zeros({kSlots, kWide}, at::kDouble);  // of a_s c_s^T
        for (int64_t s = 0; s <= t; ++s) {
          const at::Tensor u = at::matmul(Head(p, h), Head(fit, h)[s]) / std::sqrt(double(kWide));
          sums = sums + ((1 + u.exp2()).log2()).unsqueeze(1) * Head(c, h)[s].unsqueeze(0);
        }
        const at::Tensor mean = sums.narrow(0, 0, Slots(tokens)) / double(t + 1);
        const at::Tensor b =
            at::softmax(at::matmul(mean, Head(q, h)[t]) / std::sqrt(double(kWide)), 0);
        heads.push_back(at::matmul(b, mean));
      }
      rows.push_back(at::cat(heads));
    }
    return Map(at::stack(rows), at + "o_proj");
  }

  const ModelConfig& c_;
  std::map<std::string, at::Tensor> weights_;
};

TEST(LunaDecoder, IsTheReleasedCode) {
  for (const SourceMemory memory : {SourceMemory::kEncoder, SourceMemory::kDecoder}) {
    for (const bool post : {true, false}) {
      for (const bool dynamic : {false, true}) {
        ModelConfig c = Luna(memory);
        c.norm = post ? NormPlace::kPost : NormPlace::kPre;
        c.final_norm = !post;
        if (dynamic) c.attention_options["luna"]["dynamic_projection"] = true;
        const auto m = Make<EncoderDecoder>(c);
        at::manual_seed(3);
        const std::vector<int64_t> lengths = {6, 3, 1};
        const at::Tensor source = at::randint(0, kVocab, {3, 6}, at::kLong),
                         target = at::randint(0, kVocab, {3, 5}, at::kLong);
        ModelState state = m->Encode(source, {Lengths(lengths), {}});
        const at::Tensor got = m->Extend(target, state);
        const Plain plain(*m, c);
        for (int64_t b = 0; b < 3; ++b) {
          ExpectClose(got[b], plain.Logits(source[b].narrow(0, 0, lengths[size_t(b)]), target[b]),
                      1e-11,
                      StrCat(NameOf(memory, SourceMemories()), post ? " post" : " pre",
                             dynamic ? " dynamic" : "", ", row ", b));
        }
      }
    }
  }
}

// What the source says changes how the target's tokens weigh each other, also where cross attention
// gives nothing: with memory=own they do not.
TEST(LunaDecoder, TheSourceReachesCausalAttention) {
  for (const SourceMemory memory : {SourceMemory::kOwn, SourceMemory::kEncoder}) {
    const auto m = Make<EncoderDecoder>(Luna(memory));
    {
      at::NoGradGuard guard;
      for (auto& p : m->named_parameters()) {
        if (p.key().find("cross_attention.o_proj") != std::string::npos) p.value().zero_();
      }
    }
    at::manual_seed(3);
    const at::Tensor target = at::randint(0, kVocab, {1, 5}, at::kLong);
    const auto logits = [&](int64_t seed) {
      at::manual_seed(uint64_t(seed));
      ModelState state = m->Encode(at::randint(0, kVocab, {1, 6}, at::kLong), {Lengths({6}), {}});
      return m->Extend(target, state);
    };
    const double change = RelRms(logits(5), logits(4));
    if (memory == SourceMemory::kOwn) {
      EXPECT_LT(change, 1e-12);
    } else {
      EXPECT_GT(change, 1e-4);
    }
  }
}

// luna_base of the released code, tied: its modules counted one by one. The norm of the memory
// after the last layer, which nothing reads, is left out.
TEST(LunaDecoder, ParametersAreThoseOfTheReleasedCode) {
  ModelConfig c = Luna(SourceMemory::kEncoder);
  c.norm = NormPlace::kPost, c.final_norm = false;
  const int64_t D = kModel, map = D * D + D, norm = 2 * D, ffn = 2 * D * 16 + D + 16;
  const int64_t encoder_layer = 5 * map + ffn + 3 * norm,  // pq, q, pc, c, out
      decoder_layer = 2 * 5 * map + ffn + 4 * norm;
  const int64_t want = kVocab * D + kSlots * D + 2 * encoder_layer + 3 * decoder_layer - norm;
  EXPECT_EQ(MakeModel(c, 1)->ParameterCount(), want);
  c.cross.memory =
      SourceMemory::kDecoder;  // a beginning of its own; the encoder's last is not read
  EXPECT_EQ(MakeModel(c, 1)->ParameterCount(), want + kSlots * D - norm);
  c.cross.memory = SourceMemory::kOwn;  // cross and causal attention have one each
  EXPECT_EQ(MakeModel(c, 1)->ParameterCount(), want + 2 * kSlots * D - 3 * norm);
}

TEST(LunaDecoder, WhatCannotBeIsRefused) {
  const auto error = [](SourceMemory memory, auto&& change) {
    ModelConfig c = Luna(memory);
    change(c);
    return Thrown([&] { MakeModel(c, 1); });
  };
  const auto encoder = SourceMemory::kEncoder, decoder = SourceMemory::kDecoder;
  ExpectContains(error(encoder, [](ModelConfig& c) { c.cross.attention = {"softmax"}; }),
                 {"cross.memory=encoder", "softmax", "cross.attention=luna"});
  ExpectContains(error(encoder, [](ModelConfig& c) { c.attention = {"latte"}; }),
                 {"cross.memory=encoder", "encoder.attention=luna", "cross.memory=decoder"});
  ExpectContains(
      error(decoder, [](ModelConfig& c) { c.attention_options["luna_causal"]["slots"] = 5; }),
      {"luna_causal", "5 slots", "4", "one memory"});
  ExpectContains(
      error(encoder, [](ModelConfig& c) { c.encoder.attention_options["luna"]["slots"] = 7; }),
      {"layer 1 of the encoder", "7 slots"});
  ExpectContains(error(decoder,
                       [](ModelConfig& c) {
                         c.cross.layer_options = Json{{"1", {{"luna", {{"tie_kv", false}}}}}};
                       }),
                 {"layers 0 and 1", "one memory"});
  ExpectContains(error(encoder,
                       [](ModelConfig& c) {
                         c.encoder.dim = 24;
                         c.own["encoder_decoder"]["share_embeddings"] = false;
                       }),
                 {"24 wide", "12", "cross.memory=decoder"});
  ModelConfig other;
  other.vocab_size = kVocab, other.cross.memory = encoder;
  ExpectContains(Thrown([&] { MakeModel(other, 1); }), {"no cross attention", "cross.memory"});
}

}  // namespace
}  // namespace cistern

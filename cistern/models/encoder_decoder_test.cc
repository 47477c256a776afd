// Sequence to sequence: every mechanism that has a cross form, decoding step by step, padding,
// gradients, states, folders, refusals.
#include "cistern/models/encoder_decoder.h"

#include <algorithm>

#include "cistern/attention/testing_mechanisms.h"
#include "cistern/base/error.h"
#include "cistern/io/test_folder.h"
#include "cistern/models/decoder_lm.h"
#include "cistern/models/model_state_file.h"
#include "cistern/models/testing_models.h"

namespace cistern {
namespace {

using namespace cistern::testing;
using ops::ImplName;
using ops::ImplScope;

constexpr int64_t kVocab = 19;

ModelConfig Config(const std::string& cross = "softmax", const std::string& decoder = "latte",
                   const std::string& encoder = "softmax") {
  ModelConfig c;
  c.kind = "encoder_decoder";
  c.vocab_size = kVocab, c.dim = 12, c.heads = 2, c.max_length = 64, c.layers = 2,
  c.decoder.layers = 3;
  c.attention = {encoder}, c.decoder.attention = {decoder}, c.cross.attention = {cross};
  for (const MechanismInfo* info : Mechanisms()) c.attention_options[info->name] = info->cases[0];
  return c;
}

// The memory goes on from the encoder (luna_decoder_test).
ModelConfig LunaDecoder() {
  ModelConfig c = Config("luna", "luna_causal", "luna");
  c.cross.memory = SourceMemory::kEncoder;
  return c;
}

// Every cross mechanism; norms, positions, convolution, embeddings and mechanisms per layer in
// some.
std::vector<ModelConfig> Configs() {
  std::vector<ModelConfig> all;
  for (const MechanismInfo* info : Mechanisms()) {
    if (info->Supports(Form::kCross) && info->verbs) all.push_back(Config(info->name));
  }
  ModelConfig c = Config("latte", "softmax");
  c.norm = NormPlace::kPost, c.positions = PositionKind::kRotary, c.bias = true,
  c.own["encoder_decoder"]["share_embeddings"] = false, c.target_vocab_size = 11,
  c.final_norm = false;
  all.push_back(c);
  c = Config();
  c.cross.attention = {"latte", "softmax", "abc_mlp"},
  c.decoder.attention = {"window", "gated_slots", "softmax"};
  c.conv = 3, c.positions = PositionKind::kLearned, c.tie_embeddings = false, c.head_bias = true;
  all.push_back(c);
  c = Config("reuse", "reuse", "reuse");
  c.attention_options["reuse"] = {{"heads", 1}, {"placement", "alternate"}, {"keep", "scores"}};
  all.push_back(c);
  c.attention_options["reuse"] = {{"placement", "full"}};
  c.positions = PositionKind::kRotary;
  all.push_back(c);
  c.attention_options["reuse"] = {{"placement", "skip"}, {"layers", 1}};
  all.push_back(c);
  all.push_back(LunaDecoder());
  c = Config("luna", "luna_causal");
  c.cross.memory = SourceMemory::kDecoder, c.norm = NormPlace::kPost;
  all.push_back(c);
  c = LunaDecoder();
  c.decoder.attention = {"luna_causal", "latte", "luna_causal"};
  c.attention_options["luna"] = {{"slots", 5}, {"dynamic_projection", true}, {"tie_kv", false}};
  c.attention_options["luna_causal"] = {{"slots", 5}, {"weight", "elu"}};
  all.push_back(c);
  return all;
}

std::string Name(const ModelConfig& c) {
  return c.Summary() + " " + c.attention_options["reuse"].dump();
}

double Tolerance(const ModelConfig& c) {
  double wide = 1;
  for (const Form form : {Form::kBidirectional, Form::kCausal, Form::kCross}) {
    const LayerStack stack = c.Stack(form);
    for (const std::string& name : stack.options().attention)
      wide = std::max(wide, FindMechanism(name).tolerance / 1e-6);
  }
  return 1e-11 * wide;
}

at::Tensor Source(int64_t batch, int64_t length) {
  return at::randint(0, kVocab, {batch, length}, at::kLong);
}
at::Tensor Target(const ModelConfig& c, int64_t batch, int64_t length) {
  return at::randint(0, c.TargetVocabSize(), {batch, length}, at::kLong);
}

at::Tensor Steps(EncoderDecoder& m, const at::Tensor& target, ModelState& state) {
  std::vector<at::Tensor> outs;
  for (int64_t t = 0; t < target.size(1); ++t)
    outs.push_back(m.Extend(target.narrow(1, t, 1), state));
  return at::cat(outs, 1);
}

at::Tensor Whole(EncoderDecoder& m, const at::Tensor& source, const at::Tensor& lengths,
                 const at::Tensor& target, const ops::Mask& mask = {}) {
  ModelState state = m.Encode(source, {lengths, {}});
  return m.Extend(target, state, mask);
}

TEST(EncoderDecoder, TeacherForcingEqualsDecodingStepByStep) {
  for (const ModelConfig& config : Configs()) {
    const auto m = Make<EncoderDecoder>(config);
    at::manual_seed(3);
    const at::Tensor source = Source(2, 7), target = Target(config, 2, 9),
                     lengths = Lengths({7, 4});
    for (const ops::Impl impl : kImpls) {
      ImplScope scope(impl);
      const std::string what = Name(config) + " " + ImplName(impl);
      const at::Tensor whole = Whole(*m, source, lengths, target);
      EXPECT_EQ(whole.sizes(), at::IntArrayRef({2, 9, config.TargetVocabSize()})) << what;
      ModelState state = m->Encode(source, {lengths, {}});
      const at::Tensor steps = Steps(*m, target, state);
      ExpectClose(steps, whole, Tolerance(config), what);
      EXPECT_TRUE(at::equal(state.positions, Lengths({9, 9}))) << what;
      const auto g = Gradients(steps.square().sum(), m->parameters()),
                 want = Gradients(whole.square().sum(), m->parameters());
      for (size_t i = 0; i < g.size(); ++i) {
        EXPECT_LE((g[i] - want[i]).norm().item<double>(),
                  10 * Tolerance(config) * (want[i].norm().item<double>() + 1))
            << what << i;
      }
      at::NoGradGuard guard;
      state = m->Encode(source, {lengths, {}});
      ExpectClose(Steps(*m, target, state), whole, Tolerance(config), what + " in place");
    }
  }
}

TEST(EncoderDecoder, PaddingIsNotSeenAndRowsAreAlone) {
  for (const ModelConfig& config : Configs()) {
    const auto m = Make<EncoderDecoder>(config);
    at::manual_seed(3);
    const std::vector<int64_t> source_lengths = {7, 3, 1}, target_lengths = {2, 5, 4};
    const at::Tensor source = Source(3, 7), target = Target(config, 3, 5),
                     lengths = Lengths(source_lengths);
    const ops::Mask mask = {Lengths(target_lengths), {}};
    const at::Tensor real = (at::arange(5).unsqueeze(0) < mask.lengths->unsqueeze(1)).unsqueeze(2);
    for (const ops::Impl impl : kImpls) {
      ImplScope scope(impl);
      const std::string what = Name(config) + " " + ImplName(impl);
      const at::Tensor got = Whole(*m, source, lengths, target, mask) * real;
      ExpectClose(Whole(*m, at::cat({source, Source(3, 4)}, 1), lengths, target, mask) * real, got,
                  Tolerance(config), what + ", more source");
      ModelState state = m->Encode(source, {lengths, {}});
      m->Extend(target, state, mask);
      EXPECT_TRUE(at::equal(state.positions, *mask.lengths)) << what;
      const at::Tensor next = Target(config, 3, 2), more = m->Extend(next, state);
      for (int64_t b = 0; b < 3; ++b) {
        const int64_t s = source_lengths[size_t(b)], t = target_lengths[size_t(b)];
        const at::Tensor joined =
            at::cat({target.narrow(0, b, 1).narrow(1, 0, t), next.narrow(0, b, 1)}, 1);
        const at::Tensor alone =
            Whole(*m, source.narrow(0, b, 1).narrow(1, 0, s), Lengths({s}), joined);
        ExpectClose(got.narrow(0, b, 1).narrow(1, 0, t), alone.narrow(1, 0, t), Tolerance(config),
                    what + ", row alone");
        ExpectClose(more.narrow(0, b, 1), alone.narrow(1, t, 2), Tolerance(config),
                    what + ", goes on");
      }
    }
    // What is real is seen.
    at::Tensor other = source.clone();
    other[1][2] = (other[1][2] + 1) % kVocab;
    const at::Tensor got = Whole(*m, source, lengths, target, mask),
                     changed = Whole(*m, other, lengths, target, mask);
    EXPECT_GT(RelRms(changed[1].narrow(0, 0, 5), got[1].narrow(0, 0, 5)), 1e-6) << Name(config);
    ExpectClose(changed[0].narrow(0, 0, 2), got[0].narrow(0, 0, 2), 1e-13, "another row");
  }
}

TEST(EncoderDecoder, GradientsEqualDifferences) {
  for (const ModelConfig& config :
       {Config("latte", "softmax"), Config("softmax", "abc_mlp", "latte"),
        Config("reuse", "reuse", "reuse"), LunaDecoder()}) {
    const auto m = Make<EncoderDecoder>(config);
    at::manual_seed(3);
    const at::Tensor source = Source(2, 5), target = Target(config, 2, 4),
                     lengths = Lengths({5, 3});
    at::Tensor targets = Target(config, 2, 4);
    targets[1][3] = -100;
    const auto loss = [&] {
      ModelState state = m->Encode(source, {lengths, {}});
      return m->Loss(m->Hidden(target, state, {Lengths({4, 3}), {}}), targets);
    };
    const auto parameters = m->named_parameters();
    const auto gradients = Gradients(loss(), m->parameters());
    at::NoGradGuard guard;
    size_t i = 0;
    for (auto& p : parameters) {
      at::Tensor value = p.value();
      const at::Tensor direction = at::randn_like(value), before = value.clone();
      const double step = 1e-5;
      value.copy_(before + step * direction);
      const double up = loss().item<double>();
      value.copy_(before - step * direction);
      const double down = loss().item<double>(), want = (up - down) / (2 * step),
                   got = (gradients[i++] * direction).sum().item<double>();
      value.copy_(before);
      EXPECT_NEAR(got, want, 1e-7 * std::max(1.0, std::abs(want)))
          << Name(config) << " " << p.key();
    }
    ModelState state = m->Encode(source, {lengths, {}});
    ExpectClose(loss(), NextTokenLoss(m->Extend(target, state, {Lengths({4, 3}), {}}), targets),
                1e-12, "loss");
  }
}

TEST(EncoderDecoder, StatesAreValues) {
  for (const ModelConfig& config : Configs()) {
    const auto m = Make<EncoderDecoder>(config);
    at::NoGradGuard guard;
    at::manual_seed(3);
    const std::string what = Name(config);
    const at::Tensor source = Source(2, 6), lengths = Lengths({6, 4}), first = Target(config, 2, 3),
                     next = Target(config, 4, 3);
    ModelState state = m->Encode(source, {lengths, {}});
    m->Extend(first, state);
    const ModelState kept = state.Clone();
    int64_t bytes = state.positions.nbytes();
    for (const State& layer : state.layers) bytes += layer.Bytes();
    EXPECT_EQ(state.Bytes(), bytes) << what;
    const at::Tensor rows = at::tensor({1, 0, 0, 1}, at::kLong);  // beams
    ModelState beams = state.Reorder(rows);
    const auto pick = [&](const at::Tensor& x) { return x.index_select(0, rows); };
    const at::Tensor want =
        Whole(*m, pick(source), pick(lengths), at::cat({pick(first), next}, 1)).narrow(1, 3, 3);
    ExpectClose(m->Extend(next, beams), want, Tolerance(config), what + ", beams");
    m->Extend(next.narrow(0, 2, 2), state);  // must not reach the clone
    ModelState again = kept.Clone();
    ExpectClose(m->Extend(next.narrow(0, 2, 2), again), want.narrow(0, 2, 2), Tolerance(config),
                what + ", clone");
  }
}

TEST(EncoderDecoder, StateBytesAreKnownBeforeARun) {
  at::NoGradGuard guard;
  for (const ModelConfig& config : Configs()) {
    const auto m = Make<EncoderDecoder>(config);
    for (const auto& [source, target] : {std::pair{6, 0}, std::pair{1, 9}, std::pair{30, 12}}) {
      ModelState state = m->Encode(Source(2, source), {Lengths({source, source}), {}});
      m->Extend(Target(config, 2, target / 3), state);
      m->Extend(Target(config, 2, target - target / 3), state);
      EXPECT_EQ(m->Compact(state).Bytes(), m->StateBytes(2, target, source))
          << Name(config) << " " << source << " " << target;
    }
  }
  // Decoding floats, the target's states have a form of their own; the source's are only read.
  for (const char* mechanism : {"latte", "abc_mlp"}) {
    ModelConfig config = Config(mechanism, mechanism);
    config.dim = 64;
    const auto m = std::dynamic_pointer_cast<EncoderDecoder>(MakeModel(config, 1));
    m->eval();
    ModelState state = m->Encode(Source(2, 9), {});
    for (int i = 0; i < 3; ++i) m->Extend(Target(config, 2, 1), state);
    EXPECT_EQ(m->Compact(state).Bytes(), m->StateBytes(2, 3, 9)) << mechanism;
  }
  const auto bounded = Make<EncoderDecoder>(Config("latte", "latte"));
  EXPECT_EQ(bounded->StateBytes(1, 0, 0), bounded->StateBytes(1, 1'000'000, 1'000'000));
  const auto cross = Make<EncoderDecoder>(
      Config("softmax", "latte"));  // three layers of keys and values, 12 doubles wide
  EXPECT_EQ(cross->StateBytes(2, 5, 107) - cross->StateBytes(2, 5, 7), 2 * 3 * 100 * 2 * 12 * 8);
}

TEST(EncoderDecoder, TheTargetIsCutBackAndTheSourceStays) {
  at::NoGradGuard guard;
  ModelConfig config = Config("latte", "softmax");
  config.positions = PositionKind::kRotary;
  const auto m = Make<EncoderDecoder>(config);
  at::manual_seed(3);
  const at::Tensor source = Source(2, 7), lengths = Lengths({7, 4}), target = Target(config, 2, 9),
                   next = Target(config, 2, 3);
  ModelState state = m->Encode(source, {lengths, {}});
  m->Extend(target, state);
  m->Truncate(state, 4);
  const at::Tensor want =
      Whole(*m, source, lengths, at::cat({target.narrow(1, 0, 4), next}, 1)).narrow(1, 4, 3);
  ExpectClose(m->Extend(next, state), want, 1e-11, "cut back");
  EXPECT_TRUE(at::equal(state.positions, Lengths({7, 7})));
  ExpectContains(Thrown([&] { m->Truncate(state, 8); }), {"[encoder_decoder]", "7 tokens", "8"});
  ModelState uneven = m->Encode(source, {lengths, {}});
  m->Extend(target, uneven, {Lengths({9, 5}), {}});
  ExpectContains(Thrown([&] { m->Truncate(uneven, 2); }),
                 {"[encoder_decoder]", "padded or packed", "Clone"});
  const auto fixed = Make<EncoderDecoder>(Config("softmax", "latte"));
  ModelState whole = fixed->Encode(source, {lengths, {}});
  fixed->Extend(target, whole);
  ExpectContains(Thrown([&] { fixed->Truncate(whole, 2); }), {"layer 0", "latte", "Clone"});
}

TEST(EncoderDecoder, AFileGoesOnToTheBit) {
  at::NoGradGuard guard;
  const TestFolder folder;
  const std::string path = folder / "a.state";
  for (const ModelConfig& config : Configs()) {
    const auto m = Make<EncoderDecoder>(config);
    at::manual_seed(3);
    ModelState state = m->Encode(Source(3, 7), {Lengths({7, 1, 4}), {}});
    m->Extend(Target(config, 3, 5), state, {Lengths({5, 0, 2}), {}});
    m->Extend(Target(config, 3, 1), state);
    SaveModelState(path, *m, {state, {}, {{"tokenizer", "17"}}});
    ModelState loaded = LoadModelState(path, *m, {{"tokenizer", "17"}}).state;
    ASSERT_EQ(loaded.layers.size(), state.layers.size());
    EXPECT_EQ(loaded.Bytes(), m->Compact(state).Bytes()) << Name(config);
    for (const int64_t length : {4, 1, 1}) {
      const at::Tensor target = Target(config, 3, length);
      ExpectSameBits(m->Extend(target, loaded), m->Extend(target, state), Name(config));
    }
    EXPECT_TRUE(at::equal(loaded.positions, state.positions));
  }
  // Of another model: one with other cross attention has other layers, a language model has fewer.
  const auto m = Make<EncoderDecoder>(Config("latte"));
  ModelState state = m->Encode(Source(1, 3), {Lengths({3}), {}});
  SaveModelState(path, *m, {state, {}, {}});
  ExpectContains(Thrown([&] { LoadModelState(path, *Make<EncoderDecoder>(Config("softmax"))); }),
                 {"another model", "latte,latte,latte,latte,latte,latte",
                  "latte,latte,latte,softmax,softmax,softmax"});
  ModelConfig lm;
  lm.vocab_size = kVocab, lm.dim = 12, lm.heads = 2, lm.layers = 3, lm.attention = {"latte"};
  const auto decoder = std::dynamic_pointer_cast<DecoderLm>(MakeModel(lm, 1));
  decoder->to(at::kDouble);
  ExpectContains(Thrown([&] { LoadModelState(path, *decoder); }),
                 {"another model", "those of this model latte,latte,latte"});
}

// A reused head of cross attention needs no keys: its layer caches the source's values alone.
TEST(EncoderDecoder, ReuseHasListsOfItsOwnForSelfAndCross) {
  ModelConfig config = Config("reuse", "reuse");
  config.attention_options["reuse"] = {{"placement", "full"}};
  const auto m = Make<EncoderDecoder>(config);
  const ModelState state = m->Encode(Source(2, 6), {Lengths({6, 4}), {}});
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(state.layers[i]["k"].size(1), i == 0 ? 2 : 0);
    EXPECT_EQ(state.layers[3 + i]["k"].sizes(), at::IntArrayRef({2, i == 0 ? 2 : 0, 6, 6}));
    EXPECT_EQ(state.layers[3 + i]["v"].sizes(), at::IntArrayRef({2, 2, 6, 6}));
  }
  EXPECT_FALSE(m->named_parameters().contains("decoder.layers.1.cross_attention.q_proj.weight"));
  EXPECT_TRUE(m->named_parameters().contains("decoder.layers.1.cross_attention.v_proj.weight"));
  // Nothing copied: softmax.
  config.attention_options["reuse"] = {{"heads", 0}};
  const at::Tensor source = Source(2, 6), target = Target(config, 2, 5), lengths = Lengths({6, 4});
  ExpectClose(Whole(*Make<EncoderDecoder>(config), source, lengths, target),
              Whole(*Make<EncoderDecoder>(Config("softmax", "softmax")), source, lengths, target),
              1e-13, "K=0");
}

TEST(EncoderDecoder, ReuseKeepsHandlesOrScores) {
  ModelConfig config = Config("reuse", "reuse", "reuse");
  for (const std::string placement : {"full", "alternate"}) {
    config.attention_options["reuse"] = {{"placement", placement}};
    const auto handles = Make<EncoderDecoder>(config);
    config.attention_options["reuse"]["keep"] = "scores";
    const auto scores = Make<EncoderDecoder>(config);
    at::manual_seed(3);
    const at::Tensor source = Source(2, 6), target = Target(config, 2, 5),
                     lengths = Lengths({6, 4});
    const at::Tensor a = Whole(*handles, source, lengths, target),
                     b = Whole(*scores, source, lengths, target);
    ExpectClose(b, a, 1e-12, placement);
    const auto g = Gradients(b.square().sum(), scores->parameters()),
               want = Gradients(a.square().sum(), handles->parameters());
    for (size_t i = 0; i < g.size(); ++i) ExpectClose(g[i], want[i], 1e-9, placement);
  }
}

// ---- sizes, folders, refusals

TEST(EncoderDecoder, Parameters) {
  ModelConfig c = Config("softmax", "softmax", "softmax");
  const int64_t D = c.dim, attention = 4 * D * D, ffn = 8 * D * D, norm = 2 * D;
  const int64_t blocks =
      2 * (attention + ffn + 2 * norm) + 3 * (2 * attention + ffn + 3 * norm) + 2 * norm;
  EXPECT_EQ(MakeModel(c, 1)->ParameterCount(), blocks + kVocab * D);
  c.own["encoder_decoder"]["share_embeddings"] = false, c.target_vocab_size = 11;
  EXPECT_EQ(MakeModel(c, 1)->ParameterCount(), blocks + (kVocab + 11) * D);
  c.tie_embeddings = false, c.head_bias = true;
  EXPECT_EQ(MakeModel(c, 1)->ParameterCount(), blocks + (kVocab + 11) * D + 11 * (D + 1));
  EXPECT_EQ(c.Summary(),
            "encoder softmax, 2 layers x 12; decoder softmax, 3 layers x 12 and softmax to the "
            "source, 2 heads");
  c.decoder.layers = 0, c.decoder.attention.clear(), c.attention = {"latte"};
  EXPECT_EQ(c.Summary(),
            "encoder latte, 2 layers x 12; decoder latte, 2 layers x 12 and softmax to the source, "
            "2 heads");
}

TEST(EncoderDecoder, FoldersRoundTrip) {
  for (const ModelConfig& config : Configs()) {
    const TestFolder folder;
    const auto m = Make<EncoderDecoder>(config);
    SaveModel(*m, folder.path());
    const auto loaded = std::dynamic_pointer_cast<EncoderDecoder>(LoadModel(folder.path()));
    ASSERT_TRUE(loaded) << Name(config);
    ModelConfig a = config, b = loaded->config();
    EXPECT_EQ(a.Describe().Write(), b.Describe().Write());
    const at::Tensor source = Source(2, 6), target = Target(config, 2, 5),
                     lengths = Lengths({6, 4});
    ExpectSameBits(Whole(*loaded, source, lengths, target), Whole(*m, source, lengths, target),
                   Name(config));
  }
}

TEST(EncoderDecoder, WhatCannotBeIsRefused) {
  const auto error = [](auto&& change) {
    ModelConfig c = Config();
    change(c);
    return Thrown([&] { MakeModel(c, 1); });
  };
  EXPECT_EQ(error([](ModelConfig&) {}), "no error");
  ExpectContains(error([](ModelConfig& c) { c.cross.attention = {"gated_slots"}; }),
                 {"gated_slots", "no cross"});
  ExpectContains(error([](ModelConfig& c) { c.attention = {"gated_slots"}; }),
                 {"gated_slots", "no bidirectional"});
  ExpectContains(error([](ModelConfig& c) { c.cross.attention = {"sofmax"}; }),
                 {"sofmax", "softmax"});
  ExpectContains(error([](ModelConfig& c) {
                   c.cross.attention = {"latte", "latte"};
                 }),
                 {"cross.attention lists 2", "3 layers"});
  ExpectContains(error([](ModelConfig& c) {
                   c.decoder.attention = {"latte", "latte"};
                 }),
                 {"decoder.attention lists 2", "3 layers"});
  ExpectContains(error([](ModelConfig& c) {
                   c.attention = {"latte", "latte"};
                   c.decoder.attention.clear();
                 }),
                 {"attention lists 2", "3 layers of the decoder", "decoder.attention"});
  EXPECT_EQ(error([](ModelConfig& c) { c.cross.attention.clear(); }), "no error");  // softmax
  ExpectContains(error([](ModelConfig& c) { c.target_vocab_size = 7; }),
                 {"target_vocab_size=7", "share_embeddings=false"});
  EXPECT_EQ(error([](ModelConfig& c) { c.head_bias = true; }), "no error");
  ExpectContains(error([](ModelConfig& c) { c.vocab_size = 0; }), {"vocab_size"});
  ExpectContains(error([](ModelConfig& c) {
                   c.cross.attention = {"latte", "reuse", "softmax"};
                 }),
                 {"cross.attention", "latte leaves none"});
  const auto m = Make<EncoderDecoder>(Config());
  const at::Tensor source = Source(2, 6), target = Target(Config(), 2, 5),
                   lengths = Lengths({6, 4});
  ExpectContains(Thrown([&] {
                   Whole(*m, source, lengths, target, {{}, Starts(2, 5, {{0, 2}})});
                 }),
                 {"[encoder_decoder]", "source each"});
  ExpectContains(Thrown([&] { Whole(*m, source, Lengths({6}), target); }),
                 {"[B] = [2]", "lengths"});
  ModelState none;
  ExpectContains(Thrown([&] { m->Extend(target, none); }), {"0 layers", "Encode"});
}

}  // namespace
}  // namespace cistern

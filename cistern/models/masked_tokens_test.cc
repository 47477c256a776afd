// Models with masked tokens: prompts padded on the left, rows with holes.
#include "cistern/attention/testing_mechanisms.h"
#include "cistern/base/error.h"
#include "cistern/io/test_folder.h"
#include "cistern/models/encoder_classifier.h"
#include "cistern/models/language_model.h"
#include "cistern/models/masked_lm.h"
#include "cistern/models/span_predictor.h"
#include "cistern/models/two_tower.h"

namespace cistern {
namespace {

using namespace cistern::testing;

ModelConfig Config(const std::string& kind, const std::string& attention,
                   const std::string& positions) {
  ModelConfig c;
  c.kind = kind, c.vocab_size = 23, c.dim = 12, c.heads = 2, c.max_length = 64;
  c.layers = 2;
  c.attention = {attention};
  c.positions = ValueOf(positions, PositionKinds());
  if (FindModel(kind).classifies) c.classes = 5;
  return c;
}

// ids [B,T], zeros where they are masked; the rows apart.
struct Batch {
  at::Tensor ids = at::zeros({3, 9}, at::kLong), valid = at::zeros({3, 9}, at::kBool);
  std::vector<at::Tensor> rows;
};
Batch MakeBatch() {
  Batch b;
  const std::vector<std::vector<int64_t>> real = {
      {4, 5, 6, 7, 8}, {0, 1, 2, 3, 4, 5, 6, 7, 8}, {1, 4, 5, 8}};
  for (int64_t i = 0; i < 3; ++i) {
    const at::Tensor index = at::tensor(real[size_t(i)]),
                     row = at::randint(1, 23, {index.size(0)}, at::kLong);
    b.ids[i].index_copy_(0, index, row);
    b.valid[i].index_fill_(0, index, true);
    b.rows.push_back(row.unsqueeze(0));
  }
  return b;
}

TEST(MaskedTokens, PromptsPaddedOnTheLeftGoOnAsEachAlone) {
  for (const std::string attention : {"latte", "softmax", "window", "gated_slots"}) {
    for (const std::string positions : {"learned", "none"}) {
      ModelConfig config = Config("decoder_lm", attention, positions);
      config.conv = 3;
      const auto made = MakeModel(config, 3);
      auto& model = dynamic_cast<LanguageModel&>(*made);
      model.to(at::kDouble);
      model.eval();
      at::NoGradGuard guard;
      const Batch b = MakeBatch();
      ops::Mask mask;
      mask.valid = b.valid;
      ModelState state = model.EmptyState(3);
      const at::Tensor logits = model.Extend(b.ids, state, mask),
                       next = at::randint(1, 23, {3, 2}, at::kLong),
                       after = model.Extend(next, state, {});
      for (int64_t i = 0; i < 3; ++i) {
        const std::string what = attention + " " + positions + " row " + std::to_string(i);
        ModelState alone = model.EmptyState(1);
        const at::Tensor want = model.Extend(b.rows[size_t(i)], alone, {});
        EXPECT_EQ(want.size(1), b.valid[i].sum().item<int64_t>());
        ExpectClose(logits[i].index({b.valid[i]}), want[0], 1e-11, what);
        ExpectClose(after[i], model.Extend(next.narrow(0, i, 1), alone, {})[0], 1e-11,
                    what + " goes on");
      }
    }
  }
}

TEST(MaskedTokens, AClassifierReadsTheOthersAlone) {
  for (const std::string attention : {"latte", "softmax", "linformer", "luna"}) {
    const auto made = MakeModel(Config("encoder_classifier", attention, "learned"), 3);
    auto& model = dynamic_cast<EncoderClassifier&>(*made);
    model.to(at::kDouble);
    model.eval();
    at::NoGradGuard guard;
    const Batch b = MakeBatch();
    NamedTensors inputs;
    inputs.Set("ids", b.ids), inputs.Set("lengths", Lengths({9, 9, 6})),
        inputs.Set("valid", b.valid);
    const at::Tensor logits = model.Logits(inputs);
    for (int64_t i = 0; i < 3; ++i) {
      const at::Tensor row = i < 2 ? b.rows[size_t(i)] : b.rows[2].narrow(1, 0, 3);
      ExpectClose(logits.narrow(0, i, 1), model.Forward(row, Lengths({row.size(1)})), 1e-11,
                  attention + " row " + std::to_string(i));
    }
  }
}

TEST(MaskedTokens, ADecoderReadsASourceAsWithoutThem) {
  for (const std::string cross : {"softmax", "latte", "abc_mlp", "luna"}) {
    ModelConfig config = Config("encoder_decoder", "latte", "learned");
    config.cross.attention = {cross};
    const auto made = MakeModel(config, 3);
    auto& model = dynamic_cast<LanguageModel&>(*made);
    model.to(at::kDouble);
    model.eval();
    at::NoGradGuard guard;
    const Batch b = MakeBatch();
    ops::Mask mask = {Lengths({9, 9, 6}), std::nullopt, b.valid};
    const at::Tensor target = at::randint(1, 23, {3, 4}, at::kLong);
    ModelState state = model.Encode(b.ids, mask);
    const at::Tensor logits = model.Extend(target, state);
    NamedTensors batch = {{"source", b.ids},
                          {"source_lengths", *mask.lengths},
                          {"source_valid", b.valid},
                          {"ids", target},
                          {"targets", target}};
    double sum = 0;
    for (int64_t i = 0; i < 3; ++i) {
      const std::string what = cross + " row " + std::to_string(i);
      const at::Tensor row = i < 2 ? b.rows[size_t(i)] : b.rows[2].narrow(1, 0, 3);
      ModelState alone = model.Encode(row, {Lengths({row.size(1)}), {}});
      ExpectClose(logits.narrow(0, i, 1), model.Extend(target.narrow(0, i, 1), alone), 1e-11, what);
      sum += NextTokenLoss(logits[i], target[i]).item<double>() / 3;
    }
    EXPECT_NEAR(model.TrainingLoss(batch).item<double>(), sum, 1e-11) << cross;
  }
}

TEST(MaskedTokens, AMaskedLanguageModelPredictsAsWithoutThem) {
  for (const std::string attention : {"latte", "softmax", "linformer", "luna"}) {
    const auto made = MakeModel(Config("masked_lm", attention, "learned"), 3);
    auto& model = dynamic_cast<MaskedLm&>(*made);
    model.to(at::kDouble);
    model.eval();
    at::NoGradGuard guard;
    Batch b = MakeBatch();
    ops::Mask mask;
    mask.valid = b.valid;
    b.ids[1][2] = model.mask_id(), b.rows[1][0][2] = model.mask_id();
    const at::Tensor hidden = model.Hidden(b.ids, mask);
    for (int64_t i = 0; i < 3; ++i)
      ExpectClose(hidden[i].index({b.valid[i]}), model.Hidden(b.rows[size_t(i)])[0], 1e-11,
                  attention + " row " + std::to_string(i));
    at::Tensor targets = at::full({3, 9}, -100, at::kLong);
    targets[1][2] = 7;
    const at::Tensor want =
        NextTokenLoss(model.Logits(model.Hidden(b.rows[1])[0][2]), at::tensor({int64_t{7}})[0]);
    const NamedTensors batch = {{"ids", b.ids}, {"valid", b.valid}, {"targets", targets}};
    ExpectClose(model.TrainingLoss(batch), want, 1e-11, attention);
  }
}

TEST(MaskedTokens, ASpanPredictorPredictsAsWithoutThem) {
  for (const std::string attention : {"latte", "softmax", "linformer", "luna"}) {
    const auto made = MakeModel(Config("span_predictor", attention, "learned"), 3);
    auto& model = dynamic_cast<SpanPredictor&>(*made);
    model.to(at::kDouble);
    model.eval();
    at::NoGradGuard guard;
    const Batch b = MakeBatch();
    const at::Tensor logits = model.SpanLogits({{"ids", b.ids}, {"valid", b.valid}});
    const at::Tensor targets = at::zeros({3, 2}, at::kLong);
    double sum = 0;
    for (int64_t i = 0; i < 3; ++i) {
      const at::Tensor alone = model.SpanLogits({{"ids", b.rows[size_t(i)]}})[0];
      ExpectClose(logits[i].index({b.valid[i]}), alone, 1e-11, attention);
      EXPECT_TRUE(logits[i].index({b.valid[i].logical_not()}).isneginf().all().item<bool>());
      // A span from the first real token to the last.
      const at::Tensor real = b.valid[i].nonzero().squeeze(1);
      targets[i][0] = real[0], targets[i][1] = real[-1];
      const at::Tensor log_p = at::log_softmax(alone, 0);
      sum -= (log_p[0][0] + log_p[-1][1]).item<double>() / 6;
    }
    const NamedTensors batch = {{"ids", b.ids}, {"valid", b.valid}, {"targets", targets}};
    EXPECT_NEAR(model.TrainingLoss(batch).item<double>(), sum, 1e-11) << attention;
    ExpectContains(ErrorMessage([&] { model.TrainingLoss(batch, 0.1); }), {"label_smoothing"});
    targets[2][1] = 9;
    EXPECT_EQ(ErrorMessage([&] { model.TrainingLoss(batch); }),
              "[span_predictor] target 9 is not within the rows; their tokens are 0 to 8");
  }
}

TEST(MaskedTokens, TwoTowersReadTheOthersAlone) {
  const auto made = MakeModel(Config("two_tower", "latte", "learned"), 3);
  auto& model = dynamic_cast<TwoTower&>(*made);
  model.to(at::kDouble);
  model.eval();
  at::NoGradGuard guard;
  const Batch a = MakeBatch(), b = MakeBatch();
  const at::Tensor whole = Lengths({9, 9, 9});
  const at::Tensor logits = model.Logits({{"ids", a.ids},
                                          {"lengths", whole},
                                          {"valid", a.valid},
                                          {"second_ids", b.ids},
                                          {"second_lengths", whole},
                                          {"second_valid", b.valid}});
  for (int64_t i = 0; i < 3; ++i) {
    const at::Tensor &x = a.rows[size_t(i)], &y = b.rows[size_t(i)];
    ExpectClose(logits.narrow(0, i, 1),
                model.Logits({{"ids", x},
                              {"lengths", Lengths({x.size(1)})},
                              {"second_ids", y},
                              {"second_lengths", Lengths({y.size(1)})}}),
                1e-11, "row " + std::to_string(i));
  }
}

}  // namespace
}  // namespace cistern

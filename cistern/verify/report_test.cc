// What people and programs see of the results, and the suite for one trained model.
#include "cistern/verify/report.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cistern/models/decoder_lm.h"
#include "cistern/models/encoder_classifier.h"
#include "cistern/ops/testing.h"
#include "cistern/verify/model_check.h"

namespace cistern::verify {
namespace {

using testing::ExpectContains;

Result Row(const std::string& mechanism, const std::string& property, double error,
           double tolerance, const std::string& reason = "") {
  Result r{mechanism, {{"slots", 3}}, property, ops::Impl::kKernel, {}, 0.5};
  if (!reason.empty()) {
    r.outcome = NotApplicable(reason);
    return r;
  }
  Meter meter;
  meter.Add(error, tolerance, "causal, T=65");
  r.outcome = meter.result();
  return r;
}

TEST(Report, AMatrixWithALegendAndItsFailures) {
  const std::vector<Result> results = {
      Row("latte", "definition", 3e-16, 1e-12), Row("latte", "definition", 2e-13, 1e-12),
      Row("latte", "merge", 0, 0), Row("window", "definition", 4e-3, 1e-12),
      Row("window", "merge", 0, 0, "its states do not merge")};
  const std::string text = MatrixText(results, {100, false});
  EXPECT_EQ(text,
            "error/tolerance of the comparison that came closest to its tolerance; 0: every bit "
            "agrees.\n"
            "Errors are relative, in root mean square: |got - wanted| / |wanted|.\n"
            "\n"
            "         definition  merge\n"
            "latte   2e-13/1e-12      0\n"
            "window         FAIL     -a\n"
            "\n"
            "-a  its states do not merge\n"
            "\n"
            "FAIL  window {\"slots\":3}, definition, kernel: error 4e-03, tolerance 1e-12, at "
            "causal, T=65\n");
  EXPECT_EQ(Failures(results), 1);
  const std::string narrow = MatrixText(results, {20, false});
  ExpectContains(narrow,
                 {"         definition\nlatte   2e-13/1e-12\n", "        merge\nlatte       0\n"});
  ExpectContains(MatrixText(results, {100, true}),
                 {"\033[1;31m       FAIL\033[0m", "\033[32m", "\033[2m"});
}

TEST(Report, FormsHaveRowsOfTheirOwn) {
  std::vector<Result> results = {Row("latte", "pieces", 2e-13, 1e-12),
                                 Row("latte", "pieces", 3e-3, 1e-12)};
  results[0].form = Form::kCausal, results[1].form = Form::kCross;
  testing::ExpectContains(MatrixText(results, {100, false}),
                          {"latte causal  2e-13/1e-12\n", "latte cross          FAIL\n",
                           "FAIL  latte cross {\"slots\":3}, pieces"});
  EXPECT_EQ(ResultsJson(results)[1]["form"], "cross");
  EXPECT_FALSE(ResultsJson({Row("latte", "pieces", 0, 0)})[0].contains("form"));
}

TEST(Report, JsonHoldsEveryResult) {
  const Json json = ResultsJson({Row("latte", "merge", 1e-13, 1e-12),
                                 Row("window", "merge", 0, 0, "its states do not merge")});
  EXPECT_EQ(json[0]["outcome"], "pass");
  EXPECT_EQ(json[0]["tolerance"], 1e-12);
  EXPECT_EQ(json[0]["options"]["slots"], 3);
  EXPECT_EQ(json[0]["where"], "causal, T=65");
  EXPECT_EQ(json[1]["outcome"], "not applicable");
  EXPECT_EQ(json[1]["reason"], "its states do not merge");
  EXPECT_FALSE(json[1].contains("error"));
}

std::shared_ptr<DecoderLm> Small(const std::vector<std::string>& attention) {
  ModelConfig config;
  config.vocab_size = 50, config.dim = 16, config.heads = 2, config.layers = 2,
  config.max_length = 128;
  config.attention = attention;
  config.conv = 3;
  config.init_std = 0.2;
  return std::dynamic_pointer_cast<DecoderLm>(MakeModel(config, 3));
}

TEST(ModelCheck, AModelAgreesWithItselfInEveryWay) {
  at::manual_seed(1);
  const at::Tensor ids = at::randint(50, {70}, at::kLong);
  for (const MechanismInfo* info : Mechanisms()) {
    if (!info->Supports(Form::kCausal) || !info->verbs) continue;
    const std::string first =
        info->copies_scores ? "softmax" : "latte";  // one that leaves scores to be copied
    const auto model = Small({first, info->name}), twin = Small({first, info->name});
    twin->to(at::kDouble);
    const auto results = CheckModel(*model, *twin, ids, false);
    EXPECT_EQ(results.size(), 9u);
    for (const ModelResult& r : results) {
      EXPECT_FALSE(r.outcome.failed())
          << info->name << " " << r.property << ": " << FailureText(r.outcome);
      EXPECT_GT(r.outcome.comparisons, 0) << r.property;
    }
  }
}

TEST(ModelCheck, UpToTheEndOfLearnedPositions) {
  ModelConfig config = Small({"latte"})->config();
  config.positions = PositionKind::kLearned;
  for (const int64_t length : {40, 43}) {
    config.max_length = length;
    const auto make = [&] { return std::dynamic_pointer_cast<DecoderLm>(MakeModel(config, 3)); };
    const auto model = make(), twin = make();
    twin->to(at::kDouble);
    const auto results = CheckModel(*model, *twin, at::randint(50, {40}, at::kLong), false);
    for (const ModelResult& r : results)
      EXPECT_FALSE(r.outcome.failed()) << r.property << ": " << FailureText(r.outcome);
  }
}

TEST(ModelCheck, ADifferentTwinIsFoundAndTheRunStopsWhenTold) {
  const at::Tensor ids = at::randint(50, {40}, at::kLong);
  const auto model = Small({"latte"}), twin = Small({"latte"});
  twin->to(at::kDouble);
  {
    at::NoGradGuard guard;
    twin->parameters()[0].mul_(1.001);
  }
  const auto results =
      CheckModel(*model, *twin, ids, false, [](const ModelResult&) { return false; });
  ASSERT_EQ(results.size(), 1u);
  EXPECT_EQ(results[0].property, "float");
  EXPECT_TRUE(results[0].outcome.failed());
  ExpectContains(testing::Thrown([&] { CheckModel(*model, *twin, ids.narrow(0, 0, 5), false); }),
                 {"[verify]", "at least 16", "[5]"});
}

TEST(ClassifierCheck, AClassifierAgreesWithItselfAndADifferentTwinIsFound) {
  auto make = [](const std::string& mechanism, const std::string& pooling) {
    ModelConfig config;
    config.kind = "encoder_classifier", config.vocab_size = 30, config.classes = 4,
    config.pooling = ValueOf(pooling, PoolingKinds());
    config.dim = 16, config.heads = 2, config.layers = 2, config.max_length = 64,
    config.init_std = 0.2;
    config.attention = {mechanism};
    return std::dynamic_pointer_cast<EncoderClassifier>(MakeModel(config, 3));
  };
  at::manual_seed(1);
  const at::Tensor ids = at::randint(30, {50}, at::kLong);
  for (const MechanismInfo* info : Mechanisms()) {
    if (!info->Supports(Form::kBidirectional)) continue;
    const std::string pooling = info->name == "latte" ? "cls" : "mean";
    const auto model = make(info->name, pooling), twin = make(info->name, pooling);
    twin->to(at::kDouble);
    const auto results = CheckRows(*model, *twin, ids);
    ASSERT_EQ(results.size(), 4u);
    for (const ModelResult& r : results) {
      EXPECT_FALSE(r.outcome.failed())
          << info->name << " " << r.property << ": " << FailureText(r.outcome);
      EXPECT_GT(r.outcome.comparisons, 0) << r.property;
    }
  }
  const auto model = make("latte", "mean"), twin = make("latte", "mean");
  twin->to(at::kDouble);
  {
    at::NoGradGuard guard;
    twin->parameters()[0].mul_(1.001);
  }
  const auto results = CheckRows(*model, *twin, ids, [](const ModelResult&) { return false; });
  ASSERT_EQ(results.size(), 1u);
  EXPECT_TRUE(results[0].outcome.failed());
}

// Every kind of models.def, each with mechanisms that differ from stack to stack.
ModelConfig OfKind(const std::string& kind) {
  ModelConfig config;
  config.kind = kind, config.vocab_size = 30, config.dim = 16, config.heads = 2, config.layers = 2,
  config.max_length = 64, config.init_std = 0.2;
  if (config.info().classifies) config.classes = 4;
  if (kind == "forecaster") {
    config.vocab_size = 0;
    config.own[kind] = Json{{"inputs", 3}, {"outputs", 2}};
  }
  config.attention = {"latte", "softmax"};
  return config;
}

std::vector<ModelResult> CheckKind(const ModelConfig& config, bool spoil = false) {
  at::manual_seed(1);
  const at::Tensor ids = at::randint(30, {40}, at::kLong),
                   source = at::randint(30, {29}, at::kLong),
                   values = at::randn({40, 3}, at::kFloat);
  const auto model = MakeModel(config, 3), twin = MakeModel(config, 3);
  twin->to(at::kDouble);
  if (spoil) {
    at::NoGradGuard guard;
    twin->parameters().back().mul_(1.01).add_(0.01);  // of what is zero, and of what has no mean
  }
  if (auto* stateful = dynamic_cast<StatefulModel*>(model.get())) {
    return CheckModel(*stateful, dynamic_cast<StatefulModel&>(*twin),
                      config.kind == "forecaster" ? values : ids, false, nullptr,
                      config.info().encodes ? source : at::Tensor());
  }
  return CheckRows(*model, *twin, ids);
}

// A NaN is no agreement.
TEST(ModelCheck, AModelOfNaNsIsRefusedAndNamesTheWeight) {
  for (const char* kind : {"decoder_lm", "encoder_classifier"}) {
    const auto model = MakeModel(OfKind(kind), 3), twin = MakeModel(OfKind(kind), 3);
    twin->to(at::kDouble);
    {
      at::NoGradGuard guard;
      for (const auto& m : {model, twin}) m->named_parameters()["norm.weight"][0].fill_(NAN);
    }
    const at::Tensor ids = at::randint(30, {40}, at::kLong);
    ExpectContains(testing::Thrown([&] {
                     if (auto* lm = dynamic_cast<StatefulModel*>(model.get())) {
                       CheckModel(*lm, dynamic_cast<StatefulModel&>(*twin), ids, false);
                     } else {
                       CheckRows(*model, *twin, ids);
                     }
                   }),
                   {"'norm.weight'", "not finite"});
  }
}

TEST(Meter, WhatIsNotFinitePassesNoTolerance) {
  const double infinity = std::numeric_limits<double>::infinity();
  const auto failed = [](double error, double tolerance) {
    Meter meter;
    meter.Add(error, tolerance, "here");
    meter.Add(0, 1e-3, "there");
    return meter.result().failed();
  };
  EXPECT_TRUE(failed(infinity, infinity));
  EXPECT_TRUE(failed(0, infinity));
  EXPECT_TRUE(failed(NAN, 1));
  EXPECT_TRUE(failed(2, 1));
  EXPECT_TRUE(failed(1e-300, 0));
  EXPECT_FALSE(failed(0, 0));
  EXPECT_FALSE(failed(1, 1));
}

TEST(ModelCheck, EveryKindOfModelIsChecked) {
  for (const std::string& kind : ModelKinds()) {
    const ModelConfig config = OfKind(kind);
    const auto results = CheckKind(config);
    EXPECT_EQ(results.size(), config.info().encodes              ? 11u
                              : config.info().Has(Form::kCausal) ? 9u
                                                                 : 4u)
        << kind;
    for (const ModelResult& r : results) {
      EXPECT_FALSE(r.outcome.failed())
          << kind << " " << r.property << ": " << FailureText(r.outcome);
      const bool applies = !(config.info().encodes && r.property == "packed");
      EXPECT_EQ(r.outcome.comparisons > 0, applies) << kind << " " << r.property;
    }
    EXPECT_TRUE(CheckKind(config, true)[0].outcome.failed()) << kind << ": a different twin";
  }
}

TEST(ModelCheck, EveryMechanismOfACrossAttentionAndOfAnEncoder) {
  for (const MechanismInfo* info : Mechanisms()) {
    if (info->copies_scores || info->MakesLatents()) continue;
    for (const Form form : {Form::kCross, Form::kBidirectional}) {
      if (!info->Supports(form)) continue;
      ModelConfig config = OfKind("encoder_decoder");
      StackOptions own;
      own.attention = {info->name};
      (form == Form::kCross ? config.cross : config.encoder) = own;
      for (const ModelResult& r : CheckKind(config)) {
        EXPECT_FALSE(r.outcome.failed()) << info->name << " " << FormName(form) << " " << r.property
                                         << ": " << FailureText(r.outcome);
      }
    }
  }
}

// Sources that change each other are not asked to be what each is alone.
TEST(ModelCheck, SourcesThatMeet) {
  ModelConfig config = OfKind("encoder_decoder");
  config.encoder.attention = {"nystrom"};
  config.encoder.attention_options = {{"nystrom", {{"landmarks", 4}, {"start", "batch"}}}};
  int64_t left_out = 0;
  for (const ModelResult& r : CheckKind(config)) {
    EXPECT_FALSE(r.outcome.failed()) << r.property << ": " << FailureText(r.outcome);
    left_out += r.property == "source" && r.outcome.kind == Outcome::Kind::kNotApplicable;
  }
  EXPECT_EQ(left_out, 1);
}

TEST(ModelCheck, ASourceIsAskedForWhereThereIsOne) {
  const auto lm = Small({"latte"}), twin = Small({"latte"});
  const at::Tensor ids = at::randint(50, {40}, at::kLong);
  ExpectContains(testing::Thrown([&] { CheckModel(*lm, *twin, ids, false, nullptr, ids); }),
                 {"decoder_lm", "no source"});
  const auto pair = MakeModel(OfKind("encoder_decoder"), 1);
  auto& model = dynamic_cast<LanguageModel&>(*pair);
  ExpectContains(testing::Thrown([&] { CheckModel(model, model, ids, false); }),
                 {"encoder_decoder", "needs the tokens of a source"});
}

TEST(ModelCheck, ClassifiersOfRealValues) {
  ModelConfig config = OfKind("encoder_classifier");
  config.vocab_size = 0;
  config.own["encoder_classifier"] = Json{{"input", "values"}, {"channels", 3}};
  const auto model = MakeModel(config, 3), twin = MakeModel(config, 3);
  twin->to(at::kDouble);
  at::manual_seed(1);
  for (const ModelResult& r : CheckRows(*model, *twin, at::randn({40, 3}, at::kFloat))) {
    EXPECT_FALSE(r.outcome.failed()) << r.property << ": " << FailureText(r.outcome);
    EXPECT_GT(r.outcome.comparisons, 0) << r.property;
  }
}

}  // namespace
}  // namespace cistern::verify

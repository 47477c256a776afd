// Models that read whole rows: classifiers of one text, of two and of real values, and models that
// predict hidden tokens or spans.
#include <ATen/ATen.h>

#include <cmath>

#include "cistern/models/classifier.h"
#include "cistern/models/masked_lm.h"
#include "cistern/ops/impl.h"
#include "cistern/tasks/row_groups.h"
#include "cistern/verify/model_check.h"
#include "cistern/verify/subject.h"

namespace cistern::verify {
namespace {

// ids [B,T] or values [B,T,C], and the rows' lengths.
struct Text {
  at::Tensor input;
  std::vector<int64_t> lengths;

  int64_t rows() const { return input.size(0); }
  Text Row(int64_t b) const {
    const int64_t count = lengths[size_t(b)];
    return {input.narrow(0, b, 1).narrow(1, 0, count), {count}};
  }
  // Row b, or the tokens of every row from its length on, as they are; all else other than it was.
  Text OthersThan(int64_t b, int64_t vocab) const {
    Text out{Other(input, vocab), std::vector<int64_t>(lengths.size(), input.size(1))};
    out.input[b].copy_(input[b]);
    out.lengths[size_t(b)] = lengths[size_t(b)];
    return out;
  }
  Text WithOtherPadding(int64_t vocab) const {
    Text out{Other(input, vocab), lengths};
    for (int64_t b = 0; b < rows(); ++b) {
      const int64_t count = lengths[size_t(b)];
      out.input[b].narrow(0, 0, count).copy_(input[b].narrow(0, 0, count));
    }
    return out;
  }

 private:
  static at::Tensor Other(const at::Tensor& x, int64_t vocab) {
    return x.is_floating_point() ? x + 1 : (x + 1).remainder(vocab);
  }
};
using Texts = std::vector<Text>;  // one, or two of a model that compares them

template <class Change>
Texts Each(const Texts& texts, Change&& change) {
  Texts out;
  for (const Text& text : texts) out.push_back(change(text));
  return out;
}

// The input, other tokens of it in other rows (turned round by a third), and their lengths, from
// the whole to a single token. The second texts are those of the rows after.
Texts TextsOf(const Model& model, const at::Tensor& input) {
  const int64_t length = input.size(1), third = length / 3;
  const Text first{at::cat({input, input.roll(third, 1), input.roll(2 * third, 1), input.flip(1)}),
                   {length, length / 2 + 1, third, 1}};
  for (const std::string& name : model.info().inputs) {
    if (name == "second_ids")
      return {first, {first.input.roll(-1, 0), {length / 2 + 1, third, 1, length}}};
  }
  return {first};
}

// What the model says of each row: [classes], or [T,C] of the tokens of a row where it speaks of
// these; every fifth of them is hidden from a MaskedLm.
Tensors Answers(Model& model, const Texts& texts) {
  const Text& first = texts[0];
  const at::Tensor lengths = LengthsOf(first.lengths);
  Tensors answers;
  if (auto* tokens = dynamic_cast<TokenPredictor*>(&model)) {
    at::Tensor ids = first.input;
    if (const auto* masked = dynamic_cast<const MaskedLm*>(&model))
      ids = ids.masked_fill(at::arange(ids.size(1)).remainder(5).eq(2), masked->mask_id());
    const at::Tensor logits = tokens->Logits(tokens->Hidden(ids, {lengths, {}}));
    for (int64_t b = 0; b < first.rows(); ++b)
      answers.push_back(logits[b].narrow(0, 0, first.lengths[size_t(b)]));
    return answers;
  }
  auto* classifier = dynamic_cast<Classifier*>(&model);
  CISTERN_CHECK(classifier, "[verify] a model of kind ", model.info().name,
                " neither classifies rows nor predicts their tokens");
  NamedTensors inputs = {{first.input.is_floating_point() ? "values" : "ids", first.input},
                         {"lengths", lengths}};
  if (texts.size() > 1) {
    inputs.Set("second_ids", texts[1].input);
    inputs.Set("second_lengths", LengthsOf(texts[1].lengths));
  }
  const at::Tensor logits = classifier->Logits(inputs);
  for (int64_t b = 0; b < first.rows(); ++b) answers.push_back(logits[b]);
  return answers;
}

at::Tensor Flat(const Tensors& answers) {
  Tensors flat;
  for (const at::Tensor& answer : answers) flat.push_back(answer.reshape({-1}));
  return at::cat(flat);
}

std::string SeesPadding(const Model& model) {
  if (const auto* tokens = dynamic_cast<const TokenPredictor*>(&model))
    return tokens->SeesPadding();
  const auto* classifier = dynamic_cast<const Classifier*>(&model);
  return classifier ? classifier->SeesPadding() : "";
}

}  // namespace

std::vector<ModelResult> CheckRows(Model& model, Model& twin, const at::Tensor& input,
                                   const std::function<bool(const ModelResult&)>& done) {
  CISTERN_CHECK(input.dim() >= 1 && input.dim() <= 2 && input.size(0) >= 16,
                "[verify] expected ids of shape [T] or values of shape [T,C] with T of at least "
                "16, got ",
                input.sizes());
  at::NoGradGuard guard;
  model.eval();
  twin.eval();
  at::manual_seed(1);
  const Texts texts = TextsOf(model, input.unsqueeze(0));
  auto run = [&] { return Flat(Answers(twin, texts)); };
  const Tensors answers = Answers(twin, texts);
  const at::Tensor all = Flat(answers);
  RequireFinite(twin, all);
  const double in_float = ToleranceOf(twin, run, all, 1e-6, std::ldexp(1, -23));
  const double in_double = ToleranceOf(twin, run, all, 1e-12, std::ldexp(1, -52));
  const int64_t rows = texts[0].rows(), vocab = model.config().vocab_size;

  auto precision = [&] {
    Meter meter;
    meter.Close(Flat(Answers(model, texts)), all, in_float, "T=", input.size(0));
    return meter.result();
  };
  auto padding = [&] {
    if (const std::string by = SeesPadding(twin); !by.empty())
      return NotApplicable("padding takes part, by " + by);
    if (RowsMeet(twin)) return NotApplicable(kRowsMeet);
    Meter meter;
    for (int64_t b = 0; b < rows; ++b) {
      const Texts row = Each(texts, [b](const Text& text) { return text.Row(b); });
      meter.Close(Answers(twin, row)[0], answers[size_t(b)], in_double, "row of ",
                  row[0].lengths[0], " tokens");
    }
    const Texts other = Each(texts, [vocab](const Text& t) { return t.WithOtherPadding(vocab); });
    meter.Close(Flat(Answers(twin, other)), all, in_double, "other tokens in the padding");
    return meter.result();
  };
  auto neighbours = [&] {
    if (RowsMeet(twin)) return NotApplicable(kRowsMeet);
    Meter meter;
    for (int64_t b = 0; b < rows; ++b) {
      const Texts other = Each(texts, [&](const Text& text) { return text.OthersThan(b, vocab); });
      meter.Close(Answers(twin, other)[size_t(b)], answers[size_t(b)], in_double, "row ", b,
                  " among others");
    }
    return meter.result();
  };
  auto implementations = [&] {
    Meter meter;
    for (const ops::Impl impl :
         {ops::Impl::kKernel, ops::Impl::kComposite, ops::Impl::kReference}) {
      const ops::ImplScope scope(impl);
      meter.Close(Flat(Answers(twin, texts)), all, in_double, ops::ImplName(impl), ", double");
      meter.Close(Flat(Answers(model, texts)), all, in_float, ops::ImplName(impl), ", float");
    }
    return meter.result();
  };
  return RunModelChecks(
      {{"float", "the model in float = its copy in double", precision},
       {"padding", "rows padded to one length = each alone, whatever the padding holds", padding},
       {"batch", "a row's answer does not depend on the other rows", neighbours},
       {"implementations", "kernel = composite = reference", implementations}},
      done);
}

}  // namespace cistern::verify

// What a translator is trained and measured by: losses, translations, sums, metrics.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "cistern/base/error.h"
#include "cistern/decode/eval_scope.h"
#include "cistern/tasks/lm_blocks.h"
#include "cistern/tasks/translation_task.h"
#include "cistern/text/answer_score.h"
#include "cistern/text/translation_score.h"
#include "cistern/text/utf8.h"

namespace cistern {
namespace {

LanguageModel& TranslatorOf(Model& model) { return dynamic_cast<LanguageModel&>(model); }

void CheckLengths(const ModelConfig& config, const Batch& batch) {
  config.CheckPositions(Form::kBidirectional, batch["source"].size(1), "a source");
  config.CheckPositions(Form::kCausal, batch["ids"].size(1), "a target");
}

// As long as translations get: twice the source and some tokens, but not beyond learned positions.
std::vector<int64_t> MostTokens(const ModelConfig& config, const at::Tensor& source_lengths) {
  const int64_t limit = config.LengthLimit(Form::kCausal);
  const at::Tensor lengths = source_lengths.cpu();
  std::vector<int64_t> most;
  for (int64_t r = 0; r < lengths.numel(); ++r) {
    most.push_back(std::min(2 * lengths.const_data_ptr<int64_t>()[r] + 10, limit));
  }
  return most;
}

void AddSums(const BleuSums& bleu, const ChrfSums& chrf, Score* score) {
  for (size_t n = 0; n < BleuSums::kOrder; ++n) {
    score->Add("bleu_matches", int64_t(n), double(bleu.matches[n]));
    score->Add("bleu_ngrams", int64_t(n), double(bleu.ngrams[n]));
  }
  score->Add("bleu_length", double(bleu.length));
  score->Add("bleu_reference", double(bleu.reference_length));
  for (size_t n = 0; n < ChrfSums::kOrder; ++n) {
    score->Add("chrf_matches", int64_t(n), double(chrf.matches[n]));
    score->Add("chrf_translation", int64_t(n), double(chrf.translation[n]));
    score->Add("chrf_reference", int64_t(n), double(chrf.reference[n]));
  }
}

BleuSums BleuOf(const Score& score) {
  BleuSums sums;
  for (size_t n = 0; n < BleuSums::kOrder; ++n) {
    sums.matches[n] = int64_t(score.At("bleu_matches", int64_t(n)));
    sums.ngrams[n] = int64_t(score.At("bleu_ngrams", int64_t(n)));
  }
  sums.length = int64_t(score["bleu_length"]);
  sums.reference_length = int64_t(score["bleu_reference"]);
  return sums;
}

ChrfSums ChrfOf(const Score& score) {
  ChrfSums sums;
  for (size_t n = 0; n < ChrfSums::kOrder; ++n) {
    sums.matches[n] = int64_t(score.At("chrf_matches", int64_t(n)));
    sums.translation[n] = int64_t(score.At("chrf_translation", int64_t(n)));
    sums.reference[n] = int64_t(score.At("chrf_reference", int64_t(n)));
  }
  return sums;
}

// Row r of ids [B,T] int64, without what stands behind `count` of them.
std::vector<int32_t> RowOf(const at::Tensor& ids, int64_t r, int64_t count) {
  const int64_t* const from = ids.const_data_ptr<int64_t>() + r * ids.size(1);
  return {from, from + count};
}

}  // namespace

at::Tensor TranslationTask::Loss(Model& model, const Batch& batch, double label_smoothing) const {
  return model.TrainingLoss(model.ReadOf(batch.tensors), label_smoothing);
}

double TranslationTask::Terms(const Batch& batch) const {
  return double(batch["targets"].ne(-100).sum().item<int64_t>());
}

std::vector<Hypothesis> TranslationTask::Translations(LanguageModel& model,
                                                      const Batch& batch) const {
  const DecodeScope scope(model);
  ops::Mask mask;
  mask.lengths = batch["source_lengths"];
  return BeamSearch(model, model.Encode(batch["source"], mask),
                    {options_.beam, options_.length_penalty, end(), end(),
                     MostTokens(model.config(), batch["source_lengths"])});
}

// Broken bytes, of tokens that are parts of characters, are U+FFFD.
std::string TranslationTask::Text(const std::vector<int32_t>& ids) const {
  return ValidUtf8(tokenizer_->Decode(ids));
}

Score TranslationTask::Measure(Model& model, const Batch& batch) const {
  LanguageModel& translator = TranslatorOf(model);
  CheckLengths(translator.config(), batch);
  const at::Tensor targets = batch["targets"].reshape({-1}),
                   real = targets.ne(-100).nonzero().squeeze(1),
                   wanted = targets.index_select(0, real),
                   hidden = translator.HiddenOfRows(model.ReadOf(batch.tensors));
  Score score;
  MeasureTokens(translator, hidden.reshape({-1, hidden.size(-1)}).index_select(0, real), wanted,
                token_bytes_, score);
  if (!unigram_nats_.empty()) {  // with the training texts
    const at::Tensor ids = wanted.cpu();
    for (int64_t i = 0; i < ids.numel(); ++i)
      score.Add("unigram_nats", unigram_nats_[size_t(ids.const_data_ptr<int64_t>()[i])]);
  }
  const std::vector<Hypothesis> translations = Translations(translator, batch);
  const at::Tensor references = batch["targets"].cpu(), lengths = batch["lengths"].cpu();
  BleuSums bleu;
  ChrfSums chrf;
  for (int64_t r = 0; r < batch.rows; ++r) {
    const std::string said = tokenizer_->Decode(translations[size_t(r)].tokens),
                      reference = tokenizer_->Decode(
                          RowOf(references, r, lengths.const_data_ptr<int64_t>()[r] - 1));
    bleu.Add(said, reference);
    chrf.Add(said, reference);
    const AnswerScore answer = ScoreAnswer(said, {reference});
    score.Add("rows", 1);
    score.Add("exact", answer.exact);
    score.Add("word_f1", answer.f1);
  }
  AddSums(bleu, chrf, &score);
  return score;
}

Json TranslationTask::Metrics(const Score& score) const {
  const double tokens = score["tokens"];
  const BleuSums bleu = BleuOf(score);
  Json out = {{"bleu", bleu.Score()},
              {"chrf", ChrfOf(score).Score()},
              {"exact_match", 100 * score["exact"] / score["rows"]},
              {"word_f1", 100 * score["word_f1"] / score["rows"]},
              {"perplexity", std::exp(score["nats"] / tokens)},
              {"nats_per_token", score["nats"] / tokens},
              {"accuracy", 100 * score["correct"] / tokens},
              {"tokens", int64_t(tokens)},
              {"length_ratio", bleu.reference_length > 0
                                   ? double(bleu.length) / double(bleu.reference_length)
                                   : std::nan("")}};
  if (score.Has("unigram_nats"))
    out["unigram_perplexity"] = std::exp(score["unigram_nats"] / tokens);
  return out;
}

std::vector<Json> TranslationTask::Predict(Model& model, const Batch& batch) const {
  LanguageModel& translator = TranslatorOf(model);
  CheckLengths(translator.config(), batch);
  const std::vector<Hypothesis> translations = Translations(translator, batch);
  const at::Tensor source = batch["source"].cpu(), lengths = batch["source_lengths"].cpu(),
                   lines = batch["lines"].cpu();
  std::vector<Json> out;
  for (int64_t r = 0; r < batch.rows; ++r) {
    const Hypothesis& h = translations[size_t(r)];
    out.push_back({{"line", lines.const_data_ptr<int64_t>()[r]},
                   {"source", Text(RowOf(source, r, lengths.const_data_ptr<int64_t>()[r] - 1))},
                   {"translation", Text(h.tokens)},
                   {"logprob", h.logprob}});
  }
  return out;
}

}  // namespace cistern

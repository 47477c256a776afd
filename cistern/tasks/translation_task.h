#pragma once
// Sequence to sequence on a user's own pairs of texts: translation, and whatever else makes one
// text of another (spec 3.6, 4.9). The texts of the data are held in memory as tokens of one
// vocabulary for both sides. `end`, the id behind the tokenizer's, ends every source and target and
// begins every target:
//
//   source   x_1 ... x_n end
//   ids      end y_1 ... y_m
//   targets  y_1 ... y_m end
#include <memory>
#include <string>
#include <vector>

#include "cistern/decode/beam_search.h"
#include "cistern/tasks/order.h"
#include "cistern/tasks/sentence_pairs.h"
#include "cistern/tasks/task.h"
#include "cistern/text/tokenizer.h"

namespace cistern {

class TranslationTask : public Task {
 public:
  struct Options {
    std::string data, target;         // OpenPairs
    std::string valid, valid_target;  // the same; empty: shares of data
    std::string test, test_target;    // the same
    std::string source_column, target_column;
    TableOptions::Header header = TableOptions::Header::kNo;
    TokenizerKind tokenizer = TokenizerKind::kBpe;
    int64_t vocab_size = 4096, length = 128, batch_tokens = 0;
    bool group_by_length = true, skip_bad_rows = false;
    std::string metric = "bleu";  // bleu | chrf | exact_match | word_f1 | perplexity
    int64_t beam = 1;
    double length_penalty = 1;
    double valid_share = 0.02, test_share = 0.02;
    int64_t split_seed = 1;
  };
  static Fields Describe(Options& options);
  TranslationTask(const Options& options, const std::string& cache);

  void SaveAssets(const std::string& folder) const override;  // tokenizer.json
  void LoadAssets(const std::string& folder) override;
  bool TakeTokenizer(std::shared_ptr<const Tokenizer> tokenizer) override;
  // Its sentinels stand behind the end.
  bool HasFirstIdsOf(const std::string& task) const override { return task == "span_corruption"; }
  void Prepare() override;
  Json DataSummary() const override;
  void Complete(ModelConfig& config) const override;
  // Of training: of its pairs after Prepare.
  int64_t tokens_per_row() const override {
    return longest_ > 0 ? longest_ : 2 * tokens_per_sequence();
  }
  int64_t tokens_per_sequence() const override { return options_.length + 1; }
  int64_t train_rows() const override { return options_.batch_tokens > 0 ? 0 : train_.size(); }
  int64_t rows_of_batch(int64_t rows) const override;
  Batch TrainBatch(uint64_t seed, int64_t step, int64_t rows) const override;
  at::Tensor Loss(Model& model, const Batch& batch, double label_smoothing) const override;
  double Terms(const Batch& batch) const override;  // tokens of the targets, their ends included
  std::unique_ptr<BatchReader> Read(Split split, const ReadOptions& options) const override;
  // Labelled: a table of pairs. Else a table or a text of sources.
  std::unique_ptr<BatchReader> ReadFile(const std::string& path, bool labelled,
                                        const ReadOptions& options) const override;
  // The loss of the targets, and translations by beams beside them.
  Score Measure(Model& model, const Batch& batch) const override;
  // bleu, chrf, exact_match and word_f1 (of answers in words, as SQuAD's script has them),
  // perplexity, nats_per_token, accuracy (of tokens), tokens, length_ratio (of the translations to
  // the references, in tokens of BLEU); after Prepare also unigram_perplexity, by the frequencies
  // in the training targets.
  Json Metrics(const Score& score) const override;
  const Metric& metric() const override;
  // {"line", "source", "translation", "logprob"}.
  std::vector<Json> Predict(Model& model, const Batch& batch) const override;

 private:
  struct Examples {
    std::vector<int32_t> tokens;  // source and target of each pair, end to end
    std::vector<int64_t> offsets = {0}, lines;
    int64_t size() const { return int64_t(lines.size()); }
    std::vector<int32_t> Side(int64_t row, int side) const;  // 0: source, 1: target
    int64_t Length(int64_t row, int side) const;
  };
  class FileReader;

  int32_t end() const { return int32_t(tokenizer_->vocab_size()); }
  TableOptions table_options() const;
  PairFiles Files(const std::string& source, const std::string& target) const;
  std::vector<SentencePair> ReadPairs(const PairFiles& files, const char* what);
  void RefuseIdleKeys() const;
  std::string IdlePenalty() const;  // a note where length_penalty has no effect; else empty
  void LearnTokenizer(const std::vector<SentencePair>& train);
  Examples Encoded(const std::vector<SentencePair>& pairs) const;
  Examples WithoutLong(const Examples& all);
  const Examples& Set(Split split) const;
  Batch MakeBatch(const Examples& set, const std::vector<int64_t>& rows) const;
  // The best translation of each row.
  std::vector<Hypothesis> Translations(LanguageModel& model, const Batch& batch) const;
  std::string Text(const std::vector<int32_t>& ids) const;

  Options options_;
  bool loaded_ = false;  // LoadAssets
  std::shared_ptr<const Tokenizer> tokenizer_;
  std::vector<int32_t> token_bytes_;  // of each id; none of `end`
  std::vector<double> unigram_nats_;  // of each id by its frequency, one added to each count
  Examples train_, valid_, test_;
  std::unique_ptr<ShuffledOrder> order_;         // null where batches have
  std::unique_ptr<TokenBatches> token_batches_;  // batch_tokens
  int64_t longest_ = 0;                          // tokens of a training pair, both ends included
  int64_t skipped_ = 0, empty_ = 0, too_long_ = 0;
  std::vector<std::string> notes_;
};

}  // namespace cistern

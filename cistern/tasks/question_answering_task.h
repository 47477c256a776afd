#pragma once
// Extractive question answering on a user's own files (SQuAD; Devlin et al. 2019, section 4.2; P001
// Table 1, spec 4.11): which span of a text answers a question. A text that is too long for a row
// is read in windows that overlap:
//
//   ids      separator question separator window
//   targets  the places of the answer's first and last token; 0, 0 where the window has none
//
// The separator is a byte that no text has, so that the tokenizer's ids suffice.
#include <memory>
#include <string>
#include <vector>

#include "cistern/models/span_predictor.h"
#include "cistern/tasks/order.h"
#include "cistern/tasks/questions.h"
#include "cistern/tasks/task.h"
#include "cistern/text/tokenizer.h"

namespace cistern {

class QuestionAnsweringTask : public Task {
 public:
  struct Options {
    std::string data, valid, test;  // ReadQuestions; empty valid, test: shares of data
    std::string context_column = "context", question_column = "question", answer_column = "answers";
    TableOptions::Header header = TableOptions::Header::kAuto;
    TokenizerKind tokenizer = TokenizerKind::kBpe;
    int64_t vocab_size = 4096, length = 384, stride = 128, question_length = 64;
    int64_t answer_length = 30, n_best = 5;
    double no_answer_threshold = 0;
    bool group_by_length = true, skip_bad_rows = false;
    std::string metric = "f1";  // f1 | exact_match
    double valid_share = 0.02, test_share = 0.02;
    int64_t split_seed = 1;
  };
  static Fields Describe(Options& options);
  QuestionAnsweringTask(const Options& options, const std::string& cache);

  void SaveAssets(const std::string& folder) const override;  // tokenizer.json, questions.json
  void LoadAssets(const std::string& folder) override;
  bool TakeTokenizer(std::shared_ptr<const Tokenizer> tokenizer) override;
  void Prepare() override;
  Json DataSummary() const override;
  void Complete(ModelConfig& config) const override;
  int64_t tokens_per_row() const override { return options_.length; }
  int64_t train_rows() const override { return int64_t(train_.windows.size()); }
  Batch TrainBatch(uint64_t seed, int64_t step, int64_t rows) const override;  // rows: windows
  at::Tensor Loss(Model& model, const Batch& batch, double label_smoothing) const override;
  // Batches of `rows` questions, each with all of its windows.
  std::unique_ptr<BatchReader> Read(Split split, const ReadOptions& options) const override;
  std::unique_ptr<BatchReader> ReadFile(const std::string& path, bool labelled,
                                        const ReadOptions& options) const override;
  Score Measure(Model& model, const Batch& batch) const override;
  // f1 and exact_match in percent, as SQuAD's script has them; log_loss (nats of a window's first
  // or last place), examples; where there are questions without an answer also has_answer_f1,
  // no_answer_f1 and no_answer (the F1 of never answering); context_f1 (of answering with all of
  // the text).
  Json Metrics(const Score& score) const override;
  const Metric& metric() const override;
  // {"id", "question", "answer", "start" (character of the text; -1: no answer), "score",
  // "candidates": the n_best of them with their probabilities among these}.
  std::vector<Json> Predict(Model& model, const Batch& batch) const override;

 private:
  // Part of a context that one row holds, in tokens.
  struct Window {
    size_t question = 0;
    int64_t begin = 0, count = 0;
    int64_t first = 0, last = 0;  // targets: places of the row
  };
  struct Examples {
    QuestionSet set;
    std::vector<std::vector<int32_t>> contexts, questions;  // tokens; questions cut
    std::vector<Window> windows;
    std::vector<size_t> windows_of = {0};  // of question q: windows_of[q] .. windows_of[q + 1] - 1
    int64_t size() const { return int64_t(questions.size()); }
  };
  // A span of the text that may be the answer.
  struct Candidate {
    std::string text;
    int64_t start = -1;  // character of the text; -1: no answer
    double score = 0;    // the sum of both logits
  };

  TableOptions table_options() const;
  QuestionSet ReadSet(const std::string& path, bool labelled) const;
  void RefuseIdleKeys() const;
  void LearnTokenizer(const QuestionSet& train);
  Examples Encoded(QuestionSet set) const;
  void AddWindows(size_t question, Examples* out) const;
  const Examples& Set(Split split) const;
  Batch MakeBatch(const Examples& set, const std::vector<int64_t>& windows) const;
  // All windows of these questions, and what measuring and predicting takes besides.
  Batch QuestionBatch(const Examples& set, const std::vector<int64_t>& questions) const;
  // Of each question of a QuestionBatch, the best first; at least one.
  std::vector<std::vector<Candidate>> Candidates(const at::Tensor& logits,
                                                 const Batch& batch) const;

  Options options_;
  bool loaded_ = false;  // LoadAssets
  std::shared_ptr<const Tokenizer> tokenizer_;
  bool no_answers_ = false;  // of the training data: some questions have none
  Examples train_, valid_, test_;
  std::unique_ptr<ShuffledOrder> order_;
  std::vector<std::string> notes_;
};

}  // namespace cistern

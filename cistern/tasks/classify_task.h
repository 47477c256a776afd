#pragma once
// Classification, or regression, of a user's own rows: texts in bytes or byte-level BPE, or columns
// of numbers, whose quantile bins become token ids (one token for each column). Data in a table or
// in a folder for each class; split by label with a seed where the user has not split it. The texts
// of the data are held in memory as tokens.
#include <memory>
#include <string>
#include <vector>

#include "cistern/tasks/labelled_rows.h"
#include "cistern/tasks/number_measure.h"
#include "cistern/tasks/row_batch.h"
#include "cistern/tasks/task.h"
#include "cistern/text/tokenizer.h"

namespace cistern {

class ClassifyTask : public Task {
 public:
  enum class Input { kText, kNumbers };
  enum class ClassWeights { kNone, kBalanced };
  enum class ByteIds { kPlain, kShifted };
  enum class ValidFrom { kShare, kTest };
  struct Options {
    std::string data, valid, test;  // tables or folders; empty valid, test: shares of data
    std::string text_column, second_column, label_column;  // second: of a pair of texts
    TableOptions::Header header = TableOptions::Header::kAuto;
    Input input = Input::kText;
    TokenizerKind tokenizer = TokenizerKind::kBytes;
    int64_t vocab_size = 2048, length = 1024, bins = 32;
    PadTo pad_to = PadTo::kLongest;
    ByteIds byte_ids = ByteIds::kPlain;
    ValidFrom valid_from = ValidFrom::kShare;
    bool regression = false, group_by_length = true, skip_bad_rows = false;
    ClassWeights class_weights = ClassWeights::kNone;
    std::string metric = "accuracy";  // accuracy | macro_f1 | matthews | log_loss
    double valid_share = 0.1, test_share = 0.1;
    int64_t split_seed = 1;
  };
  static Fields Describe(Options& options);
  ClassifyTask(const Options& options, const std::string& cache);

  void SaveAssets(const std::string& folder) const override;  // classify.json, tokenizer.json
  void LoadAssets(const std::string& folder) override;
  bool TakeTokenizer(std::shared_ptr<const Tokenizer> tokenizer) override;
  void Prepare() override;
  Json DataSummary() const override;
  void Complete(ModelConfig& config) const override;
  int64_t tokens_per_row() const override { return options_.length; }
  Batch TrainBatch(uint64_t seed, int64_t step, int64_t rows) const override;
  int64_t train_rows() const override { return train_.size(); }
  at::Tensor Loss(Model& model, const Batch& batch, double label_smoothing) const override;
  std::string WhyNoSmoothing(const Model& model) const override;
  double Terms(const Batch& batch) const override;  // rows, or the sum of their classes' weights
  std::unique_ptr<BatchReader> Read(Split split, const ReadOptions& options) const override;
  std::unique_ptr<BatchReader> ReadFile(const std::string& path, bool labelled,
                                        const ReadOptions& options) const override;
  Score Measure(Model& model, const Batch& batch) const override;
  // Classes: accuracy, macro_f1, matthews, log_loss, examples, majority (accuracy of the training
  // data's most frequent class), classes, confusion[expected][predicted]. Regression: rmse, mae,
  // r2, examples, mean_rmse (of always giving the training data's mean).
  Json Metrics(const Score& score) const override;
  const Metric& metric() const override;
  std::vector<Json> Predict(Model& model, const Batch& batch) const override;

 private:
  struct Examples {
    std::vector<int32_t> tokens;
    std::vector<int64_t> offsets = {0};
    std::vector<double> targets;  // class, or the number itself
    std::vector<int64_t> lines;
    int64_t size() const { return int64_t(lines.size()); }
  };
  class FileReader;

  // The next row whose cells the task can read: numbers where it takes numbers, a class that it
  // knows once it knows some. Of others an Error, or with skip_bad_rows they are counted.
  bool NextRow(RowSource& source, const std::string& path, bool labelled, LabelledRow* row,
               int64_t* skipped) const;
  void CheckCells(const LabelledRow& row, const std::string& where) const;
  std::vector<LabelledRow> ReadRows(const std::string& path, const char* what);
  void LearnLabels(const std::vector<LabelledRow>& rows);
  void LearnInputs(const std::vector<LabelledRow>& train);
  std::vector<int32_t> Encode(const LabelledRow& row, const std::string& where) const;
  std::vector<int32_t> EncodeTexts(const LabelledRow& row) const;
  RowColumns NamedColumns() const;
  void RefuseIdleKeys() const;
  double Target(const std::string& label, const std::string& where) const;
  Examples Encoded(const std::vector<LabelledRow>& rows, const std::string& path) const;
  at::Tensor WeightOfClasses() const;  // balanced losses are multiplied by it: [classes] double
  const Examples& Set(Split split) const;
  Batch MakeBatch(const Examples& set, const std::vector<int64_t>& rows) const;
  TableOptions table_options() const;
  int64_t TokenIds() const;  // of what the rows hold
  int64_t shift() const { return options_.byte_ids == ByteIds::kShifted ? 1 : 0; }  // of all ids

  Options options_;
  // What is saved with the model.
  RowColumns columns_;
  std::vector<std::string> classes_;            // sorted; none for regression
  std::vector<double> class_counts_;            // in the training data
  NumberScale scale_;                           // regression: of the training labels
  std::vector<std::vector<double>> edges_;      // numbers: bin edges of each column
  std::shared_ptr<const Tokenizer> tokenizer_;  // text
  // Of the data.
  Examples train_, valid_, test_;
  std::unique_ptr<ShuffledOrder> order_;
  int64_t skipped_ = 0, empty_ = 0;
  std::vector<std::string> notes_, folder_notes_;  // folder_notes_: what of them was not read
};

}  // namespace cistern

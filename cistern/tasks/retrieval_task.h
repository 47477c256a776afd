#pragma once
// Whether two texts belong together (spec 3.3): AAN's pairs as Long Range Arena distributes them,
// or halves of documents at hand (data/text_pairs.h). A token is a byte, id byte + 1.
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "cistern/data/text_pairs.h"
#include "cistern/tasks/class_measure.h"
#include "cistern/tasks/row_batch.h"

namespace cistern {

class RetrievalTask : public ClassTask {
 public:
  struct Options {
    std::string data, text_column;
    TableOptions::Header header = TableOptions::Header::kAuto;
    int64_t length = 4000;  // tokens of each text
    PadTo pad_to = PadTo::kLongest;
    bool skip_bad_rows = false;
    double valid_share = 0.1, test_share = 0.1;  // of documents
    int64_t split_seed = 1;
  };
  static Fields Describe(Options& options);
  RetrievalTask(const Options& options, const std::string& cache);

  void SaveAssets(const std::string& folder) const override;  // retrieval.json
  void LoadAssets(const std::string& folder) override;
  void Prepare() override;
  Json DataSummary() const override;
  void Complete(ModelConfig& config) const override;
  int64_t tokens_per_row() const override { return 2 * options_.length; }
  int64_t tokens_per_sequence() const override { return options_.length; }
  int64_t train_rows() const override { return splits_[0]->size(); }
  Batch TrainBatch(uint64_t seed, int64_t step, int64_t rows) const override;
  std::unique_ptr<BatchReader> Read(Split split, const ReadOptions& options) const override;
  // A TSV of pairs in AAN's form.
  std::unique_ptr<BatchReader> ReadFile(const std::string& path, bool labelled,
                                        const ReadOptions& options) const override;
  const Metric& metric() const override;

 private:
  void RefuseIdleKeys() const;
  int64_t PairDocuments();  // rows that were skipped
  Batch MakeBatch(const TextPairs& pairs, const std::vector<int64_t>& rows) const;

  Options options_;
  std::array<std::unique_ptr<TextPairs>, 3> splits_;  // by Split
  std::unique_ptr<ShuffledOrder> order_;
  std::vector<std::string> notes_;
};

}  // namespace cistern

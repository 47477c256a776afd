#pragma once
// What the tasks on plain text share: a text file or folder in bytes, byte-level BPE or words, as
// tokens that are cached on disk; training rows are windows of one length, none of which crosses
// the border of a block. The splits are 90/5/5 % of its bytes in blocks spread over all of it or by
// position (TextSplit), or texts of their own: `valid` and `test`, or a folder with WikiText's
// three files (wiki.train.tokens, ...).
#include <memory>
#include <string>
#include <vector>

#include "cistern/data/token_cache.h"
#include "cistern/tasks/order.h"
#include "cistern/tasks/task.h"

namespace cistern {

class TextTask : public Task {
 public:
  struct Options {
    std::string text;         // a file or folder
    std::string valid, test;  // the same, for validation and test; empty: parts of `text`
    TokenizerKind tokenizer = TokenizerKind::kBpe;
    int64_t vocab_size = 2048;  // with BPE or words
    int64_t length = 256;       // tokens of a training row
    TextSplit split = TextSplit::kSpread;
    bool random_ids = false;  // uniform draws in place of the text's tokens
  };
  static Fields Describe(Options& options);
  // TaskInfo::defaults of the tasks that hide tokens of a text: mlm, span_corruption.
  static std::vector<std::string> HiddenTokenDefaults();

  void SaveAssets(const std::string& folder) const override;  // tokenizer.json
  void LoadAssets(const std::string& folder) override;
  bool TakeTokenizer(std::shared_ptr<const Tokenizer> tokenizer) override;
  void Prepare() override;  // UsageError without a text
  Json DataSummary() const override;
  std::string SplitSummary() const override;
  void Complete(ModelConfig& config) const override;
  int64_t tokens_per_row() const override { return options_.length; }

 protected:
  // `name`: of the task, for messages.
  TextTask(std::string name, Options options, std::string cache);
  const Options& options() const { return options_; }
  const Tokenizer& tokenizer() const { return *tokenizer_; }
  const std::vector<int32_t>& token_bytes() const { return token_bytes_; }
  const TokenFile& tokens(Split split) const;
  // Shuffled windows of length + 1 tokens, each beginning with the last one of another: [rows,
  // length + 1]. Each epoch cuts the pieces of the text at another offset.
  at::Tensor TrainBlocks(uint64_t seed, int64_t step, int64_t rows) const;
  TokenText Of(const TokenFile& file) const;
  TokenText Of(Split split) const;  // with random_ids its tokens are draws, the same every time
  // All of a text, in tokens.
  std::shared_ptr<TokenFile> Tokenize(const std::string& path) const;

 private:
  std::shared_ptr<const Tokenizer> LearnTokenizer(const TextSource& source, const ByteRanges& train,
                                                  const std::string& suffix);
  void CutWindows();

  std::string name_;
  Options options_;
  std::string cache_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  std::unique_ptr<TokenSplits> data_;
  std::vector<int32_t> token_bytes_;
  struct Piece {  // of the training part
    int64_t begin, tokens;
    int64_t windows_end;  // windows of this piece and those before it
  };
  std::vector<Piece> pieces_;
  std::unique_ptr<ShuffledOrder> order_;  // of the windows
  std::vector<std::string> notes_;
  uint64_t text_hash_ = 0;
  bool apart_ = false;  // validation and test are texts of their own
};

}  // namespace cistern

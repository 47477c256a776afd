#pragma once
// A text in blocks of one length, each from the empty state: the batches a language model is
// measured on, and the sums of a batch.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cistern/models/language_model.h"
#include "cistern/tasks/task.h"
#include "cistern/text/tokenizer.h"

namespace cistern {

// Bytes of text that each token id stands for; <|endoftext|>, which stands between texts, has none.
std::vector<int32_t> TokenBytes(const Tokenizer& tokenizer);

// A text cut into rows of `length` tokens, piece by piece; what is left of a piece is a shorter
// row. The last `ahead` tokens of a piece begin no row. First come all whole rows in their order,
// then the shorter ones. With max_tokens above 0 only so many tokens, in whole rows that are shared
// out evenly among the pieces. With `context` each row knows how many tokens of its piece stand
// before it, at most so many.
class TextRows {
 public:
  struct Rows {
    std::vector<int64_t> begins;  // empty: the end
    int64_t length = 0;
    int64_t before = 0;  // tokens of context, the same for all of them
  };
  TextRows(const TokenText& text, int64_t length, int64_t max_tokens, int64_t ahead,
           int64_t context = 0);
  Rows Next(int64_t most);                  // up to `most` rows of one length and context
  int64_t total() const { return total_; }  // tokens of all rows
  int64_t done() const { return done_; }
  // Which tokens max_tokens left, in words; empty: all of them.
  std::string Part() const;

 private:
  struct Piece {
    int64_t begin, tokens;
  };
  std::vector<Piece> parts_;
  int64_t length_, context_, total_ = 0, done_ = 0;
  int64_t all_ = 0;  // tokens, also those that max_tokens left out
  size_t part_ = 0;
  int64_t at_ = 0;      // in the part
  bool rests_ = false;  // the whole rows are done
};

// Blocks read `length` tokens, each from the empty state, and measure the last length - context of
// them (the stride): every token but the first of a piece is predicted once, from the tokens of its
// block, and from at least `context` of them where the piece has as many before it. The last block
// of a piece is shorter, and so are its first ones with a context. Batches: ids [B,T], targets
// [B,n] of the last n ids; blocks of one shape together, a shorter last one alone (TextRows).
// `keep` keeps alive what text.read needs. UsageError where length or rows are below 1, or context
// is not below length.
struct TextBlocks {
  int64_t length = 256, rows = 8, max_tokens = 0, context = 0;
};
std::unique_ptr<BatchReader> ReadBlocks(const TokenText& text, const TextBlocks& options,
                                        std::shared_ptr<void> keep = nullptr);

// A text in rows of options.length tokens, or `length`, the last one of a piece shorter (TextRows),
// options.rows at a time, or 16, as batches that `make` gives of their tokens [n,T] int64 and of
// where in the text they begin. `keep` as above.
using MakeTextRows =
    std::function<Batch(const at::Tensor& tokens, const std::vector<int64_t>& begins)>;
std::unique_ptr<BatchReader> ReadTextRows(TokenText text, const ReadOptions& options,
                                          int64_t length, MakeTextRows make,
                                          std::shared_ptr<void> keep = nullptr);

// Adds nats (the sum of -log p), correct, tokens and bytes of `hidden` [...,D] predicting `targets`
// [...] to `score`; `logits` makes [n,V] of rows [n,D]. They are formed for some rows at a time, so
// that a large vocabulary fits. Error where the loss is not finite, or V is not that of
// token_bytes.
void MeasureTokens(const std::function<at::Tensor(const at::Tensor&)>& logits,
                   const at::Tensor& hidden, const at::Tensor& targets,
                   const std::vector<int32_t>& token_bytes, Score& score);
void MeasureTokens(const LanguageModel& model, const at::Tensor& hidden, const at::Tensor& targets,
                   const std::vector<int32_t>& token_bytes, Score& score);

// The sums of a batch of blocks, each from the empty state. UsageError where learned positions do
// not reach that far.
Score MeasureBlocks(LanguageModel& model, const Batch& batch,
                    const std::vector<int32_t>& token_bytes);

// bits_per_byte (NaN without bytes), nats_per_token, perplexity (per token), accuracy of the next
// token in percent, tokens, bytes.
Json TokenMetrics(const Score& score);

// What decides, and what papers on words print: by Metric::name.
const Metric& BitsPerByte();
const Metric& Perplexity();

}  // namespace cistern

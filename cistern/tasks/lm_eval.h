#pragma once
// How well a language model predicts a text: in blocks of one length without carried context, and
// by position with the state carried on.
#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "cistern/models/language_model.h"
#include "cistern/text/tokenizer.h"

namespace cistern {

// Tokens begin .. begin+count-1 of a text into out.
using TokenReader = std::function<void(int64_t begin, int64_t count, int64_t* out)>;

// Bytes of text that each token id stands for; <|endoftext|>, which stands between texts, has none.
std::vector<int32_t> TokenBytes(const Tokenizer& tokenizer);

struct LmScore {
  double nats = 0;  // sum of -log p
  int64_t tokens = 0, bytes = 0, correct = 0;
  bool interrupted = false;  // what was done until then is in here

  double nats_per_token() const;
  double bits_per_byte() const;  // NaN without bytes
  double perplexity() const;     // per token
  double accuracy() const;
  void Add(const LmScore& other);
};

struct LmEvalOptions {
  int64_t length = 256;  // predicted tokens of a block
  int64_t batch = 8;
  int64_t max_tokens = 0;  // predict the first N; 0: all
  const std::atomic<bool>* interrupt = nullptr;
  std::function<void(int64_t done, int64_t total)> progress;
};

// Blocks of length + 1 tokens begin at every multiple of `length`, each from the empty state: every
// token but the first is predicted once, from the tokens of its block. The last block is shorter.
LmScore EvaluateBlocks(LanguageModel& model, const TokenReader& read, int64_t tokens,
                       const std::vector<int32_t>& token_bytes, const LmEvalOptions& options);

struct PositionBucket {
  int64_t begin = 0, end = 0;  // tokens of context: positions begin .. end-1
  int64_t state_bytes = 0;     // of one sequence, after the bucket's last position
  LmScore score;
};

struct ByPositionOptions {
  int64_t max_positions = 0;  // 0: as far as the text and learned positions reach
  int64_t rows = 4;           // starting points, evenly spread, as one batch
  int64_t piece = 1024;       // tokens per extend
  int64_t first_bucket = 64;  // buckets [0,64) [64,128) [128,256) ...
  int64_t buckets = 0;        // above 0: that many equal ones instead
  const std::atomic<bool>* interrupt = nullptr;
  std::function<void(int64_t done, int64_t total)> progress;
};

// The state is carried on from token to token, however far: memory is one piece and the state.
std::vector<PositionBucket> EvaluateByPosition(LanguageModel& model, const TokenReader& read,
                                               int64_t tokens,
                                               const std::vector<int32_t>& token_bytes,
                                               const ByPositionOptions& options);

}  // namespace cistern

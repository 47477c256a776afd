#pragma once
// How well a language model predicts a text by position, the state carried on from token to token
// far beyond the training length.
#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "cistern/models/language_model.h"
#include "cistern/tasks/task.h"

namespace cistern {

struct PositionBucket {
  int64_t begin = 0, end = 0;  // tokens of context: positions begin .. end-1
  int64_t state_bytes = 0;     // of one sequence, after the bucket's last position
  Score score;                 // lm_blocks.h: MeasureTokens
  bool interrupted = false;    // what was done until then is in here
};

struct ByPositionOptions {
  int64_t max_positions = 0;  // 0: as far as the text and learned positions reach
  int64_t rows = 4;           // starting points, evenly spread, as one batch: see StartingPoints
  int64_t piece = 1024;       // tokens per extend
  int64_t first_bucket = 64;  // buckets [0,64) [64,128) [128,256) ...
  int64_t buckets = 0;        // above 0: that many equal ones instead
  const std::atomic<bool>* interrupt = nullptr;
  std::function<void(int64_t done, int64_t total)> progress;
};

// Where the rows of a measurement begin, and how many positions each of them has. A row stays in
// its piece of the text. Up to as many rows as pieces: each begins where an evenly chosen piece
// does; more: each piece is cut into equal parts, `rows` rounded down to a multiple of the pieces.
struct StartingPoints {
  StartingPoints(const TokenText& text, int64_t rows);
  std::vector<int64_t> begins;
  int64_t positions = 0;
};

// Memory is one piece and the state, at any position.
std::vector<PositionBucket> EvaluateByPosition(LanguageModel& model, const TokenText& text,
                                               const ByPositionOptions& options);

}  // namespace cistern

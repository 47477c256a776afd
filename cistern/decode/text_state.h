#pragma once
// The state of a text: what the model remembers, and what drawing the next token needs. Read a long
// prompt once, save it, use it often.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "cistern/models/language_model.h"
#include "cistern/text/tokenizer.h"

namespace cistern {

// The tokens of one row, for the repetition penalty: which of them occurred at all, and the last
// kRecent in order.
struct TokenHistory {
  static constexpr int64_t kRecent = 8192;
  std::vector<bool> ever;  // V
  std::deque<int32_t> recent;

  void Push(int32_t token);
};

// A value like ModelState, for a batch of rows: Clone what must survive (a checkpoint; going on
// from it rolls back).
struct TextState {
  ModelState model;
  at::Tensor hidden;           // [B,1,D] at each row's last token; undefined while nothing was read
  std::vector<int64_t> drawn;  // tokens drawn in each row: the next draw's step
  std::vector<TokenHistory> history;

  int64_t rows() const { return int64_t(drawn.size()); }
  int64_t position(int64_t row) const;  // tokens in the model's state
  int64_t Bytes() const;                // of the model's state
  TextState Clone() const;
  TextState Reorder(const std::vector<int64_t>& rows)
      const;  // row i of the result is row rows[i], a copy; rows may occur often
};

TextState EmptyTextState(const LanguageModel& model, int64_t rows);

// One safetensors file (models/model_state_file.h), with "text.hidden", "text.drawn" [B],
// "text.ever" [B,V] and "text.recent" [B,<=8192], -1 before the first token. What goes on from a
// loaded state is, to the bit, what would have come without stopping. A text that nothing was read
// into cannot be saved. Errors as LoadModelState; a file made with another tokenizer is a
// UsageError too.
void SaveTextState(const std::string& path, const LanguageModel& model, const Tokenizer& tokenizer,
                   const TextState& text);
TextState LoadTextState(const std::string& path, const LanguageModel& model,
                        const Tokenizer& tokenizer);

}  // namespace cistern

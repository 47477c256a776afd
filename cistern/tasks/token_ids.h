#pragma once
// What tasks say of the tokenizer that their rows are read with.
#include <string>

#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/text/tokenizer.h"

namespace cistern {

// What the ids of rows stand for, "ids" of a run's record (Task::DataSummary).
inline std::string IdsOf(const Tokenizer& tokenizer) {
  return tokenizer.kind() == TokenizerKind::kBytes ? "bytes"
                                                   : "tokens of " + HexText(tokenizer.Hash());
}

inline void RefuseWords(const std::string& task, TokenizerKind kind) {
  if (kind == TokenizerKind::kWords)
    FailUsage("task.", task, ": tokenizer=words is of the task lm; use bpe or bytes");
}
// The same of one that comes with another model's weights.
inline void RefuseTakenWords(const std::string& task, TokenizerKind kind) {
  if (kind == TokenizerKind::kWords)
    FailUsage("task.", task, ": the other model's tokenizer is of words, which the task lm alone ",
              "takes; begin with a model of bpe or bytes");
}

}  // namespace cistern

#pragma once
// Refusals of options that others leave without effect. Of what is learned anew alone, in
// Task::Prepare: the records of earlier runs may hold such options.
#include <algorithm>
#include <string>

#include "cistern/base/error.h"
#include "cistern/io/table_reader.h"
#include "cistern/tasks/task.h"
#include "cistern/text/tokenizer.h"

namespace cistern {

inline void RefuseIdle(bool idle, const std::string& key, const std::string& beside) {
  if (idle) FailUsage(key, " has no effect with ", beside, "; leave it out");
}

// Shares of the data beside files of their own, and the seed of a split that is not made.
template <class Options>
void RefuseIdleShares(const std::string& task, const Options& o) {
  const Options unset;
  const bool valid = !o.valid.empty(), test = !o.test.empty();
  RefuseIdle(valid && o.valid_share != unset.valid_share, task + ".valid_share",
             "valid=" + o.valid);
  RefuseIdle(test && o.test_share != unset.test_share, task + ".test_share", "test=" + o.test);
  RefuseIdle(valid && test && o.split_seed != unset.split_seed, task + ".split_seed",
             "files for validation and test");
}

// Whether a file may begin with a header: a table, but not of JSON lines.
inline bool MayHaveHeader(const std::string& path) {
  TableReader::Format format;
  return TableReader::FormatOf(path, &format) && format != TableReader::Format::kJsonl;
}

// vocab_size where tokens are bytes; that of the task's defaults is not the user's.
template <class Options>
void RefuseIdleVocabulary(const std::string& task, const Options& o) {
  const std::string set = StrCat("vocab_size=", o.vocab_size);
  const auto& defaults = FindTask(task).defaults;
  RefuseIdle(o.tokenizer == TokenizerKind::kBytes && o.vocab_size != Options().vocab_size &&
                 std::find(defaults.begin(), defaults.end(), "task." + set) == defaults.end(),
             StrCat("task.", task, ".", set), "tokenizer=bytes");
}

}  // namespace cistern

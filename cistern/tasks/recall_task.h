#pragma once
// Associative recall (multi-query: Arora et al. 2023, "Zoology"): n pairs of a key and a value,
// `distance` blanks, then keys again, in another order, each followed by its value, which the model
// has to give. No key comes in two pairs; values may. What is to be remembered are n pairs.
//
//   ids      k_1 v_1 ... k_n v_n  blank ... blank  k_b  v_b  k_a ...
//   targets                                        v_b       v_a ...
#include "cistern/tasks/generated_rows.h"

namespace cistern {

class RecallTask : public GeneratedRowsTask {
 public:
  struct Options : GeneratedRowsTask::Options {
    int64_t keys = 64, values = 64;
    int64_t queries = 0;  // of each row; 0: all pairs
  };
  static Fields Describe(Options& options);
  RecallTask(const Options& options, const std::string& cache);  // UsageError: too few keys

 protected:
  GeneratedRow MakeRow(Random& random, int64_t size) const override;
  int64_t Length(int64_t size) const override {
    return 2 * size + distance() + 2 * Queries(size) - 1;
  }
  int64_t Vocabulary() const override { return keys_ + values_ + 1; }
  int64_t Answers() const override { return values_; }

 private:
  int64_t Queries(int64_t size) const;

  int64_t keys_, values_, queries_;
};

}  // namespace cistern

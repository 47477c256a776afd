#pragma once
// Copying: n random tokens, `distance` blanks and a token that says go, after which the model has
// to give the n tokens again, in their order. Each token that it gave is the input of the next step
// (as it should have been). What is to be remembered is n ln(symbols) nats.
//
//   ids      x_1 ... x_n  blank ... blank  go   x_1 ... x_{n-1}
//   targets                                x_1  x_2 ... x_n
#include "cistern/tasks/generated_rows.h"

namespace cistern {

class CopyTask : public GeneratedRowsTask {
 public:
  struct Options : GeneratedRowsTask::Options {
    int64_t symbols = 16;
  };
  static Fields Describe(Options& options);
  CopyTask(const Options& options, const std::string& cache);

 protected:
  GeneratedRow MakeRow(Random& random, int64_t size) const override;
  int64_t Length(int64_t size) const override { return 2 * size + distance(); }
  int64_t Vocabulary() const override { return symbols_ + 2; }
  int64_t Answers() const override { return symbols_; }

 private:
  int64_t symbols_;
};

}  // namespace cistern

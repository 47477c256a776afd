#pragma once
// A progress bar on standard error, when that is a terminal:
//   train  [#########---------------]  38%  1900/5000 steps  12.4 steps/s  ETA 4:09  loss 2.31
#include <chrono>
#include <cstdint>
#include <string>

namespace cistern {

struct ProgressOptions {
  int64_t total = 0;  // 0: unknown, so no bar and no ETA
  std::string label;
  std::string unit = "steps";  // steps, tokens, MB
  int64_t start = 0;           // what was done before (a resumed run); left out of the rate
  double plain_seconds =
      0;  // above 0: without a terminal, a plain line every so many seconds (not when quiet)
};

// Draws at most 10 times a second, and nothing at all without a terminal or when quiet. The line is
// wiped by Finish and the destructor. Use one at a time, from one thread.
class ProgressBar {
 public:
  explicit ProgressBar(ProgressOptions options);
  ProgressBar(int64_t total, std::string label);
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  void Update(int64_t done, const std::string& extra = "");
  void SetTotal(int64_t total) { options_.total = total; }  // it became known, or is another
  void
  Clear();  // wipes the line, so that other text can be printed; the next Update draws it again
  void Finish();  // wipes the line; later calls do nothing

  // The line itself, without control characters, cut to `columns` (characters, not bytes).
  std::string Line(int64_t done, const std::string& extra, double seconds, int columns) const;

 private:
  ProgressOptions options_;
  std::chrono::steady_clock::time_point begin_, drawn_;
  bool terminal_ = false, visible_ = false, finished_ = false;
};

// For the whole process: `--quiet`.
void SetQuiet(bool quiet);
bool Quiet();

}  // namespace cistern

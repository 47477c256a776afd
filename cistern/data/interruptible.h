#pragma once
// Making data that a signal ends at once. A training, which makes what it lacks on its way,
// finishes that and saves; `cistern data` has nothing to save.
#include "cistern/base/error.h"

namespace cistern {

class DataInterrupted : public Error {
 public:
  using Error::Error;
};

// While one lives, the first Ctrl-C, SIGTERM or SIGHUP (base/interrupt.h) ends what generates
// ListOps and Pathfinder, reads a task's text, learns a tokenizer or writes a token file: it
// removes what it has not finished and throws DataInterrupted.
class InterruptibleData {
 public:
  InterruptibleData();
  ~InterruptibleData();
  InterruptibleData(const InterruptibleData&) = delete;
  InterruptibleData& operator=(const InterruptibleData&) = delete;

  // One lives, and a signal has come; where none lives, a note says once what comes of the signal.
  // From any thread.
  static bool Stopped();
  static void Check();  // DataInterrupted where it is so
};

}  // namespace cistern

#include "cistern/data/interruptible.h"

#include <atomic>

#include "cistern/base/interrupt.h"
#include "cistern/base/terminal.h"

namespace cistern {
namespace {

std::atomic<int> living_interruptible{0};

}  // namespace

InterruptibleData::InterruptibleData() { ++living_interruptible; }
InterruptibleData::~InterruptibleData() { --living_interruptible; }

bool InterruptibleData::Stopped() {
  if (!Interrupted()) return false;
  static std::atomic<bool> noted{false};
  const bool stops = living_interruptible > 0;
  if (!stops && !noted.exchange(true))
    Note("interrupted: the data at hand are made first; the same signal again ends at once");
  return stops;
}

void InterruptibleData::Check() {
  if (Stopped()) throw DataInterrupted("interrupted; what was not finished is removed");
}

}  // namespace cistern

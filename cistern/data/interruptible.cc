#include "cistern/data/interruptible.h"

#include <atomic>

#include "cistern/base/interrupt.h"

namespace cistern {
namespace {

std::atomic<int> living_interruptible{0};

}  // namespace

InterruptibleData::InterruptibleData() { ++living_interruptible; }
InterruptibleData::~InterruptibleData() { --living_interruptible; }

bool InterruptibleData::Stopped() { return living_interruptible > 0 && Interrupted(); }

void InterruptibleData::Check() {
  if (Stopped()) throw DataInterrupted("interrupted; what was not finished is removed");
}

}  // namespace cistern

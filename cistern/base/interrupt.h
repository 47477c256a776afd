#pragma once
// The flag that Ctrl-C, SIGTERM and SIGHUP set: long work looks at it, finishes what it is at and
// saves.
#include <atomic>

namespace cistern {

std::atomic<bool>& Interrupted();

// From now on the first of these signals sets the flag; one of the same kind more than a second
// later ends the process.
void InstallInterruptHandler();

}  // namespace cistern

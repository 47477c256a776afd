#pragma once
// Whether a thread may still call for others.

namespace cistern {

// How many threads a loop that begins here would have: NumThreads(), or 1 inside of another loop's
// region (parallel.h).
int ThreadsHere();

}  // namespace cistern

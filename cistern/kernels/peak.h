#pragma once
// What the machine can do at most, measured in place: multiply-adds and memory. Shares of these
// mean something where an instruction set's theoretical peak does not: clock rates change with it.
#include <cstdint>

namespace cistern {

// GFLOP/s (a multiply-add is two operations) of NumThreads() threads that do nothing else, with the
// active SIMD target (isa.h); T float or double. The best of some rounds within about `seconds`.
// A target without multiply-adds (sse4, portable) is measured with what it does in their place.
template <class T>
double MultiplyAddPeak(double seconds = 0.2);

// GB/s (10^9 bytes) of NumThreads() threads that add two arrays into a third: 12 bytes a float,
// what the caches fetch before a write not counted. `bytes` of each array: more than the caches.
double TriadBandwidth(int64_t bytes = int64_t{64} << 20, double seconds = 0.2);

}  // namespace cistern

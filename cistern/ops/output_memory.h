#pragma once
// Memory of large op outputs on the CPU, used again after they are gone.
//
// The C library gives memory beyond its thresholds back to the system, so that every large output
// is faulted in anew, page by page: at 16,384 tokens and more that takes as long as the kernels.
// Here freed blocks wait for the next output; in huge pages where the system grants them. Blocks in
// use and blocks that wait are never more than 5/4 of what was in use at once, and the system may
// take the pages of those that wait when it runs short of memory (MADV_FREE).
#include <c10/core/Allocator.h>

namespace cistern::ops {

// For blocks of 1 MiB and more; smaller ones are torch's. Safe for threads.
c10::Allocator& OutputAllocator();

// Bytes that wait for their next use.
size_t WaitingOutputBytes();

}  // namespace cistern::ops

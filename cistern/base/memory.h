#pragma once
// Memory of this process and of the machine, in bytes; 0 where the system does not say.
#include <cstdint>
#include <string>

namespace cistern {

// Resident memory of this process, now and at its highest since ResetPeakMemory.
int64_t ResidentBytes();
int64_t PeakBytes();
void ResetPeakMemory();

// Pages that this process has been given so far without reading a disk: the cost of fresh memory.
int64_t PageFaults();

// What this process may still take: of the machine's free memory, of what its control groups (v1 or
// v2, themselves and those above) leave, and of its own limit of address space (ulimit -v), the
// least.
int64_t AvailableBytes();

// The parts that AvailableBytes is made of: what the machine and the control groups leave to all
// processes together, and what its own limit of address space leaves to this one alone. INT64_MAX
// where there is no limit.
int64_t SharedAvailableBytes();
int64_t OwnAvailableBytes();
// Of the control groups, for tests: `root` stands for / and `self` for the contents of
// /proc/self/cgroup.
int64_t CgroupAvailableBytes(const std::string& root, const std::string& self);

}  // namespace cistern

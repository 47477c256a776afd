#pragma once
// Which operations a piece of work spends its time in, by torch's own records of them
// (at::RecordFunction): forward and backward, of torch and of Cistern.
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace cistern::bench {

struct OperationTime {
  std::string name;  // "aten::mm", "cistern::slot_read_backward"
  int64_t calls = 0;
  double milliseconds = 0;  // in the operation itself, without those that it calls
};

struct Profile {
  double milliseconds = 0;                // of the whole work
  std::vector<OperationTime> operations;  // the longest first
  // Of the work outside all operations: between them, and in other threads.
  double Outside() const;
};

// Runs the work once and records it; the records cost about a microsecond an operation. Only one at
// a time in a process; operations of other threads are counted with their own time.
Profile ProfileWork(const std::function<void()>& work);

}  // namespace cistern::bench

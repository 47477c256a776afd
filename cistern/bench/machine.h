#pragma once
// Where figures come from: the processor, the threads, the program. Figures of different machines
// are not comparable.
#include <string>

#include "cistern/io/fields.h"

namespace cistern::bench {

struct Machine {
  std::string processor;  // as the system names it
  int64_t cores = 0;      // that the system has
  int64_t threads = 0;    // of the process, where a row does not say its own
  std::string isa;        // SIMD target, where a row does not say its own
  std::string torch;      // version
  std::string program;    // version
  std::string commit;     // of the source tree that the program was built in; "+" where files had
                          // changed; empty: not known
  std::string Line() const;  // "AMD EPYC 9R14, 2 cores; 2 threads, avx512; torch 2.15.0; ..."
};
Machine ThisMachine(const std::string& program_version);
Json MachineJson(const Machine& machine);
Machine ReadMachine(const Json& json);  // Error where something is missing

// Why figures of the two are not comparable; empty: they are. Version and commit may differ.
std::string Difference(const Machine& a, const Machine& b);

}  // namespace cistern::bench

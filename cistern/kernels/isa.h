#pragma once
// Which SIMD instruction set the kernels use: the best the machine has, or the one forced by CISTERN_ISA (avx512, avx2, sse4, portable...).
#include <string>
#include <vector>

namespace cistern {

std::vector<std::string> CompiledIsas();  // best first
std::string ActiveIsa();                  // the one in use; throws UsageError when CISTERN_ISA names one that is unknown or not supported here

}  // namespace cistern

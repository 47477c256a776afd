#pragma once
// Which SIMD instruction set the kernels use: the best the machine has, or the one forced by
// CISTERN_ISA (avx512_amx, avx512, avx2, sse4, portable...). avx512_amx is avx512 with products of
// bfloat16 by Intel's tiles (AMX), where the processor has them and the system lets this process.
#include <string>
#include <vector>

namespace cistern {

std::vector<std::string> CompiledIsas();   // best first
std::vector<std::string> SupportedIsas();  // those of them this machine can run, best first
std::string ActiveIsa();  // the one in use; throws UsageError when CISTERN_ISA names one that is
                          // unknown or not supported here

// Switches this process to another one (tests compare them); the empty name means CISTERN_ISA
// again. Not while a kernel runs.
void ForceIsa(const std::string& isa);

// Reads CISTERN_ISA on the first call. Every kernel's dispatch goes through it (CISTERN_DISPATCH in
// dispatch.h).
void ResolveIsa();

// Whether the processor multiplies bfloat16 in hardware (AVX512-BF16), so that bfloat16 products
// are faster than those of float.
bool HasBFloat16();

// Whether the instruction set in use is avx512_amx.
bool UsesAmx();

// Whether our own kernels gain by products of bfloat16: by AMX, or by AVX512-BF16 on AMD's
// processors, where it does twice the work of a multiply-add in the same time (Zen 4, Zen 5); on
// Intel's it does no more. By the maker, not by a measurement, so that results do not depend on
// the moment.
bool GainsByBFloat16();

}  // namespace cistern

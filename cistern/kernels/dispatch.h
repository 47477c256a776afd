#pragma once
// Included before any Highway header: which targets all kernels are compiled for, and the one way
// to call them.
//
// All that a compiler can make, so that a portable fallback is always among them and can be forced
// and tested. SSSE3 would only cost compile time; SVE's vectors have no size at compile time, so
// the register tiles of gemm-inl.h cannot hold them (aarch64 uses NEON). CISTERN_LEFT_OUT_TARGETS:
// more that a build leaves out (CMakeLists.txt; scripts/check-tidy), all but the portable one.
#ifndef CISTERN_LEFT_OUT_TARGETS
#define CISTERN_LEFT_OUT_TARGETS 0
#endif
#define HWY_COMPILE_ALL_ATTAINABLE
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | CISTERN_LEFT_OUT_TARGETS)

#include "cistern/kernels/isa.h"

#define CISTERN_DISPATCH(function) (::cistern::ResolveIsa(), HWY_DYNAMIC_DISPATCH(function))

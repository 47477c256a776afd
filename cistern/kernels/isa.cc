#include "cistern/kernels/isa.h"

#include <cstdint>
#include <cstdlib>

#include "cistern/base/error.h"
#include "cistern/kernels/dispatch.h"
#include "hwy/highway.h"

namespace cistern {
namespace {

std::string NameOf(int64_t target) {
  switch (target) {
    case HWY_AVX3_DL:
      return "avx512_dl";
    case HWY_AVX3:
      return "avx512";
    case HWY_AVX2:
      return "avx2";
    case HWY_SSE4:
      return "sse4";
    case HWY_NEON:
      return "neon";
    case HWY_EMU128:
    case HWY_SCALAR:
      return "portable";
    default:
      return "target" + std::to_string(target);
  }
}

constexpr int64_t kPortable = HWY_EMU128 | HWY_SCALAR;

// Highway numbers better targets lower.
std::vector<int64_t> Targets(int64_t mask) {
  std::vector<int64_t> targets;
  for (; mask != 0; mask &= mask - 1) targets.push_back(mask & -mask);
  return targets;
}

std::vector<std::string> Names(int64_t mask) {
  std::vector<std::string> names;
  for (int64_t target : Targets(mask)) names.push_back(NameOf(target));
  return names;
}

int64_t Supported() { return int64_t{HWY_TARGETS} & (hwy::SupportedTargets() | kPortable); }

int64_t active = 0;

void Activate(int64_t target) {
  active = target;
  hwy::GetChosenTarget().Update(target);
}

}  // namespace

std::vector<std::string> CompiledIsas() { return Names(HWY_TARGETS); }
std::vector<std::string> SupportedIsas() { return Names(Supported()); }

void ForceIsa(const std::string& isa) {
  if (isa.empty()) {
    const char* name = std::getenv("CISTERN_ISA");
    if (name != nullptr && *name != '\0') return ForceIsa(name);
    return Activate(Targets(Supported()).front());
  }
  for (int64_t target : Targets(Supported())) {
    if (NameOf(target) == isa) return Activate(target);
  }
  for (const std::string& name : CompiledIsas()) {
    if (name == isa) FailUsage("CISTERN_ISA=", isa, " is not supported by this machine");
  }
  throw UsageError(UnknownName("CISTERN_ISA", isa, CompiledIsas()));
}

void ResolveIsa() {
  [[maybe_unused]] static const bool once =
      (ForceIsa(""), true);  // a failed first try throws again on the next call
}

std::string ActiveIsa() {
  ResolveIsa();
  return NameOf(active);
}

bool HasBFloat16() {
#if HWY_ARCH_X86
  return __builtin_cpu_supports("avx512bf16") != 0;
#else
  return false;
#endif
}

bool GainsByBFloat16Pairs() {
#if HWY_ARCH_X86
  return HasBFloat16() && __builtin_cpu_is("amd") != 0;
#else
  return false;
#endif
}

}  // namespace cistern

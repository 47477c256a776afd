#include "cistern/kernels/isa.h"

#include <cstdint>
#include <cstdlib>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "cistern/base/error.h"
#include "cistern/kernels/dispatch.h"
#include "hwy/highway.h"

namespace cistern {
namespace {

// A target of Highway; amx: with Intel's tiles beside it, for which Highway has no target.
struct Isa {
  int64_t target;
  bool amx;
};

std::string NameOf(Isa isa) {
  if (isa.amx) return "avx512_amx";
  switch (isa.target) {
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
      return "target" + std::to_string(isa.target);
  }
}

constexpr int64_t kPortable = HWY_EMU128 | HWY_SCALAR;

// Highway numbers better targets lower.
std::vector<Isa> Isas(int64_t mask, bool amx) {
  std::vector<Isa> isas;
  for (; mask != 0; mask &= mask - 1) {
    const int64_t target = mask & -mask;
    if (amx && target == HWY_AVX3) isas.push_back({target, true});
    isas.push_back({target, false});
  }
  return isas;
}

std::vector<std::string> Names(const std::vector<Isa>& isas) {
  std::vector<std::string> names;
  names.reserve(isas.size());
  for (const Isa& isa : isas) names.push_back(NameOf(isa));
  return names;
}

// Whether the processor has AMX-TILE and AMX-BF16, and Linux gives this process, which has to ask,
// the 8 KiB of their registers.
bool MayUseAmx() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr unsigned kBFloat16 = 1u << 22, kTile = 1u << 24;   // leaf 7, EDX
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XTILEDATA
  static const bool may = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return HasBFloat16() && __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kBFloat16) != 0 &&
           (d & kTile) != 0 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return may;
#else
  return false;
#endif
}

std::vector<Isa> Compiled() { return Isas(HWY_TARGETS, HWY_ARCH_X86 != 0); }
std::vector<Isa> Supported() {
  return Isas(int64_t{HWY_TARGETS} & (hwy::SupportedTargets() | kPortable), MayUseAmx());
}

Isa active = {0, false};

void Activate(Isa isa) {
  active = isa;
  hwy::GetChosenTarget().Update(isa.target);
}

// The empty name: what CISTERN_ISA says.
void Choose(const std::string& isa) {
  if (isa.empty()) {
    const char* name = std::getenv("CISTERN_ISA");
    if (name != nullptr && *name != '\0') return Choose(name);
    return Activate(Supported().front());
  }
  for (const Isa& supported : Supported()) {
    if (NameOf(supported) == isa) return Activate(supported);
  }
  const std::vector<std::string> compiled = CompiledIsas();
  for (const std::string& name : compiled) {
    if (name == isa) FailUsage("CISTERN_ISA=", isa, " is not supported by this machine");
  }
  throw UsageError(UnknownName("CISTERN_ISA", isa, compiled));
}

}  // namespace

std::vector<std::string> CompiledIsas() { return Names(Compiled()); }
std::vector<std::string> SupportedIsas() { return Names(Supported()); }

void ForceIsa(const std::string& isa) {
  ResolveIsa();  // else the first dispatch would take what is forced here back
  Choose(isa);
}

void ResolveIsa() {
  [[maybe_unused]] static const bool once =
      (Choose(""), true);  // a failed first try throws again on the next call
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

bool UsesAmx() {
  ResolveIsa();
  return active.amx;
}

bool GainsByBFloat16() {
  if (UsesAmx()) return true;
#if HWY_ARCH_X86
  static const bool gains = HasBFloat16() && __builtin_cpu_is("amd") != 0;
  return gains;
#else
  return false;
#endif
}

}  // namespace cistern

#include "cistern/nn/padding_reads.h"

#include "cistern/attention/head_groups.h"
#include "cistern/base/error.h"

namespace cistern {
namespace {

// Those whose two forms differ: a test compares them for every mechanism (parts_test).
struct Differs {
  const char *mechanism, *why;
};
constexpr Differs kDiffer[] = {
    {"window", "a token reads its neighbours, and padding has none"},
    {"abc_cluster", "its clusters are those of a whole row, and a written state has others"},
    {"rfa", "its cross form may have another denominator"},
};

std::string Refusal(const Mechanism& mechanism) {
  const MechanismInfo& info = mechanism.info();
  if (mechanism.SeesPadding()) return "its options let padding take part like any token";
  if (info.HandsOnMemory() || info.memory == MemoryUse::kFixed)
    return "its tokens read a memory whose slots may depend on their number";
  if (mechanism.dims().relative) return "relative positions have no place for padding";
  for (const Differs& d : kDiffer) {
    if (info.name == d.mechanism || InHeadGroups(info.name, d.mechanism)) return d.why;
  }
  if (!info.verbs || !info.Supports(Form::kCross) || !mechanism.FormRefusal(Form::kCross).empty())
    return "its tokens read no written state that other queries could read";
  return "";
}

}  // namespace

void RequirePaddingReads(const Mechanism& mechanism) {
  if (const std::string why = Refusal(mechanism); !why.empty())
    FailUsage("padding=reads is not defined for ", mechanism.info().name, ": ", why,
              "; use softmax, latte, abc_mlp, linear, performer or linformer, or padding=masked");
}

}  // namespace cistern

#include "cistern/nn/padding_reads.h"

#include "cistern/base/error.h"

namespace cistern {
namespace {

std::string Refusal(const Mechanism& mechanism) {
  const MechanismInfo& info = mechanism.info();
  if (mechanism.SeesPadding()) return "its options let padding take part like any token";
  if (info.HandsOnMemory() || info.memory == MemoryUse::kFixed)
    return "its tokens read a memory whose slots may depend on their number";
  if (mechanism.dims().relative) return "relative positions have no place for padding";
  if (!info.padding_refusal.empty()) return info.padding_refusal;
  if (!info.verbs || !info.Supports(Form::kCross) || !mechanism.FormRefusal(Form::kCross).empty())
    return "its tokens read no written state that other queries could read";
  return "";
}

}  // namespace

void RequirePaddingReads(const Mechanism& mechanism) {
  if (const std::string why = Refusal(mechanism); !why.empty())
    FailUsage("padding=reads is not defined for ", mechanism.info().name, ": ", why,
              "; use softmax or reuse, or padding=masked");
}

}  // namespace cistern

#include "cistern/nn/attention_observer.h"

#include "cistern/base/error.h"

namespace cistern {
namespace {

thread_local AttentionObserver* active_observer = nullptr;

}  // namespace

AttentionObserver::AttentionObserver() {
  CISTERN_CHECK(!active_observer, "[observer] another one is active in this thread");
  active_observer = this;
}
AttentionObserver::~AttentionObserver() { active_observer = nullptr; }
AttentionObserver* AttentionObserver::Active() { return active_observer; }

}  // namespace cistern

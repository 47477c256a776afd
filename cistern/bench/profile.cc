#include "cistern/bench/profile.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>

namespace cistern::bench {
namespace {

using Clock = std::chrono::steady_clock;

double Milliseconds(Clock::time_point began) {
  return std::chrono::duration<double, std::milli>(Clock::now() - began).count();
}

// An operation that has begun on this thread, and those around it.
struct Running : at::ObserverContext {
  Clock::time_point began;
  double inside = 0;  // milliseconds of the operations that it called
  Running* outer = nullptr;
};
thread_local Running* innermost = nullptr;

struct Totals {
  std::mutex mutex;
  std::map<std::string, OperationTime> by_name;
};
Totals* totals = nullptr;  // of the one profile that runs

std::unique_ptr<at::ObserverContext> Begin(const at::RecordFunction&) {
  auto running = std::make_unique<Running>();
  running->outer = innermost;
  innermost = running.get();
  running->began = Clock::now();
  return running;
}

void End(const at::RecordFunction& function, at::ObserverContext* context) {
  auto* running = static_cast<Running*>(context);
  if (running == nullptr) return;
  const double passed = Milliseconds(running->began);
  innermost = running->outer;
  if (innermost != nullptr) innermost->inside += passed;
  if (totals == nullptr) return;
  const std::lock_guard lock(totals->mutex);
  OperationTime& time = totals->by_name[function.name()];
  ++time.calls;
  time.milliseconds += std::max(0.0, passed - running->inside);
}

// The gradient of a function of autograd's has the name of a C++ type: as operations are named.
std::string Readable(std::string name) {
  constexpr std::string_view kNode = "torch::autograd::CppNode<";
  const size_t node = name.find(kNode);
  if (node == std::string::npos || !name.ends_with('>')) return name;
  name.erase(node, kNode.size());
  name.pop_back();
  for (const std::string_view part :
       {"ops::", "(anonymous namespace)::", "::Function", "Function"}) {
    if (const size_t at = name.find(part, node); at != std::string::npos)
      name.erase(at, part.size());
  }
  return name + "_backward";
}

}  // namespace

double Profile::Outside() const {
  double sum = 0;
  for (const OperationTime& o : operations) sum += o.milliseconds;
  return std::max(0.0, milliseconds - sum);
}

Profile ProfileWork(const std::function<void()>& work) {
  Totals own;
  totals = &own;
  // Removed again whatever the work does.
  struct Callback {
    at::CallbackHandle handle = at::addGlobalCallback(
        at::RecordFunctionCallback(&Begin, &End)
            .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
    ~Callback() {
      at::removeCallback(handle);
      totals = nullptr;
    }
  };
  Profile profile;
  {
    const Callback callback;
    const auto began = Clock::now();
    work();
    profile.milliseconds = Milliseconds(began);
  }
  for (auto& [name, time] : own.by_name) {
    time.name = Readable(name);
    profile.operations.push_back(time);
  }
  std::sort(profile.operations.begin(), profile.operations.end(),
            [](const auto& a, const auto& b) { return a.milliseconds > b.milliseconds; });
  return profile;
}

}  // namespace cistern::bench

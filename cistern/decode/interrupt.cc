#include "cistern/decode/interrupt.h"

#include <csignal>

namespace cistern {
namespace {

InterruptFlag interrupt_flag{false};
static_assert(InterruptFlag::is_always_lock_free);
struct sigaction former_int, former_term;

void OnInterrupt(int signal) {
  interrupt_flag.store(true, std::memory_order_relaxed);
  struct sigaction action = {};
  action.sa_handler = SIG_DFL;
  ::sigaction(signal, &action, nullptr);
}

}  // namespace

InterruptScope::InterruptScope() {
  interrupt_flag = false;
  struct sigaction action = {};
  action.sa_handler = OnInterrupt;  // no SA_RESTART: a read from the terminal ends too
  sigemptyset(&action.sa_mask);
  ::sigaction(SIGINT, &action, &former_int);
  ::sigaction(SIGTERM, &action, &former_term);
}

InterruptScope::~InterruptScope() {
  ::sigaction(SIGINT, &former_int, nullptr);
  ::sigaction(SIGTERM, &former_term, nullptr);
}

const InterruptFlag* InterruptScope::flag() const { return &interrupt_flag; }

}  // namespace cistern

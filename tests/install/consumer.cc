// The smallest program on an installed Cistern: find_package(cistern), a header, a call into the
// library.
#include <iostream>

#include "cistern/base/error.h"
#include "cistern/base/random.h"

int main() {
  cistern::Random random(7);
  std::cout << "one draw: " << random.Below(1000) << "\n";
  std::cout << cistern::UnknownName("mechanism", "late", {"softmax", "latte"}) << "\n";
}

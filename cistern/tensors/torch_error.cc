#include "cistern/tensors/torch_error.h"

#include <c10/util/Exception.h>

namespace cistern {

std::string FirstLine(const std::exception& e) {
  const auto* torch = dynamic_cast<const c10::Error*>(&e);
  const std::string what = torch != nullptr ? torch->what_without_backtrace() : e.what();
  return what.substr(0, what.find('\n'));
}

}  // namespace cistern

#pragma once
// The folder of what is made once from data and kept.
#include <string>

namespace cistern {

// Where tokens and generated data are kept: `asked`, or $XDG_CACHE_HOME/cistern, or
// ~/.cache/cistern. Made when missing.
std::string CacheFolder(const std::string& asked);

}  // namespace cistern

#pragma once
// A piece of an open file, at any place of it, by any thread: unlike mapped memory, a file that is
// cut short while it is in use is an Error.
#include <cstddef>
#include <cstdint>
#include <string>

namespace cistern {

// `bytes` from byte `at` on. Error that names `where` (the path, perhaps with a line) and the
// system's reason, or the byte at which the file ends.
void ReadAt(int fd, int64_t at, size_t bytes, void* out, const std::string& where);

}  // namespace cistern

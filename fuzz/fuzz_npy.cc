// .npy files: a header that is anything, and data of exactly the size that it says.
#include <cmath>

#include "cistern/io/npy.h"
#include "fuzz/fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return cistern::FuzzOne(data, size, [](std::string_view bytes) {
    static cistern::FuzzFile holder;
    const cistern::NpyFile file(holder.Holding(bytes));
    int64_t count = 1;
    for (const int64_t n : file.shape()) count *= n;
    if (count != file.size() || size_t(count) > bytes.size()) __builtin_trap();
    std::string numbers(size_t(count) * sizeof(double), '\0');
    auto* const out = reinterpret_cast<double*>(numbers.data());
    file.Read(0, count, out);
    for (int64_t i = 0; i < count; ++i) {
      if (std::isinf(out[i])) __builtin_trap();
    }
    if (count > 0) {
      double last = 0;
      file.Read(count - 1, 1, &last);
      if (!std::isnan(out[count - 1]) && last != out[count - 1]) __builtin_trap();
    }
  });
}

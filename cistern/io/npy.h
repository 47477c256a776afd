#pragma once
// numpy's .npy files: written as version 1.0, read as 1.0 to 3.0; little-endian, C order; F64, F32,
// F16, I64, I32, I16, I8, U8, U16, U32, U64 and BOOL.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cistern/base/error.h"
#include "cistern/io/dtype.h"

namespace cistern {

template <class T>
constexpr DType DTypeOf() {
  if constexpr (std::is_same_v<T, double>) return DType::kF64;
  if constexpr (std::is_same_v<T, float>) return DType::kF32;
  if constexpr (std::is_same_v<T, int64_t>) return DType::kI64;
  if constexpr (std::is_same_v<T, int32_t>) return DType::kI32;
  if constexpr (std::is_same_v<T, uint8_t>) return DType::kU8;
  if constexpr (std::is_same_v<T, bool>) return DType::kBool;
}

struct NpyArray {
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  std::vector<uint64_t> storage;  // aligned for every type
  int64_t bytes = 0;
  std::string name;  // of the file, for messages

  int64_t size() const { return bytes / DTypeBytes(dtype); }
  const void* raw() const { return storage.data(); }
  // Throws Error when the elements have another type.
  template <class T>
  const T* data() const {
    CISTERN_CHECK(dtype == DTypeOf<T>(), name, ": expected ", DTypeName(DTypeOf<T>()),
                  ", it holds ", DTypeName(dtype));
    return reinterpret_cast<const T*>(storage.data());
  }
};

// Errors name the file, the offset or the header's key, and what was expected.
NpyArray ReadNpy(const std::string& path);
NpyArray ParseNpy(std::string_view bytes, const std::string& name);

void WriteNpy(const std::string& path, DType dtype, const std::vector<int64_t>& shape,
              const void* data);
template <class T>
void WriteNpy(const std::string& path, const std::vector<int64_t>& shape, const T* data) {
  WriteNpy(path, DTypeOf<T>(), shape, static_cast<const void*>(data));
}

}  // namespace cistern

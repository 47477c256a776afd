#pragma once
// Element types of the tensor files.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cistern {

enum class DType {
  kF64,
  kF32,
  kF16,
  kBF16,
  kF8E4M3,
  kF8E5M2,
  kI64,
  kI32,
  kI16,
  kI8,
  kU64,
  kU32,
  kU16,
  kU8,
  kBool
};

// As safetensors names them: "F32", "BF16", "F8_E4M3", "BOOL".
const char* DTypeName(DType dtype);
bool ParseDType(std::string_view name, DType* dtype);  // false: no such name
int64_t DTypeBytes(DType dtype);                       // per element
std::string DTypeNames();                              // all, for messages

// The bytes of a tensor; false when a size is negative or the product does not fit.
bool TensorBytes(const std::vector<int64_t>& shape, DType dtype, int64_t* bytes);

std::string ShapeText(const std::vector<int64_t>& shape);  // "[2,3]"

}  // namespace cistern

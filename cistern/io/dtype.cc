#include "cistern/io/dtype.h"

namespace cistern {
namespace {

struct Row {
  const char* name;
  int64_t bytes;
};
constexpr Row kRows[] = {{"F64", 8},     {"F32", 4}, {"F16", 2}, {"BF16", 2}, {"F8_E4M3", 1},
                         {"F8_E5M2", 1}, {"I64", 8}, {"I32", 4}, {"I16", 2},  {"I8", 1},
                         {"U64", 8},     {"U32", 4}, {"U16", 2}, {"U8", 1},   {"BOOL", 1}};
static_assert(sizeof(kRows) / sizeof(kRows[0]) == size_t(DType::kBool) + 1);

}  // namespace

const char* DTypeName(DType dtype) { return kRows[int(dtype)].name; }
int64_t DTypeBytes(DType dtype) { return kRows[int(dtype)].bytes; }

bool ParseDType(std::string_view name, DType* dtype) {
  for (int i = 0; i <= int(DType::kBool); ++i) {
    if (name != kRows[i].name) continue;
    *dtype = DType(i);
    return true;
  }
  return false;
}

std::string DTypeNames() {
  std::string names;
  for (const Row& row : kRows) names += (names.empty() ? "" : ", ") + std::string(row.name);
  return names;
}

bool TensorBytes(const std::vector<int64_t>& shape, DType dtype, int64_t* bytes) {
  int64_t product = DTypeBytes(dtype);
  for (const int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(product, size, &product)) return false;
  }
  *bytes = product;
  return true;
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i > 0 ? "," : "") + std::to_string(shape[i]);
  return text + "]";
}

}  // namespace cistern

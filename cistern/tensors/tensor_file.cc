#include "cistern/tensors/tensor_file.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "cistern/base/error.h"
#include "cistern/base/terminal.h"
#include "cistern/io/safetensors.h"

namespace cistern {
namespace {

DType FromTorch(at::ScalarType type, const std::string& where) {
  switch (type) {
    case at::kDouble:
      return DType::kF64;
    case at::kFloat:
      return DType::kF32;
    case at::kHalf:
      return DType::kF16;
    case at::kBFloat16:
      return DType::kBF16;
    case at::kLong:
      return DType::kI64;
    case at::kInt:
      return DType::kI32;
    case at::kBool:
      return DType::kBool;
    case at::kByte:
      return DType::kU8;
    default:
      Fail(where, ": tensors of type ", at::toString(type), " are not written to files");
  }
}

at::ScalarType ToTorch(DType type, const std::string& where) {
  switch (type) {
    case DType::kF64:
      return at::kDouble;
    case DType::kF32:
      return at::kFloat;
    case DType::kF16:
      return at::kHalf;
    case DType::kBF16:
      return at::kBFloat16;
    case DType::kI64:
      return at::kLong;
    case DType::kI32:
      return at::kInt;
    case DType::kBool:
      return at::kBool;
    case DType::kU8:
      return at::kByte;
    default:
      Fail(where, ": tensors of type ", DTypeName(type), " are not supported");
  }
}

}  // namespace

void SaveTensors(const std::string& path, const TensorFile& file) {
  std::vector<at::Tensor> kept;  // contiguous, alive until written
  std::vector<TensorEntry> entries;
  for (const NamedTensor& t : file.tensors) {
    const std::string where = StrCat(path, ": tensor '", t.name, "'");
    CISTERN_CHECK(t.value.defined(), where, " is undefined");
    kept.push_back(t.value.detach().to(at::kCPU).contiguous());
    const at::Tensor& x = kept.back();
    entries.push_back({t.name, FromTorch(x.scalar_type(), where), x.sizes().vec(),
                       x.const_data_ptr(), int64_t(x.nbytes())});
  }
  WriteSafetensors(path, entries, {file.metadata.begin(), file.metadata.end()});
}

TensorFile LoadTensors(const std::string& path) {
  const SafetensorsFile file(path);
  if (!file.checked()) Note(path + " has no Cistern checksum, so damage to it would go unnoticed");
  TensorFile out;
  out.metadata.assign(file.metadata().begin(), file.metadata().end());
  for (const TensorEntry& e : file.entries()) {
    const auto type = ToTorch(e.dtype, StrCat(path, ": tensor '", e.name, "'"));
    if (e.dtype == DType::kBool) {  // any other byte would be undefined behaviour to read as a bool
      const auto* bytes = static_cast<const unsigned char*>(e.data);
      CISTERN_CHECK(std::all_of(bytes, bytes + e.bytes, [](unsigned char b) { return b <= 1; }),
                    path, ": tensor '", e.name,
                    "' of type BOOL holds a byte that is neither 0 nor 1; the file is corrupt");
    }
    out.tensors.push_back(
        {e.name, at::from_blob(const_cast<void*>(e.data), e.shape, at::TensorOptions().dtype(type))
                     .clone()});
  }
  return out;
}

}  // namespace cistern

#pragma once
// Named tensors from and to safetensors files.
#include <string>
#include <utility>
#include <vector>

#include "cistern/tensors/named_tensors.h"

namespace cistern {

struct TensorFile {
  std::vector<NamedTensor> tensors;
  std::vector<std::pair<std::string, std::string>> metadata;
};

// The file appears whole or not at all. Tensors of any device. Error, naming the file and the
// tensor, where it cannot be written or read, and for types that neither side has.
void SaveTensors(const std::string& path, const TensorFile& file);
TensorFile LoadTensors(const std::string& path);  // on the CPU

}  // namespace cistern

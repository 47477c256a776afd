#pragma once
// The safetensors format (https://github.com/huggingface/safetensors): 8 bytes of header length, a
// JSON header, the tensors' bytes. What we write has a checksum in its metadata, which is verified
// when the file is read.
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "cistern/io/dtype.h"

namespace cistern {

struct TensorEntry {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;  // row-major
  const void* data = nullptr;  // not null even when bytes == 0 in a file that was read
  int64_t bytes = 0;           // must be the product of shape and element size
};

// A file mapped into memory (private and writable: writing to a tensor changes this process's view
// alone). Everything is checked before the constructor returns: header length, JSON, types, shapes
// against bytes, offsets that cover the data exactly once, duplicates. A broken or truncated file
// is an Error "model.safetensors: tensor 'wte': ...". Entries point into this object. Where the
// file leaves a tensor unaligned for its type, the entry points to an aligned copy. Nobody may
// truncate the file meanwhile (our own writers replace, never truncate). Where the metadata have a
// checksum, all of the file is read once and compared with it.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);
  // The same from bytes in memory, which must outlive the object.
  SafetensorsFile(std::string_view bytes, const std::string& name);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::vector<TensorEntry>& entries() const {
    return entries_;
  }  // in the order of their data
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  // The file has a checksum, and its contents fit it; files of other programs have none.
  bool checked() const { return checked_; }
  const TensorEntry* Find(const std::string& name) const;  // null when there is none
  const TensorEntry& Get(
      const std::string& name) const;  // Error naming the file and the nearest tensor
  const std::string& path() const { return path_; }

 private:
  void Parse(std::string_view bytes);
  void VerifyChecksum();
  void Unmap();

  std::string path_;
  void* map_ = nullptr;
  size_t map_bytes_ = 0;
  std::vector<TensorEntry> entries_;
  std::unordered_map<std::string, size_t> index_;
  std::map<std::string, std::string> metadata_;  // without the checksum
  bool checked_ = false;
  std::vector<std::vector<uint64_t>> copies_;  // of unaligned tensors
};

// Writes atomically. Data starts at a multiple of 8 and larger elements come first, so that every
// tensor is aligned; tensors of one element size keep the order given. Errors: bytes that do not
// fit the shape, names twice or "__metadata__", and every write error.
// Adds metadata "cistern.xxh64": XXH64 of the other metadata and of every tensor's name, type,
// shape and bytes, whatever their order in the file, in 16 hexadecimal digits.
void WriteSafetensors(const std::string& path, const std::vector<TensorEntry>& entries,
                      const std::map<std::string, std::string>& metadata = {});

}  // namespace cistern

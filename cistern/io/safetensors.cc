#include "cistern/io/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <set>

#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/json_text.h"

namespace cistern {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

constexpr uint64_t kMaxHeader = 100'000'000;  // as the reference implementation
constexpr size_t kAlign = 8;
constexpr char kChecksumKey[] = "cistern.xxh64";

struct Span {
  uint64_t begin = 0, end = 0;
};

// A whole number of at least 0 that fits 63 bits.
bool AsSize(const nlohmann::json& json, uint64_t* value) {
  if (!json.is_number_unsigned()) return false;
  *value = json.get<uint64_t>();
  return *value <= uint64_t(INT64_MAX);
}

// One header entry: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}.
Span ParseTensor(const std::string& place, const nlohmann::json& json, uint64_t data_bytes,
                 TensorEntry* entry) {
  CISTERN_CHECK(json.is_object(), place, "expected an object with dtype, shape and data_offsets");
  for (const auto& [key, value] : json.items()) {
    CISTERN_CHECK(key == "dtype" || key == "shape" || key == "data_offsets", place, "unknown key '",
                  key, "'; expected dtype, shape and data_offsets");
  }
  const auto dtype = json.find("dtype"), shape = json.find("shape"),
             offsets = json.find("data_offsets");
  CISTERN_CHECK(dtype != json.end() && dtype->is_string() &&
                    ParseDType(dtype->get_ref<const std::string&>(), &entry->dtype),
                place, "dtype is ", dtype == json.end() ? "missing" : JsonLine(*dtype),
                "; expected one of ", DTypeNames());
  CISTERN_CHECK(shape != json.end() && shape->is_array(), place, "shape is missing or not a list");
  for (const auto& size : *shape) {
    uint64_t value;
    CISTERN_CHECK(AsSize(size, &value), place, "shape holds ", JsonLine(size),
                  "; expected whole numbers of at least 0");
    entry->shape.push_back(int64_t(value));
  }
  Span span;
  CISTERN_CHECK(offsets != json.end() && offsets->is_array() && offsets->size() == 2 &&
                    AsSize((*offsets)[0], &span.begin) && AsSize((*offsets)[1], &span.end),
                place, "data_offsets is missing or not two whole numbers");
  CISTERN_CHECK(span.begin <= span.end && span.end <= data_bytes, place, "data_offsets [",
                span.begin, ",", span.end, "] leave the data, which has ", data_bytes,
                " bytes; the file is truncated or corrupt");
  CISTERN_CHECK(TensorBytes(entry->shape, entry->dtype, &entry->bytes), place, "shape ",
                ShapeText(entry->shape), " is too large");
  CISTERN_CHECK(uint64_t(entry->bytes) == span.end - span.begin, place, "shape ",
                ShapeText(entry->shape), " of ", DTypeName(entry->dtype), " needs ", entry->bytes,
                " bytes, data_offsets give ", span.end - span.begin);
  return span;
}

// `text` as JSON; what is not UTF-8 cannot be written as it is.
std::string Quoted(const std::string& path, const std::string& text) {
  CISTERN_CHECK(IsUtf8(text), path, ": '", text, "' is not UTF-8");
  return JsonLine(text);
}

// Of all that the file says: metadata other than the checksum, then the tensors by name.
std::string Checksum(const std::map<std::string, std::string>& metadata,
                     std::vector<const TensorEntry*> entries) {
  std::sort(entries.begin(), entries.end(),
            [](const TensorEntry* a, const TensorEntry* b) { return a->name < b->name; });
  uint64_t hash = 0;
  for (const auto& [key, value] : metadata) {
    if (key != kChecksumKey) hash = XxHash64(value, XxHash64(key, hash));
  }
  for (const TensorEntry* e : entries) {
    hash = XxHash64(StrCat(e->name, ' ', DTypeName(e->dtype), ' ', ShapeText(e->shape)), hash);
    hash = XxHash64({static_cast<const char*>(e->data), size_t(e->bytes)}, hash);
  }
  return HexText(hash);
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::string& path) : path_(path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) Fail("cannot read ", path, ": ", std::strerror(errno));
  struct stat info;
  int error = ::fstat(fd, &info) != 0 ? errno : S_ISDIR(info.st_mode) ? EISDIR : 0;
  if (error == 0 && info.st_size > 0) {
    map_bytes_ = size_t(info.st_size);
    map_ = ::mmap(nullptr, map_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    if (map_ == MAP_FAILED) {
      error = errno;
      map_ = nullptr;
    }
  }
  ::close(fd);
  if (error != 0) Fail("cannot read ", path, ": ", std::strerror(error));
  try {
    Parse({static_cast<const char*>(map_), map_bytes_});
  } catch (...) {
    Unmap();
    throw;
  }
}

SafetensorsFile::SafetensorsFile(std::string_view bytes, const std::string& name) : path_(name) {
  Parse(bytes);
}

SafetensorsFile::~SafetensorsFile() { Unmap(); }

void SafetensorsFile::Unmap() {
  if (map_ != nullptr) ::munmap(map_, map_bytes_);
  map_ = nullptr;
}

void SafetensorsFile::Parse(std::string_view bytes) {
  CISTERN_CHECK(bytes.size() >= 8, path_, ": ", bytes.size(),
                " bytes are too few for a safetensors file; it is empty or truncated");
  uint64_t header_bytes;
  std::memcpy(&header_bytes, bytes.data(), 8);
  CISTERN_CHECK(header_bytes <= kMaxHeader, path_, ": offset 0: header length ", header_bytes,
                " is over ", kMaxHeader, "; this is not a safetensors file");
  CISTERN_CHECK(header_bytes <= bytes.size() - 8, path_, ": offset 0: the header should have ",
                header_bytes, " bytes, the file has ", bytes.size() - 8,
                " after its length; it is truncated");
  const std::string_view header = bytes.substr(8, header_bytes),
                         data = bytes.substr(8 + header_bytes);
  const nlohmann::json json = ParseSortedJson(header, path_ + " (header)");
  CISTERN_CHECK(json.is_object() && header[0] == '{', path_, ": the header is not a JSON object");

  std::vector<std::pair<Span, TensorEntry>> found;
  for (const auto& [name, value] : json.items()) {
    if (name == "__metadata__") {
      CISTERN_CHECK(value.is_object(), path_, ": __metadata__ is not an object");
      for (const auto& [key, text] : value.items()) {
        CISTERN_CHECK(text.is_string(), path_, ": __metadata__: '", key, "' is ", JsonLine(text),
                      "; expected a text");
        metadata_[key] = text.get<std::string>();
      }
      continue;
    }
    TensorEntry entry;
    entry.name = name;
    const Span span =
        ParseTensor(StrCat(path_, ": tensor '", name, "': "), value, data.size(), &entry);
    found.emplace_back(span, std::move(entry));
  }
  std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first.begin, a.first.end) < std::pair(b.first.begin, b.first.end);
  });
  uint64_t end = 0;
  for (auto& [span, entry] : found) {
    CISTERN_CHECK(
        span.begin == end, path_, ": tensor '", entry.name, "': data begins at ", span.begin, ", ",
        span.begin > end ? "leaving a gap after " : "inside the tensor that ends at ", end);
    end = span.end;
    entry.data = data.data() + span.begin;
    if (reinterpret_cast<uintptr_t>(entry.data) % uintptr_t(DTypeBytes(entry.dtype)) != 0) {
      auto& copy = copies_.emplace_back(size_t(entry.bytes) / 8 + 1);
      if (entry.bytes > 0) std::memcpy(copy.data(), entry.data, size_t(entry.bytes));
      entry.data = copy.data();
    }
    index_[entry.name] = entries_.size();
    entries_.push_back(std::move(entry));
  }
  CISTERN_CHECK(end == data.size(), path_, ": the tensors end at byte ", end,
                " of the data, which has ", data.size());
  VerifyChecksum();
}

void SafetensorsFile::VerifyChecksum() {
  const auto at = metadata_.find(kChecksumKey);
  if (at == metadata_.end()) return;
  std::vector<const TensorEntry*> entries;
  for (const TensorEntry& entry : entries_) entries.push_back(&entry);
  const std::string found = Checksum(metadata_, std::move(entries));
  CISTERN_CHECK(found == at->second, path_, ": the contents do not fit their checksum (", found,
                " instead of ", at->second, " in the metadata, ", kChecksumKey,
                "); the file is corrupt, or another program has changed it");
  metadata_.erase(at);
  checked_ = true;
}

const TensorEntry* SafetensorsFile::Find(const std::string& name) const {
  const auto at = index_.find(name);
  return at == index_.end() ? nullptr : &entries_[at->second];
}

const TensorEntry& SafetensorsFile::Get(const std::string& name) const {
  if (const TensorEntry* entry = Find(name)) return *entry;
  std::vector<std::string> names;
  for (const TensorEntry& entry : entries_) names.push_back(entry.name);
  Fail(path_, ": ", UnknownName("tensor", name, names));
}

void WriteSafetensors(const std::string& path, const std::vector<TensorEntry>& entries,
                      const std::map<std::string, std::string>& metadata) {
  std::vector<const TensorEntry*> order;
  std::set<std::string> names;
  for (const TensorEntry& entry : entries) {
    int64_t bytes = 0;
    CISTERN_CHECK(TensorBytes(entry.shape, entry.dtype, &bytes) && bytes == entry.bytes, path,
                  ": tensor '", entry.name, "': shape ", ShapeText(entry.shape), " of ",
                  DTypeName(entry.dtype), " does not have the ", entry.bytes, " bytes given");
    CISTERN_CHECK(entry.name != "__metadata__" && names.insert(entry.name).second, path,
                  ": tensor '", entry.name, "' is given twice or has a reserved name");
    order.push_back(&entry);
  }
  std::stable_sort(order.begin(), order.end(), [](const TensorEntry* a, const TensorEntry* b) {
    return DTypeBytes(a->dtype) > DTypeBytes(b->dtype);
  });
  std::map<std::string, std::string> said = metadata;
  said[kChecksumKey] = Checksum(metadata, order);
  // By hand: an ordered object takes time quadratic in the number of keys.
  std::string header = "{\"__metadata__\":{";
  for (const auto& [key, value] : said)
    header += Quoted(path, key) + ":" + Quoted(path, value) + ",";
  header.back() = '}';
  header += ",";
  int64_t offset = 0;
  for (const TensorEntry* entry : order) {
    header += StrCat(Quoted(path, entry->name), ":{\"dtype\":\"", DTypeName(entry->dtype),
                     "\",\"shape\":", ShapeText(entry->shape), ",\"data_offsets\":[", offset, ",",
                     offset + entry->bytes, "]},");
    offset += entry->bytes;
  }
  header.back() = '}';
  header.resize((header.size() + kAlign - 1) / kAlign * kAlign, ' ');

  AtomicFile file(path);
  const uint64_t header_bytes = header.size();
  file.Write(&header_bytes, 8);
  file.Write(header);
  for (const TensorEntry* entry : order) file.Write(entry->data, size_t(entry->bytes));
  file.Commit();
}

}  // namespace cistern

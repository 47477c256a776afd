#include "cistern/io/npy.h"

#include <cctype>
#include <cstring>

#include "cistern/io/atomic_file.h"

namespace cistern {
namespace {

struct Code {
  const char* text;
  DType dtype;
};
constexpr Code kCodes[] = {{"<f8", DType::kF64}, {"<f4", DType::kF32}, {"<f2", DType::kF16},
                           {"<i8", DType::kI64}, {"<i4", DType::kI32}, {"<i2", DType::kI16},
                           {"|i1", DType::kI8},  {"<u8", DType::kU64}, {"<u4", DType::kU32},
                           {"<u2", DType::kU16}, {"|u1", DType::kU8},  {"|b1", DType::kBool}};

// The header is a Python literal: {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }
class HeaderReader {
 public:
  HeaderReader(std::string_view text, size_t offset, const std::string& name)
      : text_(text), offset_(offset), name_(name) {}

  void Read(NpyArray* array) {
    bool have[3] = {};
    Expect('{');
    while (!Accept('}')) {
      const std::string key = Quoted();
      Expect(':');
      const int which = key == "descr" ? 0 : key == "fortran_order" ? 1 : key == "shape" ? 2 : -1;
      if (which < 0) Complain("unknown key '" + key + "'");
      if (have[which]) Complain("key '" + key + "' is given twice");
      have[which] = true;
      if (which == 0) ReadType(array);
      if (which == 1) ReadOrder();
      if (which == 2) ReadShape(array);
      if (!Accept(',') && Peek() != '}') Complain("expected ',' or '}'");
    }
    if (Peek() != '\0' || at_ < text_.size()) Complain("text after the end");
    if (!have[0] || !have[1] || !have[2]) Complain("descr, fortran_order or shape is missing");
  }

 private:
  [[noreturn]] void Complain(const std::string& what) const {
    Fail(name_, ": header, offset ", offset_ + at_, ": ", what);
  }
  char Peek() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) ++at_;
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool Accept(char c) {
    if (Peek() != c || at_ >= text_.size()) return false;
    ++at_;
    return true;
  }
  void Expect(char c) {
    if (!Accept(c)) Complain(StrCat("expected '", c, "'"));
  }
  std::string Quoted() {
    const char quote = Peek();
    if (quote != '\'' && quote != '"') Complain("expected a quoted text");
    const size_t end = text_.find(quote, at_ + 1);
    if (end == std::string_view::npos) Complain("the quoted text has no end");
    std::string result(text_.substr(at_ + 1, end - at_ - 1));
    at_ = end + 1;
    return result;
  }
  void ReadType(NpyArray* array) {
    if (Peek() == '[') Complain("structured arrays are not supported");
    const std::string code = Quoted();
    std::string known;
    for (const Code& c : kCodes) {
      known += (known.empty() ? "" : ", ") + std::string(c.text);
      if (code != c.text) continue;
      array->dtype = c.dtype;
      return;
    }
    Complain("element type '" + code + "' is not supported; expected one of " + known);
  }
  void ReadOrder() {
    Peek();
    const std::string_view rest = text_.substr(at_);
    if (rest.substr(0, 4) == "True")
      Complain("the array is in Fortran order; save numpy.ascontiguousarray(x)");
    if (rest.substr(0, 5) != "False") Complain("fortran_order: expected True or False");
    at_ += 5;
  }
  void ReadShape(NpyArray* array) {
    Expect('(');
    while (!Accept(')')) {
      if (!std::isdigit(static_cast<unsigned char>(Peek())))
        Complain("shape: expected a whole number");
      int64_t size = 0;
      for (; at_ < text_.size() && std::isdigit(static_cast<unsigned char>(text_[at_])); ++at_) {
        if (__builtin_mul_overflow(size, 10, &size) ||
            __builtin_add_overflow(size, text_[at_] - '0', &size))
          Complain("shape: too large");
      }
      array->shape.push_back(size);
      if (!Accept(',') && Peek() != ')') Complain("shape: expected ',' or ')'");
    }
  }

  std::string_view text_;
  size_t at_ = 0, offset_;
  const std::string& name_;
};

}  // namespace

NpyArray ParseNpy(std::string_view bytes, const std::string& name) {
  CISTERN_CHECK(
      bytes.size() >= 10 && bytes.substr(0, 6) == std::string_view("\x93NUMPY", 6), name,
      ": offset 0: not a .npy file (or a truncated one): expected \\x93NUMPY and a version");
  const int version = static_cast<unsigned char>(bytes[6]);
  CISTERN_CHECK(version >= 1 && version <= 3, name, ": offset 6: version ", version,
                "; expected 1 to 3");
  const size_t length_bytes = version == 1 ? 2 : 4, begin = 8 + length_bytes;
  CISTERN_CHECK(bytes.size() >= begin, name,
                ": offset 8: the file ends inside the header's length");
  uint32_t length = 0;
  std::memcpy(&length, bytes.data() + 8, length_bytes);
  CISTERN_CHECK(length <= bytes.size() - begin, name, ": offset 8: the header should have ", length,
                " bytes, the file has ", bytes.size() - begin, " more; it is truncated");
  NpyArray array;
  array.name = name;
  HeaderReader(bytes.substr(begin, length), begin, name).Read(&array);
  const std::string_view data = bytes.substr(begin + length);
  CISTERN_CHECK(TensorBytes(array.shape, array.dtype, &array.bytes), name, ": shape ",
                ShapeText(array.shape), " is too large");
  CISTERN_CHECK(uint64_t(array.bytes) == data.size(), name, ": offset ", begin + length, ": shape ",
                ShapeText(array.shape), " of ", DTypeName(array.dtype), " needs ", array.bytes,
                " bytes, the file has ", data.size());
  array.storage.resize(size_t(array.bytes) / 8 + 1);
  if (!data.empty()) std::memcpy(array.storage.data(), data.data(), data.size());
  return array;
}

NpyArray ReadNpy(const std::string& path) { return ParseNpy(ReadFile(path), path); }

void WriteNpy(const std::string& path, DType dtype, const std::vector<int64_t>& shape,
              const void* data) {
  int64_t bytes = 0;
  CISTERN_CHECK(TensorBytes(shape, dtype, &bytes), path, ": shape ", ShapeText(shape),
                " is negative or too large");
  const char* code = nullptr;
  for (const Code& c : kCodes) {
    if (c.dtype == dtype) code = c.text;
  }
  CISTERN_CHECK(code != nullptr, path, ": .npy has no element type ", DTypeName(dtype));
  std::string sizes;
  for (const int64_t size : shape) sizes += std::to_string(size) + ", ";
  if (shape.size() > 1) sizes.resize(sizes.size() - 2);
  if (shape.size() == 1) sizes.pop_back();
  std::string header =
      StrCat("{'descr': '", code, "', 'fortran_order': False, 'shape': (", sizes, "), }");
  header.resize((10 + header.size() + 1 + 63) / 64 * 64 - 10 - 1,
                ' ');  // data starts at a multiple of 64
  header += '\n';
  CISTERN_CHECK(header.size() < 65536, path, ": too many dimensions");
  const char length[2] = {char(header.size() & 255), char(header.size() >> 8)};
  AtomicFile file(path);
  file.Write(std::string_view("\x93NUMPY\x01\x00", 8));
  file.Write(length, 2);
  file.Write(header);
  file.Write(data, size_t(bytes));
  file.Commit();
}

}  // namespace cistern

#include "cistern/io/npy.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>
#include <string_view>

#include "cistern/base/error.h"

namespace cistern {
namespace {

constexpr int64_t kMostHeader = 1 << 20, kMostNumbers = int64_t{1} << 48;

// The header's text: a Python literal of a dict with three known keys.
class NpyHeader {
 public:
  NpyHeader(std::string_view text, const std::string& path) : text_(text), path_(path) {}

  std::string descr;
  bool fortran = false;
  std::vector<int64_t> shape;

  void Parse() {
    bool seen[3] = {};
    Want('{');
    while (!Take('}')) {
      const std::string key = Text();
      Want(':');
      const int which = key == "descr" ? 0 : key == "fortran_order" ? 1 : key == "shape" ? 2 : 3;
      CISTERN_CHECK(which < 3 && !seen[which], path_, ": its header has the key '", key,
                    "', which is not one of descr, fortran_order and shape, or is there twice");
      seen[which] = true;
      if (which == 0) {
        descr = Text();
      } else if (which == 1) {
        fortran = Truth();
      } else {
        Shape();
      }
      if (!Take(',')) {
        Want('}');
        break;
      }
    }
    Blanks();
    CISTERN_CHECK(at_ == text_.size() && seen[0] && seen[1] && seen[2], path_,
                  ": its header is not {'descr': ..., 'fortran_order': ..., 'shape': ...}");
  }

 private:
  void Blanks() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
  }
  bool Take(char c) {
    Blanks();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  void Want(char c) {
    CISTERN_CHECK(Take(c), path_, ": its header has no '", c, "' at byte ", at_);
  }
  std::string Text() {
    Blanks();
    const char quote = at_ < text_.size() ? text_[at_] : '\0';
    const size_t end =
        quote == '\'' || quote == '"' ? text_.find(quote, at_ + 1) : std::string_view::npos;
    CISTERN_CHECK(end != std::string_view::npos, path_, ": expected a text in quotes at byte ", at_,
                  " of its header (arrays of records are not read; save one array of numbers)");
    std::string out(text_.substr(at_ + 1, end - at_ - 1));
    at_ = end + 1;
    return out;
  }
  bool Truth() {
    Blanks();
    for (const bool value : {true, false}) {
      const std::string_view word = value ? "True" : "False";
      if (text_.substr(std::min(at_, text_.size())).starts_with(word)) {
        at_ += word.size();
        return value;
      }
    }
    Fail(path_, ": fortran_order in its header is neither True nor False");
  }
  void Shape() {
    Want('(');
    while (!Take(')')) {
      Blanks();
      int64_t n = 0;
      const size_t begin = at_;
      while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9' && n < kMostNumbers)
        n = 10 * n + (text_[at_++] - '0');
      CISTERN_CHECK(at_ > begin && n < kMostNumbers && shape.size() < 32, path_,
                    ": the shape in its header is not a tuple of sizes");
      shape.push_back(n);
      if (!Take(',')) {
        Want(')');
        break;
      }
    }
  }

  std::string_view text_;
  const std::string& path_;
  size_t at_ = 0;
};

template <class From>
void Convert(const char* from, int64_t count, int64_t first, const std::string& path, double* out) {
  for (int64_t i = 0; i < count; ++i) {
    From x;
    std::memcpy(&x, from + i * int64_t(sizeof(From)), sizeof(From));
    out[i] = double(x);
    CISTERN_CHECK(!std::isinf(out[i]), path, ": number ", first + i + 1, " is ", out[i],
                  ", which is not finite");
  }
}

}  // namespace

NpyFile::NpyFile(const std::string& path) : path_(path) {
  fd_ = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  CISTERN_CHECK(fd_ >= 0, "cannot read ", path, ": ", std::strerror(errno));
  try {
    ReadHeader();
  } catch (...) {
    close(fd_);
    throw;
  }
}

NpyFile::~NpyFile() { close(fd_); }

void NpyFile::ReadHeader() {
  struct stat about {};
  CISTERN_CHECK(fstat(fd_, &about) == 0 && S_ISREG(about.st_mode), path_, " is no file");
  version_ = VersionOf(fd_, path_);
  unsigned char start[12] = {};
  const auto bytes = int64_t(about.st_size);
  const int64_t there = std::min<int64_t>(bytes, sizeof(start));
  ReadAt(fd_, 0, size_t(there), start, path_);
  CISTERN_CHECK(there >= 10 && std::memcmp(start, "\x93NUMPY", 6) == 0, path_,
                " is no .npy file: it does not begin with NumPy's mark",
                there >= 4 && std::memcmp(start, "PK\x03\x04", 4) == 0
                    ? " (it is a .npz archive; save each array with numpy.save)"
                    : "");
  const int version = start[6];
  CISTERN_CHECK(version >= 1 && version <= 3, path_, " is of version ", version,
                " of the .npy format; 1 to 3 are read");
  CISTERN_CHECK(version == 1 || there >= 12, path_, " ends early, in its header");
  int64_t length = start[8] | start[9] << 8;
  if (version > 1) length |= int64_t(start[10]) << 16 | int64_t(start[11]) << 24;
  const int64_t begin = version == 1 ? 10 : 12;
  CISTERN_CHECK(length <= kMostHeader && begin + length <= bytes, path_, ": its header has ",
                length, " bytes, of which ", bytes - begin, " are there");
  std::string text(size_t(length), '\0');
  ReadAt(fd_, begin, text.size(), text.data(), path_);
  NpyHeader header(text, path_);
  header.Parse();
  Descr(header.descr);
  shape_ = header.shape;
  CISTERN_CHECK(!header.fortran || shape_.size() < 2, path_,
                " is in Fortran order; save numpy.ascontiguousarray of it");
  data_ = begin + length;
  size_ = 1;
  for (const int64_t n : shape_) {
    CISTERN_CHECK(n == 0 || size_ <= kMostNumbers / n, path_, ": the shape ", ShapeText(),
                  " is too large");
    size_ *= n;
  }
  CISTERN_CHECK(bytes == data_ + size_ * width_, path_, ": expected ", size_ * width_,
                " bytes of data for the shape ", ShapeText(), ", got ", bytes - data_);
}

void NpyFile::Descr(const std::string& text) {
  const bool known = text.size() == 3 && text[1] >= 'a' && text[1] <= 'z';
  const int64_t width = known && text[2] >= '1' && text[2] <= '8' ? text[2] - '0' : 0;
  const bool ordered = known && (text[0] == '<' || (text[0] == '|' && width == 1));
  CISTERN_CHECK(!known || text[0] != '>', path_, " is big-endian (", text,
                "); save it with .astype('<f4')");
  kind_ = known ? text[1] : '?';
  width_ = width;
  const bool read =
      (kind_ == 'f' && (width == 4 || width == 8)) ||
      ((kind_ == 'i' || kind_ == 'u') && (width == 1 || width == 2 || width == 4 || width == 8)) ||
      (kind_ == 'b' && width == 1);
  CISTERN_CHECK(ordered && read, path_, " holds numbers of type '", text,
                "'; float32, float64, integers and bools are read (texts as classes: save "
                "numpy.unique(y, return_inverse=True)[1])");
}

std::string NpyFile::ShapeText() const {
  std::string out = "(";
  for (size_t i = 0; i < shape_.size(); ++i) out += StrCat(i > 0 ? ", " : "", shape_[i]);
  return out + (shape_.size() == 1 ? ",)" : ")");
}

void NpyFile::Read(int64_t begin, int64_t count, double* out) const {
  CISTERN_CHECK(begin >= 0 && count >= 0 && begin <= size_ && count <= size_ - begin, path_,
                ": numbers ", begin, " to ", begin + count, " are asked for, and it has ", size_);
  constexpr int64_t kPiece = 1 << 15;
  std::string buffer;
  for (int64_t done = 0; done < count;) {
    const int64_t n = std::min(kPiece, count - done), first = begin + done;
    buffer.resize(size_t(n * width_));
    ReadAt(fd_, data_ + first * width_, buffer.size(), buffer.data(), path_);
    CheckVersion(fd_, version_, path_);
    const auto convert = [&](auto from) {
      Convert<decltype(from)>(buffer.data(), n, first, path_, out + done);
    };
    if (kind_ == 'f') {
      width_ == 4 ? convert(float{}) : convert(double{});
    } else if (kind_ == 'i') {
      width_ == 1   ? convert(int8_t{})
      : width_ == 2 ? convert(int16_t{})
      : width_ == 4 ? convert(int32_t{})
                    : convert(int64_t{});
    } else {
      width_ == 1   ? convert(uint8_t{})
      : width_ == 2 ? convert(uint16_t{})
      : width_ == 4 ? convert(uint32_t{})
                    : convert(uint64_t{});
    }
    done += n;
  }
}

}  // namespace cistern

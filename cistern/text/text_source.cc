#include "cistern/text/text_source.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/io/byte_source.h"
#include "cistern/io/folder_files.h"
#include "cistern/text/utf8.h"

namespace cistern {
namespace fs = std::filesystem;
namespace {

constexpr int64_t kLook = 64 << 10;                    // bytes in which a NUL means binary
constexpr int64_t kNear = 4 << 10;                     // how far a line start may lie from a split
constexpr int64_t kParts = 20, kLeastBlock = 8 << 10;  // of a spread split; bytes of a block

std::FILE* OpenForReading(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "rb");
  CISTERN_CHECK(file, "cannot open ", path, ": ", std::strerror(errno));
  return file;
}

struct Head {
  std::string other;  // what the first bytes of a file say it is, where that is no text
  int64_t mark = 0;   // bytes of a byte order mark
};

Head HeadOf(const std::string& path) {
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(OpenForReading(path), &std::fclose);
  std::string head(kLook, ' ');
  head.resize(std::fread(head.data(), 1, head.size(), file.get()));
  CISTERN_CHECK(!std::ferror(file.get()), "cannot read ", path, ": ", std::strerror(errno));
  for (const auto& [magic, unpack] :
       {std::pair("\x1f\x8b", "gunzip"), std::pair("\xfd\x37zXZ", "unxz"),
        std::pair("\x28\xb5\x2f\xfd", "unzstd")}) {
    if (head.starts_with(magic))
      return {StrCat("is compressed, and training reads a text from everywhere in it; unpack it: ",
                     unpack, " -k ", path)};
  }
  const size_t at = head.find('\0');
  if (at != head.npos)
    return {StrCat("looks binary (NUL byte at offset ", at, "); text is expected")};
  return {"", int64_t(head.size() - WithoutMark(head).size())};
}

int64_t ModifiedAt(const std::string& path) {
  std::error_code ignored;
  return int64_t(fs::last_write_time(path, ignored).time_since_epoch().count());
}

}  // namespace

TextSource::TextSource(const std::string& path) : path_(path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  CISTERN_CHECK(status.type() != fs::file_type::not_found, path, " does not exist");
  CISTERN_CHECK(!error, "cannot open ", path, ": ", error.message());
  const auto add = [&](const std::string& file, int64_t bytes, int64_t mark) {
    files_.push_back({file, bytes_, bytes, mark, ModifiedAt(file)});
    bytes_ += bytes;
  };
  if (fs::is_regular_file(status)) {
    const Head head = HeadOf(path);
    CISTERN_CHECK(head.other.empty(), path, " ", head.other);
    const int64_t bytes = int64_t(fs::file_size(path)) - head.mark;
    CISTERN_CHECK(bytes > 0, path, " is empty; text is expected");
    add(path, bytes, head.mark);
    return;
  }
  CISTERN_CHECK(!fs::is_fifo(status), path,
                " is a pipe, and a text is read several times; write it to a file, and give that");
  CISTERN_CHECK(fs::is_directory(status), path, " is neither a file nor a folder");
  FolderFiles found;
  FindFiles(path, Folders::kSearch, &found);
  Skipped binary("binary file"), empty("empty file");
  for (const std::string& file : found.paths) {
    const Head head = HeadOf(file);
    const int64_t bytes = int64_t(fs::file_size(file)) - head.mark;
    if (bytes == 0) {
      empty.Add(file);
    } else if (!head.other.empty()) {
      binary.Add(file);
    } else {
      add(file, bytes, head.mark);
    }
  }
  found.Note(&notes_);
  binary.Note(&notes_);
  empty.Note(&notes_);
  CISTERN_CHECK(!files_.empty(), "the folder ", path, " holds no text files", AsReasons(notes_));
}

void TextSource::Scan(const std::function<void(int64_t done, int64_t total)>& progress) {
  if (scanned_) return;
  std::vector<std::string> notes;  // kept at the end: `progress` may throw
  XxHash64Stream hash;
  for (const File& file : files_) {
    TextReader reader(*this, {file.begin, file.begin + file.bytes});
    int64_t bad = -1, crlf = 0, base = file.mark;  // base: the offset in the file of text[0]
    std::string text;  // a piece, after what the last one left of a character
    bool after_cr = false;
    for (std::string_view piece = reader.Next(); !piece.empty(); piece = reader.Next()) {
      hash.Add(piece);
      for (const char c : piece) {
        crlf += after_cr && c == '\n';
        after_cr = c == '\r';
      }
      if (bad < 0) {
        text += piece;
        size_t i = 0;
        while (i < text.size()) {
          if (uint8_t(text[i]) < 0x80) {
            ++i;
            continue;
          }
          const Utf8Char c = DecodeUtf8(text, i);
          if (c.code == Utf8Char::kIncomplete) break;
          if (c.code == Utf8Char::kInvalid) {
            bad = base + int64_t(i);
            break;
          }
          i += c.length;
        }
        text.erase(0, i);
        base += int64_t(i);
      }
      if (progress) progress(reader.position(), bytes_);
    }
    if (bad < 0 && !text.empty()) bad = base;
    if (bad >= 0)
      notes.push_back(
          StrCat(file.path, " is not UTF-8 from byte offset ", bad, " on; treated as raw bytes"));
    if (crlf > 0)
      notes.push_back(StrCat(file.path, " has ", crlf,
                             " CRLF line ends; they are kept and counted as two bytes"));
  }
  hash_ = hash.Value();
  notes_.insert(notes_.end(), notes.begin(), notes.end());
  scanned_ = true;
}

uint64_t TextSource::Hash() const {
  if (!hash_) {
    XxHash64Stream hash;
    TextReader reader(*this, {0, bytes_});
    for (std::string_view piece = reader.Next(); !piece.empty(); piece = reader.Next())
      hash.Add(piece);
    hash_ = hash.Value();
  }
  return *hash_;
}

void TextSource::CheckUnchanged() const {
  for (const File& file : files_) {
    std::error_code error;
    const auto bytes = fs::file_size(file.path, error);
    CISTERN_CHECK(!error && int64_t(bytes) == file.mark + file.bytes &&
                      ModifiedAt(file.path) == file.modified,
                  file.path, " changed while it was read; start again when it is complete");
  }
}

std::string TextSource::Read(int64_t offset, int64_t size) const {
  TextReader reader(*this, {offset, std::min(bytes_, offset + size)}, size);
  std::string out;
  for (std::string_view piece = reader.Next(); !piece.empty(); piece = reader.Next()) out += piece;
  return out;
}

struct TextReader::Stream {
  std::FILE* file = nullptr;
  ~Stream() { Close(); }
  void Close() {
    if (file) std::fclose(file);
    file = nullptr;
  }
};

TextReader::TextReader(const TextSource& source, ByteRange range, int64_t piece)
    : source_(source),
      position_(range.begin),
      end_(range.end),
      piece_(std::max<int64_t>(piece, 1)),
      stream_(std::make_unique<Stream>()) {
  CISTERN_CHECK(range.begin >= 0 && range.begin <= range.end && range.end <= source.bytes(),
                "range ", range.begin, "..", range.end, " is outside the ", source.bytes(),
                " bytes of ", source.path());
}
TextReader::~TextReader() = default;

std::string_view TextReader::Next() {
  const auto& files = source_.files();
  buffer_.clear();
  if (position_ >= end_) return buffer_;
  while (position_ >= files[file_].begin + files[file_].bytes) {
    ++file_;
    stream_->Close();
  }
  const TextSource::File& file = files[file_];
  if (!stream_->file) {
    stream_->file = OpenForReading(file.path);
    CISTERN_CHECK(fseeko(stream_->file, file.mark + position_ - file.begin, SEEK_SET) == 0,
                  "cannot read ", file.path, ": ", std::strerror(errno));
  }
  buffer_.resize(std::min({piece_, end_ - position_, file.begin + file.bytes - position_}));
  CISTERN_CHECK(std::fread(buffer_.data(), 1, buffer_.size(), stream_->file) == buffer_.size(),
                "cannot read ", file.path, ": ",
                std::ferror(stream_->file) ? std::strerror(errno) : "it has become shorter");
  position_ += int64_t(buffer_.size());
  return buffer_;
}

int64_t Size(const ByteRanges& ranges) {
  int64_t size = 0;
  for (const ByteRange& r : ranges) size += r.size();
  return size;
}

TextSplits SplitText(const TextSource& source, TextSplit split) {
  const auto boundary = [&](double share) {
    const auto at = int64_t(double(source.bytes()) * share);
    if (at == 0) return at;
    const std::string near =
        source.Read(at - 1, kNear + 1);  // near[0] is the byte before the boundary
    const size_t line = near.find('\n');
    if (line != near.npos) return at + int64_t(line);
    size_t i = 1;
    while (i < std::min<size_t>(near.size(), 4) && (uint8_t(near[i]) & 0xC0) == 0x80) ++i;
    return at + int64_t(i) - 1;
  };
  const int64_t parts = split == TextSplit::kTail
                            ? 1
                            : std::clamp<int64_t>(source.bytes() / 20 / kLeastBlock, 1, kParts);
  TextSplits out;
  int64_t begin = 0;
  for (int64_t i = 0; i < parts; ++i) {
    const auto share = [&](double of) { return (double(i) + of) / double(parts); };
    const int64_t first = boundary(share(.90)), second = std::max(first, boundary(share(.95))),
                  end = i + 1 < parts ? boundary(share(1)) : source.bytes();
    out.train.push_back({begin, first});
    out.valid.push_back({first, second});
    out.test.push_back({second, end});
    begin = end;
  }
  return out;
}

}  // namespace cistern

#pragma once
// A source of text: a file, or a folder whose text files are taken as one text, end to end, in the
// order of their paths.
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cistern {

struct ByteRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const ByteRange&) const = default;
};
using ByteRanges = std::vector<ByteRange>;  // ascending, apart from each other
int64_t Size(const ByteRanges& ranges);     // the sum of their sizes

class TextSource {
 public:
  struct File {
    std::string path;
    int64_t begin, bytes;  // where it begins in the whole text, and its size there
    int64_t mark;          // bytes of the byte order mark before it, which is no part of the text
    int64_t modified;      // in the file system's ticks
  };

  // Looks at the files and at the first 64 KiB of each, no more. An Error when the path is missing,
  // unreadable or neither file nor folder; when a file is empty, compressed (gzip, xz, zstd) or
  // looks binary (a NUL byte); when a folder holds no text. In a folder hidden, empty and binary
  // files (compressed ones among them), links to folders and links that lead nowhere are skipped
  // with a note; an unreadable file is an Error.
  explicit TextSource(const std::string& path);

  const std::string& path() const { return path_; }
  const std::vector<File>& files() const { return files_; }
  int64_t bytes() const { return bytes_; }  // of the whole text
  // What the user should know: files skipped, and after Scan() bytes that are not UTF-8 (kept as
  // they are) and CRLF line ends (kept too).
  const std::vector<std::string>& notes() const { return notes_; }

  // Reads everything once, for the notes on its contents and for Hash; the second call does
  // nothing. What `progress` throws ends it, with nothing done.
  void Scan(const std::function<void(int64_t done, int64_t total)>& progress = nullptr);

  // Of the text's bytes, whatever the names and times of its files. Reads everything unless Scan
  // did.
  uint64_t Hash() const;

  // An Error when a file's size or time of modification is no longer what it was: what was read
  // since then may be of two texts.
  void CheckUnchanged() const;

  // Up to `size` bytes from `offset`; fewer only at the end. A file that has shrunk since is an
  // Error.
  std::string Read(int64_t offset, int64_t size) const;

 private:
  std::string path_;
  std::vector<File> files_;
  std::vector<std::string> notes_;
  int64_t bytes_ = 0;
  bool scanned_ = false;
  mutable std::optional<uint64_t> hash_;
};

// Streams a range of a source (which must outlive it) in pieces, across files; never holds more
// than one piece.
class TextReader {
 public:
  TextReader(const TextSource& source, ByteRange range, int64_t piece = 1 << 20);
  ~TextReader();
  // The next piece, empty at the end; the view lives until the next call.
  std::string_view Next();
  int64_t position() const { return position_; }  // of the whole text, behind the last piece

 private:
  const TextSource& source_;
  int64_t position_, end_, piece_;
  size_t file_ = 0;
  struct Stream;
  std::unique_ptr<Stream> stream_;
  std::string buffer_;
};

// How a text is split into 90 % for training, 5 % for validation and 5 % for the test.
// kSpread: the text is cut into 20 equal parts, fewer where 5 % of a part were below 8 KiB, and
// each part into 90, 5 and 5 % in this order. So validation and test are blocks from everywhere.
// kTail: one part. Validation and test are the last tenth, which may be another kind of text.
enum class TextSplit { kSpread, kTail };

// Each boundary is moved forward to the next line start, or, failing one within 4 KiB, to the next
// beginning of a UTF-8 character. One range for each part; those of a tiny text may be empty.
struct TextSplits {
  ByteRanges train, valid, test;
};
TextSplits SplitText(const TextSource& source, TextSplit split = TextSplit::kSpread);

}  // namespace cistern

#include "cistern/data/token_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/data/interruptible.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/file_lock.h"
#include "cistern/io/read_at.h"

namespace cistern {
namespace {

constexpr char kTokenMagic[8] = {'C', 'I', 'S', 'T', 'T', 'O', 'K', '2'};
constexpr int64_t kVerifyUpTo = int64_t{1} << 30;
constexpr size_t kDigits = 16;       // of a hash as text
constexpr int64_t kPiece = 1 << 18;  // tokens read at a time

uint64_t HeaderChecksum(const TokenHeader& header) {
  return XxHash64({reinterpret_cast<const char*>(&header), offsetof(TokenHeader, header_checksum)});
}

uint64_t PiecesChecksum(const std::vector<TokenPiece>& pieces) {
  return XxHash64(
      {reinterpret_cast<const char*>(pieces.data()), pieces.size() * sizeof(TokenPiece)});
}

// Bytes behind the ids.
uint64_t PiecesSize(const TokenHeader& header) {
  return header.pieces == 0 ? 0 : header.pieces * sizeof(TokenPiece) + sizeof(uint64_t);
}

// Writes ids behind a header that is filled in last.
class TokenWriter {
 public:
  TokenWriter(const std::string& path, TokenHeader header) : file_(path), header_(header) {
    file_.Write(&header_, sizeof header_);
  }

  void Add(const std::vector<int32_t>& ids) {
    header_.count += ids.size();
    if (header_.width == 4) return Write(ids.data(), ids.size() * 4);
    narrow_.assign(ids.begin(), ids.end());
    Write(narrow_.data(), narrow_.size() * 2);
  }

  int64_t count() const { return int64_t(header_.count); }

  void Finish(const std::vector<TokenPiece>& pieces) {
    header_.checksum = checksum_.Value();
    if (pieces.size() > 1) {
      header_.pieces = uint32_t(pieces.size());
      const uint64_t checksum = PiecesChecksum(pieces);
      file_.Write(pieces.data(), pieces.size() * sizeof(TokenPiece));
      file_.Write(&checksum, sizeof checksum);
    }
    header_.header_checksum = HeaderChecksum(header_);
    file_.Overwrite(0, &header_, sizeof header_);
    file_.Commit();
  }

 private:
  void Write(const void* data, size_t size) {
    checksum_.Add({static_cast<const char*>(data), size});
    file_.Write(data, size);
  }

  AtomicFile file_;
  TokenHeader header_;
  XxHash64Stream checksum_;
  std::vector<uint16_t> narrow_;
};

// "" when the file at `path` can be used as it is, else why not ("missing" when there is none).
std::string WhyNotReuse(const std::string& path, uint64_t source_hash, uint64_t tokenizer_hash,
                        const ByteRanges& ranges) {
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) return "missing";
  try {
    const TokenFile file(path);
    const TokenHeader& h = file.header();
    ByteRanges there;
    for (const TokenPiece& p : file.pieces()) there.push_back({p.begin, p.end});
    if (h.source_hash != source_hash || there != ranges) return "the text has changed";
    if (h.tokenizer_hash != tokenizer_hash) return "the tokenizer has changed";
    if (file.size() * h.width <= kVerifyUpTo) file.Verify();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

}  // namespace

TokenFile::TokenFile(const std::string& path) : path_(path) {
  fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  CISTERN_CHECK(fd_ >= 0, "cannot open ", path, ": ", std::strerror(errno));
  struct stat info {};
  const bool regular = ::fstat(fd_, &info) == 0 && S_ISREG(info.st_mode);
  const uint64_t size = regular ? uint64_t(info.st_size) : 0;
  std::string broken;
  uint64_t ids = 0;
  if (size < sizeof header_ || ::pread(fd_, &header_, sizeof header_, 0) != sizeof header_) {
    broken = StrCat(" is not a token file: it has only ", size, " bytes");
  } else if (std::memcmp(header_.magic, kTokenMagic, sizeof kTokenMagic) != 0) {
    broken = StrCat(" is not a token file: it does not begin with ",
                    std::string(kTokenMagic, sizeof kTokenMagic));
  } else if (header_.header_checksum != HeaderChecksum(header_) ||
             (header_.width != 2 && header_.width != 4) || header_.begin > header_.end) {
    broken = " is damaged: its header does not fit its checksum";
  } else if (ids = size - sizeof header_;
             ids < PiecesSize(header_) || (ids - PiecesSize(header_)) % header_.width != 0 ||
             (ids - PiecesSize(header_)) / header_.width != header_.count) {
    broken = StrCat(" is damaged: ", header_.count, " tokens of ", header_.width,
                    " bytes are announced, ", ids, " bytes are there");
  } else {
    broken = ReadPieces();
  }
  if (!broken.empty()) {
    Close();
    Fail(path, broken);
  }
}

std::string TokenFile::ReadPieces() {
  pieces_.clear();
  if (header_.pieces == 0) {
    pieces_.push_back({int64_t(header_.begin), int64_t(header_.end), int64_t(header_.count)});
    return "";
  }
  pieces_.resize(header_.pieces);
  const off_t at = off_t(sizeof header_ + header_.count * header_.width);
  const size_t size = pieces_.size() * sizeof(TokenPiece);
  uint64_t checksum = 0;
  ReadAt(fd_, at, size, pieces_.data(), path_);
  ReadAt(fd_, at + off_t(size), sizeof checksum, &checksum, path_);
  bool fits = checksum == PiecesChecksum(pieces_);
  int64_t byte = int64_t(header_.begin), token = 0;
  for (const TokenPiece& p : pieces_) {
    fits = fits && p.begin >= byte && p.end >= p.begin && p.tokens_end >= token;
    byte = p.end;
    token = p.tokens_end;
  }
  fits = fits && pieces_.front().begin == int64_t(header_.begin) && byte == int64_t(header_.end) &&
         token == int64_t(header_.count);
  return fits ? "" : " is damaged: its pieces do not fit their checksum";
}

int64_t TokenFile::bytes() const {
  int64_t bytes = 0;
  for (const TokenPiece& p : pieces_) bytes += p.end - p.begin;
  return bytes;
}

TokenFile::~TokenFile() { Close(); }

TokenFile::TokenFile(TokenFile&& other) noexcept { *this = std::move(other); }

TokenFile& TokenFile::operator=(TokenFile&& other) noexcept {
  if (this == &other) return *this;
  Close();
  path_ = std::move(other.path_);
  header_ = std::exchange(other.header_, {});
  pieces_ = std::move(other.pieces_);
  fd_ = std::exchange(other.fd_, -1);
  return *this;
}

void TokenFile::Close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void TokenFile::Read(int64_t begin, int64_t count, void* out) const {
  CISTERN_CHECK(begin >= 0 && count >= 0 && begin <= size() && count <= size() - begin, "tokens ",
                begin, " and ", count, " on are not within the ", size(), " of ", path_);
  ReadAt(fd_, off_t(sizeof header_) + begin * off_t(header_.width), size_t(count) * header_.width,
         out, path_);
}

template <class Int>
void TokenFile::Copy(int64_t begin, int64_t count, Int* out) const {
  std::vector<char> bytes(size_t(std::clamp<int64_t>(count, 0, kPiece)) * header_.width);
  for (int64_t done = 0; done < count || done == 0;) {
    const int64_t n = std::min(kPiece, count - done);
    Read(begin + done, n, bytes.data());
    for (int64_t i = 0; i < n; ++i) {
      uint32_t id = 0;  // little-endian, as the file
      std::memcpy(&id, bytes.data() + i * header_.width, header_.width);
      CISTERN_CHECK(id < header_.vocab_size, path_, " is damaged: token ", begin + done + i,
                    " has id ", id, ", the vocabulary has ", header_.vocab_size);
      out[done + i] = Int(id);
    }
    done += std::max<int64_t>(n, 1);
  }
}
template void TokenFile::Copy(int64_t, int64_t, int32_t*) const;
template void TokenFile::Copy(int64_t, int64_t, int64_t*) const;

void TokenFile::Verify() const {
  XxHash64Stream checksum;
  std::vector<char> bytes(size_t(std::min(size(), kPiece)) * header_.width);
  for (int64_t begin = 0; begin < size(); begin += kPiece) {
    const int64_t n = std::min(kPiece, size() - begin);
    Read(begin, n, bytes.data());
    checksum.Add({bytes.data(), size_t(n) * header_.width});
  }
  CISTERN_CHECK(checksum.Value() == header_.checksum, path_,
                " is damaged: its tokens do not fit their checksum");
}

void BuildTokenFile(const TextSource& source, const ByteRanges& ranges, const Tokenizer& tokenizer,
                    const std::string& path, const TextProgress& progress) {
  TokenHeader header{};
  std::memcpy(header.magic, kTokenMagic, sizeof kTokenMagic);
  header.vocab_size = uint64_t(tokenizer.vocab_size());
  header.width = header.vocab_size <= 65536 ? 2 : 4;
  header.begin = uint64_t(ranges.front().begin);
  header.end = uint64_t(ranges.back().end);
  header.source_hash = source.Hash();
  header.tokenizer_hash = tokenizer.Hash();
  TokenWriter writer(path, header);
  std::vector<TokenPiece> pieces;
  const int64_t total = Size(ranges);
  int64_t before = 0;
  for (const ByteRange& range : ranges) {
    TextReader reader(source, range);
    StreamEncoder encoder(tokenizer);
    for (std::string_view piece = reader.Next(); !piece.empty(); piece = reader.Next()) {
      InterruptibleData::Check();
      writer.Add(encoder.Push(piece));
      if (progress) progress(before + reader.position() - range.begin, total);
    }
    writer.Add(encoder.Finish());
    before += range.size();
    pieces.push_back({range.begin, range.end, writer.count()});
  }
  source.CheckUnchanged();
  writer.Finish(pieces);
}

std::unique_ptr<Tokenizer> TrainTokenizerOn(TokenizerKind kind, const TextSource& source,
                                            const ByteRanges& ranges, int64_t vocab_size,
                                            const TextProgress& progress) {
  std::unique_ptr<TextReader> reader;
  size_t next = 0;
  const auto read = [&]() -> std::string_view {
    while (true) {
      InterruptibleData::Check();
      const std::string_view piece = reader ? reader->Next() : std::string_view();
      if (!piece.empty() || next == ranges.size()) return piece;
      reader = std::make_unique<TextReader>(source, ranges[next++]);
    }
  };
  if (kind == TokenizerKind::kWords) return TrainWords(read, vocab_size);
  return TrainBpe(read, vocab_size, [&](int64_t done, int64_t total) {
    InterruptibleData::Check();
    if (progress) progress(done, total);
  });
}

// The file: the checksum of what follows in 16 digits, a newline, then tokenizer.json.
std::unique_ptr<Tokenizer> OpenTokenizer(TokenizerKind kind, const TextSource& source,
                                         const ByteRanges& ranges, int64_t vocab_size,
                                         const std::string& path, std::vector<std::string>* notes,
                                         const TextProgress& progress) {
  const FileLock lock(path + ".lock", path, FileLock::Wait::kYes);
  const std::filesystem::path file = path;
  RemoveLeftovers(file.has_parent_path() ? file.parent_path().string() : ".",
                  file.filename().string());
  if (std::filesystem::exists(file)) {
    try {
      const std::string text = ReadFile(path);
      CISTERN_CHECK(text.size() > kDigits && text[kDigits] == '\n' &&
                        HexText(XxHash64(std::string_view(text).substr(kDigits + 1))) ==
                            text.substr(0, kDigits),
                    path, " is damaged: its contents do not fit their checksum");
      return ParseTokenizer(std::string_view(text).substr(kDigits + 1), path);
    } catch (const Error& e) {
      notes->push_back(StrCat("made ", path, " anew: ", e.what()));
    }
  }
  auto tokenizer = TrainTokenizerOn(kind, source, ranges, vocab_size, progress);
  source.CheckUnchanged();
  const std::string json = tokenizer->ToJson();
  WriteFileAtomically(path, HexText(XxHash64(json)) + "\n" + json);
  return tokenizer;
}

TokenSplits OpenTokenSplits(const TextSource& source, const TextSplits& splits,
                            const Tokenizer& tokenizer, const std::string& folder,
                            const TextProgress& progress) {
  return OpenTokenSplits({&source, splits.train}, {&source, splits.valid}, {&source, splits.test},
                         tokenizer, folder, progress);
}

TokenSplits OpenTokenSplits(const TextPart& train_part, const TextPart& valid_part,
                            const TextPart& test_part, const Tokenizer& tokenizer,
                            const std::string& folder, const TextProgress& progress) {
  EnsureDirectory(folder);
  const FileLock lock(folder + "/lock", folder, FileLock::Wait::kYes);
  RemoveLeftovers(folder);
  const uint64_t tokenizer_hash = tokenizer.Hash();
  const int64_t total = Size(train_part.ranges) + Size(valid_part.ranges) + Size(test_part.ranges);
  int64_t before = 0;  // bytes of the parts that are done
  bool reused = true;
  std::vector<std::string> notes;
  const auto get = [&](const std::string& name, const TextPart& part) {
    const std::string path = (std::filesystem::path(folder) / name).string();
    const std::string why = WhyNotReuse(path, part.source->Hash(), tokenizer_hash, part.ranges);
    if (!why.empty()) {
      reused = false;
      if (why != "missing") notes.push_back(StrCat("made ", path, " anew: ", why));
      BuildTokenFile(*part.source, part.ranges, tokenizer, path,
                     progress ? [&](int64_t done, int64_t) { progress(before + done, total); }
                              : TextProgress());
    }
    before += Size(part.ranges);
    return TokenFile(path);
  };
  TokenFile train = get("train.tok", train_part), valid = get("valid.tok", valid_part),
            test = get("test.tok", test_part);
  return {std::move(train), std::move(valid), std::move(test), reused, std::move(notes)};
}

}  // namespace cistern

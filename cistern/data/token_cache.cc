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
#include "cistern/io/atomic_file.h"
#include "cistern/io/file_lock.h"

namespace cistern {
namespace {

constexpr char kTokenMagic[8] = {'C', 'I', 'S', 'T', 'T', 'O', 'K', '2'};
constexpr int64_t kVerifyUpTo = int64_t{1} << 30;
constexpr size_t kDigits = 16;       // of a hash as text
constexpr int64_t kPiece = 1 << 18;  // tokens read at a time

uint64_t HeaderChecksum(const TokenHeader& header) {
  return XxHash64({reinterpret_cast<const char*>(&header), offsetof(TokenHeader, header_checksum)});
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

  void Finish() {
    header_.checksum = checksum_.Value();
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
                        ByteRange range) {
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) return "missing";
  try {
    const TokenFile file(path);
    const TokenHeader& h = file.header();
    if (h.source_hash != source_hash || h.begin != uint64_t(range.begin) ||
        h.end != uint64_t(range.end))
      return "the text has changed";
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
  if (size < sizeof header_ || ::pread(fd_, &header_, sizeof header_, 0) != sizeof header_) {
    broken = StrCat(" is not a token file: it has only ", size, " bytes");
  } else if (std::memcmp(header_.magic, kTokenMagic, sizeof kTokenMagic) != 0) {
    broken = StrCat(" is not a token file: it does not begin with ",
                    std::string(kTokenMagic, sizeof kTokenMagic));
  } else if (header_.header_checksum != HeaderChecksum(header_) ||
             (header_.width != 2 && header_.width != 4) || header_.begin > header_.end) {
    broken = " is damaged: its header does not fit its checksum";
  } else if ((size - sizeof header_) % header_.width != 0 ||
             (size - sizeof header_) / header_.width != header_.count) {
    broken = StrCat(" is damaged: ", header_.count, " tokens of ", header_.width,
                    " bytes are announced, ", size - sizeof header_, " bytes are there");
  }
  if (!broken.empty()) {
    Close();
    Fail(path, broken);
  }
}

TokenFile::~TokenFile() { Close(); }

TokenFile::TokenFile(TokenFile&& other) noexcept { *this = std::move(other); }

TokenFile& TokenFile::operator=(TokenFile&& other) noexcept {
  if (this == &other) return *this;
  Close();
  path_ = std::move(other.path_);
  header_ = std::exchange(other.header_, {});
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
  char* to = static_cast<char*>(out);
  size_t left = size_t(count) * header_.width;
  for (off_t at = off_t(sizeof header_) + begin * off_t(header_.width); left > 0;) {
    const ssize_t n = ::pread(fd_, to, left, at);
    if (n < 0 && errno == EINTR) continue;
    CISTERN_CHECK(n > 0, "cannot read ", path_, ": ",
                  n < 0 ? std::strerror(errno) : "it became shorter while in use");
    to += n;
    at += n;
    left -= size_t(n);
  }
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

void BuildTokenFile(const TextSource& source, ByteRange range, const Tokenizer& tokenizer,
                    const std::string& path, const TextProgress& progress) {
  TokenHeader header{};
  std::memcpy(header.magic, kTokenMagic, sizeof kTokenMagic);
  header.vocab_size = uint64_t(tokenizer.vocab_size());
  header.width = header.vocab_size <= 65536 ? 2 : 4;
  header.begin = uint64_t(range.begin);
  header.end = uint64_t(range.end);
  header.source_hash = source.Hash();
  header.tokenizer_hash = tokenizer.Hash();
  TextReader reader(source, range);
  TokenWriter writer(path, header);
  StreamEncoder encoder(tokenizer);
  for (std::string_view piece = reader.Next(); !piece.empty(); piece = reader.Next()) {
    writer.Add(encoder.Push(piece));
    if (progress) progress(reader.position() - range.begin, range.size());
  }
  writer.Add(encoder.Finish());
  source.CheckUnchanged();
  writer.Finish();
}

std::unique_ptr<Tokenizer> TrainTokenizerOn(TokenizerKind kind, const TextSource& source,
                                            ByteRange range, int64_t vocab_size,
                                            const TextProgress& progress) {
  TextReader reader(source, range);
  const auto next = [&] { return reader.Next(); };
  return kind == TokenizerKind::kWords ? TrainWords(next, vocab_size)
                                       : TrainBpe(next, vocab_size, progress);
}

// The file: the checksum of what follows in 16 digits, a newline, then tokenizer.json.
std::unique_ptr<Tokenizer> OpenTokenizer(TokenizerKind kind, const TextSource& source,
                                         ByteRange range, int64_t vocab_size,
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
  auto tokenizer = TrainTokenizerOn(kind, source, range, vocab_size, progress);
  source.CheckUnchanged();
  const std::string json = tokenizer->ToJson();
  WriteFileAtomically(path, HexText(XxHash64(json)) + "\n" + json);
  return tokenizer;
}

TokenSplits OpenTokenSplits(const TextSource& source, const Tokenizer& tokenizer,
                            const std::string& folder, const TextProgress& progress) {
  const TextSplits splits = SplitText(source);
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
  const int64_t total = train_part.range.size() + valid_part.range.size() + test_part.range.size();
  int64_t before = 0;  // bytes of the parts that are done
  bool reused = true;
  std::vector<std::string> notes;
  const auto get = [&](const std::string& name, const TextPart& part) {
    const std::string path = (std::filesystem::path(folder) / name).string();
    const std::string why = WhyNotReuse(path, part.source->Hash(), tokenizer_hash, part.range);
    if (!why.empty()) {
      reused = false;
      if (why != "missing") notes.push_back(StrCat("made ", path, " anew: ", why));
      BuildTokenFile(*part.source, part.range, tokenizer, path,
                     progress ? [&](int64_t done, int64_t) { progress(before + done, total); }
                              : TextProgress());
    }
    before += part.range.size();
    return TokenFile(path);
  };
  TokenFile train = get("train.tok", train_part), valid = get("valid.tok", valid_part),
            test = get("test.tok", test_part);
  return {std::move(train), std::move(valid), std::move(test), reused, std::move(notes)};
}

}  // namespace cistern

#include "cistern/data/token_cache.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

#include "cistern/base/error.h"
#include "cistern/text/files.h"

namespace cistern {
namespace {

constexpr char kTokenMagic[8] = {'C', 'I', 'S', 'T', 'T', 'O', 'K', '1'};
constexpr int64_t kVerifyUpTo = int64_t{1} << 30;

uint64_t HeaderChecksum(const TokenHeader& header) {
  return Hash64({reinterpret_cast<const char*>(&header), offsetof(TokenHeader, header_checksum)});
}

// One multiplication per id, whatever its width.
struct IdChecksum {
  uint64_t value = 0xcbf29ce484222325u;
  void Add(uint32_t id) { value = (value ^ id) * 0x100000001b3u; }
};

// Writes ids behind a header that is filled in last; the file takes its name when all is well, else
// it goes.
class TokenWriter {
 public:
  TokenWriter(std::string path, TokenHeader header)
      : path_(std::move(path)),
        temporary_(StrCat(path_, ".tmp", getpid())),
        header_(header),
        file_(std::fopen(temporary_.c_str(), "wb")) {
    CISTERN_CHECK(file_, "cannot write ", path_, ": ", std::strerror(errno));
    Write(&header_, sizeof header_);
  }
  ~TokenWriter() {
    if (!file_) return;
    std::fclose(file_);
    std::remove(temporary_.c_str());
  }
  TokenWriter(const TokenWriter&) = delete;
  TokenWriter& operator=(const TokenWriter&) = delete;

  void Add(const std::vector<int32_t>& ids) {
    for (const int32_t id : ids) checksum_.Add(uint32_t(id));
    header_.count += ids.size();
    if (header_.width == 4) return Write(ids.data(), ids.size() * 4);
    narrow_.assign(ids.begin(), ids.end());
    Write(narrow_.data(), narrow_.size() * 2);
  }

  void Finish() {
    header_.checksum = checksum_.value;
    header_.header_checksum = HeaderChecksum(header_);
    CISTERN_CHECK(std::fseek(file_, 0, SEEK_SET) == 0, "cannot write ", path_, ": ",
                  std::strerror(errno));
    Write(&header_, sizeof header_);
    const bool ok = std::fclose(std::exchange(file_, nullptr)) == 0 &&
                    std::rename(temporary_.c_str(), path_.c_str()) == 0;
    if (ok) return;
    const std::string why = std::strerror(errno);
    std::remove(temporary_.c_str());
    Fail("cannot write ", path_, ": ", why);
  }

 private:
  void Write(const void* data, size_t size) {
    CISTERN_CHECK(size == 0 || std::fwrite(data, 1, size, file_) == size, "cannot write ", path_,
                  ": ", std::strerror(errno));
  }

  std::string path_, temporary_;
  TokenHeader header_;
  std::FILE* file_;
  IdChecksum checksum_;
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
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  CISTERN_CHECK(descriptor >= 0, "cannot open ", path, ": ", std::strerror(errno));
  struct stat info {};
  const bool regular = fstat(descriptor, &info) == 0 && S_ISREG(info.st_mode);
  map_size_ = regular ? size_t(info.st_size) : 0;
  if (map_size_ >= sizeof header_) {
    map_ = mmap(nullptr, map_size_, PROT_READ, MAP_SHARED, descriptor, 0);
    if (map_ == MAP_FAILED) map_ = nullptr;
  }
  const std::string why = std::strerror(errno);
  close(descriptor);
  CISTERN_CHECK(map_size_ >= sizeof header_, path, " is no token file: it has only ", map_size_,
                " bytes");
  CISTERN_CHECK(map_, "cannot map ", path, ": ", why);
  std::memcpy(&header_, map_, sizeof header_);
  std::string broken;
  if (std::memcmp(header_.magic, kTokenMagic, sizeof kTokenMagic) != 0) {
    broken = " is no token file: it does not begin with CISTTOK1";
  } else if (header_.header_checksum != HeaderChecksum(header_) ||
             (header_.width != 2 && header_.width != 4) || header_.begin > header_.end) {
    broken = " is damaged: its header does not fit its checksum";
  } else if ((map_size_ - sizeof header_) % header_.width != 0 ||
             (map_size_ - sizeof header_) / header_.width != header_.count) {
    broken = StrCat(" is damaged: ", header_.count, " tokens of ", header_.width,
                    " bytes are announced, ", map_size_ - sizeof header_, " bytes are there");
  }
  if (!broken.empty()) {
    Close();
    Fail(path, broken);
  }
  ids_ = static_cast<const char*>(map_) + sizeof header_;
}

TokenFile::~TokenFile() { Close(); }

TokenFile::TokenFile(TokenFile&& other) noexcept { *this = std::move(other); }

TokenFile& TokenFile::operator=(TokenFile&& other) noexcept {
  if (this == &other) return *this;
  Close();
  path_ = std::move(other.path_);
  header_ = std::exchange(other.header_, {});
  map_ = std::exchange(other.map_, nullptr);
  map_size_ = std::exchange(other.map_size_, 0);
  ids_ = std::exchange(other.ids_, nullptr);
  return *this;
}

void TokenFile::Close() {
  if (map_) munmap(map_, map_size_);
  map_ = nullptr;
}

void TokenFile::CheckRange(int64_t begin, int64_t count) const {
  CISTERN_CHECK(begin >= 0 && count >= 0 && begin <= size() && count <= size() - begin, "tokens ",
                begin, " and ", count, " on are not within the ", size(), " of ", path_);
}

void TokenFile::Verify() const {
  IdChecksum checksum;
  for (int64_t i = 0; i < size(); ++i) checksum.Add(uint32_t((*this)[i]));
  CISTERN_CHECK(checksum.value == header_.checksum, path_,
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
  writer.Finish();
}

std::unique_ptr<Tokenizer> TrainBpeOn(const TextSource& source, ByteRange range, int64_t vocab_size,
                                      const TextProgress& progress) {
  TextReader reader(source, range);
  return TrainBpe([&] { return reader.Next(); }, vocab_size, progress);
}

TokenSplits OpenTokenSplits(const TextSource& source, const Tokenizer& tokenizer,
                            const std::string& folder, const TextProgress& progress) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  CISTERN_CHECK(!error, "cannot make the folder ", folder, ": ", error.message());
  const TextSplits splits = SplitText(source);
  const uint64_t source_hash = source.Hash(), tokenizer_hash = tokenizer.Hash();
  bool reused = true;
  std::vector<std::string> notes;
  const auto get = [&](const std::string& name, ByteRange range) {
    const std::string path = (std::filesystem::path(folder) / name).string();
    const std::string why = WhyNotReuse(path, source_hash, tokenizer_hash, range);
    if (!why.empty()) {
      reused = false;
      if (why != "missing") notes.push_back(StrCat("made ", path, " anew: ", why));
      BuildTokenFile(
          source, range, tokenizer, path,
          progress ? [&](int64_t done, int64_t) { progress(range.begin + done, source.bytes()); }
                   : TextProgress());
    }
    return TokenFile(path);
  };
  TokenFile train = get("train.tok", splits.train), valid = get("valid.tok", splits.valid),
            test = get("test.tok", splits.test);
  return {std::move(train), std::move(valid), std::move(test), reused, std::move(notes)};
}

}  // namespace cistern

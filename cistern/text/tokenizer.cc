#include "cistern/text/tokenizer.h"

#include "cistern/base/hash.h"
#include "cistern/io/atomic_file.h"
#include "cistern/text/bpe.h"
#include "cistern/text/pretokenize.h"

namespace cistern {

const EnumNames<TokenizerKind>& TokenizerKinds() {
  static const EnumNames<TokenizerKind> names = {{TokenizerKind::kBpe, "bpe"},
                                                 {TokenizerKind::kBytes, "bytes"},
                                                 {TokenizerKind::kWords, "words"}};
  return names;
}

void Tokenizer::Save(const std::string& path) const { WriteFileAtomically(path, ToJson()); }

std::string Tokenizer::Decode(const std::vector<int32_t>& ids) const {
  std::string text;
  for (const int32_t id : ids) text += Bytes(id);
  return text;
}

uint64_t Tokenizer::Hash() const { return XxHash64(ToJson()); }

std::unique_ptr<Tokenizer> MakeByteTokenizer() {
  BpeModel model;
  for (int byte = 0; byte < 256; ++byte) model.tokens.emplace_back(1, char(byte));
  return MakeBpe(std::move(model), "byte tokenizer");
}

StreamEncoder::StreamEncoder(const Tokenizer& tokenizer)
    : tokenizer_(tokenizer), cut_(std::make_unique<PreTokenStream>()) {}
StreamEncoder::~StreamEncoder() = default;

std::vector<int32_t> StreamEncoder::Push(std::string_view bytes) {
  if (tokenizer_.kind() == TokenizerKind::kBytes)
    return tokenizer_.Encode(bytes);  // nothing merges: no cut is wrong
  return tokenizer_.Encode(cut_->Push(bytes));
}

std::vector<int32_t> StreamEncoder::Finish() { return tokenizer_.Encode(cut_->Finish()); }

}  // namespace cistern

#include "cistern/tasks/masked_lines.h"

#include "cistern/base/error.h"

namespace cistern {
namespace {

constexpr std::string_view kMask = "<mask>";

}  // namespace

std::vector<MaskedLine> MaskedLines::Next(int64_t most) {
  std::vector<MaskedLine> out;
  for (std::string line; int64_t(out.size()) < most && lines_.Next(&line);) {
    if (line.find_first_not_of(" \t") == std::string::npos) continue;
    MaskedLine& masked = out.emplace_back();
    masked.number = lines_.number();
    std::string_view rest = line;
    size_t at = rest.find(kMask);
    CISTERN_CHECK(at != rest.npos, lines_.path(), ":", lines_.number(), ": expected ", kMask,
                  " where tokens are to be filled in");
    for (; at != rest.npos; at = rest.find(kMask)) {
      std::string_view before = rest.substr(0, at);
      if (tokenizer_.kind() == TokenizerKind::kBpe && before.ends_with(' '))
        before.remove_suffix(1);
      masked.parts.push_back(tokenizer_.Encode(before));
      rest.remove_prefix(at + kMask.size());
    }
    masked.parts.push_back(tokenizer_.Encode(rest));
  }
  return out;
}

}  // namespace cistern

#pragma once
// Words as tokens: what stands between white space, with a token </s> for each line end and <unk>
// for words that are not in the vocabulary: word level, as fairseq's language models read WikiText
// (spec 3.6). What tokenizer.json says of it: a normalizer that replaces "\n" by " </s> ", the
// split at white space, and a WordLevel model.
//
// Ids: <s> 0, <pad> 1, </s> 2, <unk> 3, then words by frequency, then names that no text has, so
// that their number is a multiple of 8: fairseq's dictionary. WikiText-103 has 267,744.
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cistern/text/tokenizer.h"

namespace cistern {

// Words of ids 0, 1, ...; an Error that begins with `where` where one is empty, has white space or
// is there twice, and where </s> or <unk> is missing.
std::unique_ptr<Tokenizer> MakeWords(std::vector<std::string> words, const std::string& where);

// tokenizer.json of type WordLevel.
std::unique_ptr<Tokenizer> ParseWords(std::string_view json, const std::string& name);

}  // namespace cistern

#include "cistern/tasks/text_task.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <utility>

#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/base/progress.h"
#include "cistern/base/random.h"
#include "cistern/data/interruptible.h"
#include "cistern/io/scratch_folder.h"
#include "cistern/tasks/cache.h"
#include "cistern/tasks/idle_keys.h"
#include "cistern/tasks/lm_blocks.h"
#include "cistern/tasks/token_ids.h"
#include "cistern/tasks/uniform_ids.h"

namespace cistern {

namespace {

constexpr uint64_t kRandomTraining = 0x72646d74, kRandomSplit = 0x72646d73;

const EnumNames<TextSplit>& SplitNames() {
  static const EnumNames<TextSplit> names = {{TextSplit::kSpread, "spread"},
                                             {TextSplit::kTail, "tail"}};
  return names;
}

}  // namespace

Fields TextTask::Describe(Options& o) {
  Fields f;
  f.Add("text", &o.text, "a text file, or a folder of them");
  f.Add("valid", &o.valid,
        "a text for validation, with `test` beside it; empty: 90, 5 and 5 % of `text`, or "
        "wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens where it is a folder of these")
      .OmitWhen("");
  f.Add("test", &o.test, "a text for the test, with `valid` beside it").OmitWhen("");
  f.Add("tokenizer", &o.tokenizer,
        "byte-level BPE learned from the training text; bytes; or the words between white space "
        "with a token for a line end, as WikiText is read at word level (task lm)",
        TokenizerKinds());
  f.Add("vocab_size", &o.vocab_size,
        "tokens that BPE learns, or words: the most frequent ones, the others are <unk>",
        {256, 1 << 20});
  f.Add("length", &o.length, "tokens of a training row", {2, int64_t{1} << 30});
  f.Add("split", &o.split,
        "validation and test (5 % each): blocks spread over the whole text, or its tail, which "
        "may be another kind of text",
        SplitNames());
  f.Add(
       "random_ids", &o.random_ids,
       "every token of training, validation and test is drawn uniformly from the vocabulary, in "
       "rows as long as those of the text: the model trained on random data of P001's Fig 4. Files "
       "that are named later (cistern analyze MODEL FILE) are read as they are")
      .OmitWhen(false);
  return f;
}

std::vector<std::string> TextTask::HiddenTokenDefaults() {
  // Without positions that are relative (rotary) a few minutes teach little more than frequencies.
  // Muon leaves that stage far sooner than AdamW (docs/notes/settings-2026-11.md).
  return {"model.dim=128",
          "model.layers=2",
          "model.heads=4",
          "model.attention=window:2+latte:2",
          "model.positions=rotary",
          "model.init_std=0.0884",
          "model.embedding_std=0.1",
          "task.length=128",
          "train.batch=16",
          "train.optimizer=muon",
          "train.weight_decay=0.1",
          "train.schedule=linear",
          "train.lr=7e-3"};
}

TextTask::TextTask(std::string name, Options options, std::string cache)
    : name_(std::move(name)), options_(std::move(options)), cache_(std::move(cache)) {
  if (name_ != "lm") RefuseWords(name_, options_.tokenizer);
  if (!options_.valid.empty() && options_.split != TextSplit::kSpread)
    FailUsage("task.", name_, ": split=", NameOf(options_.split, SplitNames()),
              " cuts validation and test from the text; leave it out, or omit valid and test");
}

bool TextTask::TakeTokenizer(std::shared_ptr<const Tokenizer> tokenizer) {
  if (name_ != "lm") RefuseTakenWords(name_, tokenizer->kind());
  tokenizer_ = std::move(tokenizer);
  token_bytes_ = TokenBytes(*tokenizer_);
  return true;
}

// That of the options, learned from the training part and kept in the cache.
std::shared_ptr<const Tokenizer> TextTask::LearnTokenizer(const TextSource& source,
                                                          const ByteRanges& train,
                                                          const std::string& suffix) {
  if (options_.tokenizer == TokenizerKind::kBytes) return MakeByteTokenizer();
  const std::string kind = NameOf(options_.tokenizer, TokenizerKinds());
  ProgressBar bar({0, "learn BPE", "merges"});
  return OpenTokenizer(options_.tokenizer, source, train, options_.vocab_size,
                       StrCat(CacheFolder(cache_), "/", kind, "-", options_.vocab_size, "-",
                              HexText(text_hash_), suffix),
                       &notes_, [&](int64_t done, int64_t) { bar.Update(done); });
}

namespace {

// The three texts: those of the options, or WikiText's three files in one folder.
std::array<std::string, 3> Texts(const TextTask::Options& o, const std::string& name) {
  if (o.valid.empty() != o.test.empty())
    FailUsage("task.", name, ".", o.valid.empty() ? "test" : "valid",
              " needs the other one of valid and test beside it");
  if (!o.valid.empty()) return {o.text, o.valid, o.test};
  std::array<std::string, 3> wiki = {o.text + "/wiki.train.tokens", o.text + "/wiki.valid.tokens",
                                     o.text + "/wiki.test.tokens"};
  std::error_code ignored;
  for (const std::string& file : wiki) {
    if (!std::filesystem::exists(file, ignored)) return {o.text, "", ""};
  }
  return wiki;
}

}  // namespace

void TextTask::Prepare() {
  if (options_.text.empty())
    FailUsage("task.", name_, ".text is empty: name a text file or folder to learn from");
  if (!tokenizer_) RefuseIdleVocabulary(name_, options_);
  const std::array<std::string, 3> texts = Texts(options_, name_);
  const bool apart = !texts[1].empty();
  const std::string cache = CacheFolder(cache_);
  std::vector<TextSource> sources;
  for (const std::string& text : texts) {
    if (text.empty()) continue;
    TextSource& source = sources.emplace_back(text);
    ProgressBar bar({source.bytes(), "read text", "bytes"});
    source.Scan([&](int64_t done, int64_t) {
      InterruptibleData::Check();
      bar.Update(done);
    });
    notes_.insert(notes_.end(), source.notes().begin(), source.notes().end());
  }
  const TextSplits splits = apart ? TextSplits() : SplitText(sources[0], options_.split);
  const auto whole = [](const TextSource& source) {
    return TextPart{&source, {{0, source.bytes()}}};
  };
  const TextPart train = apart ? whole(sources[0]) : TextPart{&sources[0], splits.train},
                 valid = apart ? whole(sources[1]) : TextPart{&sources[0], splits.valid},
                 test = apart ? whole(sources[2]) : TextPart{&sources[0], splits.test};
  text_hash_ = sources[0].Hash();
  if (apart) {
    text_hash_ = XxHash64(
        StrCat(HexText(text_hash_), HexText(sources[1].Hash()), HexText(sources[2].Hash())));
    notes_.push_back(StrCat("training on all of ", texts[0], ", validation on ", texts[1],
                            ", test on ", texts[2]));
  }
  apart_ = apart;
  // One part is the same as the tail, and shares its files.
  const std::string suffix =
      train.ranges.size() > 1 ? StrCat("-spread", train.ranges.size()) : std::string();
  if (!tokenizer_) tokenizer_ = LearnTokenizer(sources[0], train.ranges, suffix);
  {
    ProgressBar bar(
        {Size(train.ranges) + Size(valid.ranges) + Size(test.ranges), "encode text", "bytes"});
    data_ = std::make_unique<TokenSplits>(OpenTokenSplits(
        train, valid, test, *tokenizer_,
        StrCat(cache, "/tokens-", HexText(text_hash_), "-", HexText(tokenizer_->Hash()), suffix),
        [&](int64_t done, int64_t) { bar.Update(done); }));
  }
  notes_.insert(notes_.end(), data_->notes.begin(), data_->notes.end());
  token_bytes_ = TokenBytes(*tokenizer_);
  for (const Split split : {Split::kValid, Split::kTest}) {
    CISTERN_CHECK(
        tokens(split).size() >= 2, apart ? texts[split == Split::kValid ? 1 : 2] : options_.text,
        ": too short: the ", split == Split::kValid ? "validation" : "test", " part",
        apart ? "" : " (5 %)", " has ", tokens(split).size(), " tokens; use a longer text");
  }
  CutWindows();
}

// A piece of n tokens holds (n - length) / length windows, at any offset at which they fit: each of
// its tokens is in a window at one of them. One that is too short for that holds one window, or
// none.
void TextTask::CutWindows() {
  const int64_t length = options_.length, train = data_->train.size(), needed = 2 * length + 1;
  pieces_.clear();
  int64_t begin = 0, windows = 0, longest = 0;
  for (const TokenPiece& piece : data_->train.pieces()) {
    const int64_t tokens = piece.tokens_end - begin;
    windows += std::max<int64_t>((tokens - length) / length, tokens > length ? 1 : 0);
    pieces_.push_back({begin, tokens, windows});
    longest = std::max(longest, tokens);
    begin = piece.tokens_end;
  }
  if (pieces_.size() == 1) {
    CISTERN_CHECK(train >= needed, options_.text, ": too short: the training part",
                  apart_ ? "" : " (90 %)", " has ", train, " tokens, and rows of length ", length,
                  " need at least ", needed, "; use a longer text or a smaller task.length");
  }
  CISTERN_CHECK(windows > 0, options_.text, ": too short: the training part has ", train,
                " tokens in ", pieces_.size(), " pieces, the longest of ", longest,
                ", and no row of length ", length,
                " fits into one; use a longer text, a smaller task.length or task.split=tail");
  order_ = std::make_unique<ShuffledOrder>(windows);
}

const TokenFile& TextTask::tokens(Split split) const {
  return split == Split::kTrain   ? data_->train
         : split == Split::kValid ? data_->valid
                                  : data_->test;
}

void TextTask::Complete(ModelConfig& config) const {
  config.vocab_size = tokenizer_->vocab_size();
  config.max_length = std::max(config.max_length, options_.length);
}

at::Tensor TextTask::TrainBlocks(uint64_t seed, int64_t step, int64_t rows) const {
  const int64_t length = options_.length, windows = pieces_.back().windows_end;
  const at::Tensor window = at::empty({rows, length + 1}, at::kLong);
  if (options_.random_ids) {
    int64_t* id = window.mutable_data_ptr<int64_t>();
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t t = 0; t <= length; ++t)
        *id++ = UniformId(seed ^ kRandomTraining, uint64_t(step * rows + r), uint64_t(t),
                          tokenizer_->vocab_size());
    }
    return window;
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t index = step * rows + r;
    const auto draw = int64_t(Philox(seed, 0x0ff5e7, uint64_t(index / windows))[0]);
    const int64_t at = order_->At(seed, index, rows);
    const auto piece = std::upper_bound(
        pieces_.begin(), pieces_.end(), at,
        [](int64_t window_at, const Piece& p) { return window_at < p.windows_end; });
    const int64_t first = piece == pieces_.begin() ? 0 : std::prev(piece)->windows_end,
                  slack = piece->tokens - (piece->windows_end - first) * length;
    data_->train.Copy(piece->begin + draw % slack + (at - first) * length, length + 1,
                      window.mutable_data_ptr<int64_t>() + r * (length + 1));
  }
  return window;
}

TokenText TextTask::Of(const TokenFile& file) const {
  TokenText text = {
      file.size(),
      [&file](int64_t begin, int64_t count, int64_t* out) { file.Copy(begin, count, out); },
      token_bytes_, options_.length};
  if (file.pieces().size() > 1) {
    for (const TokenPiece& piece : file.pieces()) text.ends.push_back(piece.tokens_end);
  }
  return text;
}

TokenText TextTask::Of(Split split) const {
  TokenText text = Of(tokens(split));
  if (!options_.random_ids) return text;
  text.read = [split, vocab = tokenizer_->vocab_size()](int64_t begin, int64_t count,
                                                        int64_t* out) {
    for (int64_t i = 0; i < count; ++i)
      out[i] = UniformId(kRandomSplit, uint64_t(split), uint64_t(begin + i), vocab);
  };
  return text;
}

std::shared_ptr<TokenFile> TextTask::Tokenize(const std::string& path) const {
  const TextSource source(path);
  const ScratchFolder folder;  // the mapping keeps its file alive
  const std::string temporary = folder / "text.tok";
  ProgressBar bar({.total = source.bytes(), .label = "tokenise", .unit = "bytes"});
  BuildTokenFile(source, {{0, source.bytes()}}, *tokenizer_, temporary,
                 [&](int64_t done, int64_t) { bar.Update(done); });
  auto file = std::make_shared<TokenFile>(temporary);
  CISTERN_CHECK(file->size() >= 2, path, " is too short: ", file->size(),
                " tokens to measure; at least 2 are needed");
  return file;
}

std::string TextTask::SplitSummary() const {
  if (apart_) return "a text of its own";
  if (options_.split == TextSplit::kTail) return "the tail of the text";
  if (!data_) return "blocks spread over the text";
  const size_t blocks = data_->test.pieces().size();
  return blocks > 1 ? StrCat(blocks, " blocks spread over the text")
                    : "the tail of the text, which is too short for more blocks";
}

Json TextTask::DataSummary() const {
  auto split = [](const TokenFile& f) { return Json{{"tokens", f.size()}, {"bytes", f.bytes()}}; };
  Json summary = {{"text", options_.text},
                  {"xxh64", HexText(text_hash_)},
                  {"tokenizer_xxh64", HexText(tokenizer_->Hash())},
                  {"tokenizer", NameOf(tokenizer_->kind(), TokenizerKinds())},
                  {"vocab_size", tokenizer_->vocab_size()},
                  {"ids", IdsOf(*tokenizer_)},
                  {"train", split(data_->train)},
                  {"valid", split(data_->valid)},
                  {"test", split(data_->test)},
                  {"notes", notes_}};
  // Records of earlier versions, which had one, do not say it.
  if (const size_t blocks = data_->test.pieces().size(); blocks > 1) summary["blocks"] = blocks;
  if (options_.random_ids) summary["random_ids"] = true;
  return summary;
}

void TextTask::SaveAssets(const std::string& folder) const {
  tokenizer_->Save(folder + "/tokenizer.json");
}

void TextTask::LoadAssets(const std::string& folder) {
  const std::string path = folder + "/tokenizer.json";
  std::error_code ignored;
  CISTERN_CHECK(std::filesystem::exists(path, ignored), folder,
                " is not the folder of a text model: it lacks tokenizer.json");
  tokenizer_ = LoadTokenizer(path);
  token_bytes_ = TokenBytes(*tokenizer_);
}

}  // namespace cistern

#include <algorithm>
#include <queue>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

#include "cistern/base/error.h"
#include "cistern/text/bpe.h"
#include "cistern/text/pretokenize.h"

// Pair counts are kept up to date merge by merge (Sennrich et al. 2016): each pair remembers the
// words it was seen in, and a heap whose entries may be stale gives the most frequent one.
namespace cistern {
namespace {

struct Word {
  std::vector<int32_t> ids;
  int64_t count;
};

struct Pair {
  int64_t count = 0;
  bool touched = false;        // has gained counts since it was last put on the heap
  std::vector<int32_t> words;  // may name one twice, and words that have lost the pair
};

struct HeapEntry {
  int64_t count;
  uint64_t pair;
  bool operator<(const HeapEntry& o) const {
    return count != o.count ? count < o.count : pair > o.pair;
  }
};

uint64_t PairKey(int32_t left, int32_t right) {
  return uint64_t(uint32_t(left)) << 32 | uint32_t(right);
}

struct WordHash {
  using is_transparent = void;
  size_t operator()(std::string_view s) const { return std::hash<std::string_view>()(s); }
};

std::vector<Word> CountWords(const std::function<std::string_view()>& next, TextPieces pieces) {
  std::unordered_map<std::string, int64_t, WordHash, std::equal_to<>> counts;
  PreTokenStream stream;
  const auto add = [&](std::string_view text) {
    for (size_t begin = 0, end; begin < text.size(); begin = end) {
      end = PreTokenEnd(text, begin);
      const std::string_view piece = text.substr(begin, end - begin);
      const auto found = counts.find(piece);
      if (found != counts.end()) {
        ++found->second;
      } else {
        counts.emplace(piece, 1);
      }
    }
  };
  for (std::string_view piece = next(); !piece.empty(); piece = next())
    add(pieces == TextPieces::kTexts ? piece : stream.Push(piece));
  add(stream.Finish());
  std::vector<Word> words;
  words.reserve(counts.size());
  for (const auto& [text, count] : counts) {
    Word word{{}, count};
    for (const char c : text) word.ids.push_back(uint8_t(c));
    words.push_back(std::move(word));
  }
  return words;
}

class Trainer {
 public:
  explicit Trainer(std::vector<Word> words) : words_(std::move(words)) {
    for (size_t w = 0; w < words_.size(); ++w) {
      const auto& ids = words_[w].ids;
      for (size_t i = 0; i + 1 < ids.size(); ++i)
        Add(ids[i], ids[i + 1], int32_t(w), words_[w].count);
    }
    PushTouched();
  }

  // The most frequent pair, or a count below 2 when nothing is worth merging.
  HeapEntry Best() {
    while (!heap_.empty()) {
      HeapEntry top = heap_.top();
      heap_.pop();
      const auto found = pairs_.find(top.pair);
      const int64_t now = found == pairs_.end() ? 0 : found->second.count;
      if (now == top.count) return top;
      if (now > 0) heap_.push({now, top.pair});
    }
    return {0, 0};
  }

  void Apply(uint64_t pair, int32_t id) {
    const auto left = int32_t(pair >> 32), right = int32_t(pair);
    std::vector<int32_t> where = std::move(pairs_[pair].words);
    pairs_.erase(pair);
    std::sort(where.begin(), where.end());
    where.erase(std::unique(where.begin(), where.end()), where.end());
    for (const int32_t w : where) {
      auto& ids = words_[w].ids;
      const int64_t count = words_[w].count;
      size_t out = 0;
      for (size_t i = 0; i < ids.size(); ++out) {
        if (i + 1 < ids.size() && ids[i] == left && ids[i + 1] == right) {
          if (out > 0) {
            Remove(ids[out - 1], left, count);
            Add(ids[out - 1], id, w, count);
          }
          if (i + 2 < ids.size()) {
            Remove(right, ids[i + 2], count);
            Add(id, ids[i + 2], w, count);
          }
          ids[out] = id;
          i += 2;
        } else {
          ids[out] = ids[i++];
        }
      }
      ids.resize(out);
    }
    PushTouched();
  }

 private:
  void Add(int32_t left, int32_t right, int32_t word, int64_t count) {
    const uint64_t key = PairKey(left, right);
    Pair& pair = pairs_[key];
    pair.count += count;
    if (!pair.touched) touched_.push_back(key);
    pair.touched = true;
    if (pair.words.empty() || pair.words.back() != word) pair.words.push_back(word);
  }
  void Remove(int32_t left, int32_t right, int64_t count) {
    const auto found = pairs_.find(PairKey(left, right));
    if (found != pairs_.end()) found->second.count -= count;
  }
  void PushTouched() {
    for (const uint64_t key : touched_) {
      const auto found = pairs_.find(key);
      if (found == pairs_.end()) continue;
      found->second.touched = false;
      if (found->second.count > 0) heap_.push({found->second.count, key});
    }
    touched_.clear();
  }

  std::vector<Word> words_;
  std::unordered_map<uint64_t, Pair> pairs_;
  std::priority_queue<HeapEntry> heap_;
  std::vector<uint64_t> touched_;
};

}  // namespace

std::unique_ptr<Tokenizer> TrainBpe(
    const std::function<std::string_view()>& next, int64_t vocab_size,
    const std::function<void(int64_t done, int64_t total)>& progress, TextPieces pieces) {
  if (vocab_size < 256)
    FailUsage("a byte-level vocabulary has at least 256 tokens, got ", vocab_size);
  if (vocab_size > 1 << 24)
    FailUsage("a vocabulary of ", vocab_size, " tokens is too large (at most ", 1 << 24, ")");
  BpeModel model;
  for (int byte = 0; byte < 256; ++byte) model.tokens.emplace_back(1, char(byte));
  Trainer trainer(CountWords(next, pieces));
  // Two ways to one string ("a"+"bc", "ab"+"c") share its id, so a pair may come up again; it keeps
  // its rank.
  std::unordered_map<std::string, int32_t> known;
  std::unordered_set<uint64_t> merged;
  while (int64_t(model.tokens.size()) < vocab_size) {
    if (progress) progress(int64_t(model.tokens.size()), vocab_size);
    const HeapEntry best = trainer.Best();
    if (best.count < 2) break;
    const auto left = int32_t(best.pair >> 32), right = int32_t(best.pair);
    const auto [token, fresh] =
        known.emplace(model.tokens[left] + model.tokens[right], int32_t(model.tokens.size()));
    if (fresh) model.tokens.push_back(token->first);
    if (merged.insert(best.pair).second) model.merges.emplace_back(left, right);
    trainer.Apply(best.pair, token->second);
  }
  if (progress) progress(int64_t(model.tokens.size()), vocab_size);
  return MakeBpe(std::move(model), "trained tokenizer");
}

}  // namespace cistern

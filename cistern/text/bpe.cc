#include "cistern/text/bpe.h"

#include <algorithm>
#include <array>
#include <mutex>
#include <queue>
#include <unordered_map>

#include "cistern/base/error.h"
#include "cistern/text/pretokenize.h"

namespace cistern {
namespace {

struct StringHash {
  using is_transparent = void;
  size_t operator()(std::string_view s) const { return std::hash<std::string_view>()(s); }
};
template <class T>
using StringMap = std::unordered_map<std::string, T, StringHash, std::equal_to<>>;

uint64_t Key(int32_t left, int32_t right) {
  return uint64_t(uint32_t(left)) << 32 | uint32_t(right);
}

struct Merge {
  int32_t rank, id;
};

// Pre-tokens seen before, with their ids end to end.
struct Cache {
  static constexpr size_t kEntries = 1 << 17, kLongest = 64;
  StringMap<std::pair<uint32_t, uint32_t>> places;
  std::vector<int32_t> ids;
};

class Bpe : public Tokenizer {
 public:
  Bpe(BpeModel model, const std::string& where) : model_(std::move(model)) {
    const auto& tokens = model_.tokens;
    StringMap<int32_t> known;
    byte_ids_.fill(-1);
    for (size_t id = 0; id < tokens.size(); ++id) {
      CISTERN_CHECK(!tokens[id].empty(), where, ": token ", id, " is empty");
      CISTERN_CHECK(known.emplace(tokens[id], id).second, where, ": tokens ",
                    known.find(tokens[id])->second, " and ", id,
                    " are the same: ", BytesToName(tokens[id]));
      if (tokens[id].size() == 1) byte_ids_[uint8_t(tokens[id][0])] = int32_t(id);
    }
    for (int byte = 0; byte < 256; ++byte) {
      CISTERN_CHECK(byte_ids_[byte] >= 0, where, ": the vocabulary lacks byte ", byte, " (",
                    BytesToName(std::string(1, char(byte))), ")");
    }
    merges_.reserve(model_.merges.size() * 2);
    for (size_t rank = 0; rank < model_.merges.size(); ++rank) {
      const auto [left, right] = model_.merges[rank];
      const auto joined = known.find(tokens[left] + tokens[right]);
      const std::string names = BytesToName(tokens[left]) + " " + BytesToName(tokens[right]);
      CISTERN_CHECK(joined != known.end(), where, ": merge ", rank, " (", names,
                    ") gives a token that is not in the vocabulary");
      CISTERN_CHECK(merges_.emplace(Key(left, right), Merge{int32_t(rank), joined->second}).second,
                    where, ": merge ", rank, " (", names, ") is there twice");
    }
  }

  TokenizerKind kind() const override {
    const bool bytes = model_.merges.empty() && model_.added.empty() && model_.tokens.size() == 256;
    return bytes ? TokenizerKind::kBytes : TokenizerKind::kBpe;
  }
  int64_t vocab_size() const override { return int64_t(model_.tokens.size()); }
  std::string_view Bytes(int32_t id) const override {
    CISTERN_CHECK(id >= 0 && id < vocab_size(), "token id ", id, " is outside the vocabulary of ",
                  vocab_size());
    return model_.tokens[id];
  }
  std::string ToJson() const override { return BpeJson(model_); }
  int32_t AddedToken(std::string_view content) const override {
    for (const BpeAdded& token : model_.added) {
      if (token.content == content) return token.id;
    }
    return -1;
  }

  std::vector<int32_t> Encode(std::string_view text) const override {
    std::vector<int32_t> ids;
    ids.reserve(model_.merges.empty() ? text.size() : text.size() / 3);
    // One caller at a time uses the shared cache; others meanwhile have their own.
    std::unique_lock lock(mutex_, std::try_to_lock);
    Cache own;
    Cache& cache = lock.owns_lock() ? cache_ : own;
    while (!text.empty()) {
      const BpeAdded* added = nullptr;  // the leftmost, then longest
      size_t at = text.size();
      for (const BpeAdded& token : model_.added) {
        const size_t found =
            text.substr(0, std::min(text.size(), at + token.content.size())).find(token.content);
        if (found < at || (found == at && added && token.content.size() > added->content.size()))
          at = found, added = &token;
      }
      EncodePlain(text.substr(0, at), cache, ids);
      text.remove_prefix(at);
      if (added) {
        ids.push_back(added->id);
        text.remove_prefix(added->content.size());
      }
    }
    return ids;
  }

 private:
  void EncodePlain(std::string_view text, Cache& cache, std::vector<int32_t>& ids) const {
    if (merges_.empty()) {
      for (const char c : text) ids.push_back(byte_ids_[uint8_t(c)]);
      return;
    }
    std::vector<int32_t> word;
    for (size_t begin = 0, end; begin < text.size(); begin = end) {
      end = PreTokenEnd(text, begin);
      const std::string_view piece = text.substr(begin, end - begin);
      const bool cached = piece.size() <= Cache::kLongest;
      if (cached) {
        const auto place = cache.places.find(piece);
        if (place != cache.places.end()) {
          const auto first = cache.ids.begin() + place->second.first;
          ids.insert(ids.end(), first, first + place->second.second);
          continue;
        }
      }
      word.clear();
      for (const char c : piece) word.push_back(byte_ids_[uint8_t(c)]);
      word.size() <= 48 ? MergeShort(word) : MergeLong(word);
      ids.insert(ids.end(), word.begin(), word.end());
      if (cached) {
        if (cache.places.size() >= Cache::kEntries) cache.places.clear(), cache.ids.clear();
        cache.places.emplace(piece, std::pair(uint32_t(cache.ids.size()), uint32_t(word.size())));
        cache.ids.insert(cache.ids.end(), word.begin(), word.end());
      }
    }
  }

  const Merge* Find(int32_t left, int32_t right) const {
    const auto merge = merges_.find(Key(left, right));
    return merge == merges_.end() ? nullptr : &merge->second;
  }

  // The lowest rank first, the leftmost of equals; O(n^2), the faster way for words.
  void MergeShort(std::vector<int32_t>& word) const {
    std::array<const Merge*, 48> pairs;
    for (size_t i = 0; i + 1 < word.size(); ++i) pairs[i] = Find(word[i], word[i + 1]);
    while (word.size() > 1) {
      const size_t count = word.size() - 1;
      size_t best = count;
      for (size_t i = 0; i < count; ++i) {
        if (pairs[i] && (best == count || pairs[i]->rank < pairs[best]->rank)) best = i;
      }
      if (best == count) return;
      word[best] = pairs[best]->id;
      word.erase(word.begin() + best + 1);
      std::copy(pairs.begin() + best + 1, pairs.begin() + count, pairs.begin() + best);
      if (best + 1 < word.size()) pairs[best] = Find(word[best], word[best + 1]);
      if (best > 0) pairs[best - 1] = Find(word[best - 1], word[best]);
    }
  }

  // The same by a heap over a linked list; O(n log n).
  void MergeLong(std::vector<int32_t>& word) const {
    const int64_t n = int64_t(word.size());
    std::vector<int64_t> before(n), after(n);
    struct Candidate {
      int32_t rank;
      int64_t at;
      int32_t left, right, id;
      bool operator<(const Candidate& o) const {
        return rank != o.rank ? rank > o.rank : at > o.at;
      }
    };
    std::priority_queue<Candidate> heap;
    const auto push = [&](int64_t at) {
      if (at < 0 || after[at] >= n) return;
      if (const Merge* merge = Find(word[at], word[after[at]]))
        heap.push({merge->rank, at, word[at], word[after[at]], merge->id});
    };
    for (int64_t i = 0; i < n; ++i) before[i] = i - 1, after[i] = i + 1;
    for (int64_t i = 0; i + 1 < n; ++i) push(i);
    while (!heap.empty()) {
      const Candidate c = heap.top();
      heap.pop();
      // Stale when either side has been merged since; -1 marks what a merge swallowed.
      if (word[c.at] != c.left || after[c.at] >= n || word[after[c.at]] != c.right) continue;
      const int64_t gone = after[c.at];
      word[c.at] = c.id;
      word[gone] = -1;
      after[c.at] = after[gone];
      if (after[c.at] < n) before[after[c.at]] = c.at;
      push(before[c.at]);
      push(c.at);
    }
    std::erase(word, -1);
  }

  BpeModel model_;
  std::array<int32_t, 256> byte_ids_;
  std::unordered_map<uint64_t, Merge> merges_;
  mutable std::mutex mutex_;
  mutable Cache cache_;
};

}  // namespace

std::unique_ptr<Tokenizer> MakeBpe(BpeModel model, const std::string& where) {
  return std::make_unique<Bpe>(std::move(model), where);
}

}  // namespace cistern

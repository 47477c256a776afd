#include "cistern/data/listops.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string_view>
#include <unordered_map>

#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/base/parallel.h"
#include "cistern/base/random.h"
#include "cistern/data/interruptible.h"

namespace cistern {
namespace {

constexpr double kOperatorShare = .25;
constexpr int64_t kCandidateBlock =
    4096;  // candidates drawn in parallel at a time; no result depends on it
constexpr int64_t kPatience =
    1 << 20;  // candidates without one new example until the search is given up

// The value of an operator over digits, given how often each digit occurs.
int ApplyListOp(uint8_t op, const std::array<int64_t, 10>& counts) {
  int64_t n = 0, sum = 0;
  int low = 9, high = 0;
  for (int d = 0; d < 10; ++d) {
    if (counts[d] == 0) continue;
    n += counts[d];
    sum += d * counts[d];
    low = std::min(low, d);
    high = std::max(high, d);
  }
  if (op == kListOpsMin) return low;
  if (op == kListOpsMax) return high;
  if (op == kListOpsSm) return int(sum % 10);
  const auto at = [&](int64_t rank) {
    int d = 0;
    while (rank >= counts[d]) rank -= counts[d++];
    return d;
  };
  return (at((n - 1) / 2) + at(n / 2)) / 2;  // the mean of the two middles is cut to a whole number
}

// One candidate; stops early once it is too long.
class ListOpsCandidate {
 public:
  ListOpsCandidate(const ListOpsOptions& options, uint64_t seed, uint64_t index,
                   std::vector<uint8_t>& out)
      : options_(options), random_(seed, index), out_(out) {
    out_.clear();
    label_ = Node(1);
  }
  bool accepted() const {
    return label_ >= 0 && int64_t(out_.size()) > options_.min_length &&
           int64_t(out_.size()) < options_.max_length;
  }
  int label() const { return label_; }

 private:
  // Appends a subexpression; its value, or -1 when the whole has become too long.
  int Node(int64_t depth) {
    if (depth >= options_.max_depth || random_.Uniform() > kOperatorShare) {
      const int digit = int(random_.Below(10));
      out_.push_back(uint8_t(kListOpsDigit0 + digit));
      return digit;
    }
    const size_t start = out_.size();
    out_.push_back(kListOpsPad);  // the operator's place: it is drawn after the arguments
    std::array<int64_t, 10> counts{};
    const int64_t args = 2 + random_.Below(options_.max_args - 1);
    for (int64_t i = 0; i < args; ++i) {
      const int value = Node(depth + 1);
      if (value < 0 || int64_t(out_.size()) >= options_.max_length) return -1;
      ++counts[value];
    }
    out_[start] = uint8_t(kListOpsMin + random_.Below(4));
    out_.push_back(kListOpsClose);
    return ApplyListOp(out_[start], counts);
  }

  const ListOpsOptions& options_;
  Random random_;
  std::vector<uint8_t>& out_;
  int label_;
};

std::string_view ListOpsBytes(std::span<const uint8_t> row) {
  return {reinterpret_cast<const char*>(row.data()), row.size()};
}

void CheckListOpsOptions(const ListOpsOptions& o) {
  for (const int64_t count : o.counts) {
    if (count < 0 || count > int64_t{1} << 31)
      FailUsage("listops: the counts must lie in 0..2^31, got ", count);
  }
  if (o.max_depth < 1 || o.max_depth > 100)
    FailUsage("listops: max_depth must lie in 1..100, got ", o.max_depth);
  if (o.max_args < 2 || o.max_args > 1000)
    FailUsage("listops: max_args must lie in 2..1000, got ", o.max_args);
  if (o.min_length < 0 || o.max_length > 1 << 24 || o.min_length + 1 >= o.max_length) {
    FailUsage("listops: no length lies between min_length ", o.min_length, " and max_length ",
              o.max_length, " (both strict, at most 2^24)");
  }
}

}  // namespace

void ListOpsSet::Add(std::span<const uint8_t> row, uint8_t label) {
  tokens.insert(tokens.end(), row.begin(), row.end());
  offsets.push_back(int64_t(tokens.size()));
  labels.push_back(label);
}

ListOpsSplits GenerateListOps(const ListOpsOptions& options, uint64_t seed,
                              const ListOpsProgress& progress) {
  CheckListOpsOptions(options);
  const int64_t wanted = options.counts[0] + options.counts[1] + options.counts[2];
  ListOpsSplits splits;
  ListOpsSet* const sets[] = {&splits.train, &splits.valid, &splits.test};
  const auto set_of = [&](int64_t n) {
    return n < options.counts[0] ? 0 : n < options.counts[0] + options.counts[1] ? 1 : 2;
  };
  const auto start_of = [&](int set) {
    return set == 0 ? 0 : set == 1 ? options.counts[0] : options.counts[0] + options.counts[1];
  };
  std::unordered_multimap<uint64_t, int64_t> seen;  // hash -> number of the example
  std::vector<std::vector<uint8_t>> rows(kCandidateBlock);
  std::vector<int> labels(kCandidateBlock);
  int64_t done = 0, last_found = 0;
  for (int64_t first = 0; done < wanted; first += kCandidateBlock) {
    InterruptibleData::Check();
    ParallelFor(kCandidateBlock, 64, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const ListOpsCandidate candidate(options, seed, uint64_t(first + i), rows[i]);
        labels[i] = candidate.accepted() ? candidate.label() : -1;
      }
    });
    for (int64_t i = 0; i < kCandidateBlock && done < wanted; ++i) {
      if (labels[i] < 0) continue;
      const uint64_t hash = XxHash64(ListOpsBytes(rows[i]));
      const auto [from, to] = seen.equal_range(hash);
      const bool known = std::any_of(from, to, [&](const auto& entry) {
        const int set = set_of(entry.second);
        return std::ranges::equal(sets[set]->Row(entry.second - start_of(set)), rows[i]);
      });
      if (known) continue;
      seen.emplace(hash, done);
      sets[set_of(done)]->Add(rows[i], uint8_t(labels[i]));
      ++done;
      last_found = first + i;
      splits.candidates = first + i + 1;
    }
    if (progress) progress(done, wanted);
    if (done < wanted && first + kCandidateBlock - last_found > kPatience) {
      FailUsage("listops: found ", done, " of ", wanted, " different expressions with ",
                options.min_length, " < length < ", options.max_length, ", max_depth ",
                options.max_depth, " and max_args ", options.max_args, ", and none in the last ",
                kPatience, " draws");
    }
  }
  return splits;
}

int EvaluateListOps(std::span<const uint8_t> tokens) {
  struct Open {
    uint8_t op;
    std::array<int64_t, 10> counts;
    bool empty;
  };
  std::vector<Open> stack;
  int result = -1;
  for (const uint8_t token : tokens) {
    if (result >= 0) return -1;  // something after the end
    int value;
    if (token >= kListOpsDigit0 && token < kListOpsMin) {
      value = token - kListOpsDigit0;
    } else if (token >= kListOpsMin && token <= kListOpsSm) {
      stack.push_back({token, {}, true});
      continue;
    } else if (token == kListOpsClose && !stack.empty() && !stack.back().empty) {
      value = ApplyListOp(stack.back().op, stack.back().counts);
      stack.pop_back();
    } else {
      return -1;
    }
    if (stack.empty()) {
      result = value;
    } else {
      ++stack.back().counts[value];
      stack.back().empty = false;
    }
  }
  return result;
}

uint64_t HashListOps(const ListOpsSplits& splits) {
  uint64_t hash = 0;
  for (const ListOpsSet* set : {&splits.train, &splits.valid, &splits.test}) {
    hash = XxHash64(ListOpsBytes(set->tokens), hash);
    hash = XxHash64(ListOpsBytes(set->labels), hash);
    hash = XxHash64(
        {reinterpret_cast<const char*>(set->offsets.data()), set->offsets.size() * sizeof(int64_t)},
        hash);
  }
  return hash;
}

namespace {

uint8_t Root(const ListOpsSet& set, int64_t i) { return set.Row(i).empty() ? 0 : set.Row(i)[0]; }

int Best(const std::array<int64_t, 10>& counts) {
  return int(std::max_element(counts.begin(), counts.end()) - counts.begin());
}

}  // namespace

ListOpsGuesses::ListOpsGuesses(const ListOpsSet& train) {
  std::array<int64_t, 10> all{};
  for (int64_t i = 0; i < train.size(); ++i) {
    ++all[train.labels[i]];
    ++counts_[Root(train, i)][train.labels[i]];
  }
  majority_ = Best(all);
  for (size_t root = 0; root < best_.size(); ++root) best_[root] = Best(counts_[root]);
}

double ListOpsGuesses::Nats(uint8_t root, uint8_t label) const {
  const std::array<int64_t, 10>& counts = counts_[root];
  return std::log(double(std::accumulate(counts.begin(), counts.end(), int64_t{10})) /
                  double(counts[label] + 1));
}

ListOpsBaselines MeasureListOpsBaselines(const ListOpsSet& train, const ListOpsSet& test) {
  const ListOpsGuesses guesses(train);
  int64_t majority = 0, operators = 0;
  double nats = 0;
  for (int64_t i = 0; i < test.size(); ++i) {
    const uint8_t root = Root(test, i), label = test.labels[i];
    majority += label == guesses.majority();
    operators += label == guesses.OfRoot(root);
    nats += guesses.Nats(root, label);
  }
  const double n = double(std::max<int64_t>(test.size(), 1));
  return {double(majority) / n, double(operators) / n, nats / n};
}

}  // namespace cistern

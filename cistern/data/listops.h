#pragma once
// ListOps (Nangia & Bowman 2018) as Long Range Arena makes it: nested lists of digits with MIN,
// MAX, MED and SM (sum modulo 10) over them; the label is the value, 0 to 9. Generator, the
// published TSV form, evaluator and the two baselines worth knowing.
#include <array>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <span>
#include <string>
#include <vector>

namespace cistern {

// Ids: 0 pads, digits 0..9 are 1..10, then the operators, the closing bracket, and whatever is
// unknown.
enum ListOpsToken : uint8_t {
  kListOpsPad = 0,
  kListOpsDigit0 = 1,
  kListOpsMin = 11,
  kListOpsMax,
  kListOpsMed,
  kListOpsSm,
  kListOpsClose,
  kListOpsUnknown
};
constexpr int64_t kListOpsVocab = 17;

// Examples end to end: example i is tokens[offsets[i] .. offsets[i+1]).
struct ListOpsSet {
  std::vector<uint8_t> tokens;
  std::vector<int64_t> offsets = {0};
  std::vector<uint8_t> labels;

  int64_t size() const { return int64_t(labels.size()); }
  std::span<const uint8_t> Row(int64_t i) const {
    return {tokens.data() + offsets[i], size_t(offsets[i + 1] - offsets[i])};
  }
  void Add(std::span<const uint8_t> row, uint8_t label);
};

struct ListOpsSplits {
  ListOpsSet train, valid, test;
  int64_t candidates = 0;  // expressions drawn until there were enough
};

struct ListOpsOptions {
  std::array<int64_t, 3> counts = {96000, 2000, 2000};  // train, valid, test
  int64_t min_length = 500, max_length = 2000;          // tokens; both strict: min < length < max
  int64_t max_depth = 10, max_args = 10;
};

// Progress is (examples so far, wanted).
using ListOpsProgress = std::function<void(int64_t done, int64_t total)>;

// Draws expressions until `counts` different ones have a length within the limits. Depends on seed
// and options alone: candidate i has its own random stream, whatever the threads. Options that
// cannot be met are a UsageError; so is a search that finds (nearly) nothing new within 2^20
// candidates. 100,000 published-size examples take about 8.2 % of 1.2 million candidates.
ListOpsSplits GenerateListOps(const ListOpsOptions& options, uint64_t seed,
                              const ListOpsProgress& progress = nullptr);

// The value of an expression of ids 1..15, or -1 if it is not one complete well-formed expression.
// O(length).
int EvaluateListOps(std::span<const uint8_t> tokens);

// The published text of an expression, in fully parenthesised binary form: "( ( ( [MIN 3 ) 4 ) ]
// )". The expression must be well-formed.
std::string ListOpsText(std::span<const uint8_t> tokens);

// UsageError where `folder` has one of the files that WriteListOps writes.
void CheckNoListOps(const std::string& folder);
// basic_train.tsv, basic_val.tsv and basic_test.tsv in `folder` (made if missing): a header
// "Source\tTarget", then one example a line. CheckNoListOps holds.
void WriteListOps(const ListOpsSplits& splits, const std::string& folder,
                  const ListOpsProgress& progress = nullptr);
void WriteListOpsFile(const ListOpsSet& set, const std::string& path,
                      const std::function<void()>& each = nullptr);

struct ListOpsReadOptions {
  int64_t max_length = 2000;  // longer examples are cut at the end, as LRA does; 0: never
  bool check = true;  // evaluate every expression and compare with its label; unknown words are
                      // then an Error, not kListOpsUnknown
  // Else a file may be without its labels, and they are not looked at: all are 0. Not with check.
  bool labelled = true;
};
// Reads one file; parentheses are dropped. An Error names the file and the line.
ListOpsSet ReadListOps(const std::string& path, const ListOpsReadOptions& options = {});
ListOpsSet ReadListOps(std::istream& file, const std::string& name,
                       const ListOpsReadOptions& options = {});
ListOpsSplits ReadListOpsFolder(const std::string& folder, const ListOpsReadOptions& options = {});

// Generated examples kept in `folder`, written as a whole, with checksums of its files; rebuilt,
// with a note, when they do not fit. Several processes may ask at once: one makes it, the others
// wait.
ListOpsSplits OpenListOps(const ListOpsOptions& generate, uint64_t seed, const std::string& folder,
                          const ListOpsReadOptions& options, std::vector<std::string>* notes,
                          const ListOpsProgress& progress = nullptr);

// XXH64 of the examples of all three parts.
uint64_t HashListOps(const ListOpsSplits& splits);

// The baselines: always `train`'s most frequent label, and the most frequent label for
// the expression's first token. Published tables near 37 % show a model that reads no further than
// that.
class ListOpsGuesses {
 public:
  explicit ListOpsGuesses(const ListOpsSet& train);
  int majority() const { return majority_; }
  int OfRoot(uint8_t root) const { return best_[root]; }
  // -log of the label's share under that first token, one added to each label.
  double Nats(uint8_t root, uint8_t label) const;

 private:
  int majority_;
  std::array<int, 256> best_;
  std::array<std::array<int64_t, 10>, 256> counts_{};
};

// Accuracy of both on `test`, as shares, and the mean of Nats.
struct ListOpsBaselines {
  double majority, root_operator, root_operator_loss;
};
ListOpsBaselines MeasureListOpsBaselines(const ListOpsSet& train, const ListOpsSet& test);

}  // namespace cistern

#include "cistern/decode/beam_search.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "cistern/base/error.h"
#include "cistern/decode/eval_scope.h"

namespace cistern {
namespace {

constexpr double kNever = -std::numeric_limits<double>::infinity();

// A row of the batch that is not done: its beams, those that have not ended.
struct Row {
  size_t number;  // in the batch
  std::vector<Hypothesis> live;
  std::vector<Hypothesis> ended;
};

// A beam goes on with a token.
struct Candidate {
  int64_t beam;
  int32_t token;
  double logprob;
};

// The likeliest of a row, best first: `each` of every beam, of which one may be the end. logprobs
// and tokens [beams, each].
std::vector<Candidate> CandidatesOf(const Row& row, const double* logprobs, const int64_t* tokens,
                                    int64_t each) {
  std::vector<Candidate> all;
  for (size_t beam = 0; beam < row.live.size(); ++beam) {
    for (int64_t i = 0; i < each; ++i, ++logprobs, ++tokens)
      all.push_back({int64_t(beam), int32_t(*tokens), row.live[beam].logprob + *logprobs});
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const Candidate& a, const Candidate& b) { return a.logprob > b.logprob; });
  all.resize(std::min(all.size(), 2 * row.live.size()));
  return all;
}

// The row's next beams; `from` gets the beam that each continues.
void Continue(Row& row, const std::vector<Candidate>& candidates, const BeamOptions& o,
              std::vector<int64_t>* from) {
  std::vector<Hypothesis> next;
  for (size_t rank = 0; rank < candidates.size() && int64_t(next.size()) < o.beam; ++rank) {
    const Candidate& c = candidates[rank];
    Hypothesis h = row.live[size_t(c.beam)];
    h.logprob = c.logprob;
    if (c.token == o.end) {
      if (int64_t(rank) >= o.beam || c.logprob == kNever) continue;
      h.ended = true;
      row.ended.push_back(std::move(h));
      continue;
    }
    h.tokens.push_back(c.token);
    next.push_back(std::move(h));
    from->push_back(c.beam);
  }
  row.live = std::move(next);
}

bool Done(const Row& row, const BeamOptions& o) {
  return int64_t(row.ended.size()) >= o.beam || row.live.empty() ||
         int64_t(row.live[0].tokens.size()) >= o.most[row.number];
}

Hypothesis Best(const Row& row, double length_penalty) {
  const std::vector<Hypothesis>& of = row.ended.empty() ? row.live : row.ended;
  return *std::max_element(of.begin(), of.end(), [&](const Hypothesis& a, const Hypothesis& b) {
    return a.Score(length_penalty) < b.Score(length_penalty);
  });
}

}  // namespace

void BeamOptions::Validate() const {
  if (beam < 1) FailUsage("beam must be 1 or above, got ", beam);
  if (!std::isfinite(length_penalty))
    FailUsage("length_penalty must be a number, got ", length_penalty);
}

double Hypothesis::Score(double length_penalty) const {
  return logprob / std::pow(double(tokens.size()) + 1, length_penalty);
}

std::vector<Hypothesis> BeamSearch(LanguageModel& model, ModelState state, const BeamOptions& o) {
  o.Validate();
  const int64_t beams = o.beam, vocab = model.vocab_size();
  std::vector<Hypothesis> best(o.most.size());
  if (best.empty()) return best;
  CISTERN_CHECK(state.positions.size(0) == int64_t(best.size()), "[beam search] the state has ",
                state.positions.size(0), " rows, and `most` has ", best.size());
  CISTERN_CHECK(o.start >= 0 && o.start < vocab && o.end >= 0 && o.end < vocab,
                "[beam search] start=", o.start, " and end=", o.end,
                " have to be among the model's ", vocab, " tokens");
  const DecodeScope scope(model);
  const at::TensorOptions ids = at::TensorOptions().dtype(at::kLong);
  const at::Device device = model.options().device();
  // In each row the first beam alone has a probability at first.
  std::vector<Row> rows;
  std::vector<int64_t> from;  // of each beam of the next step: its row in the state
  std::vector<int64_t> tokens(best.size() * size_t(beams), o.start);
  for (size_t r = 0; r < best.size(); ++r) {
    CISTERN_CHECK(o.most[r] >= 1, "[beam search] at least one token a row, got ", o.most[r]);
    rows.push_back({r, std::vector<Hypothesis>(size_t(beams)), {}});
    for (size_t b = 1; b < size_t(beams); ++b) rows.back().live[b].logprob = kNever;
    from.insert(from.end(), size_t(beams), int64_t(r));
  }
  while (!rows.empty() && !(o.interrupted && *o.interrupted)) {
    const auto as_tensor = [&](const std::vector<int64_t>& x) {
      return at::tensor(x, ids).to(device);
    };
    std::vector<int64_t> same(size_t(state.positions.size(0)));
    std::iota(same.begin(), same.end(), 0);
    if (from != same) state = state.Reorder(as_tensor(from));
    const at::Tensor logits =
        model.Logits(model.Hidden(as_tensor(tokens).unsqueeze(1), state)).squeeze(1);
    const at::Tensor sums = at::logsumexp(logits, 1, true);
    CISTERN_CHECK(at::isfinite(sums).all().item<bool>(),
                  "[beam search] the model's logits are not finite; its weights are broken");
    const int64_t each = std::min(2 * beams, vocab);
    const auto [values, places] = logits.topk(each, 1);
    const at::Tensor logprobs = (values - sums).to(at::kCPU, at::kDouble).contiguous(),
                     likeliest = places.cpu().contiguous();
    std::vector<Row> going;
    from.clear(), tokens.clear();
    for (size_t r = 0; r < rows.size(); ++r) {
      Row& row = rows[r];
      const int64_t offset = int64_t(r) * beams * each;
      std::vector<int64_t> continued;
      Continue(row,
               CandidatesOf(row, logprobs.const_data_ptr<double>() + offset,
                            likeliest.const_data_ptr<int64_t>() + offset, each),
               o, &continued);
      best[row.number] = Best(row, o.length_penalty);
      if (Done(row, o)) continue;
      while (int64_t(row.live.size()) < beams) {  // a vocabulary smaller than the beams
        row.live.push_back(row.live[0]);
        row.live.back().logprob = kNever;
        continued.push_back(continued[0]);
      }
      for (size_t b = 0; b < size_t(beams); ++b) {
        from.push_back(int64_t(r) * beams + continued[b]);
        tokens.push_back(row.live[b].tokens.back());
      }
      going.push_back(std::move(row));
    }
    rows = std::move(going);
  }
  return best;
}

}  // namespace cistern

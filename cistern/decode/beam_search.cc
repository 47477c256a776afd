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

// The `count` likeliest of a row, best first; `scores` and `at` [count], places in [beams, V].
std::vector<Candidate> CandidatesOf(const double* scores, const int64_t* at, int64_t count,
                                    int64_t vocab) {
  std::vector<Candidate> out;
  for (int64_t i = 0; i < count; ++i)
    out.push_back({at[i] / vocab, int32_t(at[i] % vocab), scores[i]});
  return out;
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
    const int64_t live = logits.size(0);
    std::vector<double> before;
    for (const Row& row : rows) {
      for (const Hypothesis& h : row.live) before.push_back(h.logprob);
    }
    const at::Tensor all = (at::log_softmax(logits.to(at::kDouble), 1) +
                            at::tensor(before, at::kDouble).to(device).unsqueeze(1))
                               .view({live / beams, beams * vocab});
    CISTERN_CHECK(!at::isnan(all).any().item<bool>(),
                  "[beam search] the model's logits are not finite; its weights are broken");
    // Of each beam one token may be the end.
    const int64_t count = std::min(2 * beams, beams * vocab);
    const auto [scores, at] = all.topk(count, 1);
    const at::Tensor s = scores.cpu().contiguous(), places = at.cpu().contiguous();
    std::vector<Row> going;
    from.clear(), tokens.clear();
    for (size_t r = 0; r < rows.size(); ++r) {
      Row& row = rows[r];
      const size_t offset = r * size_t(count);
      std::vector<int64_t> continued;
      Continue(row,
               CandidatesOf(s.const_data_ptr<double>() + offset,
                            places.const_data_ptr<int64_t>() + offset, count, vocab),
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

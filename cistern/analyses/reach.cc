#include "cistern/analyses/reach.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "cistern/analyses/input_gradient.h"
#include "cistern/analyses/weighted_words.h"
#include "cistern/base/error.h"
#include "cistern/base/format.h"

namespace cistern {
namespace {

// Bins of distances: 0, 1, 2-3, 4-7, 8-15, ...; a bin's place on an axis is its middle.
struct Bin {
  int64_t begin, end;  // begin .. end-1
  double middle() const { return begin == 0 ? 0.5 : std::sqrt(double(begin) * double(end - 1)); }
};
std::vector<Bin> Bins(int64_t count) {
  std::vector<Bin> bins;
  if (count > 0) bins.push_back({0, 1});
  for (int64_t begin = 1; begin < count; begin *= 2)
    bins.push_back({begin, std::min(2 * begin, count)});
  return bins;
}

// The mean over the distances of a bin, each as much as it was measured.
Mean Of(const std::vector<Mean>& all, const Bin& bin) {
  Mean out;
  for (int64_t d = bin.begin; d < bin.end; ++d) out.Merge(all[size_t(d)]);
  return out;
}

}  // namespace

const AnalysisInfo& reach_analysis() {
  static const AnalysisInfo info = [] {
    AnalysisInfo i;
    i.name = "reach";
    i.title = "Effective memory length";
    i.summary =
        "From how far back an input still changes what the model says, by gradient and by putting "
        "another token in its place; the words that a prediction depends on.";
    i.needs = "decoder_lm, masked_lm and encoder_classifier with tokens as inputs, any mechanism";
    i.refusal = InputGradientRefusal;
    BindAnalysis<ReachAnalysis>(i);
    return i;
  }();
  return info;
}

Fields ReachAnalysis::Describe(Options& o) {
  Fields f;
  f.Add("row", &o.row, "the row of the data that is drawn, from 0", {0, int64_t{1} << 40});
  f.Add("rows", &o.rows, "rows that are measured, the first ones; the drawn one besides",
        {1, int64_t{1} << 40});
  f.Add("queries", &o.queries,
        "tokens of a row whose reach is measured, the last one and others evenly before it",
        {1, 256});
  f.Add("probes", &o.probes,
        "random directions that estimate a gradient's norm, a backward pass each; 0: exactly, by "
        "all channels",
        {0, 1 << 20});
  f.Add("changes", &o.changes, "places of a row at which another token is put; 0: none",
        {0, 1 << 20});
  f.Add("threshold", &o.threshold,
        "the least change of a prediction, as total variation, that counts as one", {1e-9, 1});
  return f;
}

ReachAnalysis::ReachAnalysis(const Options& options, const AnalysisContext& context)
    : options_(options), context_(context) {}

void ReachAnalysis::AddGradients(const at::Tensor& gradients, const std::vector<int64_t>& queries) {
  const at::Tensor g = gradients.cpu().contiguous();
  const auto value = g.accessor<double, 2>();
  const int64_t length = g.size(1);
  for (size_t q = 0; q < queries.size(); ++q) {
    double sum = 0, entropy = 0;
    for (int64_t s = 0; s < length; ++s) sum += value[int64_t(q)][s];
    if (!(sum > 0)) continue;
    std::vector<double> by_distance(size_t(length), 0);
    for (int64_t s = 0; s < length; ++s) {
      const double share = value[int64_t(q)][s] / sum;
      const int64_t distance = std::abs(queries[q] - s);
      // What a causal model never sees has no share and no distance.
      if (context_.config.kind == "decoder_lm" && s > queries[q]) continue;
      gradient_[size_t(distance)].Add(share);
      by_distance[size_t(distance)] += share;
      if (share > 0) entropy -= share * std::log(share);
    }
    tokens_.Add(std::exp(entropy));
    double within = 0;
    int64_t reached = 0;
    for (auto [share, mean] : {std::pair{0.5, &half_}, {0.9, &most_}, {0.99, &all_}}) {
      while (within < share - 1e-12 && reached < length) within += by_distance[size_t(reached++)];
      mean->Add(double(reached - 1));
    }
  }
}

void ReachAnalysis::AddRow(const at::Tensor& ids, bool drawn) {
  Model& model = *context_.model;
  const int64_t length = ids.size(1);
  const bool one = context_.config.kind == "encoder_classifier";
  longest_ = std::max(longest_, length);
  gradient_.resize(size_t(longest_)), change_.resize(size_t(longest_));
  std::vector<int64_t> queries;
  const int64_t count = one ? 1 : std::min(options_.queries, length);
  for (int64_t i = 1; i <= count; ++i) queries.push_back(one ? 0 : i * length / count - 1);
  const at::Tensor gradients =
      InputGradients(model, ids, queries, options_.probes, context_.seed + uint64_t(rows_));
  if (!one) AddGradients(gradients, queries);
  if (drawn) {
    drawn_ = (gradients / gradients.sum(1, true).clamp_min(1e-300)).cpu();
    queries_ = queries;
  }
  if (one || options_.changes == 0) return;
  const at::Tensor before = Predictions(model, ids);
  const int64_t places = std::min(options_.changes, length);
  for (int64_t i = 0; i < places; ++i) {
    const int64_t place = i * length / places;
    const at::Tensor change =
        PredictionChange(model, ids, before, place, context_.seed + uint64_t(rows_))
            .cpu()
            .contiguous();
    const int64_t from = context_.config.kind == "decoder_lm" ? place : 0;
    for (int64_t t = from; t < length; ++t)
      change_[size_t(std::abs(t - place))].Add(change.const_data_ptr<double>()[t]);
  }
}

void ReachAnalysis::Add(const Batch& batch, const std::vector<CapturedLayer>&) {
  if (!batch.tensors.Has("ids"))
    FailUsage("reach: rows of this task have no tokens (ids), whose embeddings a gradient is of");
  if (batch.tensors.Has("starts") || batch.tensors.Has("valid"))
    FailUsage(
        "reach: rows with several documents or with masked tokens have no single text; give "
        "one text a row");
  for (int64_t row = 0; row < batch.rows; ++row, ++rows_) {
    const bool drawn = rows_ == options_.row;
    if (measured_ >= options_.rows && !drawn) continue;
    const int64_t length =
        batch.tensors.Has("lengths") ? batch["lengths"][row].item<int64_t>() : batch["ids"].size(1);
    if (length == 0) continue;
    const at::Tensor ids = batch["ids"].narrow(0, row, 1).narrow(1, 0, length);
    AddRow(ids, drawn);
    ++measured_;
    if (drawn) words_ = WordsOf(ids[0], context_.token);
  }
}

void ReachAnalysis::Merge(const Analysis& other_analysis) {
  const auto& other = dynamic_cast<const ReachAnalysis&>(other_analysis);
  longest_ = std::max(longest_, other.longest_);
  gradient_.resize(size_t(longest_)), change_.resize(size_t(longest_));
  for (size_t d = 0; d < other.gradient_.size(); ++d) {
    gradient_[d].Merge(other.gradient_[d]);
    change_[d].Merge(other.change_[d]);
  }
  half_.Merge(other.half_), most_.Merge(other.most_), all_.Merge(other.all_);
  tokens_.Merge(other.tokens_);
  if (!drawn_.defined()) drawn_ = other.drawn_, queries_ = other.queries_, words_ = other.words_;
  rows_ += other.rows_, measured_ += other.measured_;
}

Figures ReachAnalysis::Report() const {
  CISTERN_CHECK(measured_ > 0, "[reach] no row was read");
  const bool one = context_.config.kind == "encoder_classifier";
  Figures f;
  f.Fact("rows", measured_);
  if (!one) {
    const std::vector<Bin> bins = Bins(longest_);
    // The last distance at which a change is still one, by the means of bins.
    int64_t changed = -1;
    for (const Bin& bin : bins) {
      const Mean mean = Of(change_, bin);
      if (mean.count > 0 && mean.sum / double(mean.count) >= options_.threshold)
        changed = bin.end - 1;
    }
    f.Text(
        "A gradient says how much an infinitely small change of a token's embedding would change "
        "the output; another token in its place, how much the prediction really changes. Where a "
        "curve ends, nothing further back matters to this model, however long its text.");
    Figures::Table length{"length",
                          StrCat("How far back, in tokens; means over ", half_.count,
                                 " queries of ", measured_, " rows of up to ", longest_, " tokens"),
                          {"half of the gradient", "90 % of it", "99 % of it",
                           "tokens it spreads over", "predictions change"},
                          {}};
    length.rows.push_back({half_.Value(), most_.Value(), all_.Value(), tokens_.Value(),
                           changed < 0 ? Json() : Json(changed)});
    f.Add(std::move(length));
    Figures::Table by{"distance",
                      "By distance; the gradient's share is that of one token",
                      {"from", "to", "gradient share", "change"},
                      {}};
    LineChart gradient{
        "Influence by distance", "tokens back", "share of the gradient, a token", {}};
    LineChart change{"Another token in its place",
                     "tokens back",
                     "change of the prediction (total variation)",
                     {}};
    Series g{"gradient", {}, {}}, c{"change", {}, {}};
    for (const Bin& bin : bins) {
      const Mean share = Of(gradient_, bin), moved = Of(change_, bin);
      by.rows.push_back({bin.begin, bin.end - 1, share.Value(), moved.Value()});
      if (share.count > 0)
        g.x.push_back(bin.middle()), g.y.push_back(share.sum / double(share.count));
      if (moved.count > 0)
        c.x.push_back(bin.middle()), c.y.push_back(moved.sum / double(moved.count));
    }
    gradient.series = {g}, change.series = {c};
    gradient.log_x = gradient.log_y = change.log_x = change.log_y = true;
    f.Add(std::move(by));
    f.Add("gradient", gradient,
          "Falling steeply: only near tokens count. A point at 1/2 is the token itself.");
    if (!c.x.empty())
      f.Add("change", change,
            StrCat("Below ", Significant(options_.threshold, 2), " a change counts as none."));
  }
  if (!drawn_.defined()) {
    f.Text(StrCat("Row ", options_.row, " was not among the ", rows_,
                  " rows that were read, so nothing is drawn."));
    return f;
  }
  f.Heading(StrCat("Row ", options_.row));
  const at::Tensor map = drawn_.contiguous();
  HeatMap heat;
  heat.title = one ? "What the decision depends on" : "What each output depends on";
  heat.x_label = "token", heat.y_label = one ? "" : "output";
  heat.rows = map.size(0), heat.columns = map.size(1);
  heat.values.assign(map.const_data_ptr<double>(), map.const_data_ptr<double>() + map.numel());
  heat.square = false, heat.width = 640;
  for (const int64_t q : queries_) heat.row_names.push_back(one ? "class" : std::to_string(q + 1));
  f.Add("map", heat,
        "One line is one output, its token's number at the left: the share of its gradient in each "
        "token of the row.");
  if (words_.empty()) return f;
  std::vector<WeightedWord> words;
  const int64_t last = map.size(0) - 1, asked = one ? -1 : queries_.back();
  for (int64_t s = 0; s < map.size(1); ++s) {
    const bool hidden = context_.config.kind == "decoder_lm" && s > asked;
    words.push_back({words_.at(size_t(s)), hidden ? std::nan("") : map[last][s].item<double>()});
  }
  f.Svg("words",
        RenderWords(one ? std::string("What the decision depends on")
                        : StrCat("What the output at token ", asked + 1, " depends on"),
                    words, asked),
        "");
  return f;
}

}  // namespace cistern

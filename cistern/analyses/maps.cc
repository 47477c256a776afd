#include "cistern/analyses/maps.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "cistern/analyses/implied_weights.h"
#include "cistern/analyses/weighted_words.h"
#include "cistern/base/error.h"
#include "cistern/kernels/weight_sums.h"
#include "cistern/ops/tensor_rows.h"
#include "cistern/tensors/parallel_rows.h"

namespace cistern {
namespace {

constexpr int64_t kColumns = 128;      // of W at a time
constexpr int64_t kRankLength = 1024;  // most tokens of a row whose rank is measured
constexpr int64_t kMostCells = 256;    // of a picture's side

// Mean of blocks of `by` neighbours in both dimensions, [T,S] -> [ceil(T/by),ceil(S/by)].
at::Tensor BlockMeans(const at::Tensor& w, int64_t by) {
  if (by == 1) return w;
  return at::avg_pool2d(w.unsqueeze(0), {by, by}, {by, by}, {0, 0}, true, false).squeeze(0);
}

bool Chosen(const std::vector<int64_t>& wanted, int64_t number) {
  return wanted.empty() || std::find(wanted.begin(), wanted.end(), number) != wanted.end();
}

// Effective rank of each of [H,T,S].
at::Tensor EffectiveRanks(const at::Tensor& w) {
  const at::Tensor sigma = at::linalg_svdvals(w.to(at::kDouble));
  const at::Tensor p = sigma / sigma.sum(-1, true).clamp_min(1e-300);
  return (-(p * p.clamp_min(1e-300).log()).sum(-1)).exp();
}

// The lines of two layers or more, each named by its form where there are several.
void AddLines(const std::map<Form, Series>& by_form, LineChart* chart) {
  chart->y_from_zero = true;
  for (const auto& [form, series] : by_form) {
    if (series.x.size() < 2) continue;
    chart->series.push_back(series);
    chart->series.back().name = by_form.size() > 1 ? FormName(form) : "mean over heads";
  }
}

}  // namespace

const AnalysisInfo& maps_analysis() {
  static const AnalysisInfo info = [] {
    AnalysisInfo i;
    i.name = "maps";
    i.title = "Implied attention maps";
    i.summary =
        "The weights with which each token attends to each other, of any mechanism: heat maps, the "
        "words weighted, entropy, effective rank, locality.";
    i.needs = "every model of one text a row; each mechanism that is linear in its values";
    i.refusal = RowsRefusal;
    BindAnalysis<MapsAnalysis>(i);
    return i;
  }();
  return info;
}

Fields MapsAnalysis::Describe(Options& o) {
  Fields f;
  f.Add("layers", &o.layers, "layers to look at, from 1; none: all", {1, 4096});
  f.Add("heads", &o.heads,
        "heads to draw, from 1; none: the mean over the heads of a layer. The table has all",
        {1, 4096});
  f.Add("row", &o.row, "the row of the data that is drawn, from 0", {0, int64_t{1} << 40});
  f.Add("query", &o.query,
        "the token whose view of the others is drawn as words, from 1; 0: the last real one",
        {0, int64_t{1} << 40});
  f.Add("words", &o.words, "draw the words of a text by their weights");
  f.Add("rank_rows", &o.rank_rows,
        "rows whose effective rank is measured: it costs the cube of the length; 0: none",
        {0, 1 << 30});
  return f;
}

MapsAnalysis::MapsAnalysis(const Options& options, const AnalysisContext& context)
    : options_(options), context_(context) {}

void MapsAnalysis::HeadSums::Merge(const HeadSums& o) {
  entropy.Merge(o.entropy), share.Merge(o.share), distance.Merge(o.distance);
  sum.Merge(o.sum), negative.Merge(o.negative), rank.Merge(o.rank);
  without += o.without;
}

void MapsAnalysis::AddRow(const CapturedLayer& layer, int64_t row, bool rank,
                          std::vector<HeadSums>* sums, Drawn* drawn) const {
  const ImpliedWeights weights(layer, row);
  const bool all = layer.core->SeesPadding(), causal = layer.form == Form::kCausal;
  const int64_t queries = all ? layer.queries() : layer.RealQueries(row),
                sources = all ? layer.sources() : layer.RealSources(row);
  if (queries == 0 || sources == 0) return;
  const auto real = at::TensorOptions(at::kDouble);
  const int64_t heads = layer.heads(),
                pool = (std::max(queries, sources) + kMostCells - 1) / kMostCells,
                step = (kColumns + pool - 1) / pool * pool;
  const bool ranked = rank && std::max(queries, sources) <= kRankLength;
  const int64_t asked = options_.query > 0 ? std::min(options_.query, queries) - 1 : queries - 1;
  std::vector<WeightSums> totals(size_t(heads * queries));
  at::Tensor probe;
  std::vector<at::Tensor> whole, cells, seen;
  for (int64_t begin = 0; begin < layer.sources(); begin += step) {
    const int64_t count = std::min(step, layer.sources() - begin);
    const at::Tensor columns = weights.Columns(begin, count);
    const at::Tensor part = weights.Probe(begin, columns);
    if (part.defined()) probe = probe.defined() ? probe + part : part;
    const int64_t kept = std::min(count, sources - begin);
    if (kept <= 0) continue;
    const at::Tensor w =
        ops::UnitStride(columns.narrow(1, 0, queries).narrow(2, 0, kept).to(at::kCPU));
    // Earlier queries of a causal layer do not see these columns.
    const int64_t first = causal ? std::min(begin, queries) : 0;
    ops::DispatchType(w, [&]<class T>(T) {
      AddWeightSums<T>({w.const_data_ptr<T>() + first * w.stride(1), heads, queries - first, kept,
                        w.stride(0), w.stride(1), first, begin},
                       queries, totals.data());
    });
    if (!ranked && !drawn) continue;
    const at::Tensor exact = w.to(at::kDouble);
    if (ranked) whole.push_back(exact);
    if (!drawn) continue;
    seen.push_back(exact.select(1, asked));
    cells.push_back(BlockMeans(exact, pool));
  }
  weights.Check(probe);
  const at::Tensor table = at::from_blob(totals.data(), {heads, queries, 4}, real);
  const at::Tensor absolute = table.select(2, 0), logs = table.select(2, 1),
                   sum = table.select(2, 2), distance = table.select(2, 3);
  const at::Tensor size = absolute.clamp_min(1e-300), negative = (absolute - sum) / 2;
  const at::Tensor looks = (absolute > 0).to(at::kDouble),
                   entropy = (size.log() - logs / size) * looks;  // [H,T]
  const at::Tensor visible = causal ? at::arange(1, queries + 1, real).clamp_max(double(sources))
                                    : at::full({queries}, double(sources), real);
  const at::Tensor several = (visible > 1).to(at::kDouble);
  const at::Tensor share = entropy / visible.clamp_min(2).log() * several;
  at::Tensor ranks;
  if (ranked) ranks = EffectiveRanks(at::cat(whole, 2));
  const auto of = [&](const at::Tensor& x, int64_t h) { return x[h].sum().item<double>(); };
  for (int64_t h = 0; h < heads; ++h) {
    HeadSums& s = (*sums)[size_t(h)];
    const auto looking = int64_t(of(looks, h));
    s.without += queries - looking;
    s.entropy.Add(of(entropy, h), looking), s.sum.Add(of(sum, h), queries);
    s.share.Add(of(share, h), int64_t(of(looks * several, h)));
    s.negative.Add(of(negative / size, h), looking);
    if (layer.form != Form::kCross) s.distance.Add(of(distance / size, h), looking);
    if (ranked && looking > 0) s.rank.Add(ranks[h].item<double>());
  }
  if (!drawn) return;
  drawn->name = layer.name;
  drawn->queries = queries, drawn->sources = sources, drawn->seen_query = asked;
  drawn->causal = causal;
  const at::Tensor picture = at::cat(cells, 2), view = at::cat(seen, 1);
  if (options_.heads.empty()) {
    drawn->maps.emplace_back(layer.name, picture.mean(0));
    drawn->query.emplace_back(layer.name, view.mean(0));
  }
  for (int64_t h = 0; h < heads; ++h) {
    if (options_.heads.empty() || !Chosen(options_.heads, h + 1)) continue;
    const std::string name = StrCat(layer.name, ", head ", h + 1);
    drawn->maps.emplace_back(name, picture[h]);
    drawn->query.emplace_back(name, view[h]);
  }
}

void MapsAnalysis::Add(const Batch& batch, const std::vector<CapturedLayer>& all) {
  const std::vector<CapturedLayer> layers = ThatRead(all, "maps");
  if (layers_.empty()) {
    for (const CapturedLayer& l : layers)
      layers_.push_back({l.name, l.layer->mechanism().info().name, l.form, l.number,
                         std::vector<HeadSums>(size_t(l.heads()))});
    for (const int64_t n : options_.layers) {
      if (n > int64_t(layers.size()))
        FailUsage("maps.layers=", n, ": the model has ", layers.size(), " layers of attention");
    }
    for (const int64_t n : options_.heads) {
      if (std::none_of(layers.begin(), layers.end(),
                       [n](const CapturedLayer& l) { return n <= l.heads(); }))
        FailUsage("maps.heads=", n, ": the layers have ", layers[0].heads(), " heads");
    }
  }
  CISTERN_CHECK(layers.size() == layers_.size(), "[maps] a batch ran ", layers.size(),
                " layers, the first one ", layers_.size());
  // Of each row, by layer; only the row that is drawn has pictures.
  std::vector<std::vector<std::vector<HeadSums>>> rows(size_t(batch.rows));
  std::vector<Drawn> drawn(layers.size());
  ForRows(batch.rows, [&](int64_t row) {
    auto& sums = rows[size_t(row)];
    for (size_t i = 0; i < layers.size(); ++i) {
      sums.emplace_back(size_t(layers[i].heads()));
      if (!Chosen(options_.layers, int64_t(i) + 1)) continue;
      AddRow(layers[i], row, rows_ + row < options_.rank_rows, &sums[i],
             rows_ + row == options_.row ? &drawn[i] : nullptr);
    }
  });
  for (int64_t row = 0; row < batch.rows; ++row, ++rows_) {
    const bool draws = rows_ == options_.row;
    for (size_t i = 0; i < layers.size(); ++i) {
      for (size_t h = 0; h < layers_[i].heads.size(); ++h)
        layers_[i].heads[h].Merge(rows[size_t(row)][i][h]);
      if (!draws || drawn[i].maps.empty()) continue;
      drawn[i].before = layers[i].TokensBeforeText(batch);
      drawn_.push_back(std::move(drawn[i]));
    }
    if (draws && batch.tensors.Has("ids")) words_ = WordsOf(batch["ids"][row], context_.token);
  }
}

void MapsAnalysis::Merge(const Analysis& other_analysis) {
  const auto& other = dynamic_cast<const MapsAnalysis&>(other_analysis);
  if (layers_.empty()) {
    layers_ = other.layers_;
  } else {
    for (size_t i = 0; i < other.layers_.size(); ++i) {
      for (size_t h = 0; h < layers_[i].heads.size(); ++h)
        layers_[i].heads[h].Merge(other.layers_[i].heads[h]);
    }
  }
  if (drawn_.empty()) drawn_ = other.drawn_, words_ = other.words_;
  rows_ += other.rows_;
}

Figures MapsAnalysis::Report() const {
  CISTERN_CHECK(rows_ > 0, "[maps] no row was read");
  Figures f;
  f.Fact("rows", rows_);
  f.Text(
      "The weights with which each token attends to each other, whatever the mechanism: what a "
      "head gives is these weights times its values. They are exact up to rounding, and checked "
      "against the layer's output. Of a layer with a memory stream they are the weights of reading "
      "the slots times those of packing them, the mean over packing's heads.");
  Figures::Table table{"heads",
                       "Means over all real queries of " + std::to_string(rows_) +
                           " rows; the effective rank over fewer rows",
                       {"layer", "mechanism", "head", "entropy", "share of ln(tokens)", "distance",
                        "effective rank", "row sum", "negative"},
                       {}};
  LineChart entropy{"Entropy by layer", "layer", "share of ln(tokens seen)", {}};
  LineChart locality{"Locality by layer", "layer", "mean distance in tokens", {}};
  std::map<Form, Series> shares, distances;  // means over heads
  int64_t without = 0;
  for (const LayerSums& l : layers_) {
    HeadSums all;
    for (size_t h = 0; h < l.heads.size(); ++h) {
      const HeadSums& s = l.heads[h];
      all.Merge(s);
      if (s.sum.count == 0) continue;
      table.rows.push_back({l.name, l.mechanism, int64_t(h) + 1, s.entropy.Value(), s.share.Value(),
                            s.distance.Value(), s.rank.Value(), s.sum.Value(), s.negative.Value()});
    }
    without += all.without;
    const auto add = [&](const Mean& mean, Series* series) {
      if (mean.count == 0) return;
      series->x.push_back(double(l.number));
      series->y.push_back(mean.sum / double(mean.count));
    };
    add(all.share, &shares[l.form]), add(all.distance, &distances[l.form]);
  }
  f.Add(std::move(table));
  if (without > 0) {
    f.Fact("queries_without_weights", without);
    f.Text(StrCat(without,
                  " queries, counted in each head, have no weight at all: they look nowhere, and "
                  "have a part in the row sum alone."));
  }
  AddLines(shares, &entropy), AddLines(distances, &locality);
  if (!entropy.series.empty())
    f.Add("entropy", entropy,
          "1: a layer's heads look at all tokens alike; 0: each query looks at one token.");
  if (!locality.series.empty())
    f.Add("locality", locality, "How far away, in tokens, what a query attends to stands.");
  if (drawn_.empty()) {
    f.Text(StrCat("Row ", options_.row, " was not among the ", rows_,
                  " rows that were read, so nothing is drawn."));
    return f;
  }
  f.Heading(StrCat("Row ", options_.row));
  f.Text(
      "One line of a map is one query: where it looks. A diagonal is attention to near tokens, a "
      "vertical stripe a token that all look at, an even area a mean. Long rows are drawn as means "
      "of neighbouring tokens.");
  int number = 0;
  for (const Drawn& d : drawn_) {
    const int64_t by = (std::max(d.queries, d.sources) + kMostCells - 1) / kMostCells;
    for (const auto& entry : d.maps) {
      const at::Tensor map = entry.second.contiguous();
      HeatMap heat;
      heat.title = entry.first;
      heat.x_label = by == 1 ? "token attended to" : StrCat("token attended to / ", by);
      heat.y_label = by == 1 ? "query" : StrCat("query / ", by);
      heat.rows = map.size(0), heat.columns = map.size(1);
      const auto* data = map.const_data_ptr<double>();
      heat.values.assign(data, data + map.numel());
      heat.signed_values = map.min().item<double>() < -1e-6;
      f.Add(StrCat("map-", ++number), heat, "");
    }
  }
  if (!options_.words || words_.empty()) return f;
  number = 0;
  f.Heading("Words by weight");
  for (const Drawn& d : drawn_) {
    if (!d.before) continue;
    for (const auto& entry : d.query) {
      std::vector<WeightedWord> words;
      for (int64_t s = 0; s < entry.second.size(0); ++s) {
        const int64_t word = s - *d.before;
        const bool hidden = d.causal && s > d.seen_query;
        words.push_back({word < 0 ? "[cls]" : words_.at(size_t(word)),
                         hidden ? std::nan("") : entry.second[s].item<double>()});
      }
      f.Svg(StrCat("words-", ++number),
            RenderWords(StrCat(entry.first, ": what token ", d.seen_query + 1, " attends to"),
                        words, d.seen_query),
            "");
    }
  }
  return f;
}

}  // namespace cistern

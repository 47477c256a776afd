#include "cistern/analyses/similarity.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cistern/analyses/implied_weights.h"
#include "cistern/analyses/reuse_plan.h"
#include "cistern/base/error.h"
#include "cistern/base/format.h"
#include "cistern/base/parallel.h"
#include "cistern/tasks/uniform_ids.h"
#include "cistern/tensors/parallel_rows.h"

namespace cistern {
namespace {

constexpr int64_t kBlock = 64;         // columns of W at a time, of every layer
constexpr double kProbability = 2e-3;  // how far a row may be from one
constexpr double kNoWeight = 1e-30;    // a row whose sum is not above it looks nowhere

// |a - b| summed over n <= 2,048 numbers in lanes, which the compiler makes vectors of.
double Difference(const float* a, const float* b, int64_t n) {
  constexpr int64_t kLanes = 16;
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) lanes[j] += std::abs(a[i + j] - b[i + j]);
  }
  double sum = 0;
  for (const float lane : lanes) sum += double(lane);
  for (; i < n; ++i) sum += double(std::abs(a[i] - b[i]));
  return sum;
}

using Grid = std::vector<std::vector<double>>;
using BestMatch = std::vector<Grid>;  // SimilarityAnalysis::BestMatches

// The most alike of the heads of each layer with those of each other: [l][l'] = max_h S(l,h -> l').
Grid OfLayers(const BestMatch& best) {
  Grid out;
  for (const auto& heads : best) {
    out.emplace_back(best.size(), 0);
    for (const auto& head : heads) {
      for (size_t l = 0; l < best.size(); ++l) out.back()[l] = std::max(out.back()[l], head[l]);
    }
  }
  return out;
}

std::vector<std::string> NamesOf(const std::vector<int64_t>& numbers) {
  std::vector<std::string> names;
  for (const int64_t number : numbers) names.push_back(std::to_string(number));
  return names;
}

void AddLayerMap(const Grid& of_layers, const std::vector<int64_t>& numbers, Figures* f) {
  const size_t layers = of_layers.size();
  HeatMap map;
  map.title = "Most similar heads of two layers";
  map.x_label = "layer compared with", map.y_label = "layer";
  map.rows = map.columns = int64_t(layers);
  map.row_names = map.column_names = NamesOf(numbers);
  for (const auto& line : of_layers) map.values.insert(map.values.end(), line.begin(), line.end());
  f->Add("layers", map,
         "Each cell: the head of the line's layer that is most like some head of the column's "
         "layer. The darker the cells beside the diagonal against those far from it, the more do "
         "adjacent layers repeat each other.");
}

// Adjacent layers: are they the most alike?
void AddByDistance(const BestMatch& best, const Grid& of_layers,
                   const std::vector<int64_t>& numbers, Figures* f) {
  const size_t layers = best.size();
  Figures::Table by_distance{"distance",
                             "Mean over pairs of layers that are so far apart",
                             {"layers apart", "most similar heads", "mean over heads"},
                             {}};
  LineChart apart{"Similarity by distance of layers", "layers apart", "similarity", {}};
  Series most{"most similar heads", {}, {}}, average{"mean over heads of the best match", {}, {}};
  for (int64_t d = 1; d <= numbers.back() - numbers[0]; ++d) {
    double sum = 0, heads_sum = 0;
    int64_t pairs = 0, heads = 0;
    for (size_t l = 0; l < layers; ++l) {
      for (size_t to = 0; to < layers; ++to) {
        if (std::abs(numbers[l] - numbers[to]) != d) continue;
        sum += of_layers[l][to], ++pairs;
        for (const auto& head : best[l]) heads_sum += head[to], ++heads;
      }
    }
    if (pairs == 0) continue;
    by_distance.rows.push_back({d, sum / double(pairs), heads_sum / double(heads)});
    most.x.push_back(double(d)), most.y.push_back(sum / double(pairs));
    average.x.push_back(double(d)), average.y.push_back(heads_sum / double(heads));
  }
  f->Add(std::move(by_distance));
  if (layers > 2) {
    apart.series = {most, average};
    f->Add("distance", apart, "Falling lines: the further apart, the less alike.");
  }
}

// Fig 3, both directions: heads of a layer from the least to the most alike.
void AddRanks(const BestMatch& best, const std::vector<int64_t>& numbers, Figures* f) {
  const size_t layers = best.size();
  Figures::Table ranks{"adjacent",
                       "Heads by how like the next layer (or the one before) they are",
                       {"layer", "compared with", "rank", "head", "similarity"},
                       {},
                       false};
  for (const bool forward : {true, false}) {
    LineChart chart{forward ? "Heads of a layer against the next layer"
                            : "Heads of a layer against the layer before",
                    "rank of the head, from the least alike",
                    "similarity of the best match",
                    {}};
    for (size_t l = 0; l < layers; ++l) {
      if (forward ? l + 1 == layers : l == 0) continue;
      const size_t to = forward ? l + 1 : l - 1;
      if (std::abs(numbers[l] - numbers[to]) != 1) continue;
      std::vector<std::pair<double, int64_t>> sorted;
      for (size_t h = 0; h < best[l].size(); ++h)
        sorted.emplace_back(best[l][h][to], int64_t(h) + 1);
      std::sort(sorted.begin(), sorted.end());
      Series series{StrCat(numbers[l], " to ", numbers[to]), {}, {}};
      for (size_t r = 0; r < sorted.size(); ++r) {
        series.x.push_back(double(r) + 1), series.y.push_back(sorted[r].first);
        ranks.rows.push_back(
            {numbers[l], numbers[to], int64_t(r) + 1, sorted[r].second, sorted[r].first});
      }
      chart.series.push_back(std::move(series));
    }
    if (chart.series.empty()) continue;
    f->Add(forward ? "next" : "before", chart,
           "One line a layer: its heads sorted by how like the best matching head of the other "
           "layer they are.");
  }
  f->Add(std::move(ranks));
}

// first: SimilarityAnalysis::first_.
void AddPairs(const std::vector<double>& mean, const std::vector<int64_t>& first,
              const std::vector<int64_t>& numbers, Figures* f) {
  const size_t layers = first.size() - 1;
  Figures::Table pairs{
      "heads", "Every two heads", {"layer", "head", "layer 2", "head 2", "similarity"}, {}, false};
  const auto count = size_t(first.back());
  for (size_t l = 0; l < layers; ++l) {
    for (auto h = size_t(first[l]); h < size_t(first[l + 1]); ++h) {
      for (size_t to = l; to < layers; ++to) {
        for (auto g = std::max(h + 1, size_t(first[to])); g < size_t(first[to + 1]); ++g)
          pairs.rows.push_back({numbers[l], int64_t(h) - first[l] + 1, numbers[to],
                                int64_t(g) - first[to] + 1, mean[h * count + g]});
      }
    }
  }
  f->Add(std::move(pairs));
}

}  // namespace

void AddDifferences(const float* rows, int64_t count, int64_t n, double* sums) {
  constexpr int64_t kChunk = 2048;
  // Row i has count-1-i partners: rows from both ends together have equally many.
  ParallelFor((count + 1) / 2, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t at = 0; at < n; at += kChunk) {
        const int64_t length = std::min(kChunk, n - at);
        for (const int64_t a : {i, count - 1 - i}) {
          for (int64_t b = a + 1; b < count; ++b)
            sums[a * count + b] += Difference(rows + a * n + at, rows + b * n + at, length);
          if (i == count - 1 - i) break;
        }
      }
    }
  });
  for (int64_t a = 0; a < count; ++a) {
    for (int64_t b = a + 1; b < count; ++b) sums[b * count + a] = sums[a * count + b];
  }
}

const AnalysisInfo& similarity_analysis() {
  static const AnalysisInfo info = [] {
    AnalysisInfo i;
    i.name = "similarity";
    i.title = "Similarity of attention between layers and heads";
    i.summary =
        "How alike the heads of a model attend (P001): between layers, adjacent layers by rank, "
        "how "
        "many examples are enough; and which scores a Reuse model could take over.";
    i.needs = "two layers of attention or more over the same tokens";
    i.refusal = [](const ModelConfig& config) -> std::string {
      if (std::string refusal = RowsRefusal(config); !refusal.empty()) return refusal;
      const LayerStack stack = config.Stack(config.info().forms[0]);
      if (stack.layers() < 2) return "of one layer there is none to compare; use maps";
      for (int64_t l = 0; l < stack.layers(); ++l) {
        if (FindMechanism(stack.Mechanism(l)).MakesLatents())
          return "after " + stack.Mechanism(l) +
                 " the layers attend to latents and no longer to tokens; use maps";
      }
      return "";
    };
    BindAnalysis<SimilarityAnalysis>(i);
    i.compare = [](const std::vector<ComparedModel>& models) {
      std::vector<SimilarityCell> cells;
      for (const ComparedModel& m : models) {
        for (SimilarityCell& c :
             dynamic_cast<const SimilarityAnalysis&>(*m.analysis).Cells(m.label))
          cells.push_back(std::move(c));
      }
      Figures f;
      AddCells(cells, &f);
      return f;
    };
    return i;
  }();
  return info;
}

Fields SimilarityAnalysis::Describe(Options& o) {
  Fields f;
  f.Add("normalise", &o.normalise,
        "weights that are no probabilities are made so, |w| / sum |w|; else they are refused");
  f.Add("data", &o.data,
        "the rows that are read; rows as long of ids drawn uniformly from the vocabulary (--seed), "
        "as P001's random data; or both, one after the other, with what differs",
        {{Data::kRows, "rows"}, {Data::kRandom, "random"}, {Data::kBoth, "both"}});
  f.Add("threshold", &o.threshold,
        "how alike heads have to be for the recommended Reuse model to copy them", {0.0, 1.0});
  return f;
}

SimilarityAnalysis::SimilarityAnalysis(const Options& options, const AnalysisContext& context)
    : options_(options), context_(context) {}

std::vector<double> SimilarityAnalysis::MeanOf(const std::vector<double>& sums,
                                               const std::vector<double>& counts) {
  std::vector<double> mean = sums;
  for (size_t i = 0; i < mean.size(); ++i) mean[i] /= counts[i];
  return mean;
}

void SimilarityAnalysis::AddRow(const std::vector<const CapturedLayer*>& layers, int64_t row,
                                Sums* sums) const {
  const CapturedLayer& some = *layers[0];
  const bool all = some.core->SeesPadding(), causal = some.form == Form::kCausal;
  const int64_t queries = all ? some.queries() : some.RealQueries(row), heads = first_.back();
  if (queries == 0) {
    sums->skipped = 1;
    return;
  }
  std::vector<ImpliedWeights> weights;
  weights.reserve(layers.size());
  std::vector<at::Tensor> probes(layers.size()), totals(layers.size()), sizes(layers.size());
  for (const CapturedLayer* l : layers) weights.emplace_back(*l, row);
  const auto add = [](at::Tensor* to, const at::Tensor& x) {
    if (x.defined()) *to = to->defined() ? *to + x : x;
  };
  at::Tensor looking = at::ones({heads, queries}, at::kDouble);  // 0: the head has no weight there
  for (size_t i = 0; options_.normalise && i < layers.size(); ++i) {
    for (int64_t begin = 0; begin < some.sources(); begin += kBlock)
      add(&sizes[i],
          weights[i].Columns(begin, std::min(kBlock, some.sources() - begin)).abs().sum(2));
    const at::Tensor none = sizes[i] <= kNoWeight;
    sizes[i].masked_fill_(none, std::numeric_limits<double>::infinity());
    looking.narrow(0, first_[i], none.size(0))
        .masked_fill_(none.narrow(1, 0, queries).to(at::kCPU), 0);
  }
  sums->without = heads * queries - looking.sum().item<int64_t>();
  std::vector<double> differences(size_t(heads * heads), 0);
  double lowest = 0;
  for (int64_t begin = 0; begin < some.sources(); begin += kBlock) {
    const int64_t count = std::min(kBlock, some.sources() - begin);
    // Earlier queries do not see these columns.
    const int64_t first = causal ? std::min(begin, queries) : 0, seeing = queries - first;
    if (seeing == 0) break;
    const at::Tensor block = at::empty({heads, seeing, count}, at::kFloat);
    for (size_t i = 0; i < layers.size(); ++i) {
      at::Tensor w = weights[i].Columns(begin, count);
      add(&probes[i], weights[i].Probe(begin, w));
      if (options_.normalise) w = w.abs() / sizes[i].unsqueeze(2);
      w = w.narrow(1, first, seeing);
      if (!totals[i].defined()) totals[i] = at::zeros({w.size(0), queries}, w.options());
      totals[i].narrow(1, first, seeing) += w.sum(2);
      lowest = std::min(lowest, w.min().item<double>());
      block.narrow(0, first_[i], w.size(0)).copy_(w);
    }
    AddDifferences(block.const_data_ptr<float>(), heads, seeing * count, differences.data());
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    weights[i].Check(probes[i]);
    const at::Tensor wanted =
        looking.narrow(0, first_[i], totals[i].size(0)).to(totals[i].device());
    const double off = (totals[i] - wanted).abs().max().item<double>();
    CISTERN_CHECK(lowest >= -kProbability && off <= kProbability, "[similarity] the weights of ",
                  names_[i], " (", mechanisms_[i], ") are no probabilities: the least is ", lowest,
                  " and a query's sum is ", off,
                  " off 1; total variation compares probabilities. --set similarity.normalise=true "
                  "compares |w| / sum |w| in their place");
  }
  // Over the queries of which both heads have weights: of those that one of the two has alone the
  // difference is its weights' sum, 1.
  const at::Tensor both = at::matmul(looking, looking.t()).contiguous();
  const auto of = both.accessor<double, 2>();
  for (int64_t a = 0; a < heads; ++a) {
    for (int64_t b = 0; b < heads; ++b) {
      const double n = of[a][b], alone = of[a][a] + of[b][b] - 2 * n;
      const double apart = (differences[size_t(a * heads + b)] - alone) / 2;
      sums->heads.push_back(n > 0 ? 1 - apart / n : 0);
      sums->counts.push_back(n > 0 ? 1 : 0);
    }
  }
  sums->tokens = double(queries);
  sums->rows = 1;
}

Batch WithRandomIds(const Batch& batch, int64_t vocab, uint64_t seed, int64_t first_row) {
  if (!batch.tensors.Has("ids") || batch.tensors.Has("source"))
    FailUsage("similarity.data: random ids take the place of the ids of a row, and these rows are ",
              batch.tensors.Has("ids") ? "pairs of a source and a target" : "no ids",
              "; use data=rows");
  Batch out = batch;
  const at::Tensor ids = batch["ids"].cpu().clone().contiguous();
  const int64_t length = ids.size(1);
  at::Tensor real = at::ones_like(ids, at::kBool);
  if (const at::Tensor lengths = batch.tensors.Find("lengths"); lengths.defined())
    real =
        (at::arange(length, at::kLong).unsqueeze(0) < lengths.cpu().unsqueeze(1)).expand_as(real);
  if (const at::Tensor valid = batch.tensors.Find("valid"); valid.defined())
    real = real.logical_and(valid.cpu());
  real = real.contiguous();
  int64_t* id = ids.mutable_data_ptr<int64_t>();
  const bool* is_real = real.const_data_ptr<bool>();
  for (int64_t r = 0; r < ids.size(0); ++r) {
    for (int64_t t = 0; t < length; ++t, ++id, ++is_real) {
      if (*is_real) *id = UniformId(seed, uint64_t(first_row + r), uint64_t(t), vocab);
    }
  }
  out.Add("ids", ids.to(batch["ids"].device()));
  return out;
}

void SimilarityAnalysis::Add(const Batch& batch, const std::vector<CapturedLayer>& layers) {
  if (options_.data != Data::kRandom) AddLayers(batch, layers, &data_);
  if (options_.data == Data::kRows) return;
  const Batch random = WithRandomIds(batch, context_.config.vocab_size, context_.seed, drawn_);
  drawn_ += batch.rows;
  AddLayers(random, RunLayers(*context_.model, random), &random_);
}

void SimilarityAnalysis::AddLayers(const Batch& batch, const std::vector<CapturedLayer>& all,
                                   Sums* sums) {
  const std::vector<CapturedLayer> layers = ThatRead(all, "similarity");
  std::vector<const CapturedLayer*> used;  // of the first form; cross attention has other sources
  for (const CapturedLayer& l : layers) {
    if (l.form == layers[0].form) used.push_back(&l);
  }
  if (names_.empty()) {
    first_ = {0};
    for (const CapturedLayer* l : used) {
      names_.push_back(l->name);
      numbers_.push_back(l->number);
      mechanisms_.push_back(l->layer->mechanism().info().name);
      first_.push_back(first_.back() + l->heads());
    }
    other_layers_ = int64_t(layers.size() - used.size());
  }
  sums->heads.resize(size_t(first_.back() * first_.back()), 0);
  sums->counts.resize(sums->heads.size(), 0);
  CISTERN_CHECK(used.size() == names_.size() && used.size() >= 2, "[similarity] ", used.size(),
                " layers of attention ran in a batch; expected two or more, always as many");
  for (const CapturedLayer* l : used)
    CISTERN_CHECK(l->queries() == used[0]->queries() && l->sources() == used[0]->sources(),
                  "[similarity] ", l->name, " attends to ", l->sources(), " tokens, ",
                  used[0]->name, " to ", used[0]->sources());
  std::vector<Sums> rows(size_t(batch.rows));
  ForRows(batch.rows, [&](int64_t row) { AddRow(used, row, &rows[size_t(row)]); });
  for (const Sums& row : rows) {
    sums->Merge(row);
    if (row.rows > 0 && (sums->rows & (sums->rows - 1)) == 0)
      sums->snapshots.push_back({sums->rows, sums->heads, sums->counts});
  }
}

void SimilarityAnalysis::Merge(const Analysis& other_analysis) {
  const auto& other = dynamic_cast<const SimilarityAnalysis&>(other_analysis);
  if (names_.empty()) {
    *this = other;
    return;
  }
  data_.Merge(other.data_);
  random_.Merge(other.random_);
}

void SimilarityAnalysis::Sums::Merge(const Sums& other) {
  heads.resize(std::max(heads.size(), other.heads.size()), 0);
  counts.resize(heads.size(), 0);
  for (size_t i = 0; i < other.heads.size(); ++i)
    heads[i] += other.heads[i], counts[i] += other.counts[i];
  rows += other.rows, skipped += other.skipped, without += other.without, tokens += other.tokens;
}

std::vector<std::vector<std::vector<double>>> SimilarityAnalysis::BestMatches(
    const std::vector<double>& heads) const {
  const size_t layers = names_.size();
  const auto count = size_t(first_.back());
  std::vector<std::vector<std::vector<double>>> best(layers);
  for (size_t l = 0; l < layers; ++l) {
    for (auto h = size_t(first_[l]); h < size_t(first_[l + 1]); ++h) {
      best[l].emplace_back(layers, 0);
      for (size_t to = 0; to < layers; ++to) {
        for (auto g = size_t(first_[to]); g < size_t(first_[to + 1]); ++g)
          best[l].back()[to] = std::max(best[l].back()[to], heads[h * count + g]);
      }
    }
  }
  return best;
}

std::vector<SimilarityCell> SimilarityAnalysis::Cells(const std::string& model) const {
  std::vector<SimilarityCell> cells;
  for (const bool random : {false, true}) {
    const Sums& sums = random ? random_ : data_;
    if (sums.rows == 0) continue;
    SimilarityCell cell;
    cell.model = model, cell.data = random ? "random ids" : "rows";
    cell.random = random;
    cell.images = context_.task == "image" || context_.task == "pathfinder";
    cell.layers = numbers_, cell.rows = sums.rows;
    cell.tokens = sums.tokens / double(sums.rows);
    const auto best = BestMatches(Heads(random));
    for (const auto& line : OfLayers(best))
      cell.most.insert(cell.most.end(), line.begin(), line.end());
    for (const auto& heads : best) {
      for (size_t l = 0; l < names_.size(); ++l) {
        double sum = 0;
        for (const auto& head : heads) sum += head[l];
        cell.mean.push_back(sum / double(heads.size()));
      }
    }
    cells.push_back(std::move(cell));
  }
  return cells;
}

Figures SimilarityAnalysis::Report() const {
  const bool random = options_.data == Data::kRandom;
  const Sums& sums = random ? random_ : data_;
  CISTERN_CHECK(sums.rows > 0, "[similarity] no row with a token was read");
  const std::vector<double> mean = Heads(random);
  const BestMatch best = BestMatches(mean);
  const Grid of_layers = OfLayers(best);
  const std::vector<SimilarityCell> cells = Cells("");
  Figures f;
  f.Fact("rows", sums.rows).Fact("rows_without_tokens", sums.skipped);
  f.Fact("data", random ? "random ids" : "rows");
  AddDefinition(random, &f);
  AddLayerMap(of_layers, numbers_, &f);
  f.Fact("layers_most_like_an_adjacent_one", MostLikeAdjacent(cells[0]));
  f.Fact("layers", int64_t(names_.size()));
  AddCells(cells, &f);
  AddByDistance(best, of_layers, numbers_, &f);
  AddRanks(best, numbers_, &f);
  AddPairs(mean, first_, numbers_, &f);
  AddExamples(sums, of_layers, &f);
  AddReuse(best, sums.tokens / double(sums.rows), &f);
  return f;
}

void SimilarityAnalysis::AddDefinition(bool random, Figures* f) const {
  const Sums& sums = random ? random_ : data_;
  f->Text(StrCat(
      "1 minus the total variation distance between the attention of two heads, the mean over the "
      "real queries of ",
      sums.rows, random ? " rows of random ids" : " rows",
      ": 1 means that both always look at the same tokens, 0 that they never do."));
  if (sums.without > 0) {
    f->Fact("queries_without_weights", sums.without);
    f->Text(StrCat(sums.without,
                   " queries, counted in each head, have no weight at all: they look nowhere, and "
                   "are left out of what the head is compared in."));
  }
  if (other_layers_ > 0)
    f->Text(StrCat(other_layers_,
                   " layers of another form are left out: they attend to other "
                   "tokens."));
}

void SimilarityAnalysis::AddExamples(const Sums& sums, const Grid& of_layers, Figures* f) const {
  const size_t layers = of_layers.size();
  Figures::Table enough{"examples",
                        "How far the layers' map after the first rows is from the last",
                        {"rows", "largest difference", "mean difference"},
                        {}};
  for (const Snapshot& s : sums.snapshots) {
    if (s.rows >= sums.rows) continue;
    const auto then = OfLayers(BestMatches(MeanOf(s.sums, s.counts)));
    double largest = 0, sum = 0;
    for (size_t l = 0; l < layers; ++l) {
      for (size_t to = 0; to < layers; ++to) {
        const double off = std::abs(then[l][to] - of_layers[l][to]);
        largest = std::max(largest, off), sum += off;
      }
    }
    enough.rows.push_back({s.rows, largest, sum / double(layers * layers)});
  }
  if (!enough.rows.empty()) f->Add(std::move(enough));
}

void SimilarityAnalysis::AddReuse(const BestMatch& best, double length, Figures* f) const {
  f->Heading("A Reuse model");
  const bool softmax = std::all_of(mechanisms_.begin(), mechanisms_.end(),
                                   [](const std::string& m) { return m == "softmax"; });
  const bool even = std::all_of(best.begin(), best.end(),
                                [&](const auto& heads) { return heads.size() == best[0].size(); });
  if (!softmax || !even || context_.config.info().forms.size() > 1) {
    f->Text(
        "Reuse takes over the scores of exact softmax attention, so nothing is recommended for "
        "this model; train one with model.attention=softmax in all layers of one stack.");
    return;
  }
  const LayerStack stack = context_.config.Stack(context_.config.info().forms[0]);
  for (int64_t l = 1; l < stack.layers(); ++l) {
    if (stack.Alike(0, l)) continue;
    f->Text(StrCat("Layer ", l + 1,
                   " has other options of softmax than layer 1, and all layers of a Reuse model "
                   "share theirs, so nothing is recommended for this model."));
    return;
  }
  const ReuseRecommendation r = RecommendReuse(best, context_.config, options_.threshold, length);
  if (r.copied == 0) {
    f->Text(StrCat("No layer has a head that is ", Significant(options_.threshold, 3),
                   " like one of the layer before: nothing to reuse. A lower "
                   "similarity.threshold copies what is less alike."));
    return;
  }
  std::string settings;
  for (const std::string& s : r.settings)
    settings += (settings.empty() ? "" : " ") + ("--set " + s);
  f->Fact("reuse", r.options).Fact("reuse_settings", settings);
  f->Fact("reuse_copied_heads", r.copied).Fact("reuse_least_similarity", r.least);
  f->Fact("reuse_flops_share", r.flops_share).Fact("reuse_parameters_share", r.parameters_share);
  f->Text(StrCat("The heads most alike, ", r.copied, " of ", first_.back(),
                 ", could take over the scores of the layer before; the least alike of them is ",
                 Significant(r.least, 3),
                 " like its source. Predicted for the stack, with "
                 "keep=scores: ",
                 Fixed(100 * r.flops_share, 1), " % of the FLOPs and ",
                 Fixed(100 * r.parameters_share, 1), " % of the parameters. To train it:"));
  f->Preformatted(settings);
}

}  // namespace cistern

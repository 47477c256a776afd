#include "cistern/analyses/approximation.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "cistern/analyses/identity_values.h"
#include "cistern/base/error.h"

namespace cistern {
namespace {

constexpr char kRank[] = "best of rank k";
constexpr double kExact = 1e-6;  // relative errors below it are not drawn

// The option that says how large a mechanism's approximation is; empty: it has one size.
std::string SizeOption(const MechanismInfo& info) {
  const std::vector<std::string> names = info.options().Names();
  for (const char* name : {"slots", "landmarks", "features", "window"}) {
    if (std::find(names.begin(), names.end(), name) != names.end()) return name;
  }
  return "";
}

// Ranks, landmarks and slots are at most the tokens; features may be more.
bool WithinRow(const std::string& name) {
  return name == kRank || SizeOption(FindMechanism(name)) != "features";
}

Json OptionsOf(const MechanismInfo& info, int64_t size, int64_t length) {
  Json options = Json::object();
  if (const std::string name = SizeOption(info); !name.empty()) options[name] = size;
  if (info.name == "linformer")  // the projection that its theorem is about
    options["init"] = "johnson_lindenstrauss", options["length"] = length;
  if (info.name == "abc_random") options["mean"] = true;
  if (info.name == "nystrom") options["exact"] = false;
  return options;
}

// The core, of queries, keys and values alone; null with the reason in `why`: it is none.
std::shared_ptr<Mechanism> CoreOf(const MechanismInfo& info, Form form, const Json& options,
                                  const AttentionDims& dims, uint64_t seed, std::string* why) {
  if (!info.Supports(form)) {
    *why = "has no " + FormName(form) + " form";
    return nullptr;
  }
  if (info.exact || info.copies_scores) {
    *why = "is exact, or copies what is";
    return nullptr;
  }
  at::manual_seed(seed);  // what it draws
  std::shared_ptr<Mechanism> core = info.Make(options, dims);
  const auto& p = core->Projections();
  const bool plain = p.size() == 3 && p[0].name == "q" && p[1].name == "k" && p[2].name == "v" &&
                     p[0].width == dims.dim && p[1].width == dims.dim && p[2].width == dims.dim;
  const auto& weights = core->weights();
  const bool learned = std::any_of(weights.begin(), weights.end(), [](const CoreWeight& w) {
    return w.kind == CoreWeight::Kind::kTrained;
  });
  // Linformer's projection is random by its theorem, RFA's scales begin at one.
  if (!plain || (learned && info.name != "linformer" && info.name != "rfa")) {
    *why = "has learned maps of its own besides q, k and v";
    return nullptr;
  }
  core->to(at::kDouble);
  core->eval();
  return core;
}

// [H,T,T]: exact attention by plain softmax in double.
at::Tensor Exact(const at::Tensor& q, const at::Tensor& k, bool causal) {
  at::Tensor scores = at::matmul(q, k.transpose(1, 2)) / std::sqrt(double(q.size(2)));
  if (causal) {
    const at::Tensor t = at::arange(q.size(1), q.options().dtype(at::kLong));
    scores = scores.masked_fill(t > t.unsqueeze(1), -std::numeric_limits<double>::infinity());
  }
  return at::softmax(scores, 2);
}

double Norm(const at::Tensor& x) { return x.norm().item<double>(); }

HeatMap MapOf(const std::string& title, const at::Tensor& map) {
  const at::Tensor m = map.cpu().contiguous();
  HeatMap heat;
  heat.title = title;
  heat.x_label = "token attended to", heat.y_label = "query";
  heat.rows = m.size(0), heat.columns = m.size(1);
  heat.values.assign(m.const_data_ptr<double>(), m.const_data_ptr<double>() + m.numel());
  heat.signed_values = m.numel() > 0 && m.min().item<double>() < -1e-9;
  heat.width = 360;
  return heat;
}

}  // namespace

const AnalysisInfo& approximation_analysis() {
  static const AnalysisInfo info = [] {
    AnalysisInfo i;
    i.name = "approximation";
    i.title = "Approximation to softmax";
    i.summary =
        "On the queries, keys and values of a trained softmax model: how far each mechanism's "
        "attention and outputs are from exact softmax, by its size; spectra and Linformer's bound.";
    i.needs = "models with layers of softmax";
    i.refusal = [](const ModelConfig& config) -> std::string {
      if (std::string refusal = RowsRefusal(config); !refusal.empty()) return refusal;
      for (const Form form : config.info().forms) {
        const LayerStack stack = config.Stack(form);
        for (int64_t l = 0; form != Form::kCross && l < stack.layers(); ++l) {
          if (stack.Mechanism(l) == "softmax") return "";
        }
      }
      return "none of its layers is exact softmax, whose queries and keys would be approximated; "
             "train one with model.attention=softmax";
    };
    BindAnalysis<ApproximationAnalysis>(i);
    return i;
  }();
  return info;
}

Fields ApproximationAnalysis::Describe(Options& o) {
  Fields f;
  std::vector<std::string> names;
  for (const MechanismInfo* info : Mechanisms()) names.push_back(info->name);
  f.Add("mechanisms", &o.mechanisms, "mechanisms that approximate; none: all that fit", names);
  f.Add("sizes", &o.sizes, "slots, landmarks, features, window and ranks", {1, 65536});
  f.Add("layers", &o.layers, "layers to look at, from 1; none: all of softmax", {1, 4096});
  f.Add("rows", &o.rows, "rows that are measured, the first ones", {1, int64_t{1} << 40});
  f.Add("length", &o.length,
        "tokens of a row that are taken, from its beginning: it costs their cube", {2, 4096});
  f.Add("row", &o.row, "the row of the data that is drawn, from 0", {0, int64_t{1} << 40});
  f.Add("layer", &o.layer, "the layer that is drawn, from 1", {1, 4096});
  f.Add("head", &o.head, "the head that is drawn, from 1", {1, 4096});
  f.Add("drawn_size", &o.drawn_size, "the size of the mechanisms that are drawn; one of sizes",
        {1, 65536});
  f.Add(
      "bidirectional", &o.bidirectional,
      "let every query see all tokens, in a causal model too: some mechanisms have no other form");
  return f;
}

ApproximationAnalysis::ApproximationAnalysis(const Options& options, const AnalysisContext& context)
    : options_(options), context_(context) {
  if (std::find(options.sizes.begin(), options.sizes.end(), options.drawn_size) ==
      options.sizes.end())
    FailUsage("approximation.drawn_size=", options.drawn_size, " is none of approximation.sizes");
}

void ApproximationAnalysis::LayerSums::Merge(const LayerSums& o) {
  name = o.name, heads = std::max(heads, o.heads);
  for (const auto& by_name : o.errors) {
    for (const auto& by_size : by_name.second) {
      std::vector<Errors>& to = errors[by_name.first][by_size.first];
      if (to.size() < by_size.second.size()) to.resize(by_size.second.size());
      for (size_t h = 0; h < by_size.second.size(); ++h) to[h].Merge(by_size.second[h]);
    }
  }
  if (spectrum.size() < o.spectrum.size()) spectrum.resize(o.spectrum.size());
  for (size_t i = 0; i < o.spectrum.size(); ++i) spectrum[i].Merge(o.spectrum[i]);
  rank.Merge(o.rank), ninety.Merge(o.ninety), width.Merge(o.width), tokens.Merge(o.tokens);
}

ApproximationAnalysis::LayerSums ApproximationAnalysis::OfMost(const ByReach& rows) {
  int64_t all = 0, taken = 0;
  for (const auto& [reach, sums] : rows)
    if (reach > 0) all += sums.width.count;
  LayerSums out;
  for (auto it = rows.rbegin(); it != rows.rend() && (taken == 0 || 2 * taken < all); ++it) {
    out.Merge(it->second);
    out.reach = it->first, taken += it->second.width.count;
  }
  for (auto& [name, sizes] : out.errors)
    if (WithinRow(name)) sizes.erase(sizes.upper_bound(out.reach), sizes.end());
  return out;
}

void ApproximationAnalysis::AddRow(const CapturedLayer& layer, int64_t row, bool drawn,
                                   LayerSums* sums) {
  const int64_t length = std::min(options_.length, layer.RealQueries(row));
  for (const int64_t size : options_.sizes)
    if (size <= length) sums->reach = std::max(sums->reach, size);
  if (length < 2) return;
  std::vector<at::Tensor> x;
  for (const at::Tensor& t : RowOf(layer.x, row))
    x.push_back(t.narrow(2, 0, length).to(at::kDouble));
  const double width = double(x[0].size(3));
  // Scores without a divisor: every core divides by sqrt(d).
  if (layer.options.mechanism_options.value("scale", "sqrt") == "unit")
    x[0] = x[0] * std::sqrt(width);
  const Form form = options_.bidirectional ? Form::kBidirectional : layer.form;
  const bool causal = form == Form::kCausal;
  const at::Tensor w = Exact(x[0][0], x[1][0], causal), y = at::matmul(w, x[2][0]);
  const int64_t heads = w.size(0), drawn_head = options_.head - 1;
  const auto add = [&](const std::string& name, int64_t size, const at::Tensor& approximate) {
    std::vector<Errors>& all = sums->errors[name][size];
    all.resize(size_t(heads));
    const at::Tensor out = at::matmul(approximate, x[2][0]);
    for (int64_t h = 0; h < heads; ++h) {
      Errors& e = all[size_t(h)];
      e.rows.Add(Norm(approximate[h] - w[h]) / Norm(w[h]));
      e.tv.Add(0.5 * (approximate[h] - w[h]).abs().sum(1).mean().item<double>());
      e.outputs.Add(Norm(out[h] - y[h]) / std::max(Norm(y[h]), 1e-300));
    }
    if (!drawn || (size != options_.drawn_size && size != 0)) return;
    pictures_.push_back(
        {size > 0 ? StrCat(name, ", ", size) : name, approximate[drawn_head].clone()});
    // What is no probability is drawn as one, too.
    const at::Tensor map = approximate[drawn_head];
    if (map.min().item<double>() < -1e-9) {
      const at::Tensor size_of = map.abs();
      pictures_.push_back({StrCat(pictures_.back().title, ", |w| / sum |w|"),
                           size_of / size_of.sum(1, true).clamp_min(1e-300)});
    }
  };
  if (drawn) pictures_.push_back({"exact softmax", w[drawn_head].clone()});
  sums->heads = heads;
  sums->width.Add(width), sums->tokens.Add(double(length));

  const auto [u, sigma, vh] = at::linalg_svd(w, false);
  const at::Tensor s = sigma.cpu().contiguous(), share = s / s.select(1, 0).unsqueeze(1);
  if (int64_t(sums->spectrum.size()) < length) sums->spectrum.resize(size_t(length));
  for (int64_t h = 0; h < heads; ++h) {
    const double* one = s.const_data_ptr<double>() + h * length;
    double total = 0, energy = 0, entropy = 0, within = 0;
    for (int64_t i = 0; i < length; ++i) {
      sums->spectrum[size_t(i)].Add(one[i] / one[0]);
      total += one[i], energy += one[i] * one[i];
    }
    int64_t needed = 0;
    while (needed < length && within < 0.9 * energy) within += one[needed] * one[needed], ++needed;
    for (int64_t i = 0; i < length; ++i) {
      if (one[i] > 0) entropy -= one[i] / total * std::log(one[i] / total);
    }
    sums->rank.Add(std::exp(entropy)), sums->ninety.Add(double(needed));
  }
  for (const int64_t size : options_.sizes) {
    if (size > length) continue;
    add(kRank, size,
        at::matmul(u.narrow(2, 0, size) * sigma.narrow(1, 0, size).unsqueeze(1),
                   vh.narrow(1, 0, size)));
  }

  AttentionDims dims;
  dims.heads = heads, dims.dim = heads * x[0].size(3), dims.max_length = length;
  const at::Tensor identity = IdentityValues(x[2], 0, length);
  std::vector<at::Tensor> given = Copies(x, identity.size(0));
  given[2] = identity;
  for (const MechanismInfo* info : Mechanisms()) {
    const bool asked = std::find(options_.mechanisms.begin(), options_.mechanisms.end(),
                                 info->name) != options_.mechanisms.end();
    if (!options_.mechanisms.empty() && !asked) continue;
    std::vector<int64_t> sizes = options_.sizes;
    if (SizeOption(*info).empty()) sizes = {0};
    for (const int64_t size : sizes) {
      if (size > length && WithinRow(info->name)) continue;
      std::string why;
      const auto core =
          CoreOf(*info, form, OptionsOf(*info, size, length), dims, context_.seed, &why);
      if (!core) {
        if (asked) FailUsage("approximation.mechanisms: ", info->name, " ", why);
        break;
      }
      State state;
      if (causal) state = core->EmptyState(identity.size(0), given[0].options());
      Handles none;
      add(info->name, size, AsColumns(core->Attend(form, given, &state, {}, none), length));
    }
  }
}

void ApproximationAnalysis::Add(const Batch& batch, const std::vector<CapturedLayer>& layers) {
  const auto fits = [](const CapturedLayer& l) {
    return l.core->info().name == "softmax" && l.form != Form::kCross && !l.core->dims().relative &&
           !l.mask.starts;
  };
  if (layers_.empty()) {
    layers_.resize(layers.size());
    for (const int64_t n : options_.layers) {
      if (n > int64_t(layers.size()))
        FailUsage("approximation.layers=", n, ": the model has ", layers.size(),
                  " layers of attention");
    }
    if (options_.layer <= int64_t(layers.size())) {
      const int64_t heads = layers[size_t(options_.layer - 1)].heads();
      if (options_.head > heads)
        FailUsage("approximation.head=", options_.head, ": layer ", options_.layer, " has ", heads,
                  " heads");
    }
    if (std::none_of(layers.begin(), layers.end(), fits))
      FailUsage(
          "approximation: no layer is plain softmax over one text a row (relative positions, "
          "packed rows and cross attention are not looked at)");
  }
  CISTERN_CHECK(layers.size() == layers_.size(), "[approximation] a batch ran ", layers.size(),
                " layers, the first one ", layers_.size());
  for (int64_t row = 0; row < batch.rows; ++row, ++rows_) {
    if (measured_ >= options_.rows) continue;
    ++measured_;
    for (size_t i = 0; i < layers.size(); ++i) {
      const bool asked = std::find(options_.layers.begin(), options_.layers.end(),
                                   int64_t(i) + 1) != options_.layers.end();
      if (!fits(layers[i]) || (!options_.layers.empty() && !asked)) continue;
      LayerSums sums;
      sums.name = layers[i].name;
      AddRow(layers[i], row, rows_ == options_.row && int64_t(i) + 1 == options_.layer, &sums);
      layers_[i][sums.reach].Merge(sums);
    }
  }
}

void ApproximationAnalysis::Merge(const Analysis& other_analysis) {
  const auto& other = dynamic_cast<const ApproximationAnalysis&>(other_analysis);
  if (layers_.empty()) layers_.resize(other.layers_.size());
  for (size_t i = 0; i < other.layers_.size(); ++i)
    for (const auto& [reach, sums] : other.layers_[i]) layers_[i][reach].Merge(sums);
  if (pictures_.empty()) pictures_ = other.pictures_;
  rows_ += other.rows_, measured_ += other.measured_;
}

Figures ApproximationAnalysis::Report() const {
  CISTERN_CHECK(measured_ > 0, "[approximation] no row was read");
  Figures f;
  f.Fact("rows", measured_);
  f.Text(
      "Every mechanism is given the same queries, keys and values, those of the trained softmax "
      "layers, and is measured against exact attention on them. A relative error of 1 is what "
      "giving nothing at all would have. Nothing was trained for the approximation: a model that "
      "is trained with a mechanism fits its queries and keys to it. 'Best of rank k' is what no "
      "matrix of rank k can beat in attention weights.");
  Figures::Table by_layer{
      "errors",
      "Each layer and head; size 0: the mechanism has none",
      {"layer", "head", "mechanism", "size", "rows", "total variation", "outputs"},
      {},
      false};
  Figures::Table spectra{"spectra",
                         "Singular values of the attention weights, means over heads and rows",
                         {"layer", "rows", "tokens", "effective rank",
                          "values with 90 % of the energy", "size by the theorem for 50 %"},
                         {}};
  std::vector<LayerSums> layers;
  for (const ByReach& rows : layers_) layers.push_back(OfMost(rows));
  std::map<std::string, std::map<int64_t, Errors>> all;
  int64_t reach = std::numeric_limits<int64_t>::max();  // of all layers
  for (const LayerSums& l : layers)
    if (l.heads > 0) reach = std::min(reach, l.reach);
  LineChart spectrum{"Spectrum of the attention weights",
                     "number of the singular value",
                     "share of the largest",
                     {}};
  Mean width, tokens;
  for (const LayerSums& l : layers) {
    if (l.heads == 0) continue;
    for (const auto& by_name : l.errors) {
      for (const auto& by_size : by_name.second) {
        // As with rows, no curve has fewer layers at its larger sizes.
        const bool of_all = by_size.first <= reach || !WithinRow(by_name.first);
        for (size_t h = 0; h < by_size.second.size(); ++h) {
          const Errors& e = by_size.second[h];
          if (of_all) all[by_name.first][by_size.first].Merge(e);
          by_layer.rows.push_back({l.name, int64_t(h) + 1, by_name.first, by_size.first,
                                   e.rows.Value(), e.tv.Value(), e.outputs.Value()});
        }
      }
    }
    width.Merge(l.width), tokens.Merge(l.tokens);
    const double d = l.width.sum / double(l.width.count), n = l.tokens.sum / double(l.tokens.count);
    spectra.rows.push_back({l.name, l.width.count, l.tokens.Value(), l.rank.Value(),
                            l.ninety.Value(),
                            std::min(9 * d * std::log(d), 5 * std::log(n)) / 0.25});
    Series series{l.name, {}, {}};
    for (size_t i = 0; i < l.spectrum.size(); ++i) {
      if (l.spectrum[i].count == 0) continue;
      series.x.push_back(double(i) + 1);
      series.y.push_back(l.spectrum[i].sum / double(l.spectrum[i].count));
    }
    spectrum.series.push_back(std::move(series));
  }
  Figures::Table means{"means",
                       "Means over layers, heads and rows; relative errors",
                       {"mechanism", "size", "rows", "total variation", "outputs"},
                       {}};
  LineChart rows{
      "Attention weights", "size (slots, landmarks, features, window, rank)", "relative error", {}};
  LineChart outputs{
      "Outputs", "size (slots, landmarks, features, window, rank)", "relative error", {}};
  for (const auto& by_name : all) {
    Series r{by_name.first, {}, {}}, o = r;
    for (const auto& by_size : by_name.second) {
      const Errors& e = by_size.second;
      means.rows.push_back(
          {by_name.first, by_size.first, e.rows.Value(), e.tv.Value(), e.outputs.Value()});
      if (e.rows.count == 0) continue;
      const double row_error = e.rows.sum / double(e.rows.count),
                   out_error = e.outputs.sum / double(e.outputs.count);
      // One of a single size is a level line.
      const std::vector<int64_t> at =
          by_size.first == 0 ? options_.sizes : std::vector<int64_t>{by_size.first};
      for (const int64_t size : at) {
        // Errors of rounding alone would take all of the axis.
        if (row_error >= kExact) r.x.push_back(double(size)), r.y.push_back(row_error);
        if (out_error >= kExact) o.x.push_back(double(size)), o.y.push_back(out_error);
      }
    }
    rows.series.push_back(r), outputs.series.push_back(o);
  }
  Series bound{"Linformer's bound", {}, {}};
  if (width.count > 0) {
    const double d = width.sum / double(width.count), n = tokens.sum / double(tokens.count);
    for (const int64_t size : options_.sizes) {
      const double eps = std::sqrt(std::min(9 * d * std::log(d), 5 * std::log(n)) / double(size));
      if (eps <= 1) bound.x.push_back(double(size)), bound.y.push_back(eps);
    }
  }
  if (!bound.x.empty()) outputs.series.push_back(bound);
  for (LineChart* chart : {&rows, &outputs}) chart->log_x = true, chart->log_y = true;
  spectrum.log_x = spectrum.log_y = true;
  for (const LayerSums& l : layers) {
    if (l.heads > 0 && l.width.count < measured_)
      f.Text(StrCat(
          l.name, ": ", measured_ - l.width.count, " of ", measured_,
          " rows are left out. They are shorter than ",
          l.reach == 0
              ? "every one of approximation.sizes."
              : StrCat(l.reach,
                       " tokens, the largest size that at least half of the others reach.")));
  }
  f.Add(std::move(means));
  f.Add(
      "rows", rows,
      "How far the weights are from exact softmax, by size. A curve that falls is an "
      "approximation that more slots or features improve; one that stays level is another kind of "
      "attention.");
  f.Add(
      "outputs", outputs,
      bound.x.empty()
          ? "The same of what the heads give. Linformer's bound is above 1 at all of these sizes: "
            "it says nothing here."
          : "The same of what the heads give. Where Linformer's bound is drawn, its theorem "
            "promises a random projection of that size an error below it.");
  f.Add("spectrum", spectrum,
        "Falling steeply: the attention is nearly of low rank, so that a small memory can do it. "
        "Level: every query looks at something else.");
  f.Add(std::move(spectra));
  f.Add(std::move(by_layer));
  if (pictures_.empty()) {
    f.Text(StrCat("Row ", options_.row, " and layer ", options_.layer,
                  " were not among those that were measured, so nothing is drawn."));
    return f;
  }
  f.Heading(StrCat("Row ", options_.row, ", layer ", options_.layer, ", head ", options_.head));
  std::vector<std::string> svgs;
  for (const Picture& p : pictures_) svgs.push_back(RenderSvg(MapOf(p.title, p.map)));
  f.Svg(
      "maps", SideBySide(svgs, 2),
      "The same queries and keys through each mechanism, at the drawn size. Red and blue: weights "
      "above and below zero, the signed product as it is; beside it, the same as shares |w| / sum "
      "|w|, which could be probabilities.");
  return f;
}

}  // namespace cistern

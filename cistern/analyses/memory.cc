#include "cistern/analyses/memory.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "cistern/analyses/attention_logits.h"
#include "cistern/analyses/implied_weights.h"
#include "cistern/attention/head_groups.h"
#include "cistern/base/error.h"
#include "cistern/tensors/parallel_rows.h"

namespace cistern {
namespace {

// Has slots that can be looked at: a memory stream, or slots of keys and values in its state.
bool HasSlots(const MechanismInfo& info) {
  return info.slots || info.memory == MemoryUse::kFixed || info.HandsOnMemory();
}

// Of x [H,T,d]: the variance over the tokens, the mean over heads and channels.
double TokenVariance(const at::Tensor& x) {
  if (x.size(1) < 2) return std::nan("");
  const at::Tensor y = x.to(at::kDouble);
  return (y - y.mean(1, true)).square().mean().item<double>();
}

// Whether the mechanism of any layer of a config, or of a group of its heads, is such in its stack.
template <class F>
bool AnyLayer(const ModelConfig& config, const F& is) {
  for (const Form form : config.info().forms) {
    const LayerStack stack = config.Stack(form);
    for (int64_t l = 0; l < stack.layers(); ++l) {
      const auto all = MechanismsOf(stack.Mechanism(l));
      if (std::any_of(all.begin(), all.end(),
                      [&](const MechanismInfo* m) { return is(*m, stack); }))
        return true;
    }
  }
  return false;
}

bool AnySlots(const ModelConfig& config) {
  return AnyLayer(config, [](const MechanismInfo& m, const LayerStack&) { return HasSlots(m); });
}

// What Effects of arms compare (memory_claims.h).
void AddConfig(const ModelConfig& config, MemorySummary* summary) {
  for (const Form form : config.info().forms) {
    const LayerStack stack = config.Stack(form);
    for (int64_t l = 0; l < stack.layers(); ++l) {
      const std::string& name = stack.Mechanism(l);
      Json options = stack.Options(l);
      if (IsHeadGroups(name)) {  // those of its mechanisms alone
        Json own = Json::object();
        for (const MechanismInfo* m : MechanismsOf(name)) {
          own[m->name] = m->options().Write();
          own[m->name].update(options.value(m->name, Json::object()));
        }
        options = own;
      }
      summary->layers.emplace_back(name, options);
    }
  }
  ModelConfig rest = config;
  rest.attention = {}, rest.attention_options = rest.layer_options = Json::object();
  for (StackOptions* group : {&rest.encoder, &rest.decoder, &rest.cross})
    group->attention = {}, group->attention_options = group->layer_options = Json::object();
  summary->config = rest.Describe().Write();
}

}  // namespace

const AnalysisInfo& memory_analysis() {
  static const AnalysisInfo info = [] {
    AnalysisInfo i;
    i.name = "memory";
    i.title = "Slots of the memory";
    i.summary =
        "Do the slots of a memory differ (P000's degradation)? The learned memory as a picture; "
        "cosines, effective rank, unique slots, entropy of packing; beside a model of random "
        "weights.";
    i.needs =
        "layers with slots: luna, luna_causal, conv_luna and its ablations, set_transformer, "
        "shared_workspace, abc_*, gated_slots, linformer; softmax, to be compared with";
    i.refusal = [](const ModelConfig& config) -> std::string {
      if (std::string refusal = RowsRefusal(config); !refusal.empty()) return refusal;
      // Softmax as SoftmaxLogits takes it.
      const auto fits = [](const MechanismInfo& m, const LayerStack& stack) {
        return HasSlots(m) || (m.name == "softmax" && stack.form() != Form::kCross &&
                               stack.options().positions != PositionKind::kRelative);
      };
      if (AnyLayer(config, fits)) return "";
      return "none of its layers has a memory of slots; those that do: luna, conv_luna, "
             "set_transformer, shared_workspace, abc_mlp, gated_slots, linformer";
    };
    i.for_comparison = [](const ModelConfig& config) { return !AnySlots(config); };
    BindAnalysis<MemoryAnalysis>(i);
    i.compare = [](const std::vector<ComparedModel>& models) {
      std::vector<MemorySummary> all;
      for (const ComparedModel& m : models) {
        all.push_back(dynamic_cast<const MemoryAnalysis&>(*m.analysis).Summary(m.label));
        all.back().result = m.result;
        AddConfig(*m.config, &all.back());
      }
      return CompareMemories(all);
    };
    return i;
  }();
  return info;
}

Fields MemoryAnalysis::Describe(Options& o) {
  Fields f;
  f.Add(
      "reference", &o.reference,
      "the same figures of a model of this config with random weights (--seed), on the same rows");
  f.Add("reference_rows", &o.reference_rows,
        "rows of which the reference is measured, the first ones", {1, int64_t{1} << 40});
  f.Add("row", &o.row, "the row whose slots are drawn, from 0", {0, int64_t{1} << 40});
  f.Add("rows", &o.rows, "rows that are measured, the first ones, and the one that is drawn",
        {1, int64_t{1} << 40});
  return f;
}

MemoryAnalysis::MemoryAnalysis(const Options& options, const AnalysisContext& context)
    : options_(options), context_(context) {
  if (!options.reference) return;
  random_ = MakeModel(context.config, context.seed);
  random_->to(context.model->options().dtype().toScalarType());
  random_->eval();
}

void MemoryAnalysis::MemorySums::Add(const at::Tensor& memory) {
  slots = memory.size(0);
  const SlotStats s = StatsOfSlots(memory);
  empty.Add(s.empty), cosine.Add(s.cosine);
  rank.Add(s.rank), rank_share.Add(s.rank_share), participation.Add(s.participation);
  centred_rank.Add(s.centred_rank), centred_participation.Add(s.centred_participation);
  unique.Add(s.unique);
}

void MemoryAnalysis::MemorySums::Merge(const MemorySums& o) {
  slots = std::max(slots, o.slots);
  empty.Merge(o.empty), cosine.Merge(o.cosine);
  rank.Merge(o.rank), rank_share.Merge(o.rank_share), participation.Merge(o.participation);
  centred_rank.Merge(o.centred_rank), centred_participation.Merge(o.centred_participation);
  unique.Merge(o.unique);
}

void MemoryAnalysis::LayerSums::Merge(const LayerSums& o) {
  name = o.name, mechanism = o.mechanism;
  for (const auto& entry : o.memories) memories[entry.first].Merge(entry.second);
  options = o.options;
  entropy.Merge(o.entropy), likeness.Merge(o.likeness);
  tokens.Merge(o.tokens), slots.Merge(o.slots);
  reading.Merge(o.reading), products.Merge(o.products), logits.Merge(o.logits);
  divisor.Merge(o.divisor), output.Merge(o.output), packed.Merge(o.packed);
}

void MemoryAnalysis::Draw(const std::string& title, const at::Tensor& memory) {
  const at::Tensor m = memory.to(at::kDouble).contiguous().cpu();
  HeatMap map;
  map.title = title;
  map.x_label = "feature", map.y_label = "slot";
  map.rows = m.size(0), map.columns = m.size(1);
  map.values.assign(m.const_data_ptr<double>(), m.const_data_ptr<double>() + m.numel());
  map.signed_values = true;
  map.square = false;
  map.width = 640;
  pictures_.push_back(std::move(map));
}

void MemoryAnalysis::AddStream(const CapturedLayer& layer, int64_t row, LayerSums* sums,
                               bool drawn) {
  const int64_t sources = layer.core->SeesPadding() ? layer.sources() : layer.RealSources(row);
  if (sources == 0) return;
  const at::Tensor packed = layer.packed[row];
  sums->memories["packed"].Add(packed);
  sums->slots.Add(MeanCosine(packed));
  sums->packed.Add(TokenVariance(packed.unsqueeze(0)));
  at::Tensor packing;  // [G,M,sources]
  if (layer.reads()) {
    const at::Tensor y = layer.y[row].narrow(
        1, 0, layer.core->SeesPadding() ? layer.queries() : layer.RealQueries(row));
    sums->tokens.Add(MeanCosine(y.transpose(0, 1).flatten(1)));
    sums->output.Add(TokenVariance(y));
    const bool linear = !FiltersByMaximum(layer);
    const ImpliedWeights weights(layer, row, linear);  // checks its attentions
    sums->reading.Add(
        FiguresOf(weights.Unpacking().narrow(1, 0, y.size(1)).to(at::kDouble).log()).entropy);
    if (linear) packing = weights.Packing().narrow(2, 0, sources);
  }
  const std::optional<AttentionLogits> logits = PackingLogits(layer, row);
  if (logits) {
    const LogitFigures figures = FiguresOf(logits->values);
    sums->entropy.Add(figures.entropy);
    sums->logits.Add(figures.variance);
    sums->products.Add(figures.variance * logits->divisor * logits->divisor);
    sums->divisor.Add(logits->divisor);
  }
  // Without weights of the tokens, those of the filter's keys.
  if (!packing.defined() && logits) packing = at::softmax(logits->values, 2);
  for (int64_t g = 0; packing.defined() && g < packing.size(0); ++g) {
    const at::Tensor w = packing[g].to(at::kDouble).abs();
    const at::Tensor p = w / w.sum(1, true).clamp_min(1e-300);
    if (!logits && sources > 1) {
      const at::Tensor entropy = -(p * p.clamp_min(1e-300).log()).sum(1);
      sums->entropy.Add(entropy.mean().item<double>() / std::log(double(sources)));
    }
    sums->likeness.Add(MeanLikeness(p));
  }
  if (drawn) Draw(layer.name + ": what was packed", packed);
}

void MemoryAnalysis::AddState(const CapturedLayer& layer, const State& state, int64_t row,
                              LayerSums* sums, bool drawn) {
  if (layer.RealQueries(row) == 0) return;
  for (const char* name : {"key_memory", "value_memory"}) {
    const at::Tensor memory = state[name][row];  // [H,n,d]
    for (int64_t h = 0; h < memory.size(0); ++h) sums->memories[name].Add(memory[h]);
    if (drawn) Draw(StrCat(layer.name, ", head ", layer.first_head + 1, ": ", name), memory[0]);
  }
  const at::Tensor y = layer.y[row].narrow(1, 0, layer.RealQueries(row));
  sums->tokens.Add(MeanCosine(y.transpose(0, 1).flatten(1)));
  sums->output.Add(TokenVariance(y));
}

void MemoryAnalysis::AddSoftmax(const CapturedLayer& layer, int64_t row, LayerSums* sums) {
  const std::optional<AttentionLogits> logits = SoftmaxLogits(layer, row);
  if (!logits) return;
  const LogitFigures figures = FiguresOf(logits->values);
  sums->entropy.Add(figures.entropy);
  sums->logits.Add(figures.variance);
  sums->products.Add(figures.variance * logits->divisor * logits->divisor);
  sums->divisor.Add(logits->divisor);
  const at::Tensor y = layer.y[row].narrow(1, 0, layer.RealQueries(row));
  sums->tokens.Add(MeanCosine(y.transpose(0, 1).flatten(1)));
  sums->output.Add(TokenVariance(y));
}

void MemoryAnalysis::AddTo(Sums* sums, const std::vector<CapturedLayer>& whole, bool trained) {
  const std::vector<CapturedLayer> layers = ByHeadGroup(whole);
  if (layers.empty()) FailUsage("memory: the model has no layer of attention");
  if (sums->empty()) {
    bool learned = false;
    for (const CapturedLayer& l : layers) {
      LayerSums of;
      of.name = l.name, of.mechanism = l.core->info().name;
      of.options = l.options.mechanism_options;
      if (l.packed.defined() && !learned) {
        learned = true;
        const at::Tensor memory = l.layer->mechanism().InitialMemory()[0];
        of.memories["learned"].Add(memory);
        if (trained) Draw("Learned memory", memory);
      }
      sums->push_back(std::move(of));
    }
  }
  CISTERN_CHECK(layers.size() == sums->size(), "[memory] a batch ran ", layers.size(),
                " layers or groups of heads, the first one ", sums->size());
  std::vector<State> states(layers.size());
  for (size_t i = 0; i < layers.size(); ++i) {
    const CapturedLayer& l = layers[i];
    if (l.packed.defined() || !HasSlots(l.core->info())) continue;
    const bool cross = l.form == Form::kCross;
    states[i] = l.core->EmptyState(l.rows(), l.y.options().requires_grad(false));
    l.core->Write(cross ? l.written : l.x, states[i], cross ? l.written_mask : l.mask);
  }
  const int64_t rows = layers[0].rows(),
                most = trained ? options_.rows : std::min(options_.rows, options_.reference_rows);
  std::vector<Sums> of_rows(static_cast<size_t>(rows));
  ForRows(rows, [&](int64_t row) {
    const bool drawn = trained && rows_ + row == options_.row;
    if (rows_ + row >= most && !drawn) return;
    Sums& of_row = of_rows[size_t(row)];
    for (size_t i = 0; i < layers.size(); ++i) {
      const CapturedLayer& l = layers[i];
      LayerSums of;
      of.name = (*sums)[i].name, of.mechanism = (*sums)[i].mechanism;
      of.options = (*sums)[i].options;
      if (l.packed.defined()) {
        // Where the stream begins that is the learned one.
        if (l.memory.defined() && !(*sums)[i].memories.contains("learned"))
          of.memories["input"].Add(RowOf(l.memory, row)[0]);
        AddStream(l, row, &of, drawn);
      } else if (HasSlots(l.core->info())) {
        AddState(l, states[i], row, &of, drawn);
      } else {
        AddSoftmax(l, row, &of);
      }
      of_row.push_back(std::move(of));
    }
  });
  for (const Sums& of_row : of_rows) {
    for (size_t i = 0; i < of_row.size(); ++i) (*sums)[i].Merge(of_row[i]);
    if (trained && !of_row.empty()) ++measured_;
  }
}

void MemoryAnalysis::Add(const Batch& batch, const std::vector<CapturedLayer>& layers) {
  if (rows_ >= options_.rows && (options_.row < rows_ || options_.row >= rows_ + batch.rows)) {
    rows_ += batch.rows;
    return;
  }
  AddTo(&trained_, layers, true);
  if (random_ && rows_ < options_.reference_rows)
    AddTo(&untrained_, RunLayers(*random_, batch), false);
  rows_ += batch.rows;
}

void MemoryAnalysis::Merge(const Analysis& other_analysis) {
  const auto& other = dynamic_cast<const MemoryAnalysis&>(other_analysis);
  for (auto [to, from] :
       {std::pair{&trained_, &other.trained_}, std::pair{&untrained_, &other.untrained_}}) {
    if (to->empty()) to->resize(from->size());
    for (size_t i = 0; i < from->size(); ++i) {
      LayerSums sums = (*from)[i];
      // The learned memory is one, however many rows are read.
      if (!(*to)[i].name.empty()) sums.memories.erase("learned");
      (*to)[i].Merge(sums);
    }
  }
  if (pictures_.empty()) pictures_ = other.pictures_;
  rows_ += other.rows_, measured_ += other.measured_;
}

MemorySummary MemoryAnalysis::Summary(const std::string& label) const {
  MemorySummary summary;
  summary.label = label;
  const auto has_slots = [](const LayerSums& l) { return HasSlots(FindMechanism(l.mechanism)); };
  const bool any = std::any_of(trained_.begin(), trained_.end(), has_slots);
  for (const Sums* sums : {&trained_, &untrained_}) {
    MemorySummary::Numbers& to = sums == &trained_ ? summary.trained : summary.random;
    for (const LayerSums& l : *sums) {
      const bool slots = has_slots(l), softmax = !slots && l.entropy.count > 0;
      if (slots && summary.mechanism.empty())
        summary.mechanism = l.mechanism, summary.options = l.options;
      if (softmax && !any && !summary.softmax) summary.options = l.options;
      summary.softmax = summary.softmax || softmax;
      if (any && !slots) continue;  // attention beside a memory is no packing
      to.entropy.AddMean(l.entropy), to.reading.AddMean(l.reading);
      to.products.AddMean(l.products), to.logits.AddMean(l.logits);
      to.output.AddMean(l.output), to.tokens.AddMean(l.tokens), to.divisor.AddMean(l.divisor);
      for (const auto& [name, m] : l.memories) {
        if (name == "learned" || name == "input" || m.slots < 2) continue;
        to.cosine.AddMean(m.cosine), to.unique.AddMean(m.unique), to.rank.AddMean(m.rank_share);
      }
    }
  }
  return summary;
}

Figures MemoryAnalysis::Report() const {
  CISTERN_CHECK(rows_ > 0, "[memory] no row was read");
  Figures f;
  f.Fact("rows", rows_).Fact("measured_rows", measured_);
  f.Text(
      "A memory that has degraded has slots that are all alike: a mean cosine near 1, an effective "
      "rank near 1 (of at most the number of slots), few unique slots, and packing that is nearly "
      "uniform (share of ln(keys) near 1), so that each slot holds the mean of the text. The rank "
      "of the centred slots does not count an offset that all of them share. Compare with the "
      "random model: what it has already is no achievement of training, nor its fault.");
  if (random_ && measured_ > options_.reference_rows)
    f.Text(StrCat("The random model was measured on the first ", options_.reference_rows,
                  " of the rows."));
  if (context_.model && memory_analysis().for_comparison(context_.config))
    f.Text(
        "This model has no slots: its attention is here to be compared with that of models with "
        "a memory (cistern analyze MODEL --beside THIS --of memory).");
  Figures::Table slots{
      "slots",
      StrCat("Slots, each divided by its length, empty ones left out; means over ", measured_,
             " rows (and heads)"),
      {"layer", "mechanism", "memory", "model", "slots", "empty share", "cosine", "effective rank",
       "participation", "centred rank", "centred participation", "unique share"},
      {}};
  Figures::Table packing{
      "packing",
      "Packing's attention (of softmax: its own) and the outputs of the layer. Variances: of the "
      "products q . k over the keys of a query, of the logits that the divisor makes of them, of "
      "the outputs over the tokens",
      {"layer", "mechanism", "model", "entropy / ln(keys)", "likeness of slots' attention",
       "reading: entropy / ln(slots)", "divisor", "variance of products", "variance of logits",
       "variance of outputs", "variance of packed slots", "cosine over tokens",
       "cosine over slots"},
      {}};
  for (size_t i = 0; i < trained_.size(); ++i) {
    for (const Sums* sums : {&trained_, &untrained_}) {
      if (sums->empty()) continue;
      const LayerSums& l = (*sums)[i];
      const char* model = sums == &trained_ ? "trained" : "random";
      for (const auto& entry : l.memories) {
        const MemorySums& m = entry.second;
        slots.rows.push_back({l.name, l.mechanism, entry.first, model, m.slots, m.empty.Value(),
                              m.cosine.Value(), m.rank.Value(), m.participation.Value(),
                              m.centred_rank.Value(), m.centred_participation.Value(),
                              m.unique.Value()});
      }
      if (l.tokens.count == 0 && l.packed.count == 0) continue;
      packing.rows.push_back({l.name, l.mechanism, model, l.entropy.Value(), l.likeness.Value(),
                              l.reading.Value(), l.divisor.Value(), l.products.Value(),
                              l.logits.Value(), l.output.Value(), l.packed.Value(),
                              l.tokens.Value(), l.slots.Value()});
    }
  }
  f.Add(std::move(slots));
  f.Add(std::move(packing));
  if (const std::vector<PaperClaim> checks = MemoryChecks(Summary("")); !checks.empty())
    f.Add(ChecksTable("P000", checks));
  int number = 0;
  for (const HeatMap& map : pictures_)
    f.Add(StrCat("map-", ++number), map,
          "Lines are slots, columns features. Vertical stripes: all slots are equal (P000 Fig 1 a, "
          "b). Blocks of like lines: a few groups (c, d). Lines that differ: slots that differ.");
  if (options_.row >= rows_ && AnySlots(context_.config))
    f.Text(StrCat("Row ", options_.row, " was not among the ", rows_,
                  " rows that were read, so its slots are not drawn."));
  return f;
}

}  // namespace cistern

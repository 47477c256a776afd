#include "cistern/analyses/slots.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "cistern/analyses/slot_stats.h"
#include "cistern/analyses/weighted_words.h"
#include "cistern/attention/head_groups.h"
#include "cistern/base/error.h"
#include "cistern/tensors/parallel_rows.h"

namespace cistern {
namespace {

constexpr int64_t kTimes = 4;  // moments of a row that are measured

// |w| / sum |w| over the last dimension; zeros stay zeros.
at::Tensor Shares(const at::Tensor& w) {
  const at::Tensor a = w.abs();
  return a / a.sum(-1, true).clamp_min(1e-300);
}

// e^H of shares over the last dimension; 0 where all of them are.
at::Tensor Effective(const at::Tensor& p) {
  const at::Tensor e = (-(p * p.clamp_min(1e-300).log()).sum(-1)).exp();
  return e.masked_fill((p == 0).all(-1), 0);
}

// So many moments of a row, evenly, the last one after all of its tokens.
std::vector<int64_t> Times(int64_t wanted, int64_t tokens) {
  std::vector<int64_t> times;
  const int64_t count = std::min(wanted, tokens);
  for (int64_t i = 1; i <= count; ++i) times.push_back(i * tokens / count);
  return times;
}

bool KeepsSlots(const Mechanism& m) { return m.info().bounded && !SlotMemoryName(m).empty(); }

bool HasSlots(const AttentionLayerOptions& options) {
  if (IsHeadGroups(options.mechanism)) {
    const std::shared_ptr<Mechanism> whole = MakeMechanism(options);
    const auto& groups = dynamic_cast<const HeadGroups&>(*whole).groups();
    return std::any_of(groups.begin(), groups.end(),
                       [](const HeadGroups::Group& g) { return KeepsSlots(*g.mechanism); });
  }
  const MechanismInfo& info = FindMechanism(options.mechanism);
  if (info.HandsOnMemory() || info.memory == MemoryUse::kFixed) return true;
  return info.bounded && info.verbs && KeepsSlots(*MakeMechanism(options));
}

HeatMap MapOf(const at::Tensor& values, const std::string& title, const std::string& x_label,
              const std::string& y_label) {
  const at::Tensor m = values.to(at::kDouble).cpu().contiguous();
  HeatMap map;
  map.title = title, map.x_label = x_label, map.y_label = y_label;
  map.rows = m.size(0), map.columns = m.size(1);
  map.values.assign(m.const_data_ptr<double>(), m.const_data_ptr<double>() + m.numel());
  map.signed_values = map.rows * map.columns > 0 && m.min().item<double>() < -1e-9;
  map.square = false;
  map.width = 640;
  return map;
}

}  // namespace

const AnalysisInfo& slots_analysis() {
  static const AnalysisInfo info = [] {
    AnalysisInfo i;
    i.name = "slots";
    i.title = "Slots at work";
    i.summary =
        "Which tokens each slot, latent or feature of a memory holds on to, how many, for how "
        "long, and which slots the queries read; of a text with its words.";
    i.needs =
        "layers whose state is a memory of a fixed number of slots: latte, abc_*, gated_slots, "
        "linformer, luna and its kin, kernel methods; groups of heads with such";
    i.refusal = [](const ModelConfig& config) -> std::string {
      if (std::string refusal = RowsRefusal(config); !refusal.empty()) return refusal;
      for (const Form form : config.info().forms) {
        const LayerStack stack = config.Stack(form);
        for (int64_t l = 0; l < stack.layers(); ++l) {
          if (HasSlots(stack.Attention(l))) return "";
        }
      }
      return "none of its layers has a memory of slots: latte, abc_mlp, gated_slots, linformer, "
             "luna, conv_luna, linear, performer, rfa do";
    };
    BindAnalysis<SlotsAnalysis>(i);
    return i;
  }();
  return info;
}

Fields SlotsAnalysis::Describe(Options& o) {
  Fields f;
  f.Add("layers", &o.layers, "layers to look at, from 1; none: all that have slots", {1, 4096});
  f.Add("row", &o.row, "the row of the data that is drawn, from 0", {0, int64_t{1} << 40});
  f.Add("head", &o.head, "the head that is drawn, from 1; the tables have all", {1, 4096});
  f.Add("times", &o.times,
        "moments at which the slots of the causal row that is drawn are looked at; measured are at "
        "most 4 of each row",
        {1, 1 << 20});
  f.Add("words", &o.words, "slots, the most read first, that are drawn as words; 0: none",
        {0, 1 << 16});
  f.Add("rank_rows", &o.rank_rows,
        "rows whose effective rank is measured: it costs the square of the slots; 0: none",
        {0, 1 << 30});
  f.Add("rows", &o.rows, "rows that are measured, the first ones, and the one that is drawn",
        {1, int64_t{1} << 40});
  return f;
}

SlotsAnalysis::SlotsAnalysis(const Options& options, const AnalysisContext& context)
    : options_(options), context_(context) {}

void SlotsAnalysis::LayerSums::Merge(const LayerSums& o) {
  name = o.name, mechanism = o.mechanism, slots = std::max(slots, o.slots);
  number = o.number, first_head = o.first_head;
  held.Merge(o.held), age.Merge(o.age), empty.Merge(o.empty), rank.Merge(o.rank);
  read.Merge(o.read), used.Merge(o.used);
  for (auto [to, from] : {std::pair{&slot_held, &o.slot_held}, std::pair{&slot_age, &o.slot_age},
                          std::pair{&slot_read, &o.slot_read}}) {
    if (to->size() < from->size()) to->resize(from->size());
    for (size_t i = 0; i < from->size(); ++i) (*to)[i].Merge((*from)[i]);
  }
}

void SlotsAnalysis::AddRow(const CapturedLayer& layer, int64_t row, bool rank, LayerSums* sums,
                           Drawn* drawn) const {
  const bool all = layer.core->SeesPadding(), causal = layer.form == Form::kCausal;
  const int64_t sources = all ? layer.sources() : layer.RealSources(row),
                queries = all ? layer.queries() : layer.RealQueries(row);
  if (sources == 0 || queries == 0) return;
  const std::vector<SlotMoment> moments =
      WatchSlots(layer, row, Times(std::min(options_.times, kTimes), sources));
  SlotMoment last = moments.back();
  last.write = last.write.to(at::kDouble);
  const int64_t groups = last.write.size(0), slots = last.write.size(1);
  const at::Tensor p = Shares(last.write);  // [G,n,S]
  const at::Tensor held = Effective(p);
  const at::Tensor ages =
      at::arange(sources - 1, -1, -1, p.options().dtype(at::kDouble));  // of each token
  const at::Tensor age = at::matmul(p, ages);
  // Read shares of all queries that were looked at, [H,Q,n].
  std::vector<at::Tensor> reads;
  for (const SlotMoment& m : moments) reads.push_back(Shares(m.read));
  const at::Tensor r = at::cat(reads, 1), use = r.mean(1);
  const at::Tensor effective = Effective(r), used = Effective(Shares(use));
  sums->slots = slots;
  if (sums->slot_held.empty()) {
    sums->slot_held.resize(size_t(groups * slots));
    sums->slot_age.resize(size_t(groups * slots));
    sums->slot_read.resize(size_t(use.numel()));
  }
  const auto numbers = [](const at::Tensor& x) {
    const at::Tensor flat = x.to(at::kDouble).cpu().contiguous();
    return std::vector<double>(flat.const_data_ptr<double>(),
                               flat.const_data_ptr<double>() + flat.numel());
  };
  const std::vector<double> h = numbers(held), a = numbers(age), u = numbers(use);
  for (size_t i = 0; i < h.size(); ++i) {
    sums->empty.Add(h[i] == 0 ? 1 : 0);
    if (h[i] == 0) continue;
    sums->held.Add(h[i]), sums->age.Add(a[i]);
    sums->slot_held[i].Add(h[i]), sums->slot_age[i].Add(a[i]);
  }
  for (size_t i = 0; i < u.size(); ++i) sums->slot_read[i].Add(u[i]);
  sums->read.Add(effective.sum().item<double>(), effective.numel());
  sums->used.Add(used.sum().item<double>(), used.numel());
  if (rank) {
    for (int64_t g = 0; g < groups; ++g) sums->rank.Add(StatsOfSlots(last.write[g]).rank);
  }
  if (!drawn) return;
  drawn->name = layer.name, drawn->causal = causal;
  // The head that is asked for, or the nearest that there is.
  const int64_t head =
                    std::clamp<int64_t>(options_.head - 1 - layer.first_head, 0, layer.heads() - 1),
                group = std::min(head, groups - 1);
  drawn->head = layer.first_head + head + 1;
  for (const SlotMoment& m : WatchSlots(layer, row, Times(options_.times, sources))) {
    drawn->times.push_back(m.tokens);
    drawn->write.push_back(m.write[group].to(at::kDouble).cpu());
    drawn->read.push_back(m.read[head].cpu());
  }
}

void SlotsAnalysis::Begin(const std::vector<CapturedLayer>& layers) {
  bool any = false;
  for (size_t i = 0; i < layers.size(); ++i) {
    any = any || options_.head <= layers[i].heads();
    const std::vector<CapturedLayer> parts = ByHeadGroup(layers[i]);
    const bool slots = std::any_of(parts.begin(), parts.end(), [](const CapturedLayer& part) {
      return part.packed.defined() || KeepsSlots(*part.core);
    });
    const bool asked = std::find(options_.layers.begin(), options_.layers.end(), int64_t(i) + 1) !=
                       options_.layers.end();
    if (asked && !slots)
      FailUsage("slots.layers=", i + 1, ": [", layers[i].core->info().name, "] ", layers[i].name,
                " has no slots: its state has no memory of values of a fixed number");
    for (const CapturedLayer& part : parts) {
      LayerSums sums;
      sums.name = part.name, sums.mechanism = part.core->info().name;
      sums.number = int64_t(i) + 1, sums.first_head = part.first_head;
      layers_.push_back(std::move(sums));
    }
  }
  for (const int64_t n : options_.layers) {
    if (n > int64_t(layers.size()))
      FailUsage("slots.layers=", n, ": the model has ", layers.size(), " layers of attention");
  }
  if (!any)
    FailUsage("slots.head=", options_.head, ": the layers have ", layers[0].heads(), " heads");
}

void SlotsAnalysis::Add(const Batch& batch, const std::vector<CapturedLayer>& all) {
  const std::vector<CapturedLayer> whole = ThatRead(all, "slots");
  if (layers_.empty()) Begin(whole);
  const std::vector<CapturedLayer> layers = ByHeadGroup(whole);
  CISTERN_CHECK(layers.size() == layers_.size(), "[slots] a batch ran ", layers.size(),
                " layers or groups of heads, the first one ", layers_.size());
  // Of each row, by layer; only the row that is drawn has pictures.
  std::vector<std::vector<LayerSums>> rows(size_t(batch.rows));
  std::vector<Drawn> drawn(layers.size());
  ForRows(batch.rows, [&](int64_t row) {
    const bool draws = rows_ + row == options_.row;
    if (rows_ + row >= options_.rows && !draws) return;
    for (size_t i = 0; i < layers.size(); ++i) {
      LayerSums sums;
      sums.name = layers_[i].name, sums.mechanism = layers_[i].mechanism;
      sums.number = layers_[i].number, sums.first_head = layers_[i].first_head;
      const bool asked = std::find(options_.layers.begin(), options_.layers.end(), sums.number) !=
                         options_.layers.end();
      if ((options_.layers.empty() || asked) &&
          (layers[i].packed.defined() || KeepsSlots(*layers[i].core)))
        AddRow(layers[i], row, rows_ + row < options_.rank_rows, &sums,
               draws ? &drawn[i] : nullptr);
      rows[size_t(row)].push_back(std::move(sums));
    }
  });
  for (int64_t row = 0; row < batch.rows; ++row, ++rows_) {
    const bool draws = rows_ == options_.row;
    if (rows[size_t(row)].empty()) continue;
    ++measured_;
    for (size_t i = 0; i < layers.size(); ++i) {
      layers_[i].Merge(rows[size_t(row)][i]);
      if (!draws || drawn[i].write.empty()) continue;
      drawn[i].before = layers[i].TokensBeforeText(batch);
      drawn_.push_back(std::move(drawn[i]));
    }
    if (draws && batch.tensors.Has("ids")) words_ = WordsOf(batch["ids"][row], context_.token);
  }
}

void SlotsAnalysis::Merge(const Analysis& other_analysis) {
  const auto& other = dynamic_cast<const SlotsAnalysis&>(other_analysis);
  if (layers_.empty()) layers_.resize(other.layers_.size());
  for (size_t i = 0; i < other.layers_.size(); ++i) layers_[i].Merge(other.layers_[i]);
  if (drawn_.empty()) drawn_ = other.drawn_, words_ = other.words_;
  rows_ += other.rows_, measured_ += other.measured_;
}

void SlotsAnalysis::DrawLayer(const Drawn& d, int* number, Figures* f) const {
  const auto name = [&](const char* what) { return StrCat(what, "-", ++*number); };
  const std::string where = StrCat(d.name, ", head ", d.head, ": ");
  const at::Tensor &write = d.write.back(), read = at::cat(d.read, 0);  // [n,S], [Q,n]
  const int64_t slots = write.size(0), tokens = write.size(1);
  f->Add(name("held"),
         MapOf(write / write.abs().sum(1, true).clamp_min(1e-300),
               where + "what each slot holds at the end", "token", "slot"),
         "One line is one slot: the tokens it is a mean of. A dark cell is a slot that holds one "
         "token; an even line one that holds the mean of the text; lines that are alike are slots "
         "that hold the same.");
  HeatMap readers = MapOf(read, where + "who reads it", "slot", "query");
  if (d.causal && read.size(0) <= 64) {
    for (const int64_t t : d.times) readers.row_names.push_back(std::to_string(t));
  }
  f->Add(name("readers"), readers,
         d.causal ? "One line is the query of one token (its number at the left): the slots it "
                    "reads. A column that stays light is a slot that nobody reads."
                  : "One line is one query: the slots it reads.");
  if (d.times.size() > 1) {
    at::Tensor held = at::zeros({slots, int64_t(d.times.size())}, at::kDouble);
    for (size_t i = 0; i < d.times.size(); ++i)
      held.select(1, int64_t(i)).copy_(Effective(Shares(d.write[i])));
    HeatMap occupancy = MapOf(held, where + "tokens held over time", "tokens so far", "slot");
    if (d.times.size() <= 64) {
      for (const int64_t t : d.times) occupancy.column_names.push_back(std::to_string(t));
    }
    f->Add(name("occupancy"), occupancy,
           "How many tokens each slot holds. Growing to the right: a mean of ever more tokens; "
           "even: a slot that forgets as much as it takes in, or that keeps what it has.");
  }
  // The slots that are read most.
  const at::Tensor order = Shares(read).mean(0).argsort(0, true);
  const int64_t count = std::min(options_.words, slots);
  if (d.times.size() > 1 && count > 0) {
    const int64_t slot = order[0].item<int64_t>();
    at::Tensor history = at::full({int64_t(d.times.size()), tokens}, std::nan(""), at::kDouble);
    for (size_t i = 0; i < d.times.size(); ++i) {
      const at::Tensor w = d.write[i][slot];
      history[int64_t(i)].narrow(0, 0, w.size(0)).copy_(w / w.abs().sum().clamp_min(1e-300));
    }
    HeatMap map =
        MapOf(history, StrCat(where, "slot ", slot + 1, " over time"), "token", "tokens so far");
    map.signed_values = history.nan_to_num(0).min().item<double>() < -1e-9;
    if (d.times.size() <= 64) {
      for (const int64_t t : d.times) map.row_names.push_back(std::to_string(t));
    }
    f->Add(name("history"), map,
           "The slot that is read most, from the first tokens (top) to the last. A column that "
           "stays dark downwards is a token that it holds on to; one that fades is forgotten.");
  }
  if (words_.empty() || !d.before) return;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t slot = order[i].item<int64_t>();
    std::vector<WeightedWord> words;
    for (int64_t s = 0; s < tokens; ++s) {
      const int64_t word = s - *d.before;
      words.push_back(
          {word < 0 ? "[cls]" : words_.at(size_t(word)), write[slot][s].item<double>()});
    }
    f->Svg(name("words"), RenderWords(StrCat(where, "what slot ", slot + 1, " holds"), words), "");
  }
}

Figures SlotsAnalysis::Report() const {
  CISTERN_CHECK(rows_ > 0, "[slots] no row was read");
  Figures f;
  f.Fact("rows", rows_).Fact("measured_rows", measured_);
  f.Text(
      "A slot holds a weighted mean of tokens; a feature of a kernel method a weighted sum. The "
      "weights are exact: the mechanism's own code, run on slices of the identity in place of the "
      "values, and what they give is compared with what the layer gave. Tokens held is e to the "
      "power of the weights' entropy; rank says how many slots' worth of different mixtures there "
      "are, at most the number of slots.");
  Figures::Table table{
      "layers",
      StrCat("After the last token of a row, means over slots, heads and ", measured_, " rows"),
      {"layer", "mechanism", "slots", "tokens held", "age", "empty share", "effective rank",
       "slots a query reads", "slots in use"},
      {}};
  Figures::Table each{"slots",
                      "Each slot; means over rows. Read share: mean over queries",
                      {"layer", "head", "slot", "tokens held", "age", "read share"},
                      {},
                      false};
  for (const LayerSums& l : layers_) {
    if (l.held.count + l.empty.count == 0) continue;
    table.rows.push_back({l.name, l.mechanism, l.slots, l.held.Value(), l.age.Value(),
                          l.empty.Value(), l.rank.Value(), l.read.Value(), l.used.Value()});
    for (size_t i = 0; i < std::max(l.slot_held.size(), l.slot_read.size()); ++i) {
      const auto value = [i](const std::vector<Mean>& all) {
        return i < all.size() ? all[i].Value() : Json();
      };
      each.rows.push_back({l.name, l.first_head + int64_t(i) / l.slots + 1,
                           int64_t(i) % l.slots + 1, value(l.slot_held), value(l.slot_age),
                           value(l.slot_read)});
    }
  }
  f.Add(std::move(table));
  f.Add(std::move(each));
  if (drawn_.empty()) {
    f.Text(StrCat("Row ", options_.row, " was not among the ", rows_,
                  " rows that were read, so nothing is drawn."));
    return f;
  }
  f.Heading(StrCat("Row ", options_.row));
  int number = 0;
  for (const Drawn& d : drawn_) DrawLayer(d, &number, &f);
  return f;
}

}  // namespace cistern

#include "cistern/verify/model_check.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "cistern/io/scratch_folder.h"
#include "cistern/models/model_state_file.h"
#include "cistern/ops/impl.h"
#include "cistern/tasks/row_groups.h"
#include "cistern/tensors/torch_error.h"
#include "cistern/verify/subject.h"

namespace cistern::verify {
namespace {

struct Bench {
  StatefulModel &model, &twin;
  at::Tensor ids, source;  // [1,T] or values [1,T,C]; [1,S], undefined where there is no source
  bool full;
  at::Tensor logits;                   // of the twin over the whole text, [1,T,V] or [1,T,outputs]
  double in_float = 0, in_double = 0;  // tolerances

  int64_t length() const { return ids.size(1); }
  // The state before the first token of `rows` rows, each with the one source where there is one.
  ModelState Begin(StatefulModel& m, int64_t rows) const {
    if (!source.defined()) return m.EmptyState(rows);
    return Encode(m, source.expand({rows, -1}), std::vector<int64_t>(size_t(rows), source.size(1)));
  }
  static ModelState Encode(StatefulModel& m, const at::Tensor& sources,
                           const std::vector<int64_t>& lengths) {
    return dynamic_cast<LanguageModel&>(m).Encode(sources, {LengthsOf(lengths), {}});
  }
  // The tokens of `rows` rows, all alike.
  at::Tensor Rows(const at::Tensor& tokens, int64_t rows) const {
    std::vector<int64_t> sizes = tokens.sizes().vec();
    sizes[0] = rows;
    return tokens.expand(sizes).contiguous();
  }
  // Other tokens in the place of each.
  at::Tensor Others(const at::Tensor& tokens) const {
    if (tokens.is_floating_point()) return tokens + 1;
    return (tokens + 1).remainder(dynamic_cast<LanguageModel&>(model).vocab_size());
  }
  at::Tensor Pieces(StatefulModel& m, const at::Tensor& tokens, const std::vector<int64_t>& cuts,
                    const ops::Mask& mask = {}, ModelState* last = nullptr) const {
    return ExtendInPieces(m, Begin(m, tokens.size(0)), tokens, cuts, mask, last);
  }
  at::Tensor Whole(StatefulModel& m, const at::Tensor& tokens) const {
    return Pieces(m, tokens, {0, tokens.size(1)});
  }
};

Outcome Precision(Bench& b) {
  Meter meter;
  meter.Close(b.Whole(b.model, b.ids), b.logits, b.in_float, "T=", b.length());
  return meter.result();
}

Outcome PiecesAreTheWhole(Bench& b) {
  Meter meter;
  const int64_t length = b.length(), step = b.full ? 1 : std::max<int64_t>(1, length / 9);
  const at::Tensor whole = b.Whole(b.model, b.ids);
  for (int64_t cut = 1; cut < length; cut += step) {
    meter.Close(b.Pieces(b.twin, b.ids, {0, cut, length}), b.logits, b.in_double, "double, cut at ",
                cut);
    meter.Close(b.Pieces(b.model, b.ids, {0, cut, length}), whole, b.in_float, "float, cut at ",
                cut);
  }
  return meter.result();
}

Outcome StepsAreTheWhole(Bench& b) {
  Meter meter;
  meter.Close(b.Pieces(b.twin, b.ids, EachToken(b.length())), b.logits, b.in_double, "double");
  meter.Close(b.Pieces(b.model, b.ids, EachToken(b.length())), b.Whole(b.model, b.ids), b.in_float,
              "float");
  return meter.result();
}

Outcome TheFutureIsUnseen(Bench& b) {
  Meter meter;
  for (const int64_t t : {b.length() / 4, b.length() / 2, b.length() - 1}) {
    at::Tensor changed = b.ids.clone();
    at::Tensor later = changed.narrow(1, t, b.length() - t);
    later.copy_(b.Others(later));
    meter.Close(b.Whole(b.twin, changed).narrow(1, 0, t), b.logits.narrow(1, 0, t), b.in_double,
                "tokens from ", t, " on changed");
  }
  return meter.result();
}

// Three rows of one text: all of it, half of it and a third, padded on the right.
std::vector<int64_t> RowLengths(int64_t length) { return {length, length / 2, length / 3}; }

Outcome PaddedRowsAreAlone(Bench& b) {
  Meter meter;
  const std::vector<int64_t> lengths = RowLengths(b.length());
  const at::Tensor ids = b.Rows(b.ids, 3);
  for (const std::vector<int64_t>& cuts :
       {std::vector<int64_t>{0, b.length()}, {0, b.length() / 2 + 1, b.length()}}) {
    ModelState state;
    const at::Tensor got = b.Pieces(b.twin, ids, cuts, {LengthsOf(lengths), {}}, &state);
    for (int64_t row = 0; row < 3; ++row) {
      const int64_t count = lengths[size_t(row)];
      meter.Close(got.narrow(0, row, 1).narrow(1, 0, count), b.logits.narrow(1, 0, count),
                  b.in_double, "row of ", count, " tokens");
    }
    // Each continues where it stopped, here with the text's first tokens.
    const int64_t more = std::min(
        {int64_t{8}, b.length() / 3, b.twin.config().LengthLimit(Form::kCausal) - b.length()});
    if (more <= 0) continue;  // the model's positions end there
    const at::Tensor next = b.twin.Extend(ids.narrow(1, 0, more), state);
    for (int64_t row = 1; row < 3; ++row) {
      const int64_t count = lengths[size_t(row)];
      const at::Tensor joined = at::cat({b.ids.narrow(1, 0, count), b.ids.narrow(1, 0, more)}, 1);
      meter.Close(next.narrow(0, row, 1), b.Whole(b.twin, joined).narrow(1, count, more),
                  b.in_double, "row of ", count, " tokens continues");
    }
  }
  return meter.result();
}

Outcome PackedDocumentsAreAlone(Bench& b) {
  if (b.source.defined())
    return NotApplicable("several documents in a row would need one source each");
  Meter meter;
  const std::vector<int64_t> begins = {0, b.length() / 3, b.length() / 2};
  const at::Tensor starts =
      StartsAt(1, b.length(), {{0, begins[0]}, {0, begins[1]}, {0, begins[2]}});
  for (const std::vector<int64_t>& cuts :
       {std::vector<int64_t>{0, b.length()}, {0, begins[1], b.length()}, EachToken(b.length())}) {
    const at::Tensor got = b.Pieces(b.twin, b.ids, cuts, {{}, starts});
    for (size_t i = 0; i < begins.size(); ++i) {
      const int64_t begin = begins[i], end = i + 1 < begins.size() ? begins[i + 1] : b.length();
      meter.Close(got.narrow(1, begin, end - begin),
                  b.Whole(b.twin, b.ids.narrow(1, begin, end - begin)), b.in_double,
                  "document of tokens ", begin, " to ", end - 1, " in ", cuts.size() - 1,
                  " pieces");
    }
  }
  return meter.result();
}

Outcome ImplementationsAgree(Bench& b) {
  Meter meter;
  for (const ops::Impl impl : {ops::Impl::kKernel, ops::Impl::kComposite, ops::Impl::kReference}) {
    const ops::ImplScope scope(impl);
    meter.Close(b.Whole(b.twin, b.ids), b.logits, b.in_double, ops::ImplName(impl), ", double");
    meter.Close(b.Whole(b.model, b.ids), b.logits, b.in_float, ops::ImplName(impl), ", float");
  }
  return meter.result();
}

Outcome StatesAreValues(Bench& b) {
  Meter meter;
  const int64_t half = b.length() / 2, rest = b.length() - half;
  ModelState state;
  b.Pieces(b.twin, b.ids.narrow(1, 0, half), {0, half}, {}, &state);
  for (int round = 0; round < 2; ++round) {
    ModelState branch = state.Clone();
    meter.Close(b.twin.Extend(b.ids.narrow(1, half, rest), branch), b.logits.narrow(1, half, rest),
                b.in_double, "clone ", round);
  }
  ModelState rows = state.Reorder(at::zeros({3}, at::kLong));
  const at::Tensor got = b.twin.Extend(b.Rows(b.ids.narrow(1, half, rest), 3), rows);
  for (int64_t row = 0; row < 3; ++row)
    meter.Close(got.narrow(0, row, 1), b.logits.narrow(1, half, rest), b.in_double,
                "one state for three rows");
  return meter.result();
}

Outcome FilesKeepEveryBit(Bench& b) {
  Meter meter;
  const int64_t half = b.length() / 2, rest = b.length() - half;
  ModelState state;
  b.Pieces(b.model, b.ids.narrow(1, 0, half), {0, half}, {}, &state);
  const ScratchFolder scratch;
  const std::string file_name = scratch / "state.safetensors";
  SaveModelState(file_name, b.model, {state, {}, {}});
  ModelState loaded = LoadModelState(file_name, b.model).state;
  meter.Same(b.model.Extend(b.ids.narrow(1, half, rest), loaded),
             b.model.Extend(b.ids.narrow(1, half, rest), state), "second half of the text");
  return meter.result();
}

// Sources of several lengths in one batch, padded with tokens of their own: what the encoder makes
// of each, and what cross attention keeps of it.
Outcome PaddedSourcesAreAlone(Bench& b) {
  const auto& twin = dynamic_cast<const LanguageModel&>(b.twin);
  if (const std::string by = twin.SourceSeesPadding(); !by.empty())
    return NotApplicable("padding takes part, by " + by);
  if (RowsMeet(b.twin)) return NotApplicable(kRowsMeet);
  Meter meter;
  const int64_t size = b.source.size(1);
  const std::vector<int64_t> lengths = {size, size / 2 + 1, size / 3, 1};
  const int64_t rows = int64_t(lengths.size());
  const at::Tensor ids = b.Rows(b.ids, rows);
  at::Tensor source = b.source.expand({rows, -1}).contiguous();
  std::vector<at::Tensor> alone;
  for (const int64_t count : lengths) {
    const at::Tensor row = b.source.narrow(1, 0, count);
    alone.push_back(ExtendInPieces(b.twin, b.Encode(b.twin, row, {count}), b.ids, {0, b.length()}));
  }
  for (int round = 0; round < 2; ++round) {
    for (const std::vector<int64_t>& cuts :
         {std::vector<int64_t>{0, b.length()}, {0, b.length() / 2, b.length()}}) {
      const at::Tensor got = ExtendInPieces(b.twin, b.Encode(b.twin, source, lengths), ids, cuts);
      for (int64_t row = 0; row < rows; ++row)
        meter.Close(got.narrow(0, row, 1), alone[size_t(row)], b.in_double, "source of ",
                    lengths[size_t(row)], " tokens",
                    round > 0 ? ", other tokens in its padding" : "");
    }
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t count = lengths[size_t(row)];
      source[row].narrow(0, count, size - count).add_(1).remainder_(b.model.config().vocab_size);
    }
  }
  return meter.result();
}

// A model that never looks at its source would pass all of the above.
Outcome TheSourceIsRead(Bench& b) {
  Meter meter;
  const at::Tensor other = (b.source + 1).remainder(b.model.config().vocab_size);
  const at::Tensor got =
      ExtendInPieces(b.twin, b.Encode(b.twin, other, {other.size(1)}), b.ids, {0, b.length()});
  meter.True(RelativeRms(got, b.logits) > b.in_double, "another source gives the same logits");
  return meter.result();
}

struct ModelProperty {
  const char *name, *description;
  Outcome (*check)(Bench&);
};

constexpr ModelProperty kProperties[] = {
    {"float", "the model in float = its copy in double", Precision},
    {"pieces", "the whole text at once = in two pieces, cut anywhere", PiecesAreTheWhole},
    {"steps", "the whole text at once = token by token, as it is generated", StepsAreTheWhole},
    {"future", "no change of later tokens changes earlier logits", TheFutureIsUnseen},
    {"padding", "padded rows of a batch = each alone, and each continues where it stopped",
     PaddedRowsAreAlone},
    {"packed", "documents packed in a row = each alone", PackedDocumentsAreAlone},
    {"implementations", "kernel = composite = reference", ImplementationsAgree},
    {"state", "states are cloned, and used for several rows", StatesAreValues},
    {"file", "a state saved to a file and loaded continues with the same bits", FilesKeepEveryBit},
};

constexpr ModelProperty kSourceProperties[] = {
    {"source", "sources padded to one length = each alone, whatever the padding holds",
     PaddedSourcesAreAlone},
    {"cross", "another source gives other logits", TheSourceIsRead},
};

}  // namespace

void RequireFinite(const Model& model, const at::Tensor& answers) {
  if (answers.isfinite().all().item<bool>()) return;
  for (const auto& p : model.named_parameters()) {
    CISTERN_CHECK(p.value().isfinite().all().item<bool>(), "the weight '", p.key(),
                  "' holds numbers that are not finite, and so do the model's answers");
  }
  Fail("the model's answers are not finite, though its weights are");
}

double ToleranceOf(Model& twin, const std::function<at::Tensor()>& run, const at::Tensor& before,
                   double least, double unit) {
  const Tensors parameters = twin.parameters();
  Tensors kept;
  for (const at::Tensor& p : parameters) {
    kept.push_back(p.clone());
    p.mul_(1 + unit * (2 * at::rand_like(p) - 1));
  }
  const double change = RelativeRms(run(), before);
  for (size_t i = 0; i < kept.size(); ++i) parameters[i].copy_(kept[i]);
  constexpr double kMost = 0.1;
  return std::isfinite(change) ? std::min(kMost, least + 16 * change) : kMost;
}

std::vector<ModelResult> RunModelChecks(const std::vector<ModelCheck>& checks,
                                        const std::function<bool(const ModelResult&)>& done) {
  std::vector<ModelResult> results;
  for (const ModelCheck& check : checks) {
    ModelResult result{check.property, check.description, {}};
    try {
      result.outcome = check.check();
    } catch (const std::exception& e) {
      result.outcome.kind = Outcome::Kind::kFail;
      result.outcome.reason = FirstLine(e);
    }
    results.push_back(result);
    if (done && !done(results.back())) break;
  }
  return results;
}

std::vector<ModelResult> CheckModel(StatefulModel& model, StatefulModel& twin,
                                    const at::Tensor& tokens, bool full,
                                    const std::function<bool(const ModelResult&)>& done,
                                    const at::Tensor& source) {
  CISTERN_CHECK(tokens.dim() == (tokens.is_floating_point() ? 2 : 1) && tokens.size(0) >= 16,
                "[verify] expected ids of shape [T] or values of shape [T,C] with T of at least "
                "16, got ",
                tokens.sizes());
  CISTERN_CHECK(source.defined() == model.info().encodes, "[verify] a model of kind ",
                model.info().name,
                source.defined() ? " has no source" : " needs the tokens of a source");
  CISTERN_CHECK(!source.defined() || (source.dim() == 1 && source.size(0) >= 8),
                "[verify] expected a source of shape [S] with S of at least 8");
  at::NoGradGuard guard;
  model.eval();
  twin.eval();
  at::manual_seed(1);
  Bench bench{
      model, twin, tokens.unsqueeze(0), source.defined() ? source.unsqueeze(0) : at::Tensor(),
      full,  {}};
  bench.logits = bench.Whole(twin, bench.ids);
  auto whole = [&] { return bench.Whole(twin, bench.ids); };
  RequireFinite(twin, bench.logits);
  bench.in_float = ToleranceOf(twin, whole, bench.logits, 1e-6, std::ldexp(1, -23));
  bench.in_double = ToleranceOf(twin, whole, bench.logits, 1e-12, std::ldexp(1, -52));
  std::vector<ModelCheck> checks;
  const auto add = [&](const ModelProperty& p) {
    checks.push_back({p.name, p.description, [&bench, &p] { return p.check(bench); }});
  };
  for (const ModelProperty& p : kProperties) add(p);
  if (source.defined()) {
    for (const ModelProperty& p : kSourceProperties) add(p);
  }
  return RunModelChecks(checks, done);
}

}  // namespace cistern::verify

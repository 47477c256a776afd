#include <ATen/ATen.h>

#include "cistern/io/scratch_folder.h"
#include "cistern/models/model.h"
#include "cistern/verify/properties.h"

namespace cistern::verify {
namespace {

bool Applies(const Subject& subject, const Settings& settings) {
  return settings.Has(Form::kCausal) && subject.Has(Form::kCausal);
}

State Written(Mechanism& m, const Tensors& x) {
  State state = m.EmptyState(x[0].size(0), x[0].options());
  m.Write(x, state, {});
  return state;
}

}  // namespace

namespace {

// What was written from a source: its size, its rows in another order, and clones of it.
void CrossState(Subject& subject, Meter& meter) {
  Mechanism& m = subject.In(at::kDouble);
  const double tolerance = subject.Tolerance(at::kDouble);
  const Tensors x = subject.Inputs(3, 9), more = subject.Inputs(3, 4),
                queries = subject.Inputs(4, 5), own = subject.Inputs(3, 5);
  State state = Written(m, x);
  const State kept = state.Clone();
  const int64_t bytes = m.Compact(state).Bytes(),
                predicted = m.StateBytes(3, 9, x[0].options(), false);
  meter.True(bytes == predicted, "cross, the state's size, predicted as ", predicted, ", is ",
             bytes);
  const at::Tensor rows = at::tensor({2, 0, 0, 1}, at::kLong);
  Tensors picked;
  for (const at::Tensor& y : x) picked.push_back(y.index_select(0, rows));
  meter.Close(m.Read(queries, state.Reorder(rows)),
              subject.Definition(Form::kCross, queries, picked), tolerance,
              "cross, reordered rows");
  if (!m.WritesAtOnce()) {
    m.Write(more, state, {});
    const Tensors whole = Joined(x, more);
    meter.Close(m.Read(own, state), subject.Definition(Form::kCross, own, whole), tolerance,
                "cross, a state that was cloned, written on");
  }
  meter.Close(m.Read(own, kept), subject.Definition(Form::kCross, own, x), tolerance,
              "cross, the clone");
}

State FromFile(Subject& fresh, Mechanism& m, const State& state, int64_t batch,
               const at::TensorOptions& options) {
  TensorFile file;
  for (const NamedTensor& t : m.Compact(state).tensors) {
    if (t.value.defined()) file.tensors.push_back(t);
  }
  const ScratchFolder scratch;
  const std::string file_name = scratch / "state.safetensors";
  SaveTensors(file_name, file);
  // A new instance and a new state: everything that is needed has to be in the file.
  Mechanism& other = fresh.In(options.dtype().toScalarType());
  TensorFile read = LoadTensors(file_name);
  State loaded = other.StateForm(batch, options, [&](const std::string& name) {
    return std::any_of(read.tensors.begin(), read.tensors.end(),
                       [&](const NamedTensor& t) { return t.name == name; });
  });
  for (NamedTensor& t : read.tensors) loaded[t.name] = t.value;
  other.CheckState(loaded);
  return loaded;
}

}  // namespace

Outcome CheckState(Subject& subject, const Settings& settings) {
  at::NoGradGuard guard;
  Meter meter;
  if (settings.Has(Form::kCross) && subject.Has(Form::kCross)) CrossState(subject, meter);
  if (!Applies(subject, settings))
    return meter.result().comparisons > 0 ? meter.result()
                                          : NotApplicable("it has neither causal nor cross form");
  Mechanism& m = subject.In(at::kDouble);
  const double tolerance = subject.Tolerance(at::kDouble);
  const Tensors first = subject.Inputs(3, 9), second = subject.Inputs(4, 5);
  State state;
  Pieces(m, first, {0, 3, 8, 9}, {}, &state);
  const State kept = state.Clone();
  const int64_t bytes = m.Compact(state).Bytes(),
                empty = m.EmptyState(3, first[0].options()).Bytes();
  meter.True((bytes == empty) == subject.info().bounded, "the state's size, declared ",
             subject.info().bounded ? "bounded" : "growing");
  meter.True(bytes == m.StateBytes(3, 9, first[0].options(), true),
             "the state's size, predicted as ", m.StateBytes(3, 9, first[0].options(), true),
             ", is ", bytes);

  const at::Tensor rows = at::tensor({2, 0, 0, 1}, at::kLong);
  State chosen = state.Reorder(rows);
  Tensors picked;
  for (const at::Tensor& y : first) picked.push_back(y.index_select(0, rows));
  const Tensors whole = Joined(picked, second);
  meter.Close(m.Extend(second, chosen, {}),
              subject.Definition(Form::kCausal, whole, whole).narrow(2, 9, 5), tolerance,
              "reordered rows");

  // Continuations of one state: the clones are independent, and the one kept at the beginning still
  // holds the first nine tokens.
  for (int round = 0; round < 2; ++round) {
    for (const int64_t row : {0, 1}) {
      State branch = kept.Clone();
      Tensors next;
      for (const at::Tensor& y : second)
        next.push_back(y.narrow(0, row, 1).expand({3, -1, -1, -1}));
      const Tensors expected = Joined(first, next);
      meter.Close(m.Extend(next, branch, {}),
                  subject.Definition(Form::kCausal, expected, expected).narrow(2, 9, 5), tolerance,
                  "branch ", row, " of a cloned state, round ", round);
    }
  }
  return meter.result();
}

Outcome CheckFile(Subject& subject, const Settings& settings) {
  const bool causal = Applies(subject, settings);
  const bool cross = settings.Has(Form::kCross) && subject.Has(Form::kCross);
  if (!causal && !cross) return NotApplicable("it has neither causal nor cross form");
  at::NoGradGuard guard;
  Meter meter;
  for (const auto dtype : {at::kDouble, at::kFloat}) {
    Mechanism& m = subject.In(dtype);
    if (cross) {
      const Tensors source = Cast(subject.Inputs(3, 9), dtype),
                    queries = Cast(subject.Inputs(3, 4), dtype);
      State state = m.EmptyState(3, source[0].options());
      m.Write(source, state, {LengthsOf({9, 5, 0}), {}});
      Subject fresh = subject.Again();
      const State loaded = FromFile(fresh, m, state, 3, source[0].options());
      meter.Same(fresh.In(dtype).Read(queries, loaded), m.Read(queries, state), "cross, ",
                 at::toString(dtype), ", read from the file");
    }
    if (!causal) continue;
    const Tensors first = Cast(subject.Inputs(3, 9), dtype),
                  second = Cast(subject.Inputs(3, 5), dtype);
    State state;
    Pieces(m, first, {0, 4, 9}, {LengthsOf({9, 5, 0}), {}}, &state);
    Subject fresh = subject.Again();
    State loaded = FromFile(fresh, m, state, 3, first[0].options());
    const at::Tensor want = m.Extend(second, state, {});
    meter.Same(fresh.In(dtype).Extend(second, loaded, {}), want, at::toString(dtype),
               ", continued from the file");
  }
  return meter.result();
}

// As text is generated: floats one by one, with a state in the form it then has (Settled).
Outcome CheckDecoding(Subject& subject, const Settings& settings) {
  if (!Applies(subject, settings)) return NotApplicable("it has no causal form");
  at::NoGradGuard guard;
  Meter meter;
  Mechanism& m = subject.In(at::kFloat);
  const int64_t length = settings.full ? 70 : 21;
  const Tensors given = subject.Inputs(3, length), more = subject.Inputs(3, 5),
                x = Cast(given, at::kFloat), next = Cast(more, at::kFloat);
  const auto steps = [&](const Tensors& y, State* state) {
    Tensors outs;
    for (int64_t t = 0; t < y[0].size(2); ++t)
      outs.push_back(m.Extend(Narrow(y, t, 1), *state, {}));
    return at::cat(outs, 2);
  };
  State state;
  const at::Tensor got = Pieces(m, x, EachToken(length), {}, &state);
  const double tolerance = subject.Tolerance(at::kFloat, Form::kCausal, given, given);
  meter.Close(got, subject.Definition(Form::kCausal, given, given), tolerance, "token by token");
  meter.True(m.Compact(state).Bytes() == m.StateBytes(3, length, x[0].options(), true),
             "the state's size, predicted as ", m.StateBytes(3, length, x[0].options(), true),
             ", is ", m.Compact(state).Bytes());

  const Tensors whole = Joined(given, more);
  const at::Tensor want = subject.Definition(Form::kCausal, whole, whole).narrow(2, length, 5);
  const double then = subject.Tolerance(at::kFloat, Form::kCausal, whole, whole);
  const auto goes_on = [&](State from, const std::string& what) {
    State at_once = from.Clone();
    const at::Tensor single = steps(next, &from);
    meter.Close(single, want, then, what, ", goes on token by token");
    meter.Close(m.Extend(next, at_once, {}), want, then, what, ", goes on at once");
    return single;
  };
  const State settled = m.Settled(state).Clone();
  const at::Tensor single = goes_on(state.Clone(), "the state");
  goes_on(settled.Clone(), "the settled state");
  Subject fresh = subject.Again();
  const State loaded = FromFile(fresh, m, state, 3, x[0].options());
  meter.Same(goes_on(loaded, "the state of a file"), single, "the state of a file, bits");
  const at::Tensor rows = at::tensor({2, 0, 0}, at::kLong);
  Tensors others;
  for (const at::Tensor& y : next) others.push_back(y.index_select(0, rows));
  State turned = state.Reorder(rows);
  meter.Close(steps(others, &turned), want.index_select(0, rows), then, "reordered rows");
  const State kept = m.Compact(settled);
  for (const NamedTensor& t : m.Compact(m.Settled(state)).tensors) {
    if (t.value.defined()) meter.Same(t.value, kept[t.name], "what went on left it alone");
  }

  if (!subject.RowsDepend().empty()) return meter.result();
  const ops::Mask mask = {LengthsOf({length, 11, 0}),
                          StartsAt(3, length, {{0, 0}, {0, 9}, {1, 4}})};
  meter.Close(Pieces(m, x, EachToken(length), mask),
              DefinitionOf(subject, Form::kCausal, given, mask), tolerance,
              "padded and packed rows");
  return meter.result();
}

Outcome CheckMerge(Subject& subject, const Settings& settings) {
  if (!subject.info().merges) return NotApplicable("its states do not merge");
  at::NoGradGuard guard;
  Meter meter;
  Mechanism& m = subject.In(at::kDouble);
  const double tolerance = subject.Tolerance(at::kDouble);
  const Tensors x = subject.Inputs(2, 20), next = subject.Inputs(2, 5), whole = Joined(x, next);
  for (const int64_t cut : {0, 1, 7, 20}) {
    const State a = Written(m, Narrow(x, 0, cut)), b = Written(m, Narrow(x, cut, 20 - cut));
    State merged = m.Merge(a, b);
    if (settings.Has(Form::kCross) && subject.Has(Form::kCross))
      meter.Close(m.Read(next, merged), subject.Definition(Form::kCross, next, x), tolerance,
                  "read after a merge at ", cut);
    if (Applies(subject, settings))
      meter.Close(m.Extend(next, merged, {}),
                  subject.Definition(Form::kCausal, whole, whole).narrow(2, 20, 5), tolerance,
                  "extended after a merge at ", cut);
  }
  const State left = m.Merge(m.Merge(Written(m, Narrow(x, 0, 4)), Written(m, Narrow(x, 4, 9))),
                             Written(m, Narrow(x, 13, 7)));
  const State right = m.Merge(Written(m, Narrow(x, 0, 4)),
                              m.Merge(Written(m, Narrow(x, 4, 9)), Written(m, Narrow(x, 13, 7))));
  for (const NamedTensor& t : left.tensors) {
    if (t.value.defined() && t.value.is_floating_point())
      meter.Close(right[t.name], t.value, tolerance, "three pieces in either order, ", t.name);
  }
  return meter.result();
}

Outcome CheckTruncate(Subject& subject, const Settings& settings) {
  if (!subject.info().truncates) return NotApplicable("its state cannot be cut back");
  if (!Applies(subject, settings)) return NotApplicable("it has no causal form");
  at::NoGradGuard guard;
  Meter meter;
  Mechanism& m = subject.In(at::kDouble);
  const Tensors x = subject.Inputs(2, 20), next = subject.Inputs(2, 6);
  for (const int64_t count : {0, 1, 12, 20}) {
    State state;
    Pieces(m, x, {0, 7, 20}, {}, &state);
    m.Truncate(state, count);
    const Tensors whole = Joined(Narrow(x, 0, count), next);
    meter.Close(m.Extend(next, state, {}),
                subject.Definition(Form::kCausal, whole, whole).narrow(2, count, 6),
                subject.Tolerance(at::kDouble), "cut back to ", count, " of 20 tokens");
  }
  return meter.result();
}

}  // namespace cistern::verify

#include <ATen/ATen.h>

#include <algorithm>

#include "cistern/verify/properties.h"

namespace cistern::verify {

std::vector<Way> Ways(const Subject& subject, const Settings& settings, int64_t length) {
  std::vector<Way> ways;
  if (settings.Has(Form::kBidirectional) && subject.Has(Form::kBidirectional))
    ways.push_back({Form::kBidirectional, "bidirectional", {}});
  if (settings.Has(Form::kCausal) && subject.Has(Form::kCausal)) {
    ways.push_back({Form::kCausal, "causal", {0, length}});
    ways.push_back({Form::kCausal, "causal in two pieces", {0, length / 2, length}});
    ways.push_back({Form::kCausal, "token by token", EachToken(length)});
  }
  return ways;
}

at::Tensor RunWay(Mechanism& m, const Way& way, const Tensors& x, const ops::Mask& mask) {
  if (way.form == Form::kBidirectional) return m.Bidirectional(x, mask);
  std::vector<int64_t> cuts;
  const int64_t length = x[0].size(2);
  for (const int64_t cut : way.cuts) cuts.push_back(std::min(cut, length));
  if (cuts.back() < length) cuts.push_back(length);
  return Pieces(m, x, cuts, mask);
}

namespace {

// Cross: padded keys are as if they were not there.
void CrossPadding(Subject& subject, Meter& meter) {
  const int64_t length = 11, reads = 4;
  Mechanism& m = subject.In(at::kDouble);
  const double tolerance = subject.Tolerance(at::kDouble);
  const Tensors queries = Leaves(subject.Inputs(3, reads)), x = Leaves(subject.Inputs(3, length));
  const at::Tensor g = subject.Weights(3, reads);
  const ops::Mask mask = {LengthsOf({length, 5, 0}), {}};
  const at::Tensor got = Whole(m, Form::kCross, queries, x, mask);
  Tensors both = queries;
  both.insert(both.end(), x.begin(), x.end());
  const Tensors got_g = Gradients((got * g).sum(), both);
  for (int64_t b = 0; b < 3; ++b) {
    const int64_t count = mask.lengths->select(0, b).item<int64_t>();
    for (size_t i = 0; i < x.size(); ++i)
      meter.Zero(got_g[x.size() + i][b].narrow(1, count, length - count),
                 "cross, gradient of the padding of ", m.Projections()[i].name);
    if (count == 0) {
      meter.Zero(got[b], "cross, a row of padding alone");
      continue;
    }
    const Tensors alone_q = Leaves(Rows(queries, b)), alone = Leaves(Narrow(Rows(x, b), 0, count));
    const at::Tensor want = Whole(m, Form::kCross, alone_q, alone);
    meter.Close(got.narrow(0, b, 1), want, tolerance, "cross, row of ", count, " keys");
    const Tensors want_g = Gradients((want * g.narrow(0, b, 1)).sum(), alone);
    for (size_t i = 0; i < x.size(); ++i)
      meter.Close(got_g[x.size() + i].narrow(0, b, 1).narrow(2, 0, count), want_g[i],
                  10 * tolerance, "cross, gradient of ", m.Projections()[i].name, ", row of ",
                  count, " keys");
  }
}

}  // namespace

Outcome CheckPadding(Subject& subject, const Settings& settings) {
  Meter meter;
  Mechanism& m = subject.In(at::kDouble);
  const double tolerance = subject.Tolerance(at::kDouble);
  const int64_t length = 19;
  Tensors x = subject.Inputs(3, length);
  for (at::Tensor& y : x) y[1].narrow(1, 8, length - 8).mul_(30);  // what padding holds stands out
  x = Leaves(x);
  const at::Tensor g = subject.Weights(3, length);
  const ops::Mask mask = {LengthsOf({length, 8, 0}), {}};
  for (const Way& way : Ways(subject, settings, length)) {
    const at::Tensor got = RunWay(m, way, x, mask);
    const Tensors got_g = Gradients((got * g).sum(), x);
    for (int64_t b = 0; b < 3; ++b) {
      const int64_t count = mask.lengths->select(0, b).item<int64_t>(), pads = length - count;
      meter.Zero(got[b].narrow(1, count, pads), way.name, ", output at the padding of a row of ",
                 count);
      for (size_t i = 0; i < x.size(); ++i)
        meter.Zero(got_g[i][b].narrow(1, count, pads), way.name, ", gradient of the padding of ",
                   m.Projections()[i].name);
      if (count == 0) continue;
      const Tensors alone = Leaves(Narrow(Rows(x, b), 0, count));
      const at::Tensor want = RunWay(m, way, alone, {});
      meter.Close(got.narrow(0, b, 1).narrow(2, 0, count), want, tolerance, way.name, ", row of ",
                  count);
      const Tensors want_g = Gradients((want * g.narrow(0, b, 1).narrow(2, 0, count)).sum(), alone);
      for (size_t i = 0; i < x.size(); ++i)
        meter.Close(got_g[i].narrow(0, b, 1).narrow(2, 0, count), want_g[i], 10 * tolerance,
                    way.name, ", gradient of ", m.Projections()[i].name, ", row of ", count);
    }
    const Tensors longer = Joined(x, subject.Inputs(3, 6, 30));
    meter.Close(RunWay(m, way, longer, mask).narrow(2, 0, length), got, tolerance, way.name,
                ", with more padding");
  }
  if (settings.Has(Form::kCross) && subject.Has(Form::kCross)) CrossPadding(subject, meter);
  return meter.result();
}

Outcome CheckResume(Subject& subject, const Settings& settings) {
  const bool causal = settings.Has(Form::kCausal) && subject.Has(Form::kCausal);
  const bool cross = settings.Has(Form::kCross) && subject.Has(Form::kCross);
  if (!causal && !cross) return NotApplicable("it has no state to go on from");
  at::NoGradGuard guard;
  Meter meter;
  Mechanism& m = subject.In(at::kDouble);
  const Tensors first = subject.Inputs(3, 9), second = subject.Inputs(3, 6);
  const std::vector<int64_t> lengths = {9, 4, 0};
  if (cross && !m.WritesAtOnce()) {
    const Tensors queries = subject.Inputs(3, 4);
    State state = m.EmptyState(3, first[0].options());
    m.Write(first, state, {LengthsOf(lengths), {}});
    m.Write(second, state, {});
    const at::Tensor got = m.Read(queries, state);
    for (int64_t b = 0; b < 3; ++b) {
      const Tensors row = Joined(Narrow(Rows(first, b), 0, lengths[size_t(b)]), Rows(second, b));
      meter.Close(got.narrow(0, b, 1), subject.Definition(Form::kCross, Rows(queries, b), row),
                  subject.Tolerance(at::kDouble), "cross, a source of ", lengths[size_t(b)],
                  " tokens goes on");
    }
  }
  if (!causal) return meter.result();
  for (const bool in_steps : {false, true}) {
    State state;
    Pieces(m, first, in_steps ? EachToken(9) : std::vector<int64_t>{0, 9}, {LengthsOf(lengths), {}},
           &state);
    const at::Tensor got = m.Extend(second, state, {});
    for (int64_t b = 0; b < 3; ++b) {
      const Tensors row = Joined(Narrow(Rows(first, b), 0, lengths[size_t(b)]), Rows(second, b));
      meter.Close(got.narrow(0, b, 1),
                  subject.Definition(Form::kCausal, row, row).narrow(2, lengths[size_t(b)], 6),
                  subject.Tolerance(at::kDouble), "row of ", lengths[size_t(b)],
                  " tokens continues", in_steps ? ", after single steps" : "");
    }
  }
  return meter.result();
}

Outcome CheckBatch(Subject& subject, const Settings& settings) {
  at::NoGradGuard guard;
  Meter meter;
  for (const auto dtype : {at::kDouble, at::kFloat}) {
    Mechanism& m = subject.In(dtype);
    const double tolerance = subject.Tolerance(dtype);
    const Tensors x = Cast(subject.Inputs(3, 37), dtype);
    Tensors loud;  // row 1 as it is; its neighbours far away
    for (const at::Tensor& y : x) {
      loud.push_back(y * 40 + 7);
      loud.back().narrow(0, 1, 1).copy_(y.narrow(0, 1, 1));
    }
    std::vector<Way> ways = Ways(subject, settings, 37);
    if (settings.Has(Form::kCross) && subject.Has(Form::kCross))
      ways.push_back({Form::kCross, "cross", {}});
    for (const Way& way : ways) {
      auto run = [&](const Tensors& y) {
        return way.form == Form::kCross ? Whole(m, Form::kCross, y, y) : RunWay(m, way, y, {});
      };
      const at::Tensor got = run(x).narrow(0, 1, 1);
      meter.Close(got, run(Rows(x, 1)), tolerance, way.name, ", ", at::toString(dtype),
                  ", alone and in a batch");
      meter.Close(run(loud).narrow(0, 1, 1), got, tolerance, way.name, ", ", at::toString(dtype),
                  ", with other rows in the batch");
    }
  }
  return meter.result();
}

Outcome CheckPacked(Subject& subject, const Settings& settings) {
  Meter meter;
  Mechanism& m = subject.In(at::kDouble);
  const int64_t length = 23;
  Tensors x = subject.Inputs(3, length);
  // The documents' levels differ by hundreds, so that none may set another's scale.
  for (at::Tensor& y : x) y.narrow(0, 0, 1).narrow(2, 5, 10).add_(400.0);
  x = Leaves(x);
  const at::Tensor g = subject.Weights(3, length);
  // Row 1 begins without a start; row 2 is all padding, though a start is marked in it.
  const ops::Mask mask = {
      LengthsOf({length, 17, 0}),
      StartsAt(3, length, {{0, 0}, {0, 5}, {0, 15}, {1, 1}, {1, 12}, {2, 0}, {1, 20}})};
  const std::vector<Document> documents = DocumentsOf(mask, 3, length);
  std::vector<Way> ways = Ways(subject, settings, length);
  if (settings.full && settings.Has(Form::kCausal) && subject.Has(Form::kCausal)) {
    for (int64_t cut = 1; cut < length; ++cut)
      ways.push_back({Form::kCausal, StrCat("causal, cut at ", cut), {0, cut, length}});
  }
  for (const Way& way : ways) {
    const at::Tensor got = RunWay(m, way, x, mask);
    const Tensors got_g = Gradients((got * g).sum(), x);
    for (const Document& d : documents) {
      const Tensors alone = Leaves(Narrow(Rows(x, d.row), d.begin, d.count));
      const at::Tensor want = RunWay(m, {way.form, "", {0, d.count}}, alone, {});
      const auto where = StrCat(way.name, ", document at row ", d.row, ", tokens ", d.begin, " to ",
                                d.begin + d.count - 1);
      const Tensors plain = Cast(alone, at::kDouble);
      meter.Close(got.narrow(0, d.row, 1).narrow(2, d.begin, d.count), want,
                  subject.Tolerance(at::kDouble, way.form, plain, plain), where);
      const Tensors want_g =
          Gradients((want * g.narrow(0, d.row, 1).narrow(2, d.begin, d.count)).sum(), alone);
      for (size_t i = 0; i < x.size(); ++i) {
        const double difference =
            (got_g[i].narrow(0, d.row, 1).narrow(2, d.begin, d.count) - want_g[i])
                .norm()
                .item<double>();
        // Levels of 400 in query and key make logits of 10^5, whose last bits are 10^-11.
        meter.Add(difference / (1 + got_g[i].norm().item<double>()),
                  1000 * subject.Tolerance(at::kDouble), "gradient of ", m.Projections()[i].name,
                  ", ", where);
      }
    }
    meter.Zero(got[1].narrow(1, 17, length - 17), way.name, ", output at padding");
    meter.Zero(got[2], way.name, ", output of a row of padding alone");
    for (const at::Tensor& d : got_g) {
      meter.Zero(d[1].narrow(1, 17, length - 17), way.name, ", gradient at padding");
      meter.Zero(d[2], way.name, ", gradient of a row of padding alone");
    }
  }
  return ways.empty() ? NotApplicable("it has neither a bidirectional nor a causal form")
                      : meter.result();
}

}  // namespace cistern::verify

#include <ATen/ATen.h>

#include <limits>

#include "cistern/verify/properties.h"

namespace cistern::verify {
namespace {

constexpr int64_t kRows = 4, kLength = 17;

// Of each row, true at the tokens that are not masked: padding on the left; holes; none at all;
// every token.
at::Tensor ValidRows() {
  const at::Tensor valid = at::ones({kRows, kLength}, at::kBool);
  valid[0].narrow(0, 0, 6).fill_(false);
  for (const int64_t t : {0, 3, 4, 9, 15}) valid[1].select(0, t).fill_(false);
  valid[2].fill_(false);
  return valid;
}

// The real tokens of one document.
struct Picked {
  int64_t row;
  std::vector<int64_t> tokens;
  at::Tensor index() const { return at::tensor(tokens, at::kLong); }
};

// A start at a masked token counts for the next real one.
std::vector<Picked> DocumentsOf(const ops::Mask& mask) {
  std::vector<Picked> documents;
  const auto is = [](const at::Tensor& x, int64_t b, int64_t t) {
    return x.select(0, b).select(0, t).item<bool>();
  };
  for (int64_t b = 0; b < kRows; ++b) {
    const int64_t end = mask.lengths ? mask.lengths->select(0, b).item<int64_t>() : kLength;
    bool begins = true;
    for (int64_t t = 0; t < end; ++t) {
      begins = begins || (mask.starts && is(*mask.starts, b, t));
      if (!is(*mask.valid, b, t)) continue;
      if (begins) documents.push_back({b, {}});
      documents.back().tokens.push_back(t);
      begins = false;
    }
  }
  return documents;
}

Tensors Pick(const Tensors& x, const Picked& d) {
  Tensors y;
  for (const at::Tensor& t : x) y.push_back(t.narrow(0, d.row, 1).index_select(2, d.index()));
  return y;
}

// [B,1,T,1]: true at the tokens that no document has.
at::Tensor Masked(const std::vector<Picked>& documents) {
  const at::Tensor masked = at::ones({kRows, kLength}, at::kBool);
  for (const Picked& d : documents) masked[d.row].index_fill_(0, d.index(), false);
  return masked.unsqueeze(1).unsqueeze(-1);
}

// Tokens that are masked hold NaN.
Tensors Inputs(const Subject& subject, const at::Tensor& masked) {
  Tensors x = subject.Inputs(kRows, kLength);
  for (at::Tensor& t : x) t.masked_fill_(masked, std::numeric_limits<double>::quiet_NaN());
  return Leaves(x);
}

void CheckWay(Subject& subject, const Way& way, const ops::Mask& mask, Meter& meter) {
  Mechanism& m = subject.In(at::kDouble);
  const double tolerance = subject.Tolerance(at::kDouble);
  const std::vector<Picked> documents = DocumentsOf(mask);
  const at::Tensor masked = Masked(documents);
  const Tensors x = Inputs(subject, masked);
  const at::Tensor g = subject.Weights(kRows, kLength);
  const std::string name = way.name + (mask.starts ? ", packed" : "");
  const at::Tensor got = RunWay(m, way, x, mask);
  const Tensors got_g = Gradients((got * g).sum(), x);
  meter.Zero(got.masked_select(masked), name, ", output at masked tokens");
  for (size_t i = 0; i < x.size(); ++i)
    meter.Zero(got_g[i].masked_select(masked), name, ", gradient of masked ",
               m.Projections()[i].name);
  for (const Picked& d : documents) {
    const auto where =
        StrCat(name, ", row ", d.row, ", ", d.tokens.size(), " tokens from ", d.tokens[0], " on");
    const Tensors alone = Leaves(Pick(x, d));
    const at::Tensor want = RunWay(m, {way.form, "", {0, int64_t(d.tokens.size())}}, alone, {});
    meter.Close(Pick({got}, d)[0], want, tolerance, where);
    const Tensors want_g = Gradients((want * Pick({g}, d)[0]).sum(), alone);
    for (size_t i = 0; i < x.size(); ++i) {
      const at::Tensor of_document = Pick({got_g[i]}, d)[0];
      meter.Add(
          (of_document - want_g[i]).norm().item<double>() / (1 + got_g[i].norm().item<double>()),
          100 * tolerance, "gradient of ", m.Projections()[i].name, ", ", where);
    }
  }
}

void CheckCross(Subject& subject, const ops::Mask& mask, Meter& meter) {
  Mechanism& m = subject.In(at::kDouble);
  const double tolerance = subject.Tolerance(at::kDouble);
  const std::vector<Picked> documents = DocumentsOf(mask);
  const at::Tensor masked = Masked(documents);
  const Tensors x = Inputs(subject, masked), queries = subject.Inputs(kRows, 3);
  const at::Tensor got = Whole(m, Form::kCross, queries, x, mask), g = subject.Weights(kRows, 3);
  const Tensors got_g = Gradients((got * g).sum(), x);
  for (size_t i = 0; i < x.size(); ++i)
    meter.Zero(got_g[i].masked_select(masked), "cross, gradient of masked ",
               m.Projections()[i].name);
  meter.Zero(got[2], "cross, a row of masked tokens alone");
  for (const Picked& d : documents) {
    meter.Close(got.narrow(0, d.row, 1), Whole(m, Form::kCross, Rows(queries, d.row), Pick(x, d)),
                tolerance, "cross, row ", d.row);
  }
}

}  // namespace

Outcome CheckMasked(Subject& subject, const Settings& settings) {
  Meter meter;
  ops::Mask mask;
  mask.valid = ValidRows();
  mask.lengths = LengthsOf({kLength, kLength - 3, kLength, kLength});
  for (const Way& way : Ways(subject, settings, kLength)) {
    CheckWay(subject, way, mask, meter);
    ops::Mask packed = mask;
    packed.starts = StartsAt(kRows, kLength, {{0, 0}, {0, 11}, {1, 4}, {1, 12}, {2, 5}, {3, 9}});
    CheckWay(subject, way, packed, meter);
  }
  if (settings.Has(Form::kCross) && subject.Has(Form::kCross)) CheckCross(subject, mask, meter);
  return meter.result();
}

}  // namespace cistern::verify

#include <ATen/ATen.h>

#include "cistern/verify/properties.h"

namespace cistern::verify {
namespace {

ops::Mask To(const ops::Mask& mask, at::Device device) {
  const auto move = [&](const std::optional<at::Tensor>& t) {
    return t ? std::optional(t->to(device)) : std::nullopt;
  };
  return {move(mask.lengths), move(mask.starts), move(mask.valid)};
}

Tensors ToAll(const Tensors& x, at::Device device) {
  Tensors y;
  for (const at::Tensor& t : x) y.push_back(t.to(device));
  return y;
}

struct Problem {
  Way way;
  std::string masked;  // how, as messages say it
  ops::Mask mask;
};

std::vector<Problem> ProblemsOf(const Subject& subject, const Settings& settings, int64_t length) {
  const at::Tensor lengths = LengthsOf({length, 8, 0}),
                   starts = StartsAt(3, length, {{0, 0}, {0, 5}, {0, 6}, {1, 3}}),
                   valid = at::arange(length).unsqueeze(0) >= at::tensor({3, 0, 9}).unsqueeze(1);
  std::vector<Way> ways = Ways(subject, settings, length);
  if (settings.Has(Form::kCross) && subject.Has(Form::kCross))
    ways.push_back({Form::kCross, "cross", {}});
  std::vector<Problem> problems;
  for (const Way& way : ways) {
    problems.push_back({way, "", {}});
    problems.push_back({way, ", padded", {lengths, {}}});
    if (!subject.RowsDepend().empty()) continue;  // no other mask has a meaning there
    problems.push_back({way, ", masked", {{}, {}, valid}});
    if (way.form != Form::kCross) problems.push_back({way, ", packed", {lengths, starts}});
  }
  return problems;
}

// The output, then the gradients of the inputs and of the parameters, on the CPU in double.
Tensors Results(Mechanism& m, const Problem& p, const Tensors& x, const at::Tensor& g,
                at::Device device) {
  Tensors leaves = Leaves(ToAll(x, device));
  const ops::Mask mask = To(p.mask, device);
  const at::Tensor out = p.way.form == Form::kCross ? Whole(m, Form::kCross, leaves, leaves, mask)
                                                    : RunWay(m, p.way, leaves, mask);
  for (const at::Tensor& parameter : m.parameters()) leaves.push_back(parameter);
  Tensors all = Gradients((out * g.to(out.options())).sum(), leaves);
  all.insert(all.begin(), out.detach());
  for (at::Tensor& t : all) t = t.to(at::kCPU, at::kDouble);
  return all;
}

std::vector<std::string> NamesOf(const Mechanism& m) {
  std::vector<std::string> names = {"output"};
  for (const Projection& p : m.Projections()) {
    if (p.OfTokens()) names.push_back("gradient of " + p.name);
  }
  for (const auto& p : m.named_parameters()) names.push_back("gradient of " + p.key());
  return names;
}

// As decoding runs: in inference mode, where nothing stands between a device and its operators.
void Decode(Subject& subject, Subject& there, const Settings& settings, Meter& meter) {
  const int64_t length = 19;
  const Tensors x = subject.Inputs(2, length);
  const at::Tensor want = Whole(subject.In(at::kDouble), Form::kCausal, x, x).detach();
  Mechanism& m = there.In(at::kDouble);
  m.to(settings.device);
  const c10::InferenceMode guard;
  State state;
  const Tensors y = ToAll(x, settings.device);
  const at::Tensor got = Pieces(m, Narrow(y, 0, 12), EachToken(12), {}, &state);
  meter.Close(got.cpu(), want.narrow(2, 0, 12), subject.Tolerance(at::kDouble), "decoding");
  state = state.Reorder(at::tensor({1}, at::kLong));
  meter.Close(m.Extend(Rows(Narrow(y, 12, length - 12), 1), state, {}).cpu(),
              want.narrow(0, 1, 1).narrow(2, 12, length - 12), subject.Tolerance(at::kDouble),
              "decoding on, of one row");
}

}  // namespace

Outcome CheckDevice(Subject& subject, const Settings& settings) {
  Meter meter;
  Subject there = subject.Again();
  const std::vector<std::string> names = NamesOf(subject.mechanism());
  for (const int64_t length : {19, settings.full ? 300 : 70}) {
    const Tensors x = subject.Inputs(3, length);
    const at::Tensor g = subject.Weights(3, length);
    for (const Problem& p : ProblemsOf(subject, settings, length)) {
      if (length > 19 && p.way.cuts.size() > 3) continue;  // token by token
      const Tensors want = Results(subject.In(at::kDouble), p, x, g, at::kCPU);
      for (const auto dtype : {at::kDouble, at::kFloat}) {
        Mechanism& m = there.In(dtype);
        m.to(settings.device);
        const Tensors got = Results(m, p, Cast(x, dtype), g, settings.device);
        const double tolerance = subject.Tolerance(dtype);
        for (size_t i = 0; i < got.size(); ++i)
          meter.Close(got[i], want[i], i == 0 ? tolerance : 20 * tolerance, p.way.name, p.masked,
                      ", ", at::toString(dtype), ", T=", length, ", ", names[i]);
      }
    }
  }
  if (settings.Has(Form::kCausal) && subject.Has(Form::kCausal))
    Decode(subject, there, settings, meter);
  return meter.result();
}

}  // namespace cistern::verify

#include "cistern/analyses/identity_values.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "cistern/base/error.h"

namespace cistern {
namespace {

using Tensors = std::vector<at::Tensor>;

bool EndsInValue(const std::string& name) {
  return name == "v" || name == "pv" || name.ends_with("_v");
}

}  // namespace

at::Tensor Copies(const at::Tensor& x, int64_t count) {
  if (!x.defined()) return x;
  std::vector<int64_t> sizes(size_t(x.dim()), -1);
  sizes[0] = count;
  return x.expand(sizes);
}
Tensors Copies(const Tensors& x, int64_t count) {
  Tensors out;
  for (const at::Tensor& t : x) out.push_back(Copies(t, count));
  return out;
}
ops::Mask Copies(const ops::Mask& mask, int64_t count) {
  ops::Mask out;
  if (mask.lengths) out.lengths = Copies(*mask.lengths, count).contiguous();
  if (mask.starts) out.starts = Copies(*mask.starts, count).contiguous();
  if (mask.valid) out.valid = Copies(*mask.valid, count).contiguous();
  return out;
}
Handles Copies(const Handles& handles, int64_t count) {
  Handles out;
  for (const HeadScores& s : handles)
    out.push_back({Copies(s.q, count), Copies(s.k, count), Copies(s.p, count),
                   Copies(s.bias, count), s.scale});
  return out;
}

std::vector<size_t> ValuesOf(const Mechanism& m, bool packed) {
  std::vector<size_t> found;
  size_t place = 0;
  for (const Projection& p : m.Projections()) {
    const bool of_packed = p.side == Side::kPacked;
    if (of_packed != packed) continue;
    if ((packed || p.side == Side::kKey) && EndsInValue(p.name)) found.push_back(place);
    ++place;
  }
  return found;
}

Tensors Untied(const Mechanism& tied, const Mechanism& untied, const Tensors& x, bool packed) {
  if (x.empty()) return x;
  Tensors out;
  std::vector<int> used(4, 0);
  for (const Projection& to : untied.Projections()) {
    if ((to.side == Side::kPacked) != packed) continue;
    int place = 0, number = 0, last = -1;
    for (const Projection& from : tied.Projections()) {
      if ((from.side == Side::kPacked) != packed) continue;
      if (from.side == to.side && number++ <= used[size_t(to.side)]) last = place;
      ++place;
    }
    ++used[size_t(to.side)];
    CISTERN_CHECK(last >= 0, "[analyze] ", tied.info().name, " has no projection of the ",
                  SideName(to.side));
    if (size_t(last) < x.size()) out.push_back(x[size_t(last)]);
  }
  return out;
}

at::Tensor IdentityValues(const at::Tensor& like, int64_t begin, int64_t n) {
  const int64_t width = like.size(3), copies = (n + width - 1) / width;
  const at::Tensor v = at::zeros({copies, like.size(1), like.size(2), width}, like.options());
  for (int64_t i = 0; i < copies; ++i) {
    const int64_t first = begin + i * width, count = std::min(width, begin + n - first);
    v.select(0, i)
        .narrow(1, first, count)
        .narrow(2, 0, count)
        .copy_(at::eye(count, like.options()).expand({like.size(1), -1, -1}));
  }
  return v;
}

at::Tensor AsColumns(const at::Tensor& y, int64_t n) {
  return y.permute({1, 2, 0, 3}).reshape({y.size(1), y.size(2), -1}).narrow(2, 0, n);
}

double RelativeError(const at::Tensor& got, const at::Tensor& want) {
  const double difference = (got - want).to(at::kDouble).norm().item<double>(),
               size = want.to(at::kDouble).norm().item<double>();
  return size > 0 ? difference / size : difference;
}

std::shared_ptr<Mechanism> UntiedCore(const CapturedLayer& layer) {
  const MechanismInfo& info = layer.core->info();
  if (!ValuesOf(*layer.core, false).empty()) return nullptr;
  const std::vector<std::string> options = info.options().Names();
  if (std::find(options.begin(), options.end(), "tie_kv") == options.end())
    FailUsage("[", info.name, "] has no projection of values, so that no weights are implied");
  Json untied = layer.options.mechanism_options;
  untied["tie_kv"] = false;
  AttentionDims dims = layer.core->dims();
  dims.first = layer.core;  // whose memory it shares
  auto core = info.Make(untied, dims);
  core->to(layer.y.scalar_type());
  core->eval();
  return core;
}

}  // namespace cistern

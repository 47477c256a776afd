#include "cistern/analyses/attention_logits.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cistern/analyses/identity_values.h"
#include "cistern/analyses/implied_weights.h"
#include "cistern/base/error.h"

namespace cistern {
namespace {

const at::Tensor* WeightOf(const Mechanism& core, const std::string& name) {
  for (const CoreWeight& w : core.weights()) {
    if (w.name == name) return w.value;
  }
  return nullptr;
}

// The filter of packing's keys and values (P000; conv_luna.h): key j covers tokens
// j S - before .. j S - before + K - 1.
struct Filter {
  at::Tensor taps;  // [G,K]; undefined: the largest of each channel
  int64_t kernel = 1, stride = 1, before = 0;
  bool inside = false;  // only windows that end in the row

  // x [G,n,w] -> [G,keys,w]
  at::Tensor operator()(const at::Tensor& x) const {
    const int64_t n = x.size(1);
    if (kernel == 1 && !taps.defined()) return x.slice(1, 0, n, stride);
    const int64_t keys = inside ? (n - kernel) / stride + 1 : (n + stride - 1) / stride;
    const double none = taps.defined() ? 0 : -std::numeric_limits<double>::infinity();
    at::Tensor out = at::full({x.size(0), keys, x.size(2)}, none, x.options());
    for (int64_t i = 0; i < kernel; ++i) {
      for (int64_t j = 0; j < keys; ++j) {
        const int64_t t = j * stride + i - before;
        if (t < 0 || t >= n) continue;
        at::Tensor key = out.select(1, j);
        if (taps.defined()) {
          key.add_(taps.select(1, i).unsqueeze(1) * x.select(1, t));
        } else {
          at::maximum_out(key, key, x.select(1, t));
        }
      }
    }
    return out;
  }
};

Filter FilterOf(const CapturedLayer& layer) {
  Json o = layer.core->info().options().Write();  // with the defaults
  o.update(layer.options.mechanism_options);
  Filter f;
  f.stride = o.value("stride", int64_t{1});
  const bool none = o.value("mask", "tokens") == "none";
  if (FiltersByMaximum(layer)) {
    f.kernel = o.at("kernel").get<int64_t>();
    f.inside = none;
  } else if (const at::Tensor* taps = WeightOf(*layer.core, "filter.weight")) {
    f.taps = taps->to(at::kDouble).cpu();
    f.kernel = f.taps.size(1);
    f.before = f.stride == 1 ? (f.kernel - 1) / 2 : 0;
    f.inside = none && f.stride > 1;
  }
  return f;
}

}  // namespace

bool FiltersByMaximum(const CapturedLayer& layer) {
  return layer.options.mechanism_options.value("filter", "conv") == "maxpool";
}

std::optional<AttentionLogits> PackingLogits(const CapturedLayer& layer, int64_t row) {
  const std::string& name = layer.core->info().name;
  const bool conv = name == "conv_luna" || name == "only_scaling" || name == "only_filtering";
  if (!layer.packed.defined() || (!conv && name != "luna" && name != "set_transformer")) return {};
  const auto& projections = layer.core->Projections();
  size_t q = 0, k = projections.size(), v = 0;
  for (size_t i = 0; i < projections.size(); ++i) {
    if (projections[i].side == Side::kMemory) q = i;
    if (projections[i].side != Side::kKey) continue;
    k = std::min(k, i), v = i;  // tied: one for both
  }
  const int64_t n = layer.core->SeesPadding() ? layer.sources() : layer.RealSources(row);
  const auto of_row = [&](size_t i) { return RowOf(layer.x.at(i), row)[0].to(at::kDouble).cpu(); };
  at::Tensor queries = of_row(q), keys = of_row(k).narrow(1, 0, n),
             values = of_row(v).narrow(1, 0, n);
  AttentionLogits out;
  out.divisor = std::sqrt(double(queries.size(2)));
  if (conv) {
    const Filter filter = FilterOf(layer);
    keys = filter(keys), values = filter(values);
    const std::string temperature = layer.options.mechanism_options.value(
        "temperature", name == "only_filtering" ? "sqrt" : "learn");
    if (temperature == "unit") out.divisor = 1;
    if (temperature == "learn")
      out.divisor = std::exp(WeightOf(*layer.core, "tau")->item<double>());
  }
  out.values = at::matmul(queries, keys.transpose(1, 2)) / out.divisor;
  const at::Tensor packed = layer.packed[row].to(at::kDouble).cpu();  // [M,D]
  const at::Tensor want = packed.unflatten(1, {values.size(0), values.size(2)}).transpose(0, 1);
  const double error = RelativeError(at::matmul(at::softmax(out.values, 2), values), want);
  CISTERN_CHECK(error <= kImpliedTolerance, "[", name, "] ", layer.name,
                ": the softmax of packing's logits misses what was packed by ", error);
  return out;
}

std::optional<AttentionLogits> SoftmaxLogits(const CapturedLayer& layer, int64_t row) {
  const Mechanism& core = *layer.core;
  if (core.info().name != "softmax" || layer.form == Form::kCross || core.dims().relative ||
      layer.mask.starts || layer.mask.valid || layer.x.size() != 3)
    return {};
  const int64_t n = layer.RealQueries(row);
  const at::Tensor q = RowOf(layer.x[0], row)[0].narrow(1, 0, n).to(at::kDouble).cpu(),
                   k = RowOf(layer.x[1], row)[0].narrow(1, 0, n).to(at::kDouble).cpu();
  AttentionLogits out;
  out.divisor = layer.options.mechanism_options.value("scale", "sqrt") == "unit"
                    ? 1
                    : std::sqrt(double(q.size(2)));
  out.values = at::matmul(q, k.transpose(1, 2)) / out.divisor;
  if (layer.form == Form::kCausal) {
    const at::Tensor hidden = at::ones({n, n}, q.options().dtype(at::kBool)).triu(1);
    out.values = out.values.masked_fill(hidden, -std::numeric_limits<double>::infinity());
  }
  return out;
}

namespace {

// Of one query: over the keys that it sees, their number, the entropy of its softmax and the
// variance of its logits.
struct QueryFigures {
  int64_t seen = 0;
  double entropy = 0, variance = 0;
};

QueryFigures OfQuery(const double* logits, int64_t keys) {
  constexpr double kHidden = -std::numeric_limits<double>::infinity();
  QueryFigures f;
  double most = kHidden, sum = 0;
  for (int64_t i = 0; i < keys; ++i) {
    if (logits[i] == kHidden) continue;
    ++f.seen;
    sum += logits[i];  // what is not finite stays so
    most = std::max(most, logits[i]);
  }
  if (f.seen < 2) return f;
  const double mean = sum / double(f.seen);
  double total = 0, along = 0, squares = 0;
  for (int64_t i = 0; i < keys; ++i) {
    if (logits[i] == kHidden) continue;
    const double below = logits[i] - most, e = std::exp(below);
    total += e;
    along += e * below;
    squares += (logits[i] - mean) * (logits[i] - mean);
  }
  f.entropy = std::log(total) - along / total;
  f.variance = squares / double(f.seen);
  return f;
}

}  // namespace

LogitFigures FiguresOf(const at::Tensor& logits) {
  const at::Tensor plain = logits.cpu().contiguous();
  const int64_t keys = plain.size(2), queries = plain.size(0) * plain.size(1);
  const double* data = plain.const_data_ptr<double>();
  double entropy = 0, variance = 0;
  int64_t counted = 0;
  for (int64_t i = 0; i < queries; ++i) {
    const QueryFigures f = OfQuery(data + i * keys, keys);
    if (f.seen < 2) continue;
    ++counted;
    entropy += f.entropy / std::log(double(f.seen));
    variance += f.variance;
  }
  return {entropy / double(counted), variance / double(counted)};  // NaN where none counts
}

}  // namespace cistern

#include "cistern/analyses/captured_layers.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "cistern/attention/head_groups.h"
#include "cistern/base/error.h"

namespace cistern {
namespace {

int64_t RealOf(const ops::Mask& mask, int64_t row, int64_t length) {
  if (mask.valid) return mask.valid->select(0, row).sum().item<int64_t>();
  return mask.lengths ? (*mask.lengths)[row].item<int64_t>() : length;
}

// The length of the first tensor of the tokens' keys.
int64_t LengthOf(const Mechanism& core, const std::vector<at::Tensor>& x) {
  for (size_t i = 0; i < core.Projections().size() && i < x.size(); ++i) {
    if (core.Projections()[i].side == Side::kKey && x[i].defined()) return x[i].size(2);
  }
  Fail("[analyze] ", core.info().name, " has no projection of the tokens that are attended to");
}

}  // namespace

std::optional<int64_t> CapturedLayer::TokensBeforeText(const Batch& batch) const {
  if (!batch.tensors.Has("ids") || batch.tensors.Has("valid") || form == Form::kCross)
    return std::nullopt;
  const int64_t before = queries() - batch["ids"].size(1);
  return before == 0 || before == 1 ? std::optional<int64_t>(before) : std::nullopt;
}

int64_t CapturedLayer::sources() const {
  return LengthOf(*core, form == Form::kCross ? written : x);
}

int64_t CapturedLayer::RealQueries(int64_t row) const { return RealOf(mask, row, queries()); }

int64_t CapturedLayer::RealSources(int64_t row) const {
  return RealOf(form == Form::kCross ? written_mask : mask, row, sources());
}

std::vector<CapturedLayer> ThatRead(const std::vector<CapturedLayer>& layers,
                                    const std::string& analysis) {
  std::vector<CapturedLayer> read;
  for (const CapturedLayer& l : layers) {
    if (l.reads()) read.push_back(l);
  }
  if (read.empty())
    FailUsage(analysis,
              ": no token reads in this model: with model.pooling=memory the tokens end in the "
              "last block, which packs alone; --of memory shows it");
  return read;
}

std::vector<CapturedLayer> ByHeadGroup(const CapturedLayer& layer) {
  auto* const whole = dynamic_cast<HeadGroups*>(layer.core);
  if (!whole) return {layer};
  std::vector<CapturedLayer> parts;
  const Json& options = layer.options.mechanism_options;
  size_t projection = 0;
  int64_t head = 0;
  for (const HeadGroups::Group& group : whole->groups()) {
    const size_t count = group.mechanism->Projections().size();
    const auto own = [&](const std::vector<at::Tensor>& all) {
      if (all.empty()) return all;
      return std::vector<at::Tensor>(all.begin() + int64_t(projection),
                                     all.begin() + int64_t(projection + count));
    };
    CapturedLayer part = layer;
    const std::string& name = group.mechanism->info().name;
    part.name = StrCat(layer.name, ", ", group.name);
    part.core = group.mechanism.get();
    part.options.mechanism = name;
    part.options.mechanism_options = options.contains(name) ? options.at(name) : Json::object();
    part.options.dims = group.mechanism->dims();
    part.x = own(layer.x), part.written = own(layer.written);
    part.first_head = head;
    part.y = layer.y.narrow(1, head, part.options.dims.heads);
    head += part.options.dims.heads;
    projection += count;
    parts.push_back(std::move(part));
  }
  return parts;
}

std::vector<CapturedLayer> ByHeadGroup(const std::vector<CapturedLayer>& layers) {
  std::vector<CapturedLayer> all;
  for (const CapturedLayer& l : layers) {
    for (CapturedLayer& part : ByHeadGroup(l)) all.push_back(std::move(part));
  }
  return all;
}

at::Tensor RowOf(const at::Tensor& x, int64_t row) {
  return !x.defined() || x.size(0) == 1 ? x : x.narrow(0, row, 1);
}
std::vector<at::Tensor> RowOf(const std::vector<at::Tensor>& x, int64_t row) {
  std::vector<at::Tensor> out;
  for (const at::Tensor& t : x) out.push_back(RowOf(t, row));
  return out;
}
ops::Mask RowOf(const ops::Mask& mask, int64_t row) {
  ops::Mask out;
  if (mask.lengths) out.lengths = RowOf(*mask.lengths, row);
  if (mask.starts) out.starts = RowOf(*mask.starts, row);
  if (mask.valid) out.valid = RowOf(*mask.valid, row);
  return out;
}

void LayerCapture::Attended(const AttentionCall& call) {
  CapturedLayer l;
  l.layer = call.layer, l.options = call.options, l.core = &call.core, l.form = call.form;
  l.x = call.x, l.mask = call.mask, l.handles = call.handles, l.y = call.y;
  if (call.read) l.read = *call.read;
  l.packed = call.packed, l.memory = call.memory;
  if (l.form == Form::kCross) {
    const auto source = sources_.find(call.layer);
    CISTERN_CHECK(source != sources_.end(),
                  "[analyze] a layer reads a state whose writing was not seen");
    const Source& of = source->second;
    if (std::equal(of.x.begin(), of.x.end(), call.x.begin(), call.x.end(),
                   [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); })) {
      // A layer that reads what it wrote of the same tokens, so that padding reads as well
      // (Stream::padding_reads). Its real tokens are those of the bidirectional form.
      l.form = Form::kBidirectional, l.mask = of.mask;
      l.y = ZeroPadding(l.y, of.mask);
    } else {
      l.written = of.x, l.written_mask = of.mask;
    }
  }
  layers_.push_back(std::move(l));
}

void LayerCapture::Written(const AttentionLayer& layer, Mechanism&,
                           const std::vector<at::Tensor>& x, const ops::Mask& mask) {
  sources_[&layer] = {x, mask};
}

std::vector<CapturedLayer> LayerCapture::Take() {
  std::vector<CapturedLayer> all = std::move(layers_);
  layers_.clear();
  sources_.clear();
  std::map<Form, int64_t> counts;
  for (CapturedLayer& l : all) {
    // Layers without attention (reuse's placement=skip) are not called; tied ones are their owner.
    int64_t& number = counts[l.form];
    l.number = number = std::max(number + 1, l.options.dims.layer + 1);
    l.name = StrCat("layer ", number);
  }
  if (counts.size() > 1) {
    for (CapturedLayer& l : all) l.name = FormName(l.form) + " " + l.name;
  }
  return all;
}

}  // namespace cistern

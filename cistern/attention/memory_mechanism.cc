#include "cistern/attention/memory_mechanism.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "cistern/base/error.h"
#include "cistern/ops/dropout.h"
#include "cistern/ops/exact_attention.h"
#include "cistern/ops/tensor_rows.h"

namespace cistern {
namespace {

using MemoryInit = MemoryMechanism::MemoryInit;

at::Tensor InitialSlots(MemoryInit init, int64_t slots, int64_t dim) {
  if (init == MemoryInit::kIdentity) return at::eye(slots, dim).unsqueeze(0);
  const at::Tensor memory = at::empty({1, slots, dim});
  if (init == MemoryInit::kNormal) return memory.normal_();
  if (init == MemoryInit::kXavier) {
    // torch's fans of [1,M,D]: M D in, D out.
    const double bound = std::sqrt(6.0 / (double(slots + 1) * double(dim)));
    return memory.uniform_(-bound, bound);
  }
  return memory.normal_(0, 1 / std::sqrt(double(dim)));  // kEmbedding, kScaled
}

// [M,D] in double, as fairseq has it: sines in the first half, cosines in the second, a zero where
// D is odd.
at::Tensor Sinusoid(int64_t slots, int64_t dim, at::Device device) {
  const at::TensorOptions options = at::TensorOptions().dtype(at::kDouble).device(device);
  const int64_t half = dim / 2;
  const at::Tensor rates =
      (at::arange(half, options) * (-std::log(10000.0) / double(std::max<int64_t>(1, half - 1))))
          .exp();
  const at::Tensor angles = at::arange(slots, options).unsqueeze(1) * rates;
  return at::cat({angles.sin(), angles.cos(), at::zeros({slots, dim - 2 * half}, options)}, 1);
}

}  // namespace

MemoryMechanism::MemoryMechanism(const MechanismInfo& info, const MemoryOptions& options,
                                 const AttentionDims& dims)
    : Mechanism(info, dims),
      slots_(options.slots),
      scaled_(options.init == MemoryInit::kScaled),
      sinusoid_(options.sinusoid),
      dropout_(options.dropout) {
  if (dims.memory_given) return;
  if (dims.first) {
    const auto& first = static_cast<const MemoryMechanism&>(*dims.first);
    memory_ = first.memory_, norm_weight_ = first.norm_weight_, norm_bias_ = first.norm_bias_;
    return;
  }
  AddWeight("memory", memory_, InitialSlots(options.init, options.slots, dims.dim),
            CoreWeight::Kind::kTrained);
  if (!options.norm) return;
  AddWeight("memory_norm.weight", norm_weight_, at::ones({dims.dim}), CoreWeight::Kind::kTrained);
  AddWeight("memory_norm.bias", norm_bias_, at::zeros({dims.dim}), CoreWeight::Kind::kTrained);
}

void MemoryMechanism::Describe(MemoryOptions& options, Fields& fields) {
  fields.Add("slots", &options.slots,
             "memory slots (M), each of the model's width and split into heads as a token is",
             {1, 65536});
  fields.Add(
      "init", &options.init,
      "initial memory: N(0,1) as P000's code (normal), N(0,1/D) as Luna's (embedding), the "
      "same times sqrt(D) where it is used as "
      "Luna's without learned positions (scaled), U(+-sqrt(6/((M+1)D))) (xavier), rows of the "
      "identity as the shared workspace's",
      {{MemoryInit::kNormal, "normal"},
       {MemoryInit::kEmbedding, "embedding"},
       {MemoryInit::kScaled, "scaled"},
       {MemoryInit::kXavier, "xavier"},
       {MemoryInit::kIdentity, "identity"}});
  fields.Add("sinusoid", &options.sinusoid,
             "sinusoids of the slots' numbers are added to the initial memory: Luna's without "
             "learned positions");
  fields.Add("norm", &options.norm,
             "a layer norm of the initial memory, after the sinusoids: Luna's encoders, whose "
             "embeddings have one too (embedding_norm)");
  fields.Add(
      "dropout", &options.dropout,
      "of the initial memory of each row in training, after both of these: Luna's encoders, as "
      "much as of the embeddings",
      {0.0, 0.95});
}

void MemoryMechanism::RequireNoneMasked(const ops::Mask& mask) const {
  CISTERN_CHECK(!mask.valid, "[", info().name,
                "] expected a mask of lengths; RealTokensFirst makes one of masked tokens");
}

at::Tensor MemoryMechanism::InitialMemoryOf(int64_t rows) const {
  if (dims().memory_given) return {};
  at::Tensor memory = scaled_ ? memory_ * std::sqrt(double(dims().dim)) : memory_;
  if (sinusoid_)
    memory = memory + Sinusoid(Slots(), dims().dim, memory.device()).to(memory.scalar_type());
  if (norm_weight_.defined())
    memory = at::layer_norm(memory, {dims().dim}, norm_weight_, norm_bias_);
  if (!is_training() || dropout_ <= 0) return memory;
  return ops::Dropout(memory.expand({rows, -1, -1}), dropout_, true);
}

at::Tensor MemoryMechanism::MemoryHeads(int64_t heads) const {
  return InitialMemory().unflatten(2, {heads > 0 ? heads : dims().heads, -1}).transpose(1, 2);
}

at::Tensor MemoryMechanism::DefinedMemory(int64_t heads) const {
  const int64_t slots = memory_.size(1), dim = memory_.size(2), half = dim / 2;
  const int64_t groups = heads > 0 ? heads : dims().heads, width = dim / groups;
  const at::Tensor given = memory_.detach().to(at::kDouble).contiguous();
  const auto number = given.accessor<double, 3>();
  const at::Tensor out = at::zeros({1, groups, slots, width}, at::kDouble);
  auto made = out.accessor<double, 4>();
  for (int64_t m = 0; m < slots; ++m) {
    std::vector<double> row;
    for (int64_t i = 0; i < dim; ++i) {
      double x = number[0][m][i];
      if (scaled_) x *= std::sqrt(double(dim));
      if (sinusoid_ && i < 2 * half) {
        const double rate =
            std::pow(10000.0, -double(i % half) / double(std::max<int64_t>(1, half - 1)));
        x += i < half ? std::sin(double(m) * rate) : std::cos(double(m) * rate);
      }
      row.push_back(x);
    }
    if (norm_weight_.defined()) {
      double mean = 0, variance = 0;
      for (const double x : row) mean += x / double(dim);
      for (const double x : row) variance += (x - mean) * (x - mean) / double(dim);
      for (int64_t i = 0; i < dim; ++i)
        row[size_t(i)] =
            (row[size_t(i)] - mean) / std::sqrt(variance + 1e-5) * norm_weight_[i].item<double>() +
            norm_bias_[i].item<double>();
    }
    for (int64_t i = 0; i < dim; ++i) made[0][i / width][m][i % width] = row[size_t(i)];
  }
  return out;
}

bool MemoryMechanism::TakesBFloat16(Form form) const {
  return form == Form::kBidirectional && ops::AttendsToBFloat16();
}

std::vector<at::Tensor> MemoryMechanism::InTypeOfTokens(std::vector<at::Tensor> packed,
                                                        const std::vector<at::Tensor>& x) {
  for (at::Tensor& t : packed) t = t.to(x[0].scalar_type());
  return packed;
}

size_t MemoryMechanism::Count(const std::function<bool(const Projection&)>& of) const {
  return size_t(std::count_if(Projections().begin(), Projections().end(), of));
}

at::Tensor MemoryMechanism::OfMemory(const std::vector<at::Tensor>& x, ProjectionId projection,
                                     int64_t batch) const {
  if (x.size() > projection) return x[projection].expand({batch, -1, -1, -1});
  const auto known =
      std::find_if(x.begin(), x.end(), [](const at::Tensor& t) { return t.defined(); });
  return MemoryHeads(Projections()[projection].heads)
      .to(ops::ComputeTypeOf(*known))
      .expand({batch, -1, -1, -1});
}

std::vector<at::Tensor> MemoryMechanism::PackedOf(const std::vector<at::Tensor>& x,
                                                  const at::Tensor& heads) const {
  const size_t tokens = Count([](const Projection& p) { return p.OfTokens(); });
  if (x.size() > tokens) return {x.begin() + int64_t(tokens), x.end()};
  return std::vector<at::Tensor>(Count([](const Projection& p) { return p.side == Side::kPacked; }),
                                 heads);
}

at::Tensor MemoryMechanism::DoExtend(const std::vector<at::Tensor>&, State&, const ops::Mask&) {
  RequireForm(info(), Form::kCausal);
  throw Error(StrCat("[", info().name, "] has no state to extend"));
}
void MemoryMechanism::DoWrite(const std::vector<at::Tensor>&, State&, const ops::Mask&) {
  RequireForm(info(), Form::kCross);
  throw Error(StrCat("[", info().name, "] has no state to write"));
}
at::Tensor MemoryMechanism::Read(const std::vector<at::Tensor>&, const State&) {
  RequireForm(info(), Form::kCross);
  throw Error(StrCat("[", info().name, "] has no state to read"));
}
at::Tensor MemoryMechanism::Packed(const State&) const {
  RequireForm(info(), Form::kCross);
  throw Error(StrCat("[", info().name, "] has no state that holds what was packed"));
}

void MemoryMechanism::GiveMemory(const std::vector<at::Tensor>&, const at::Tensor&, State&) const {
  throw Error(StrCat("[", info().name, "] has no state that keeps a given memory"));
}

at::Tensor MemoryMechanism::BidirectionalRows(const std::vector<at::Tensor>& x,
                                              const ops::Mask& mask) {
  const at::Tensor packed = Update(x, DoPack(x, mask).transpose(1, 2).flatten(2), mask);  // [B,M,D]
  const at::Tensor heads = packed.unflatten(2, {dims().heads, Width()}).transpose(1, 2);
  return DoUnpack(x, InTypeOfTokens(PackedOf({}, heads), x), mask);
}

}  // namespace cistern

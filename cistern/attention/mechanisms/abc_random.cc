#include "cistern/attention/mechanisms/abc_random.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

#include "cistern/base/random.h"

namespace cistern {

MechanismInfo abc_random_mechanism() {
  MechanismInfo i = InfoOf<AbcRandomMechanism>("abc_random");
  i.title = "ABC, random control (RD)";
  i.source = "P003 App. A.2; spec 2.14";
  i.summary =
      "Each token is added to one of n slots drawn at random; a query attends to the slots by "
      "softmax. The control that shows what "
      "learned writes are worth.";
  i.definition =
      "as abc_mlp, phi_s = e_i, i drawn from 1..n for each token; mean=true: over the count of "
      "the slot";
  i.forms = {Form::kBidirectional, Form::kCausal, Form::kCross};
  i.stochastic = true;
  i.positions = AddedPositions();
  i.slots = true;
  i.time = "O(T n d)";
  i.state = "n (2 d + 1) per head";
  i.cases = {Json{{"slots", 5}}, Json{{"slots", 5}, {"mean", true}},
             Json{{"slots", 5}, {"empty_slots", "take_part"}}};
  return i;
}

Fields AbcRandomMechanism::Describe(Options& options) {
  Fields f;
  DescribeMemory(f, options.memory);
  f.Add("mean", &options.mean, "slots hold the mean of what was written, in place of the sum");
  f.Add("seed", &options.seed,
        "of the draws in evaluation, which depend on the layer, the head and the position alone: "
        "the forms of one core draw alike, a cross-attention layer of a model draws its own. In "
        "training each row draws anew with each sequence",
        {0});
  return f;
}

AbcRandomMechanism::AbcRandomMechanism(const MechanismInfo& info, const Options& options,
                                       const AttentionDims& dims)
    : AbcMechanism(info, options.memory, Weights::kByPosition, dims),
      mean_(options.mean),
      seed_(options.seed) {
  draw_ = AddState("draw");
}

State AbcRandomMechanism::EmptyState(int64_t batch, const at::TensorOptions& options) const {
  State state = AbcMechanism::EmptyState(batch, options);
  const at::TensorOptions key = options.dtype(at::kLong).requires_grad(false);
  state[draw_] =
      is_training() && key.device() != at::kMeta
          ? at::randint(std::numeric_limits<int64_t>::max(), {batch}, key.device(at::kCPU))
                .to(key.device())
          : at::full({batch}, -1, key);
  return state;
}

namespace {

// The upper bits of 32 random ones: uniform up to n / 2^32.
int64_t SlotOf(uint64_t key, const AttentionDims& dims, int64_t head, int64_t position,
               int64_t slots) {
  const uint64_t stream = uint64_t(dims.layer * dims.heads + head) | uint64_t(dims.cross) << 63;
  const uint64_t bits = Philox(key, stream, uint64_t(position))[0];
  return int64_t((bits * uint64_t(slots)) >> 32);
}

}  // namespace

at::Tensor AbcRandomMechanism::LogWeights(const std::vector<at::Tensor>& x,
                                          const Piece& piece) const {
  const int64_t batch = x[k_].size(0), heads = x[k_].size(1), length = x[k_].size(2);
  if (piece.positions.is_meta())  // nothing is drawn, the shapes are right
    return at::zeros({batch, heads, length, slots()}, x[k_].options());
  const at::Tensor positions = piece.positions.to(at::kCPU).contiguous(),
                   keys = piece.state[draw_].to(at::kCPU).contiguous(),
                   drawn = at::empty({batch, heads, length}, positions.options());
  const int64_t *position = positions.const_data_ptr<int64_t>(),
                *key = keys.const_data_ptr<int64_t>();
  int64_t* out = drawn.mutable_data_ptr<int64_t>();
  for (int64_t b = 0; b < batch; ++b) {
    const uint64_t of_row = uint64_t(key[b] < 0 ? seed_ : key[b]);
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t t = 0; t < length; ++t)
        out[(b * heads + h) * length + t] =
            SlotOf(of_row, dims(), h, position[b * length + t], slots());
    }
  }
  return OneHotLogWeights(drawn.to(piece.positions.device()), slots(), x[k_].options());
}

at::Tensor AbcRandomMechanism::DefinedWeights(Form, const std::vector<at::Tensor>& seen) const {
  const int64_t heads = seen[k_].size(1), length = seen[k_].size(2);
  at::Tensor phi = at::zeros({heads, slots(), length}, seen[k_].options());
  // Slot floor(u n), u the first 32 random bits of (seed, layer and head, position) as a fraction.
  for (int64_t h = 0; h < heads; ++h) {
    uint64_t stream = uint64_t(dims().layer) * uint64_t(heads) + uint64_t(h);
    if (dims().cross) stream += uint64_t{1} << 63;
    for (int64_t t = 0; t < length; ++t) {
      const double u = double(Philox(uint64_t(seed_), stream, uint64_t(t))[0]) / 4294967296.0;
      phi[h][int64_t(std::floor(u * double(slots())))][t].fill_(1.0);
    }
  }
  if (mean_) phi = phi / phi.sum({2}, true).clamp_min(1.0);
  return phi.expand({seen[k_].size(0), -1, -1, -1});
}

}  // namespace cistern

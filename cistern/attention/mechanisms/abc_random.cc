#include "cistern/attention/mechanisms/abc_random.h"

#include <ATen/ATen.h>

#include "cistern/base/random.h"

namespace cistern {

const MechanismInfo& abc_random_mechanism() {
  static MechanismInfo info = [] {
    MechanismInfo i;
    i.name = "abc_random";
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
    i.positions = {"none", "learned", "sinusoidal"};
    i.time = "O(T n d)";
    i.state = "n (2 d + 1) per head";
    i.cases = {Json{{"slots", 5}}, Json{{"slots", 5}, {"mean", true}},
               Json{{"slots", 5}, {"empty_slots", "take_part"}}};
    return i;
  }();
  static const bool bound = (BindMechanism<AbcRandomMechanism>(info), true);
  (void)bound;
  return info;
}

Fields AbcRandomMechanism::Describe(Options& options) {
  Fields f;
  DescribeMemory(f, options.memory);
  f.Add("mean", &options.mean, "slots hold the mean of what was written, in place of the sum");
  f.Add("seed", &options.seed,
        "of the draws in evaluation, which depend on the layer, the head and the position alone: "
        "the forms of one core draw alike, a cross-attention layer of a model draws its own",
        {0});
  return f;
}

AbcRandomMechanism::AbcRandomMechanism(const MechanismInfo& info, const Options& options,
                                       const AttentionDims& dims)
    : AbcMechanism(info, options.memory, Weights::kByPosition, dims),
      mean_(options.mean),
      seed_(options.seed) {}

// The upper bits of 32 random ones: uniform up to n / 2^32.
int64_t AbcRandomMechanism::Draw(int64_t head, int64_t position) const {
  const uint64_t stream = uint64_t(dims().layer * dims().heads + head) | uint64_t(dims().cross)
                                                                             << 63;
  const uint64_t bits = Philox(uint64_t(seed_), stream, uint64_t(position))[0];
  return int64_t((bits * uint64_t(slots())) >> 32);
}

at::Tensor AbcRandomMechanism::LogWeights(const std::vector<at::Tensor>& x,
                                          const at::Tensor& positions) const {
  const int64_t batch = x[1].size(0), heads = x[1].size(1), length = x[1].size(2);
  at::Tensor slot;
  if (is_training()) {
    slot = at::randint(slots(), {batch, heads, length}, positions.options());
  } else {
    const at::Tensor at_cpu = positions.to(at::kCPU).contiguous(),
                     drawn = at::empty({batch, heads, length}, at_cpu.options());
    const int64_t* position = at_cpu.const_data_ptr<int64_t>();
    int64_t* out = drawn.mutable_data_ptr<int64_t>();
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t t = 0; t < length; ++t)
          out[(b * heads + h) * length + t] = Draw(h, position[b * length + t]);
      }
    }
    slot = drawn.to(positions.device());
  }
  return OneHotLogWeights(slot, slots(), x[1].options());
}

at::Tensor AbcRandomMechanism::DefinedWeights(Form, const std::vector<at::Tensor>& seen) const {
  const int64_t heads = seen[1].size(1), length = seen[1].size(2);
  at::Tensor phi = at::zeros({heads, slots(), length}, seen[1].options());
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t t = 0; t < length; ++t) phi[h][Draw(h, t)][t].fill_(1.0);
  }
  if (mean_) phi = phi / phi.sum({2}, true).clamp_min(1.0);
  return phi.expand({seen[1].size(0), -1, -1, -1});
}

}  // namespace cistern

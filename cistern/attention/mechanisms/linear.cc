#include "cistern/attention/mechanisms/linear.h"

#include <ATen/ATen.h>

#include <cmath>

#include "cistern/attention/definition.h"
#include "cistern/base/error.h"

namespace cistern {

MechanismInfo linear_mechanism() {
  MechanismInfo i = InfoOf<LinearMechanism>("linear");
  i.title = "Linear attention (ELU + 1)";
  i.source = "Katharopoulos et al. 2020 eq. 7; spec 2.3";
  i.summary =
      "A query weighs a key by the product of their features elu(x) + 1, so the sums over all "
      "keys fit in one d x d memory per head. No "
      "parameters of its own; cheap, and weaker than softmax at telling keys apart.";
  i.definition =
      "y_t = phi(q_t) S_t / (phi(q_t) . z_t + eps), S_t = sum_s phi(k_s) v_s^T, z_t = sum_s "
      "phi(k_s), phi = elu + 1";
  i.forms = {Form::kBidirectional, Form::kCausal, Form::kCross};
  i.positions = AddedPositions();
  i.time = "O(T d^2)";
  i.state = "d (d + 1) per head";
  i.cases = {Json::object(), Json{{"denominator", false}}, Json{{"eps", 1e-3}},
             Json{{"eps", 1e-6}, {"map_eps", 0.125}}};
  i.merges = true;
  return i;
}

Fields LinearMechanism::Describe(Options& options) {
  Fields f;
  f.Add("denominator", &options.denominator,
        "divide by the sum of the weights; false: by sqrt(max_length), which is another model");
  f.Add("eps", &options.eps, "added to the denominator", {1e-12, 1.0});
  f.Add("map_eps", &options.map_eps,
        "added to the features of queries and of keys: 1e-6 in P002's code, 0 elsewhere", {0, 1.0});
  return f;
}

LinearMechanism::LinearMechanism(const MechanismInfo& info, const Options& options,
                                 const AttentionDims& dims)
    : Mechanism(info, dims),
      denominator_{Denominator::Rule::kPlus, options.eps},
      map_eps_(options.map_eps) {
  RefuseAttentionDropout(info, dims);
  q_ = AddProjection({"q", Side::kQuery, dims.dim});
  k_ = AddProjection({"k", Side::kKey, dims.dim});
  v_ = AddProjection({"v", Side::kKey, dims.dim});
  memory_ = AddState("memory");
  if (!options.denominator) {
    if (options.eps != Options().eps)
      FailUsage("[linear] eps=", options.eps,
                " has no effect with denominator=false; leave it out");
    if (dims.max_length < 1)
      FailUsage(
          "[linear] denominator=false divides by sqrt(max_length); set a max_length of at least 1");
    denominator_ = {Denominator::Rule::kNone, 1 / std::sqrt(double(dims.max_length))};
  }
  const int64_t width = dims.dim / dims.heads;
  decoding_ = {{}, memory_, {}, {}, dims.heads, width, width};
  if (MayDecode(denominator_)) decoding_.decoding = AddState(kDecodingName);
}

State LinearMechanism::EmptyState(int64_t batch, const at::TensorOptions& options) const {
  State state = UndefinedState();
  state[memory_] =
      EmptyFeatureSums(batch, dims(), dims().dim / dims().heads, denominator_, options);
  return state;
}

at::Tensor LinearMechanism::DoExtend(const std::vector<at::Tensor>& x, State& state,
                                     const ops::Mask& mask) {
  return EluExtend(x[q_], x[k_], x[v_], decoding_.Of(state), mask, denominator_, map_eps_);
}

void LinearMechanism::DoWrite(const std::vector<at::Tensor>& x, State& state,
                              const ops::Mask& mask) {
  decoding_.End(state);
  EluWrite(x[k_], x[v_], state[memory_], mask, denominator_, map_eps_);
}

at::Tensor LinearMechanism::Read(const std::vector<at::Tensor>& x, const State& state) {
  return EluRead(x[q_], Settled(state)[memory_], denominator_, map_eps_);
}

at::Tensor LinearMechanism::Definition(Form form, const std::vector<at::Tensor>& queries,
                                       const std::vector<at::Tensor>& x) const {
  auto phi = [&](const at::Tensor& y) { return at::where(y > 0, y + 1, y.exp()) + map_eps_; };
  return EachQuery(form, queries, x, x[v_].size(3), [&](const auto& query, const auto& seen) {
    return WeightedValues(at::matmul(phi(query[q_]), phi(seen[k_]).transpose(2, 3)), seen[v_],
                          denominator_);
  });
}

State LinearMechanism::Merge(const State& first, const State& second) const {
  State whole = UndefinedState();
  whole[memory_] = SumOf(memory_, Settled(first), Settled(second));
  return whole;
}

LeastOperations LinearMechanism::Operations(Form form, int64_t tokens, int64_t) const {
  const double width = double(dims().dim / dims().heads);
  return MemoryOperations(form, tokens, width * double(dims().dim));
}

}  // namespace cistern

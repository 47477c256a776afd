#pragma once
// Exact softmax attention (spec 2.1): the baseline every other mechanism is compared with. Its
// state is the key-value cache, which grows. With relative positions (AttentionDims::relative) its
// scores have T5's bias, from a table that the first layer of a model owns.
#include <functional>

#include "cistern/attention/mechanism.h"
#include "cistern/attention/operations.h"
#include "cistern/ops/softmax_attention.h"

namespace cistern {

class SoftmaxMechanism : public Mechanism, public CountsOperations {
 public:
  enum class Scale { kSqrt, kUnit };  // scores are divided by sqrt(d), or by nothing
  struct Options {
    Scale scale = Scale::kSqrt;
  };
  static Fields Describe(Options& options);
  SoftmaxMechanism(const MechanismInfo& info, const Options& options, const AttentionDims& dims);

  // k [B,key_heads,capacity,d], v [B,H,capacity,d]; valid [B,capacity] bool, undefined while no row
  // was padded; count [B] int64: cache rows in use, on the CPU.
  State EmptyState(int64_t batch, const at::TensorOptions& options) const override;
  at::Tensor DoExtend(const std::vector<at::Tensor>& x, State& state,
                      const ops::Mask& mask) override;
  void DoWrite(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) override;
  at::Tensor Read(const std::vector<at::Tensor>& x, const State& state) override;
  at::Tensor Definition(Form form, const std::vector<at::Tensor>& queries,
                        const std::vector<at::Tensor>& x) const override;
  void Truncate(State& state, int64_t count) const override;
  int64_t StateBytes(int64_t batch, int64_t tokens, const at::TensorOptions& options,
                     bool decodes) const override;
  State Compact(const State& state) const override;
  void CheckState(const State& state) const override;
  // Leaves q and k to the next layer where that copies scores.
  at::Tensor DoAttend(Form form, const std::vector<at::Tensor>& x, State* state,
                      const ops::Mask& mask, Handles& handles) override;
  bool TakesBFloat16(Form) const override;
  LeastOperations Operations(Form form, int64_t tokens, int64_t before) const override;

 protected:
  // Projections q and k of `own_heads` heads, none where there are none, and v of all; the cache
  // has keys of `key_heads` heads, -1: as many. map_queries=false: the queries are the stream
  // itself.
  struct Setup {
    int64_t own_heads;
    bool rotary;
    int64_t key_heads = -1;
    Scale scale = Scale::kSqrt;
    bool map_queries = true;
  };
  SoftmaxMechanism(const MechanismInfo& info, const AttentionDims& dims, const Setup& setup);
  static void DescribeScale(Scale* scale, Fields& fields);
  double ScaleOption() const { return scale_ == Scale::kUnit ? 1 : 0; }  // of ops::SoftmaxOptions
  at::Tensor BidirectionalRows(const std::vector<at::Tensor>& x, const ops::Mask& mask) override;

  struct Own {
    at::Tensor q, k, v;  // [B,key_heads,T,d], [B,key_heads,S,d], [B,H,S,d]
  };
  // What becomes of q, k, v, whichever verb they come from: by default ops::SoftmaxAttention.
  using Compute = std::function<at::Tensor(const at::Tensor& q, const at::Tensor& k,
                                           const at::Tensor& v, const ops::SoftmaxOptions& options,
                                           const ops::Mask& mask, const at::Tensor& key_valid)>;
  void WriteBy(const at::Tensor& k, const at::Tensor& v, State& state, const ops::Mask& mask) const;
  at::Tensor ExtendBy(const Own& x, State& state, const ops::Mask& mask, const Compute& compute);
  at::Tensor ReadBy(const at::Tensor& q, const State& state, const Compute& compute);
  at::Tensor BidirectionalBy(const Own& x, const ops::Mask& mask, const Compute& compute);
  at::Tensor DefinitionBy(Form form, const at::Tensor& q, const Own& x) const;  // x.q is not used

  ProjectionId q_, k_, v_;

 private:
  double Dropout() const { return is_training() ? dims().dropout : 0.0; }

  int64_t Count(const State& state) const;  // rows of the cache in use
  // Relative positions: the bias of queries q [B,h,T,d], which stand at the keys from `before` on,
  // for `keys` keys; valid [B,keys] bool, where some are not to be seen. Undefined without.
  at::Tensor Bias(const at::Tensor& q, int64_t before, int64_t keys, const at::Tensor& valid,
                  bool causal) const;

  int64_t key_heads_;
  Scale scale_;
  at::Tensor relative_;  // [kRelativeBuckets,H], of the first layer; undefined without
  StateId keys_, values_, valid_, count_;
};

}  // namespace cistern

#pragma once
// ConvLuna (P000; spec 2.11): Luna whose packing reads keys and values through a filter along the
// tokens, one convolution of K taps for each head or a maximum of K tokens, and divides its logits
// by a learned temperature e^tau in place of sqrt(d). Values are the stream itself (W^V = I), and
// packing and unpacking share their maps. Bidirectional only.
//
// Windows of the filter: a convolution of stride 1 is centred, floor((K-1)/2) tokens to the left;
// else window j covers tokens jS to jS + K
// - 1. mask=tokens (ours): a row of n tokens gives ceil(n/S) filtered keys, whose windows begin at,
// or are centred on, a token; what is beyond the row is a zero to a convolution and is left out of
// a maximum: so padding changes nothing. mask=none: as published, padding is tokens like any other,
// and without the centred convolution a length of T gives floor((T-K)/S) + 1 keys.
#include "cistern/attention/memory_mechanism.h"

namespace cistern {

class ConvLunaMechanism : public MemoryMechanism {
 public:
  enum class FilterKind { kConv, kMaxpool };
  enum class Temperature { kLearn, kUnit, kSqrt };  // tau, at first 0; fixed at 1, at sqrt(d)
  enum class UnpackScale { kPaper, kUnit };         // 1/sqrt(d); 1, as its code has it
  enum class Values { kIdentity, kShared, kSeparate };
  enum class Masking { kTokens, kNone };
  struct Options : MemoryOptions {
    FilterKind filter = FilterKind::kConv;
    int64_t kernel = 4, stride = 1;  // K, S; K = 1 is no filter
    Temperature temperature = Temperature::kLearn;
    UnpackScale unpack_scale = UnpackScale::kPaper;
    Values values = Values::kIdentity;
    Masking mask = Masking::kTokens;
  };
  static Fields Describe(Options& options);
  ConvLunaMechanism(const MechanismInfo& info, const Options& options, const AttentionDims& dims);

  PackedOutput packed_output() const override { return PackedOutput::kShared; }
  bool SeesPadding() const override { return options_.mask == Masking::kNone; }
  at::Tensor DoPack(const std::vector<at::Tensor>& x, const ops::Mask& mask) override;
  at::Tensor DoUnpack(const std::vector<at::Tensor>& x, const std::vector<at::Tensor>& packed,
                      const ops::Mask& mask) override;
  at::Tensor Definition(Form form, const std::vector<at::Tensor>& queries,
                        const std::vector<at::Tensor>& x) const override;

 protected:
  bool LeavesPaddingOut(Form form) const override { return form == Form::kBidirectional; }
  static Fields DescribeAll(Options& options, bool filter, bool temperature);

 private:
  // [B,H,T,d] -> [B,H,T',d], or x itself where K = 1 and S = 1.
  at::Tensor Filter(const at::Tensor& x, const ops::Mask& mask) const;
  ops::Mask Filtered(const ops::Mask& mask) const;  // of what Filter gives
  bool Centred() const { return options_.filter == FilterKind::kConv && options_.stride == 1; }
  int64_t FilteredLength(int64_t length) const;

  Options options_;
  ProjectionId q_, k_, v_, memory_q_, packed_k_, packed_v_;
  at::Tensor filter_;  // filter.weight [H,K]
  at::Tensor tau_;     // scalar
};

// Its two ablations: no filter; the divisor fixed at sqrt(d).
class OnlyScalingMechanism : public ConvLunaMechanism {
 public:
  static Fields Describe(Options& options);
  OnlyScalingMechanism(const MechanismInfo& info, const Options& options,
                       const AttentionDims& dims);
};
class OnlyFilteringMechanism : public ConvLunaMechanism {
 public:
  static Fields Describe(Options& options);
  OnlyFilteringMechanism(const MechanismInfo& info, const Options& options,
                         const AttentionDims& dims);
};

}  // namespace cistern

#pragma once
// Which tokens of a batch are real and where documents begin: padding, masked tokens, packed rows.
// The mechanisms and the ops know lengths and starts; an arbitrary token mask becomes lengths by
// moving the real tokens of each row to its front (ToFront).
#include <ATen/core/Tensor.h>

#include <optional>

namespace cistern::ops {

// B rows of T tokens. What is not given says nothing: all tokens are real, of one document.
struct Mask {
  std::optional<at::Tensor> lengths;  // [B] int64: tokens t >= lengths[b] are padding
  // [B,T] bool: true where a document begins; nothing written before it is seen after it. In the
  // padding it says nothing.
  std::optional<at::Tensor> starts;
  // [B,T] bool: false where a token is as if it were not there (padding on the left, holes). A
  // start at such a token counts for the row's next real one. Mechanisms, layers and models take
  // it; ops do not.
  std::optional<at::Tensor> valid = std::nullopt;

  bool Padded() const { return lengths || valid; }
  explicit operator bool() const { return Padded() || starts; }

  // Of tokens [begin, begin + count).
  Mask Narrow(int64_t begin, int64_t count) const;
  Mask WithoutStarts() const { return {lengths, std::nullopt, valid}; }

  // [B,T] bool: true at real tokens; undefined where all of the T are.
  at::Tensor Real(int64_t length) const;
  at::Tensor Padding(int64_t length) const;  // false at real tokens; undefined where all are
  // [B,1,T,1]: Padding beside tensors [B,H,T,w].
  at::Tensor HeadsPadding(int64_t length) const;
  // [B,T] bool: the starts at real tokens; undefined without starts.
  at::Tensor RealStarts(int64_t length) const;
  // [B,T] int64: how many documents began in the piece up to each token; undefined without starts.
  at::Tensor Documents(int64_t length) const;

  // TORCH_CHECKs shapes and dtypes, and lengths on the CPU; op as in "[slot_read]".
  void Check(const char* op, const c10::SymInt& batch, const c10::SymInt& length) const;
};

// [B,T] bool: true where t < lengths[b].
at::Tensor Within(const at::Tensor& lengths, int64_t length);

// The tokens of a batch in other places.
class TokenMap {
 public:
  // from [B',T']: the token b T + t that stands in each place, B T for none; back [B,T] likewise.
  // `empty`: whether places that hold none occur, here or there. mask: of the tokens where they
  // are.
  TokenMap(at::Tensor from, at::Tensor back, bool empty, Mask mask)
      : from_(std::move(from)), back_(std::move(back)), empty_(empty), mask_(std::move(mask)) {}

  const Mask& mask() const { return mask_; }
  // x with T tokens in dimension `time` and the rows in dimension 0: the same with the tokens
  // moved; places that hold none are 0. An undefined x stays so. Differentiable.
  at::Tensor Move(const at::Tensor& x, int64_t time) const { return Pick(x, from_, time); }
  at::Tensor Back(const at::Tensor& x, int64_t time) const { return Pick(x, back_, time); }

 private:
  at::Tensor Pick(const at::Tensor& x, const at::Tensor& from, int64_t time) const;

  at::Tensor from_, back_;
  bool empty_;
  Mask mask_;
};

// The real tokens of each row first, in their order: mask() has lengths and starts in place of
// `valid`, which has to be given. What was masked stands behind them. O(T log T) a row.
TokenMap ToFront(const Mask& mask, int64_t length);

// Each document of a batch with starts in a row of its own, which begins at the row's front:
// mask() has lengths alone. Reads the mask on the CPU.
TokenMap EachDocument(const Mask& mask, int64_t length);

}  // namespace cistern::ops

#include "cistern/attention/mechanisms/nystrom.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

#include "cistern/base/error.h"
#include "cistern/ops/exact_attention.h"
#include "cistern/ops/impl.h"
#include "cistern/ops/softmax_attention.h"
#include "cistern/ops/tensor_rows.h"

namespace cistern {

MechanismInfo nystrom_mechanism() {
  MechanismInfo i = InfoOf<NystromMechanism>("nystrom");
  i.title = "Nystrom attention";
  i.source = "Xiong et al. 2021; P002 sec. 2.5; spec 2.8";
  i.summary =
      "Approximates softmax attention through m landmarks, means of segments of the queries and "
      "keys, and the pseudo-inverse of the "
      "landmarks' own attention. For encoders.";
  i.definition =
      "Y = softmax(Q Kl^T / sqrt(d)) softmax(Ql Kl^T / sqrt(d))^+ softmax(Ql K^T / sqrt(d)) V, "
      "Ql and Kl the means of m segments";
  i.forms = {Form::kBidirectional};
  i.refusals = {
      "causal: its landmarks are means over the whole sequence, so every output would depend on "
      "later tokens; use latte, abc_mlp or "
      "performer instead",
      "cross: its landmarks are means over segments of one sequence, and the method is not "
      "defined for two; use linformer, abc_mlp or "
      "softmax instead"};
  i.verbs = false;
  i.positions = AddedPositions();
  i.time = "O(T m d + m^3)";
  i.state = "none";
  i.cases = {Json{{"landmarks", 4}},
             Json{{"landmarks", 2}, {"inverse", "svd"}},
             Json{{"landmarks", 20}, {"iterations", 3}},
             Json{{"landmarks", 4}, {"conv", 5}},
             Json{{"landmarks", 20}, {"exact", true}},
             Json{{"landmarks", 4}, {"start", "batch"}},
             Json{{"landmarks", 4}, {"padding", "zeroes"}, {"conv", 3}},
             Json{{"landmarks", 4}, {"padding", "front"}},
             Json{{"landmarks", 4}, {"padding", "front_masked"}, {"conv", 3}}};
  // The inverse amplifies what rounding did before it: after 6 iterations its norm can reach 30.
  i.tolerance = 1e-5;
  return i;
}

Fields NystromMechanism::Describe(Options& options) {
  Fields f;
  f.Add(
      "landmarks", &options.landmarks,
      "landmarks of each head (m): means of the segments that a row's real tokens are cut into as "
      "evenly as goes, from token ceil(j n / m) on; a row of fewer tokens has one for each",
      {1, 65536});
  f.Add("inverse", &options.inverse,
        "pseudo-inverse of the landmarks' attention: iterative (matrix products alone), or svd (in "
        "double, slow for many landmarks; singular values below m 2^-23 of the largest count as "
        "zero, in float64 too)",
        {{Inverse::kIterative, "iterative"}, {Inverse::kSvd, "svd"}});
  f.Add("iterations", &options.iterations, "of the iterative inverse", {1, 100});
  f.Add("start", &options.start,
        "the iterative inverse begins at A^T over the largest column sum of each row and head "
        "(head), or of the whole batch as in Nystromformer's and lucidrains' code (batch): then a "
        "row's output depends on the other rows",
        {{Start::kHead, "head"}, {Start::kBatch, "batch"}});
  f.Add("padding", &options.padding,
        "tokens: segments of the row's own tokens. zeroes (Nystromformer's code): the batch's "
        "length, rounded up to a multiple of m, in m equal segments, in whose means padding is "
        "zeros; front (P002's code): the same, the zeros that round up in front; front_masked "
        "(lucidrains): as front, but means of the tokens alone, and no landmark where a segment "
        "has none. With all three, added padding changes results",
        {{Padding::kTokens, "tokens"},
         {Padding::kZeroes, "zeroes"},
         {Padding::kFront, "front"},
         {Padding::kFrontMasked, "front_masked"}});
  f.Add("exact", &options.exact,
        "softmax attention in place of the approximation for a row of at most m tokens (with "
        "another padding than tokens: where the batch's length is at most m), as Nystromformer's "
        "code "
        "for m = N");
  f.Add("conv", &options.conv,
        "taps of a convolution of the values over positions that is added, odd, one filter for "
        "each head: 0 none (P002), 33 (lucidrains), "
        "35 (Nystromformer's LRA)",
        {0, 1025});
  return f;
}

NystromMechanism::NystromMechanism(const MechanismInfo& info, const Options& options,
                                   const AttentionDims& dims)
    : Mechanism(info, dims), options_(options) {
  q_ = AddProjection({"q", Side::kQuery, dims.dim});
  k_ = AddProjection({"k", Side::kKey, dims.dim});
  v_ = AddProjection({"v", Side::kKey, dims.dim});
  if (options.start == Start::kBatch && options.inverse == Inverse::kSvd)
    FailUsage(
        "[nystrom] start=batch is where the iterative inverse begins; it goes with "
        "inverse=iterative");
  if (options.inverse == Inverse::kSvd && options.iterations != Options().iterations)
    FailUsage("[nystrom] iterations=", options.iterations,
              " has no effect with inverse=svd; leave it out");
  if (options.conv == 0) return;
  if (options.conv % 2 == 0)
    FailUsage("[nystrom] conv=", options.conv,
              " has no middle: its taps must be odd in number, or 0 for none");
  const double bound = 1 / std::sqrt(double(options.conv));
  AddWeight("filter", filter_, at::empty({dims.heads, 1, options.conv, 1}).uniform_(-bound, bound),
            CoreWeight::Kind::kTrained);
}

at::Tensor IterativePseudoInverse(const at::Tensor& A, int64_t iterations, bool one_start) {
  at::Tensor column = A.sum(-2).amax(-1);  // the rows' largest sum is 1
  if (one_start) column = column.amax().expand_as(column);
  const at::Tensor start =
      A.transpose(-2, -1) / column.masked_fill(column == 0, 1.0).unsqueeze(-1).unsqueeze(-1);
  // Z (13 - X (15 - X (7 - X))) / 4 with X = A Z, from the inside.
  const at::Tensor all = A.flatten(0, -3);
  at::Tensor Z = start.flatten(0, -3);
  for (int64_t i = 0; i < iterations; ++i) {
    const at::Tensor X = at::bmm(all, Z), inner = at::baddbmm(X, X, X, 7, -1),
                     outer = at::baddbmm(X, X, inner, 15, -1);
    Z = at::baddbmm(Z, Z, outer, 13.0 / 4, -1.0 / 4);
  }
  return Z.view_as(start);
}

at::Tensor SvdPseudoInverse(const at::Tensor& A) {
  // A matrix that is not finite would fail the whole batch: it is put aside.
  const at::Tensor broken = A.detach().isfinite().all(-1, true).all(-2, true).logical_not();
  const at::Tensor Z = at::linalg_pinv(A.masked_fill(broken, 0.0), std::optional<double>(),
                                       std::ldexp(double(A.size(-1)), -23), false);
  return Z + at::zeros_like(broken, Z.options().requires_grad(false))
                 .masked_fill(broken, std::numeric_limits<double>::quiet_NaN());
}

namespace {

// Which tokens the landmarks are means of.
struct Segments {
  int64_t count = 0, longest = 0;
  at::Tensor token;  // [B,count,longest]: their places; undefined where all segments are equally
                     // long and the batch has no padding
  at::Tensor size;   // [B,count]: tokens in them, 0: there is no such landmark
};

// Landmark j of a row of n tokens is the mean of those from ceil(j n / c) on, c = min(m, n).
Segments Cut(int64_t landmarks, int64_t length, const at::Tensor& like, const ops::Mask& mask) {
  Segments s;
  s.count = std::min(landmarks, length);
  s.longest = (length + s.count - 1) / s.count;
  if (!mask.lengths && s.longest * s.count == length) return s;
  const auto index = like.options().dtype(at::kLong).requires_grad(false);
  const at::Tensor n =
      (mask.lengths ? *mask.lengths : at::full({1}, length, index)).unsqueeze(1);  // [B or 1,1]
  const at::Tensor used = n.clamp_max(s.count), divisor = used.clamp_min(1),
                   last = (n - 1).clamp_min(0);
  const at::Tensor border = at::floor_divide(
      at::arange(s.count + 1, index).minimum(used) * n + divisor - 1, divisor);  // [B,count+1]
  const at::Tensor begin = border.narrow(1, 0, s.count);
  s.size = border.narrow(1, 1, s.count) - begin;
  s.token = (begin.unsqueeze(2) + at::arange(s.longest, index))
                .minimum(last.unsqueeze(2))
                .expand({like.size(0), -1, -1});
  return s;
}

// The same of m equal segments of a length that places in front make a multiple of m.
Segments CutInFront(int64_t landmarks, int64_t length, const at::Tensor& like,
                    const ops::Mask& mask) {
  Segments s;
  s.count = landmarks;
  s.longest = (length + landmarks - 1) / landmarks;
  const int64_t more = landmarks * s.longest - length;
  const auto index = like.options().dtype(at::kLong).requires_grad(false);
  const at::Tensor n =
      (mask.lengths ? *mask.lengths : at::full({1}, length, index)).unsqueeze(1);  // [B or 1,1]
  const at::Tensor border =
      (at::arange(landmarks + 1, index) * s.longest - more).clamp_min(0).minimum(n);
  const at::Tensor begin = border.narrow(1, 0, landmarks);
  s.size = border.narrow(1, 1, landmarks) - begin;
  s.token = (begin.unsqueeze(2) + at::arange(s.longest, index))
                .minimum((n - 1).clamp_min(0).unsqueeze(2))
                .expand({like.size(0), -1, -1});
  return s;
}

// [B,H,T,d] -> [B,H,count,d], zeros where there is no landmark.
at::Tensor Landmarks(const at::Tensor& x, const Segments& s) {
  const int64_t batch = x.size(0), heads = x.size(1), width = x.size(3);
  if (!s.token.defined()) return x.unflatten(2, {s.count, s.longest}).mean(3);
  const at::Tensor token =
      s.token.reshape({batch, 1, s.count * s.longest, 1}).expand({-1, heads, -1, width});
  const at::Tensor all = at::gather(x, 2, token).view({batch, heads, s.count, s.longest, width});
  const at::Tensor outside =
      at::arange(s.longest, s.size.options()) >= s.size.unsqueeze(2);  // [B or 1,count,longest]
  const at::Tensor sum = all.masked_fill(outside.unsqueeze(1).unsqueeze(-1), 0.0).sum(3);
  return sum / s.size.clamp_min(1).unsqueeze(1).unsqueeze(-1);
}

// The same of m equal segments of a length that zeros make a multiple of m.
at::Tensor LandmarksWithZeros(const at::Tensor& x, int64_t landmarks, bool in_front) {
  const int64_t longest = (x.size(2) + landmarks - 1) / landmarks,
                more = landmarks * longest - x.size(2);
  const at::Tensor whole =
      at::constant_pad_nd(x, {0, 0, in_front ? more : 0, in_front ? 0 : more}, 0);
  return whole.unflatten(2, {landmarks, longest}).mean(3);
}

}  // namespace

at::Tensor NystromMechanism::BidirectionalRows(const std::vector<at::Tensor>& x,
                                               const ops::Mask& mask) {
  const int64_t length = x[q_].size(2), width = x[q_].size(3);
  if (x[q_].numel() == 0) return at::zeros_like(x[v_]) + 0 * (x[q_] + x[k_] + x[v_]).sum();
  // The reference is in double as everywhere; so are singular values, because the inverse amplifies
  // rounding by up to 2^23 / m.
  const bool svd = options_.inverse == Inverse::kSvd,
             in_double = svd || ops::ActiveImpl() == ops::Impl::kReference;
  const auto type = in_double ? at::kDouble : ops::ComputeTypeOf(x[q_]);
  const auto given = [&](ProjectionId id) {
    return SeesPadding() ? ZeroPadding(x[id], mask) : x[id];
  };
  // Of tokens in bfloat16 the last product alone, F (A^+ B V), is of them: the inverse would
  // amplify what rounding does to its factors.
  const at::Tensor queries = in_double ? given(q_).to(type) : given(q_), q = queries.to(type),
                   k = given(k_).to(type), v = given(v_).to(type);
  const double scale = 1 / std::sqrt(double(width)), dropout = is_training() ? dims().dropout : 0;

  const bool of_tokens = options_.padding == Padding::kTokens,
             in_front = options_.padding == Padding::kFront,
             in_front_masked = options_.padding == Padding::kFrontMasked;
  const Segments segments = of_tokens         ? Cut(options_.landmarks, length, q, mask)
                            : in_front_masked ? CutInFront(options_.landmarks, length, q, mask)
                                              : Segments();
  const auto landmarks = [&](const at::Tensor& y) {
    return of_tokens || in_front_masked ? Landmarks(y, segments)
                                        : LandmarksWithZeros(y, options_.landmarks, in_front);
  };
  const at::Tensor ql = landmarks(q), kl = landmarks(k);
  at::Tensor scores = at::matmul(ql, kl.transpose(2, 3)) * scale, token,
             landmark;  // who is there: [B,1,1,T] and [B,1,1,count]
  if (segments.token.defined()) {
    landmark = (segments.size > 0).unsqueeze(1).unsqueeze(1);
    scores = scores.masked_fill(landmark.logical_not(), ops::LowestOf(scores.scalar_type()));
  }
  at::Tensor A = at::softmax(scores, -1);
  if (landmark.defined())
    A = A.masked_fill(landmark.logical_and(landmark.transpose(2, 3)).logical_not(), 0.0);
  if (mask.lengths) token = mask.Real(length).unsqueeze(1).unsqueeze(1);

  ops::SoftmaxOptions of_landmarks;
  of_landmarks.scale = scale;
  const at::Tensor gathered =
      ops::SoftmaxAttention(ql, k, v, of_landmarks, mask.WithoutStarts());  // B V
  const at::Tensor values = at::matmul(
      svd ? SvdPseudoInverse(A)
          : IterativePseudoInverse(A, options_.iterations, options_.start == Start::kBatch),
      gathered);
  const auto stored = queries.scalar_type();
  at::Tensor out =
      ops::MaskedAttention(queries, kl.to(stored), values.to(stored), landmark, scale, dropout);
  if (options_.exact && (length <= options_.landmarks || (of_tokens && mask.lengths))) {
    const int64_t most = std::min(options_.landmarks, length);  // tokens of a row that is exact
    const auto first = [&](const at::Tensor& y) { return y.narrow(2, 0, most); };
    const at::Tensor exact = at::constant_pad_nd(
        ops::MaskedAttention(first(q), first(k), first(v),
                             token.defined() ? token.narrow(3, 0, most) : token, scale, dropout),
        {0, 0, 0, length - most}, 0);
    out =
        length == most ? exact : at::where((*mask.lengths <= most).view({-1, 1, 1, 1}), exact, out);
  }
  if (filter_.defined()) {
    const at::Tensor seen =
        token.defined() ? v.masked_fill(token.logical_not().transpose(2, 3), 0.0) : v;
    // Padded here: with one head and a padding near the length oneDNN's gradient by the filter
    // reads and writes what is not its own (torch 2.15).
    const int64_t beside = options_.conv / 2;
    const at::Tensor padded = at::constant_pad_nd(seen, {0, 0, beside, beside}, 0);
    out =
        out + at::conv2d(padded, filter_.to(type), {}, 1, at::IntArrayRef({0, 0}), 1, dims().heads);
  }
  return out.to(x[q_].scalar_type());
}

bool NystromMechanism::TakesBFloat16(Form form) const {
  return form == Form::kBidirectional && options_.inverse == Inverse::kIterative &&
         ops::AttendsToBFloat16();
}

at::Tensor NystromMechanism::Definition(Form, const std::vector<at::Tensor>&,
                                        const std::vector<at::Tensor>& x) const {
  const bool zeroes = options_.padding != Padding::kTokens,
             masked = options_.padding == Padding::kFrontMasked;
  const int64_t length = x[q_].size(2), m = options_.landmarks,
                cut = zeroes ? m : std::min(m, length);
  if (x[q_].numel() == 0) return at::zeros_like(x[v_]);
  // Token t belongs to segment floor(t m / T); with zeros, which stand before or behind the tokens,
  // to segment floor(t / l), l the smallest with m l >= T, and the sum is divided by l.
  int64_t equal = 1;
  while (equal * m < length) ++equal;
  std::vector<std::vector<int64_t>> tokens(static_cast<size_t>(cut));
  for (int64_t t = 0; t < length; ++t) {
    const bool behind = masked || options_.padding == Padding::kFront;
    const int64_t place = behind ? t + equal * m - length : t;
    tokens[size_t(zeroes ? place / equal : t * cut / length)].push_back(t);
  }
  if (masked) std::erase_if(tokens, [](const auto& segment) { return segment.empty(); });
  const auto count = int64_t(tokens.size());
  auto means = [&](const at::Tensor& y) {
    std::vector<at::Tensor> all;
    for (const auto& segment : tokens) {
      const double size = double(zeroes && !masked ? equal : int64_t(segment.size()));
      all.push_back(y.index_select(2, at::tensor(segment, at::kLong)).sum({2}, true) / size);
    }
    return at::cat(all, 2);
  };
  const double root = std::pow(double(x[q_].size(3)), -0.25);
  const at::Tensor q = x[q_] * root, k = x[k_] * root, ql = means(q), kl = means(k);
  auto attention = [](const at::Tensor& a, const at::Tensor& b) {
    return at::softmax(at::matmul(a, b.transpose(2, 3)), 3);
  };
  const at::Tensor F = attention(q, kl), A = attention(ql, kl), B = attention(ql, k);
  at::Tensor inverse;
  if (options_.inverse == Inverse::kSvd) {
    const auto [u, s, vh] = at::linalg_svd(A, false);
    const at::Tensor small = s <= s.amax({2}, true) * (double(count) * std::ldexp(1, -23));
    inverse = at::matmul(vh.transpose(2, 3) * s.reciprocal().masked_fill(small, 0.0).unsqueeze(2),
                         u.transpose(2, 3));
  } else {
    inverse = A.transpose(2, 3) / A.sum({2}, true).amax({3}, true);
    if (options_.start == Start::kBatch) inverse = A.transpose(2, 3) / A.sum({2}).max();
    for (int64_t i = 0; i < options_.iterations; ++i) {
      const at::Tensor AZ = at::matmul(A, inverse), squared = at::matmul(AZ, AZ);
      inverse =
          (13 * inverse - at::matmul(inverse, 15 * AZ - 7 * squared + at::matmul(AZ, squared))) / 4;
    }
  }
  at::Tensor out = at::matmul(at::matmul(F, inverse), at::matmul(B, x[v_]));
  if (options_.exact && length <= m) out = at::matmul(attention(q, k), x[v_]);
  for (int64_t tap = 0; tap < options_.conv; ++tap) {
    const int64_t shift = tap - options_.conv / 2, begin = std::max<int64_t>(0, -shift),
                  kept = length - std::abs(shift);
    if (kept <= 0) continue;
    const at::Tensor weight = filter_.select(2, tap).to(at::kDouble);  // [H,1,1]
    out.narrow(2, begin, kept).add_(x[v_].narrow(2, begin + shift, kept) * weight);
  }
  return out;
}

}  // namespace cistern

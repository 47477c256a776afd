// A mechanism outside the tree: made from options, run whole, in pieces, token by token and as the
// last row of the bidirectional form. All must agree; the program prints by how much they differ
// and fails where that is more than rounding.
#include <ATen/ATen.h>

#include <algorithm>
#include <cstdio>

#include "cistern/base/error.h"
#include "mean.h"

namespace {

using cistern::State;

std::vector<at::Tensor> Narrow(const std::vector<at::Tensor>& x, int64_t begin, int64_t count) {
  std::vector<at::Tensor> piece;
  for (const at::Tensor& t : x) piece.push_back(t.narrow(2, begin, count));
  return piece;
}

// Extends from the empty state by `step` tokens at a time.
at::Tensor InPieces(cistern::Mechanism& mechanism, const std::vector<at::Tensor>& x, int64_t step) {
  State state = mechanism.EmptyState(x[0].size(0), x[0].options());
  std::vector<at::Tensor> out;
  for (int64_t t = 0; t < x[0].size(2); t += step) {
    out.push_back(mechanism.Extend(Narrow(x, t, std::min(step, x[0].size(2) - t)), state, {}));
  }
  return at::cat(out, 2);
}

double Difference(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

bool Agree(const cistern::Json& options) {
  const int64_t batch = 2, length = 100;
  cistern::AttentionDims dims;
  dims.dim = 64;
  dims.heads = 4;
  static const cistern::MechanismInfo info = cistern::mean_mechanism();
  const auto mechanism =
      info.Make(options, dims);  // an unknown option is an error with the nearest name
  std::vector<at::Tensor> x;     // projected tensors, in declared order
  for (const cistern::Projection& p : mechanism->Projections())
    x.push_back(at::randn({batch, dims.heads, length, p.width / dims.heads}, at::kDouble));

  const at::Tensor whole = InPieces(*mechanism, x, length);
  const double pieces = Difference(whole, InPieces(*mechanism, x, 33)),
               tokens = Difference(whole, InPieces(*mechanism, x, 1));
  const at::Tensor last = mechanism->Bidirectional(x, {}).narrow(2, length - 1, 1);
  const double prefix = Difference(whole.narrow(2, length - 1, 1), last);
  std::printf(
      "%-28s pieces of 33: %.1e   token by token: %.1e   bidirectional, last token: %.1e   state: "
      "%lld bytes\n",
      options.dump().c_str(), pieces, tokens, prefix,
      static_cast<long long>(mechanism->EmptyState(1, at::kFloat).Bytes()));
  return pieces < 1e-12 && tokens < 1e-12 && prefix < 1e-12;
}

}  // namespace

int main() {
  try {
    at::NoGradGuard no_grad;
    const bool gated = Agree({{"slots", 8}}), plain = Agree({{"slots", 1}, {"gated", false}});
    std::printf(gated && plain ? "all forms agree\n" : "the forms differ\n");
    return gated && plain ? 0 : 1;
  } catch (const cistern::Error& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}

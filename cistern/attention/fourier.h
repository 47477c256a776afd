#pragma once
// Fourier features of positions, which stand beside the tokens that a perceiver's latents attend to
// (Jaegle et al. 2021 sec. 3.2; spec 2.9). The block makes them (nn/latent_block); the core is
// given projections and knows nothing of them.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linspace.h>

#include <algorithm>
#include <cmath>

#include "cistern/io/fields.h"

namespace cistern {

struct FourierOptions {
  int64_t bands = 0;     // K; 0: none
  double max_freq = 10;  // mu, the largest resolution: frequencies go up to mu / 2

  int64_t Channels() const { return bands > 0 ? 2 * bands + 1 : 0; }
};

// The options fourier_bands and fourier_max_freq.
inline void DescribeFourier(Fields& fields, FourierOptions& options) {
  fields.Add("fourier_bands", &options.bands,
             "frequencies of the Fourier features of a token's position that stand beside it where "
             "the latents attend to it, as a sine and a cosine each and the position itself, for "
             "max_length positions in [-1,1]; 0: none",
             {0, 4096});
  fields.Add("fourier_max_freq", &options.max_freq,
             "the largest resolution of these: frequencies go in equal steps from 1 to half of it; "
             "10 in lucidrains",
             {2.0, 1e6});
}
// Those of a mechanism's options, already checked; the defaults where it has none.
inline FourierOptions FourierOf(const Json& options) {
  FourierOptions fourier;
  if (!options.is_object()) return fourier;
  fourier.bands = options.value("fourier_bands", fourier.bands);
  fourier.max_freq = options.value("fourier_max_freq", fourier.max_freq);
  return fourier;
}

// Positions [..] int64 of a text of up to `length` tokens -> [..,2K+1] in double: with x = 2 t /
// (length - 1) - 1 in [-1,1] and f_k from 1 to mu/2 in equal steps, sin(pi f_k x) for each k, then
// cos(pi f_k x), then x (lucidrains' order).
inline at::Tensor FourierFeatures(const at::Tensor& positions, int64_t length,
                                  const FourierOptions& options) {
  const at::Tensor x =
      positions.to(at::kDouble) * (2.0 / double(std::max<int64_t>(1, length - 1))) - 1;
  const at::Tensor angles =
      x.unsqueeze(-1) * at::linspace(1, options.max_freq / 2, options.bands, x.options()) * M_PI;
  return at::cat({angles.sin(), angles.cos(), x.unsqueeze(-1)}, -1);
}

}  // namespace cistern

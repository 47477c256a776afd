#include "cistern/models/row_encoder.h"

#include <ATen/ATen.h>

#include "cistern/base/error.h"

namespace cistern {

at::Tensor RowEncoder::Forward(const at::Tensor& embedded, const ops::Mask& mask,
                               const at::Tensor& positions) const {
  const char* what = "[rows to classify]";
  CISTERN_CHECK(embedded.dim() == 3 && mask.lengths && !mask.starts, what,
                " expected one document a row, with lengths");
  CheckMask(what, mask, embedded.size(0), embedded.size(1));
  if (mask.valid) {
    const ops::TokenMap front = trunk_.RealTokensFirst(mask);
    return Forward(front.Move(embedded, 1), front.mask(), front.Move(positions, 1));
  }
  const at::Tensor& lengths = *mask.lengths;
  const at::Tensor x = pooling_.With(embedded);
  at::Tensor places = positions;
  if (!places.defined()) {
    places = RowPositions(x.size(1), lengths);
  } else {
    CISTERN_CHECK(places.sizes() == embedded.sizes().slice(0, 2), what,
                  " expected positions of shape [B,T], got ", places.sizes());
    trunk_.RequireGivenPositions();
    if (pooling_.extra() > 0)  // the learned token comes first
      places = at::cat({at::zeros_like(places.narrow(1, 0, 1)), places + pooling_.extra()}, 1);
  }
  const Stream stream = trunk_.Enter(x, {lengths + pooling_.extra(), {}}, places);
  return pooling_.Forward(trunk_, trunk_.Bidirectional(stream), lengths);
}

}  // namespace cistern

#include "cistern/attention/token_positions.h"

#include <ATen/ATen.h>

namespace cistern {

at::Tensor PiecePositions(const at::Tensor& before, int64_t length, const ops::Mask& mask) {
  const at::Tensor t = at::arange(length, before.options());
  const at::Tensor running =
      before.unsqueeze(1) + t.unsqueeze(0);  // [B,T], as if no document began in the piece
  if (!mask.starts || length == 0) return running;
  // Since the last start at or before t: t - that start; before the first start of the piece: go on
  // counting.
  const at::Tensor last = std::get<0>(
      at::cummax(at::where(*mask.starts, t.unsqueeze(0), at::full({}, -1, t.options())), 1));
  return at::where(last >= 0, t.unsqueeze(0) - last, running);
}

at::Tensor PositionsAfter(const at::Tensor& before, const at::Tensor& positions,
                          const ops::Mask& mask) {
  if (positions.size(1) == 0) return before;
  if (!mask.lengths) return positions.select(1, positions.size(1) - 1) + 1;
  const at::Tensor last = (*mask.lengths - 1).clamp_min(0).unsqueeze(1);
  return at::where(*mask.lengths > 0, positions.gather(1, last).squeeze(1) + 1, before);
}

at::Tensor TablePositions(const at::Tensor& before, int64_t length, const ops::Mask& mask) {
  const at::Tensor positions = PiecePositions(before, length, mask);
  if (!mask.lengths || length == 0) return positions;
  const at::Tensor last = (PositionsAfter(before, positions, mask) - 1).clamp_min(0),
                   t = at::arange(length, before.options());
  return at::where(t.unsqueeze(0) < mask.lengths->unsqueeze(1), positions, last.unsqueeze(1));
}

}  // namespace cistern

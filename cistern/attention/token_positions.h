#pragma once
// Where each token of a piece stands in its document, from the tokens each row has seen before and
// the piece's mask. Models count them for position embeddings, mechanisms whose weights depend on
// the position keep `count` [B] in their state.
#include "cistern/ops/mask.h"

namespace cistern {

// before [B] int64: tokens of the document that each row is in (or [1] for all rows) -> [B,T] (or
// [1,T]): position of each token, 0 at a document's first. Padding counts on.
at::Tensor PiecePositions(const at::Tensor& before, int64_t length, const ops::Mask& mask);

// The same for a table of positions: padding has that of the last token before it, or 0.
at::Tensor TablePositions(const at::Tensor& before, int64_t length, const ops::Mask& mask);

// The count [B] after the piece: one past each row's last token, `before` where the row has none.
at::Tensor PositionsAfter(const at::Tensor& before, const at::Tensor& positions,
                          const ops::Mask& mask);

}  // namespace cistern

#include "cistern/models/token_predictor.h"

#include "cistern/base/error.h"

namespace cistern {

void TokenPredictor::CheckTokens(const ModelConfig& config) {
  const LayerStack stack = config.Stack(Form::kBidirectional);
  for (int64_t layer = 0; layer < stack.layers(); ++layer) {
    if (FindMechanism(stack.Mechanism(layer)).MakesLatents()) {
      FailUsage("a model of kind ", config.kind, " predicts each token, but after ",
                stack.Mechanism(layer),
                " there are only latents; use another mechanism, such as latte");
    }
  }
}

void TokenPredictor::CheckInputs(const at::Tensor& ids, const ops::Mask& mask) const {
  CISTERN_CHECK(ids.dim() == 2, "[", info().name, "] expected ids of shape [B,T], got ", ids.dim(),
                " dimensions");
  CISTERN_CHECK(!mask.starts, "[", info().name, "] a row is one document, without starts");
  CheckMask(StrCat("[", info().name, "]"), mask, ids.size(0), ids.size(1));
}

}  // namespace cistern

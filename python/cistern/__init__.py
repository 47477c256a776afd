"""Linear-time attention with bounded memory, for PyTorch: Cistern's C++ kernels as functions and
modules.

    import torch, cistern
    layer = cistern.nn.Attention("latte", dim=512, heads=8)  # causal; any of cistern.mechanisms()
    y = layer(torch.randn(2, 4096, 512))

- cistern.functional: the cores on projected tensors, such as scaled_dot_product_attention's
- cistern.nn: Attention, Core, MultiheadAttention
- cistern.load: a model folder of the C++ program
- cistern.state: detach, reorder, state_bytes

torch.func.grad and torch.func.vmap do not go through operators whose autograd is in C++: use
torch.autograd.grad.
"""

from cistern import functional, nn, state
from cistern._library import VERSION as __version__
from cistern._library import UsageError, mechanisms
from cistern.models import (DecoderLM, EncoderClassifier, EncoderDecoder, Forecaster, MaskedLM,
                            SpanPredictor, TwoTower, load)

__all__ = [
    "DecoderLM",
    "EncoderClassifier",
    "EncoderDecoder",
    "Forecaster",
    "MaskedLM",
    "SpanPredictor",
    "TwoTower",
    "UsageError",
    "__version__",
    "functional",
    "load",
    "mechanisms",
    "nn",
    "state",
]

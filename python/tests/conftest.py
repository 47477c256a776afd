import pytest
import torch

import cistern


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    torch.compiler.reset()


# Sizes that every mechanism accepts, small enough to be quick. The options are those of the
# conformance suite's first case.
DIM, HEADS, LENGTH = 16, 2, 12
MAX_LENGTH = 64


def forms():
    """(mechanism, options, form) for the first case of every mechanism and every form of it."""
    return [
        pytest.param(name, info["cases"][0], form, id=f"{name}-{form}")
        for name, info in cistern.mechanisms().items()
        for form in info["forms"]
    ]


def memories():
    """(mechanism, options) for every case of every mechanism that packs tokens into a memory."""
    return [
        pytest.param(name, options, id=f"{name}-{i}")
        for name, info in cistern.mechanisms().items()
        if info["memory"] in ("fixed", "stream", "replaced") and "bidirectional" in info["forms"]
        for i, options in enumerate(info["cases"])
    ]


def make_core(name, options, form, **kw):
    return cistern.nn.Core(name, DIM, HEADS, form=form, max_length=MAX_LENGTH, options=options,
                           **kw)


def make_layer(name, options, form, **kw):
    return cistern.nn.Attention(name, DIM, HEADS, form=form, max_length=MAX_LENGTH, options=options,
                                **kw)


def handles(layer, x, source=None):
    """What reuse attention takes from the layer before, as arguments: here its inputs, split into
    heads."""
    if layer.copied == 0:
        return {}
    return {
        "handles":
        tuple(
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in (x, x if source is None else source))
    }


def tensors(core, batch=2, length=LENGTH, source=None, dtype=torch.float32, requires_grad=False):
    """Inputs of a core; those of the key side are `source` long in the cross form."""
    out = []
    for p in core.projections:
        rows = length if source is None or p["side"] == "query" else source
        x = torch.randn(batch, p["heads"], rows, p["width"] // p["heads"], dtype=dtype)
        out.append(x.requires_grad_(requires_grad))
    return out


def error(x, y):
    """Relative RMS difference."""
    x, y = x.detach(), y.detach()
    return float((x - y).double().norm() / y.double().norm().clamp_min(1e-30))

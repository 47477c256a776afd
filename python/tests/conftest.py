import pytest
import torch

import cistern


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    torch.compiler.reset()


# Sizes that every mechanism accepts, small enough to be quick. The options are those of the conformance suite's first case.
DIM, HEADS, LENGTH = 16, 2, 12
MAX_LENGTH = 64


def refusal(name, make):
    """Why a mechanism cannot be made, or None."""
    info = cistern.mechanisms()[name]
    if "heads" in info["options"]:  # reuse: its K is no head of a layer
        return "not in the Python package yet: its options have the names of a layer's arguments"
    try:
        make(name, info["cases"][0], info["forms"][0])
    except cistern.UsageError as e:
        return str(e)


def forms(make=None):
    """(mechanism, options, form) for the first case of every mechanism that Python has and every form of it."""
    return [
        pytest.param(name, info["cases"][0], form, id=f"{name}-{form}")
        for name, info in cistern.mechanisms().items()
        for form in info["forms"]
        if refusal(name, make or make_core) is None
    ]


def make_core(name, options, form, **kw):
    return cistern.nn.Core(name, DIM, HEADS, form=form, max_length=MAX_LENGTH, **options, **kw)


def make_layer(name, options, form, **kw):
    return cistern.nn.Attention(name, DIM, HEADS, form=form, max_length=MAX_LENGTH, **options, **kw)


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

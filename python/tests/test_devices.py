"""Layers on a GPU, where this machine has one: the numbers of the CPU, forward and backward."""

import copy

import pytest
import torch
from conftest import DIM, LENGTH, error, forms, handles, make_layer

import cistern

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

LAYERS = forms()
CAUSAL = [p for p in LAYERS if p.values[2] == "causal"]


def call(layer, form, x, **kw):
    source = x[:, :7] if form == "cross" else None
    return layer(x, source, **handles(layer, x, source), **kw)


@pytest.mark.parametrize("lengths", [None, [LENGTH, 5]], ids=["whole", "padded"])
@pytest.mark.parametrize("name, options, form", LAYERS)
def test_as_on_the_cpu(name, options, form, lengths):
    here = make_layer(name, options, form).eval().double()
    there = copy.deepcopy(here).cuda()
    if form == "cross" or lengths is None:
        kw = kw_there = {}
    else:
        kw = {"lengths": torch.tensor(lengths)}
        kw_there = {"lengths": torch.tensor(lengths).cuda()}
    x = torch.randn(2, LENGTH, DIM, dtype=torch.float64, requires_grad=True)
    x_there = x.detach().cuda().requires_grad_()
    y, y_there = call(here, form, x, **kw), call(there, form, x_there, **kw_there)
    assert y_there.is_cuda
    assert error(y_there.cpu(), y) < 1e-10
    y.square().sum().backward()
    y_there.square().sum().backward()
    assert error(x_there.grad.cpu(), x.grad) < 1e-9
    for p, q in zip(here.parameters(), there.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            assert (q.grad.cpu() - p.grad).norm() < 1e-9 * max(float(p.grad.norm()), 1e-3)


@pytest.mark.parametrize("name, options, form", CAUSAL)
def test_token_by_token(name, options, form):
    layer = make_layer(name, options, form).eval().cuda()
    if layer.copied:
        pytest.skip("its scores come from the layer before")
    x = torch.randn(2, LENGTH, DIM, device="cuda")
    with torch.no_grad():
        state, steps = layer.empty_state(2), []
        for t in range(LENGTH):
            y, state = layer.extend(x[:, t:t + 1], state)
            steps.append(y)
        assert error(torch.cat(steps, 1), layer(x)) < 1e-4


@pytest.mark.parametrize("name", ["latte", "abc_mlp", "linear", "softmax"])
def test_autocast_and_compile(name):
    layer = cistern.nn.Attention(name, 32, 2).cuda()
    x = torch.randn(2, 40, 32, device="cuda")
    want = layer(x)
    with torch.autocast("cuda", torch.bfloat16):
        assert error(layer(x).float(), want) < 3e-2
    assert error(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), want) < 1e-5

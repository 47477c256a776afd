"""The primitives and the cores as torch operators: schema, fake tensors, autograd, gradients."""

import cistern
import pytest
import torch
from conftest import forms, make_core, memories, tensors

B, H, T, N, D = 2, 2, 7, 3, 4


def rand(*shape, grad=True):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


def masks():
    starts = torch.zeros(B, T, dtype=torch.bool)
    starts[0, 4] = True
    return [(None, None), (starts, None), (None, torch.tensor([T, 3])),
            (starts, torch.tensor([6, T]))]


def slot_inputs(name):
    a = rand(B, H, T, N) if name == "slot_read" else rand(B, H, T, D)
    return [a, rand(B, H, T, N), rand(B, H, T, D), rand(B, H, N, D), rand(B, H, N)]


def sum_inputs(name):
    a = rand(B, H, T, N) if name == "sum_read" else rand(B, H, T, D)
    return [a, rand(B, H, T, N), rand(B, H, T, D), rand(B, H, N, D)]


def cases():
    for starts, lengths in masks():
        for name in ("slot_read", "slot_match"):
            for want_z in (False, True):
                yield name, slot_inputs(name), (starts, lengths, want_z)
        for name in ("sum_read", "sum_match"):
            for gate in (None, -rand(B, H, T, N, grad=False).abs(),
                         -rand(B, H, T, 1, grad=False).abs()):
                extra = [] if gate is None else [gate.requires_grad_()]
                yield name, sum_inputs(name), (*(extra or [None]), starts, lengths)
        yield "short_conv", [rand(B, T, D), rand(D, 3), rand(B, 2, D)], (starts, lengths)
        if starts is None:
            yield "short_conv", [rand(B, T, D), rand(D, 3), rand(B, 2, D)], (None, lengths, 1)


CASES = list(cases())


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: f"{CASES[i][0]}-{i}")
def test_primitive(index):
    name, inputs, rest = CASES[index]
    op = getattr(torch.ops.cistern, name).default
    torch.library.opcheck(op, (*inputs, *rest))
    differentiable = [
        *inputs, *(r for r in rest if isinstance(r, torch.Tensor) and r.requires_grad)
    ]

    def f(*x):
        own = iter(x[len(inputs) :])
        out = op(
            *x[:len(inputs)],
            *(next(own) if isinstance(r, torch.Tensor) and r.requires_grad else r for r in rest))
        return tuple(o for o in out if o.numel() > 0)

    assert torch.autograd.gradcheck(f, differentiable)


def check_op(core, verb, x, lengths=None, state=(), keep=False):
    """opcheck, with the inputs that the verb does not use without a gradient: None in eager code is
    zeros in a graph."""
    op = torch.ops.cistern.attend.default
    rest = (list(state), lengths, None, core.spec, verb, False, keep)
    trained = [t for t in (*x, *core.weights()) if t.requires_grad]
    found = torch.autograd.grad(op(x, core.weights(), *rest)[0].sum(), trained, allow_unused=True)
    unused = {id(t) for t, g in zip(trained, found) if g is None}
    x, weights = ([t.detach() if id(t) in unused else t for t in list]
                  for list in (x, core.weights()))
    torch.library.opcheck(op, (x, weights, *rest))


@pytest.mark.parametrize("name, options, form", forms())
def test_attend(name, options, form):
    core = make_core(name, options, form).double().eval()
    x = tensors(core, source=5 if form == "cross" else None, dtype=torch.float64,
                requires_grad=True)
    verb = "extend" if form == "causal" else form
    check_op(core, verb, x, torch.tensor([5, 3]))
    if form == "causal" and cistern.mechanisms()[name]["bounded"]:
        state = list(core.empty_state(2, x[0]).values())
        check_op(core, verb, x, state=state, keep=True)


def memory_verbs(core, batch=2, length=T):
    """(verb, inputs) of each part of a memory stream, the memory's tensors among them."""
    x = tensors(core, batch=batch, length=length, dtype=torch.float64, requires_grad=True)
    rows = core.initial_memory().shape[1]

    def of(heads, batch):
        return [
            torch.randn(batch, h, rows, core.dim // h, dtype=torch.float64, requires_grad=True)
            for h in heads
        ]

    queries, keys = ([t for t, p in zip(x, core.projections) if p["side"] == side]
                     for side in ("query", "key"))
    slots = of([p["heads"] for p in core.memory_projections], 1)
    yield "pack", [*keys, *slots]
    yield "update", [*keys, *slots, *of([core.heads], batch)]
    yield "unpack", [*queries, *of([p["heads"] for p in core.packed_projections], batch)]


@pytest.mark.parametrize("name, options", memories())
def test_memory(name, options):
    core = make_core(name, options, "bidirectional").double().eval()
    torch.nn.init.normal_(core.memory)
    for verb, x in memory_verbs(core):
        check_op(core, verb, x, torch.tensor([5, 3]))
        check_traced_gradient(core, verb, x)
    weights = [w.detach().requires_grad_() for w in core.weights()]
    for verb, x in memory_verbs(core, batch=1, length=4):

        def f(*given):
            parts = [list(given[: len(x)]), list(given[len(x) :])]
            return torch.ops.cistern.attend(*parts, [], None, None, core.spec, verb, False,
                                            False)[0]

        assert torch.autograd.gradcheck(f, (*x, *weights), fast_mode=True)


def check_traced_gradient(core, verb, x):
    """attend_backward runs the forward again; its gradients are those of eager autograd through the
    primitives."""
    rest = ([], torch.tensor([5, 3]), None, core.spec, verb, False, False)
    y, _ = torch.ops.cistern.attend(x, core.weights(), *rest)
    g = torch.randn_like(y)
    wanted = [*x, *(w for w in core.weights() if w.requires_grad)]
    eager = torch.autograd.grad(y, wanted, g, allow_unused=True, materialize_grads=True)
    args = ([t.detach() for t in x], [w.detach() for w in core.weights()], *rest)
    again = torch.ops.cistern.attend_backward([g], *args)
    trained = [again[len(x) + i] for i, w in enumerate(core.weights()) if w.requires_grad]
    for a, b in zip(eager, [*again[: len(x)], *trained], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name, options, form", forms())
def test_traced_gradient_is_the_eager_one(name, options, form):
    core = make_core(name, options, form).double().eval()
    x = tensors(core, source=5 if form == "cross" else None, dtype=torch.float64,
                requires_grad=True)
    check_traced_gradient(core, "extend" if form == "causal" else form, x)

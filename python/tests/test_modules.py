"""Modules under torch's tools: compile, export, deepcopy, state_dict, pickle, autocast; the drop-in
for torch.nn.MultiheadAttention."""

import copy
import io
import pickle

import cistern
import cistern.functional as CF
import pytest
import torch
from conftest import DIM, HEADS, LENGTH, error, forms, handles, make_core, make_layer, memories
from torch import nn

LAYERS = forms()
CAUSAL = [p for p in LAYERS if p.values[2] == "causal"]
MEMORIES = {p.values[0] for p in memories()}
BOUNDED = [p for p in CAUSAL if cistern.mechanisms()[p.values[0]]["bounded"]]


def call(layer, form, x):
    source = x[:, :7] if form == "cross" else None
    module = getattr(layer, "_orig_mod", layer)  # of torch.compile
    return layer(x, source, **handles(module, x, source))


@pytest.mark.parametrize("name, options, form", LAYERS)
def test_compile(name, options, form):
    # of no other test: the library meets it in a graph first
    layer = make_layer(name, options, form, layer=9)
    if name == "performer":
        layer.eval()  # redraws its features in training
    if name in ("rfa", "rfa_gate", "abc_random"):
        layer.eval()  # draw in training: a graph draws other numbers than eager code
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, LENGTH, DIM)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    call(compiled, form, x)
    call(layer, form, a).square().sum().backward()
    eager = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    layer.zero_grad()
    y = call(compiled, form, b)
    y.square().sum().backward()
    assert error(y, call(layer, form, a)) < 1e-5
    assert error(b.grad, a.grad) < 1e-4
    largest = max(g.norm() for g in eager)  # others may be rounding alone
    for p, g in zip([p for p in layer.parameters() if p.grad is not None], eager, strict=True):
        assert (p.grad - g).norm() < 1e-4 * max(g.norm(), 1e-3 * largest)


@pytest.mark.parametrize("name", ["latte", "linear_attention", "softmax_attention"])
def test_compile_functions(name):
    f = torch.compile(lambda q, k, v: getattr(CF, name)(q, k, v, causal=True), fullgraph=True,
                      backend="aot_eager")
    q, k, v = (torch.randn(2, 3, 9, 8) for _ in range(3))
    assert error(f(q, k, v), getattr(CF, name)(q, k, v, causal=True)) < 1e-6
    g = torch.compile(lambda q, k, v, s: CF.latte(q, k, v, causal=True, state=s), fullgraph=True,
                      backend="aot_eager")
    _, state = CF.latte(q, k, v, causal=True, return_state=True)
    assert error(g(q, k, v, state)[0], CF.latte(q, k, v, causal=True, state=state)[0]) < 1e-6


def heads_of(heads=2, width=8, length=9):
    return [torch.randn(2, heads, length, width) for _ in range(3)]


# Functions, and calls that differ in what a graph holds fixed.
OTHERS = {
    "width": ("latte", [heads_of(), heads_of(width=4), heads_of(width=16, length=11)], {}),
    "heads": ("softmax", [heads_of(), heads_of(heads=3), heads_of(heads=4)], {}),
    "slots": ("abc_mlp", [[*heads_of(), torch.randn(2, 2, 9, n)] for n in (3, 5, 6)], {}),
    "whole number": ("window", [heads_of()] * 3, {"window": (2, 4, 5)}),
    "fraction": ("rfa", [heads_of()] * 3, {"tau": (0.5, 1.25, 2.0)}),
    "dropout": ("softmax", [heads_of()] * 3, {"dropout": (0.0, 0.25, 0.5)}),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("what", OTHERS)
def test_compile_functions_for_other_sizes_and_options(what, dynamic):
    name, calls, options = OTHERS[what]
    core = cistern.nn.Core("rfa", DIM, HEADS)
    weights = dict(zip(core._weights, core.weights())) if name == "rfa" else None

    def run(*x, **option):
        return getattr(CF, name)(*x, causal=True, weights=weights, **option)

    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for i, x in enumerate(calls):
        option = {key: values[i] for key, values in options.items()}
        dropped = option.pop("dropout", 0.0)
        y = compiled(*x, dropout=dropped, **option)
        assert (error(y, run(*x, **option)) < 1e-6) == (dropped == 0)


def test_compile_with_inductor_and_dynamic_length():
    layer = cistern.nn.Attention("latte", DIM, HEADS, conv=3)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for length in (8, 12, 20):
        x = torch.randn(2, length, DIM, requires_grad=True)
        y = compiled(x)
        assert error(y, layer(x)) < 1e-5
        y.sum().backward()


def test_inductor_takes_every_mechanism():
    """One graph, so that the compiler runs once."""
    chosen = {p.values[0]: p.values for p in LAYERS}
    layers = [(make_layer(*values).eval(), values[2]) for values in chosen.values()]
    assert len(layers) > 20

    def run(x):
        return [call(layer, form, x) for layer, form in layers]

    x = torch.randn(2, LENGTH, DIM)
    with torch.no_grad():
        for (layer, _), y, wanted in zip(layers,
                                         torch.compile(run, fullgraph=True)(x), run(x),
                                         strict=True):
            assert error(y, wanted) < 1e-5, layer


@pytest.mark.parametrize("name, options, form", BOUNDED)
def test_compile_extend(name, options, form):
    layer = make_layer(name, options, form, conv=3).eval()
    step = torch.compile(lambda x, state: layer.extend(x, state), fullgraph=True,
                         backend="aot_eager")
    x = torch.randn(2, LENGTH, DIM)
    with torch.no_grad():
        state = layer.empty_state(2)
        out = []
        for piece in x.split(4, 1):
            y, state = step(piece, state)
            out.append(y)
        assert error(torch.cat(out, 1), layer(x)) < 1e-5


def test_a_growing_state_is_no_part_of_a_graph():
    layer = cistern.nn.Attention("softmax", DIM, HEADS).eval()
    step = torch.compile(lambda x, state: layer.extend(x, state), fullgraph=True,
                         backend="aot_eager")
    with pytest.raises(Exception, match="the state grows with every call"):
        step(torch.randn(1, 2, DIM), layer.empty_state(1))


def test_compiled_dropout_has_the_gradient_of_its_own_draw():
    layer = cistern.nn.Attention("latte", DIM, HEADS, dropout=0.5)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, LENGTH, DIM, requires_grad=True)
    y = compiled(x)
    (g,) = torch.autograd.grad(y.sum(), layer.o_proj.weight, retain_graph=True)
    assert not torch.equal(compiled(x), compiled(x))
    # v only scales linearly: sum_{values} dL/dv . v = L where every draw of the backward is the
    # forward's.
    (gv,) = torch.autograd.grad(y.sum(), layer.v_proj.weight)
    assert error((gv * layer.v_proj.weight).sum(), y.sum()) < 1e-4


@pytest.mark.parametrize("name, options, form", LAYERS)
def test_export(name, options, form):
    layer = make_layer(name, options, form, layer=8).eval()  # as above
    x = torch.randn(2, LENGTH, DIM)
    args = (x, x[:, :7]) if form == "cross" else (x,)
    kw = handles(layer, *args)
    program = torch.export.export(layer, args, kw, strict=False)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    with torch.no_grad():
        assert error(torch.export.load(file).module()(*args, **kw), layer(*args, **kw)) < 1e-6


def test_export_with_dynamic_shapes():
    layer = cistern.nn.Attention("abc_mlp", DIM, HEADS, slots=4).eval()
    batch, time = torch.export.Dim("batch", min=1,
                                   max=64), torch.export.Dim("time", min=2, max=4096)
    program = torch.export.export(layer, (torch.randn(2, 8, DIM), ),
                                  dynamic_shapes=({0: batch, 1: time}, ))
    x = torch.randn(3, 50, DIM)
    assert error(program.module()(x), layer(x)) < 1e-6


@pytest.mark.parametrize("name, options, form", LAYERS)
def test_copies(name, options, form):
    layer = make_layer(name, options, form, bias=True, conv=3 if form == "causal" else 0).eval()
    x = torch.randn(2, LENGTH, DIM)
    expected = call(layer, form, x)
    assert torch.equal(call(copy.deepcopy(layer), form, x), expected)
    assert torch.equal(call(pickle.loads(pickle.dumps(layer)), form, x), expected)
    other = make_layer(name, options, form, bias=True, conv=3 if form == "causal" else 0).eval()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(call(other, form, x), expected)


@pytest.mark.parametrize("name, options, form", CAUSAL)
def test_states_are_values(name, options, form):
    layer = make_layer(name, options, form, conv=3).eval()
    x = torch.randn(2, LENGTH, DIM)
    with torch.no_grad():
        whole = call(layer, form, x)
        _, state = layer.extend(x[:, :7], **handles(layer, x[:, :7]))
        later = handles(layer, x[:, 7:])
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        for other in (state, pickle.loads(pickle.dumps(state)), copy.deepcopy(state),
                      torch.load(file)):
            assert error(layer.extend(x[:, 7:], other, **later)[0], whole[:, 7:]) < 1e-5
        swapped = cistern.state.reorder(state, torch.tensor([1, 0]))
        swapped_later = handles(layer, x[:, 7:].flip(0))
        rest = layer.extend(x[:, 7:].flip(0), swapped, **swapped_later)[0].flip(0)
        assert error(rest, whole[:, 7:]) < 1e-5
        assert cistern.state.state_bytes(state) == sum(t.nbytes for t in state.values())


def test_gradients_go_through_states():
    layer = cistern.nn.Attention("latte", DIM, HEADS, conv=3).double()
    x = torch.randn(1, LENGTH, DIM, dtype=torch.float64, requires_grad=True)
    (whole,) = torch.autograd.grad(layer(x)[:, 6:].square().sum(), x)
    _, state = layer.extend(x[:, :6])
    (pieces,) = torch.autograd.grad(layer.extend(x[:, 6:], state)[0].square().sum(), x)
    torch.testing.assert_close(pieces, whole)
    _, state = layer.extend(x[:, :6])
    (cut, ) = torch.autograd.grad(
        layer.extend(x[:, 6:], cistern.state.detach(state))[0].square().sum(), x)
    assert (cut[:, :6] == 0).all() and not (whole[:, :6] == 0).all()


@pytest.mark.parametrize("name, options, form",
                         CAUSAL + [p for p in LAYERS if p.values[0] in MEMORIES])
def test_autocast(name, options, form):
    layer = make_layer(name, options, form, conv=3 if form == "causal" else 0).eval()
    x = torch.randn(2, LENGTH, DIM, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = call(layer, form, x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.isfinite().all()
    if name != "abc_cluster":  # rounded keys may take another slot
        assert error(y.float(), call(layer, form, x)) < 0.05


def test_rotary_goes_on():
    layer = cistern.nn.Attention("softmax", DIM, HEADS, positions="rotary").eval()
    x = torch.randn(1, LENGTH, DIM)
    a, state = layer.extend(x[:, :5])
    b, _ = layer.extend(x[:, 5:], state, positions=torch.arange(5, LENGTH).unsqueeze(0))
    assert error(torch.cat([a, b], 1), layer(x)) < 1e-5
    with pytest.raises(cistern.UsageError, match="positions"):
        layer.extend(x[:, 5:], state)
    with pytest.raises(cistern.UsageError, match="rotary"):
        cistern.nn.Attention("latte", DIM, HEADS, positions="rotary")


def test_rotary_cross_attention_in_pieces():
    layer = make_layer("softmax", {}, "cross", positions="rotary").double().eval()
    for p in layer.parameters():
        nn.init.normal_(p, std=0.3)
    x, source = (torch.randn(2, n, DIM, dtype=torch.float64) for n in (6, 9))
    at, whole = torch.arange(9).unsqueeze(0), layer(x, source)
    in_two = layer.write(source[:, 4:], layer.write(source[:, :4]), positions=at[:, 4:])
    for state in (layer.write(source), in_two):
        y = torch.cat([layer.read(x[:, i:i + 2], state, positions=at[:, i:i + 2])
                       for i in (0, 2, 4)], 1)
        assert error(y, whole) < 1e-10
    valid = torch.tensor([True, False, True, True, True]).expand(2, -1)
    kept = layer.write(source[:, 4:][:, valid[0]], layer.write(source[:, :4]),
                       positions=at[:, 4:][:, valid[0]])
    masked = layer.write(source[:, 4:], layer.write(source[:, :4]), valid=valid,
                         positions=at[:, 4:])
    assert error(layer.read(x, masked, positions=at[:, :6]),
                 layer.read(x, kept, positions=at[:, :6])) < 1e-10
    with pytest.raises(cistern.UsageError, match=r"write\(source, state, positions=...\)"):
        layer.write(source[:, 4:], in_two)
    with pytest.raises(cistern.UsageError, match=r"read\(x, state, positions=...\)"):
        layer.read(x, in_two)


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "sinusoidal_halves"])
def test_positions_of_embeddings_are_no_layer_s(positions):
    with pytest.raises(cistern.UsageError, match=f"positions={positions} are added to embeddings"):
        cistern.nn.Attention("latte", DIM, HEADS, positions=positions)
    with pytest.raises(cistern.UsageError, match="did you mean 'learned'"):
        cistern.nn.Attention("latte", DIM, HEADS, positions="lerned")


class Doubled(nn.Linear):

    def forward(self, x):
        return 2 * super().forward(x)


def put_around(layer, name, how):
    """Makes the map of that name give twice what it gave."""
    linear = getattr(layer, name)
    if how == "hook":
        linear.register_forward_hook(lambda module, given, y: 2 * y)
    elif how == "hook before":
        linear.register_forward_pre_hook(lambda module, given: (2 * given[0], ))
    elif how == "forward":
        linear.forward = lambda x: 2 * nn.Linear.forward(linear, x)
    elif how == "parametrization":
        nn.utils.parametrize.register_parametrization(linear, "weight", Doubling())
    elif how == "subclass":
        setattr(layer, name, Doubled(DIM, DIM, bias=False))
        getattr(layer, name).load_state_dict(linear.state_dict())


class Doubling(nn.Module):

    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("how", ["hook", "hook before", "forward", "parametrization", "subclass"])
def test_what_is_put_around_a_projection_is_run(how):
    layer = cistern.nn.Attention("softmax", DIM, HEADS, conv=3).eval()
    plain = copy.deepcopy(layer)
    x = torch.randn(2, LENGTH, DIM)
    for name, wanted in (("v_proj", 2 * plain(x)), ("q_proj", None)):
        put_around(layer, name, how)
        if wanted is None:
            with torch.no_grad():
                plain.q_proj.weight *= 2
            wanted = 2 * plain(x)
        assert error(layer(x), wanted) < 1e-5
        a, state = layer.extend(x[:, :5])
        assert error(torch.cat([a, layer.extend(x[:, 5:], state)[0]], 1), wanted) < 1e-5


def test_head_groups():
    layer = cistern.nn.Attention("window:1+t2r:1", DIM, HEADS, window={"window": 4},
                                 t2r={"features": 5})
    assert "core.t2r.map.weight" in layer.state_dict()
    x = torch.randn(1, LENGTH, DIM)
    a, state = layer.extend(x[:, :5])
    b, _ = layer.extend(x[:, 5:], state)
    assert error(torch.cat([a, b], 1), layer(x)) < 1e-5


def test_tied_layers():
    first = cistern.nn.Attention("linformer", DIM, HEADS, max_length=20, slots=4,
                                 sharing="layerwise")
    later = cistern.nn.Attention("linformer", DIM, HEADS, max_length=20, slots=4,
                                 sharing="layerwise", layer=1, first=first)
    assert "core.key.weight" in first.state_dict() and not any(
        k.startswith("core") for k in later.state_dict())
    later(torch.randn(1, 8, DIM)).sum().backward()
    assert first.core.key.weight.grad.abs().sum() > 0


def torch_mha(**kw):
    return nn.MultiheadAttention(DIM, HEADS, **kw)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_softmax_is_torch_multihead_attention(batch_first, bias):
    theirs, ours = torch_mha(batch_first=batch_first, bias=bias), cistern.nn.MultiheadAttention(
        DIM, HEADS, batch_first=batch_first, bias=bias, mechanism="softmax"
    )
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, LENGTH, DIM)
    source = torch.randn(3, 7, DIM)
    if not batch_first:
        x, source = x.transpose(0, 1), source.transpose(0, 1)
    pad = torch.arange(7) >= torch.tensor([[7], [4], [1]])
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    torch.testing.assert_close(ours(x, x, x)[0], theirs(x, x, x)[0], rtol=1e-4, atol=1e-5)
    causal = dict(attn_mask=mask, is_causal=True, need_weights=False)
    torch.testing.assert_close(
        ours(x, x, x, **causal)[0],
        theirs(x, x, x, **causal)[0], rtol=1e-4, atol=1e-5)
    holes = torch.tensor([[1, 1, 0, 0, 0, 0, 0], [0, 1, 0, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0]]).bool()
    for padding in (pad, holes, torch.zeros(3, 7).masked_fill(pad, -torch.inf)):
        a, b = (m(x, source, source, key_padding_mask=padding)[0] for m in (ours, theirs))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    one = x[:, 0] if not batch_first else x[0]
    torch.testing.assert_close(
        ours(one, one, one)[0],
        theirs(one, one, one)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", sorted(MEMORIES))
def test_a_memory_comes_in_and_goes_out(name):
    info = cistern.mechanisms()[name]
    layer = make_layer(name, info["cases"][0], "bidirectional").eval()
    x, lengths = torch.randn(2, LENGTH, DIM), torch.tensor([LENGTH, 5])
    learned = layer.core.initial_memory()
    assert isinstance(layer.core.memory,
                      nn.Parameter) and learned.shape == (1, info["cases"][0]["slots"], DIM)
    if info["memory"] == "fixed":
        for kw in (dict(memory=learned), dict(return_memory=True)):
            with pytest.raises(cistern.UsageError,
                               match=rf"\[{name}\], bidirectional, hands no memory on.*luna"):
                layer(x, **kw)
        return
    y, packed = layer(x, lengths=lengths, return_memory=True)
    assert torch.equal(y, layer(x, lengths=lengths)) and packed.shape == (2, *learned.shape[1:])
    assert torch.equal(y, layer(x, memory=learned, lengths=lengths)) and (y[1, 5:] == 0).all()
    z, other = layer(x, memory=(learned + packed).detach().requires_grad_(), lengths=lengths,
                     return_memory=True)
    assert error(z, y) > 1e-5 and error(other, packed) > 1e-5
    with pytest.raises(cistern.UsageError, match="give each document a row"):
        layer(x, starts=torch.zeros(2, LENGTH, dtype=torch.bool))
    with pytest.raises(cistern.UsageError, match="return_memory=True"):
        make_layer(name, info["cases"][0], "bidirectional", tokens_out=False)(x)
    alone = make_layer(name, info["cases"][0], "bidirectional", tokens_out=False).eval()
    alone.load_state_dict({k: v for k, v in layer.state_dict().items() if k in alone.state_dict()})
    nothing, same = alone(x, lengths=lengths, return_memory=True)
    assert nothing is None and torch.equal(same, packed) and set(alone.state_dict()) <= set(
        layer.state_dict())


def test_memory_goes_through_a_compiled_stack():
    first = make_layer("luna", {"slots": 3, "init": "scaled"}, "bidirectional")
    later = make_layer("luna", {"slots": 3, "init": "scaled"}, "bidirectional", first=first)
    layers = nn.ModuleList([first, later])
    assert "core.memory" in first.state_dict() and "core.memory" not in later.state_dict()

    def run(x):
        memory = layers[0].core.initial_memory()
        for layer in layers:
            y, packed = layer(x, memory=memory, return_memory=True)
            x, memory = x + y, memory + packed
        return x, memory

    x = torch.randn(2, LENGTH, DIM)
    for got, wanted in zip(torch.compile(run, fullgraph=True, backend="aot_eager")(x), run(x)):
        assert error(got, wanted) < 1e-5
    got, wanted = torch.compile(run, fullgraph=True)(x), run(x)
    assert error(got[0], wanted[0]) < 1e-5 and error(got[1], wanted[1]) < 1e-5


@pytest.mark.parametrize("form", ["bidirectional", "cross"])
def test_dropout_of_the_initial_memory(form):
    layer = make_layer("luna", {"slots": 4, "dropout": 0.5}, form)
    x = torch.randn(2, LENGTH, DIM)
    kept = layer.core.initial_memory()
    assert 0 < (kept == 0).sum() < kept.numel()
    assert torch.equal(kept, 2 * layer.core.memory * (kept != 0))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for module in (layer, compiled):
        assert not torch.equal(call(module, form, x), call(module, form, x))
    layer.eval()
    assert torch.equal(layer.core.initial_memory(), layer.core.memory)
    assert torch.equal(call(layer, form, x), call(layer, form, x))


def test_compiled_dropout_of_a_core_s_own_memory_has_its_gradient():
    core = make_core("luna", {"slots": 4, "dropout": 0.5}, "bidirectional")
    compiled = torch.compile(core, fullgraph=True, backend="aot_eager")
    queries, keys = torch.randn(2, 1, HEADS, LENGTH, DIM // HEADS).unbind(0)
    y = compiled(queries, keys)
    # What was dropped has no gradient; draws of the backward's own would not drop the same twice.
    first, again = (torch.autograd.grad(y.sum(), core.memory, retain_graph=True)[0]
                    for _ in range(2))
    assert torch.equal(first, again) and 0 < (first == 0).sum() < first.numel()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_cannot_hold_redrawn_features(dtype):
    x = torch.randn(2, LENGTH, DIM)
    layer = cistern.nn.Attention("performer", DIM, HEADS).to(dtype)
    with pytest.raises(cistern.UsageError, match="redraws its features.*autocast.*redraw=0"):
        layer(x.to(dtype))
    layer.eval()(x.to(dtype))
    cistern.nn.Attention("performer", DIM, HEADS, redraw=0).to(dtype)(x.to(dtype))


def test_latents_attend_to_the_tokens():
    layer = make_layer("perceiver", {"latents": 4}, "bidirectional").eval()
    x = torch.randn(2, LENGTH, DIM)
    assert layer(x).shape == (2, 4, DIM)
    shuffled = x[:, torch.randperm(LENGTH)]
    assert error(layer(shuffled), layer(x)) < 1e-5
    latents = torch.randn(2, 9, DIM)
    cross = make_layer("softmax", {}, "cross").eval()
    cross.load_state_dict(
        {k: v
         for k, v in layer.state_dict().items() if not k.startswith("core.")})
    assert torch.equal(layer(x, memory=latents), cross(latents, x))
    with pytest.raises(cistern.UsageError, match="hands no memory on"):
        layer(x, return_memory=True)


@pytest.mark.parametrize("form", ["causal", "bidirectional", "cross"])
def test_reuse_takes_over_scores(form):
    """With the weights of its own heads at softmax attention's, and the first heads' scores from a
    layer whose weights are those of the rest."""
    whole = make_layer("softmax", {}, form).eval()
    before = make_layer("softmax", {}, form).eval()
    reuse = make_layer("reuse", {"heads": 1}, form).eval()
    half = DIM // HEADS
    with torch.no_grad():
        for name in ("q_proj", "k_proj"):
            weight = getattr(whole, name).weight
            getattr(reuse, name).weight.copy_(weight[:half])
            getattr(before, name).weight[:half] = weight[half:]
        for name in ("v_proj", "o_proj"):
            getattr(reuse, name).weight.copy_(getattr(whole, name).weight)
    x = torch.randn(2, LENGTH, DIM)
    source = (x[:, :7],) if form == "cross" else ()
    _, left = before(x, *source, return_handles=True)
    y, again = reuse(x, *source, handles=left, return_handles=True)
    assert error(y, whole(x, *source)) < 1e-5
    assert torch.equal(again[0][:, 1:], left[0][:, :1]) and again[1].shape[1] == HEADS
    if form == "causal":
        _, state, first = before.extend(x[:, :5], return_handles=True)
        _, _, second = before.extend(x[:, 5:], state, return_handles=True)
        a, state = reuse.extend(x[:, :5], handles=first)
        b, _ = reuse.extend(x[:, 5:], state, handles=second)
        assert error(torch.cat([a, b], 1), y) < 1e-5
    if form == "cross":
        with pytest.raises(cistern.UsageError, match="layer\\(x, source, handles=...\\)"):
            reuse.write(source[0])
    with pytest.raises(
            cistern.UsageError,
            match="takes over the scores of 1 heads of the layer before, got those of 0"):
        reuse(x, *source)
    with pytest.raises(cistern.UsageError, match="takes over no scores"):
        before(x, *source, handles=left)
    with pytest.raises(cistern.UsageError, match="leaves no scores"):
        make_layer("latte", {}, form)(x, *source, return_handles=True)


@pytest.mark.parametrize("name", sorted({p.values[0] for p in LAYERS}))
def test_drop_in_or_reason(name):
    options = {k: v for k, v in cistern.mechanisms()[name]["cases"][0].items() if k != "latents"}
    try:
        ours = cistern.nn.MultiheadAttention(DIM, HEADS, batch_first=True, mechanism=name,
                                             max_length=64, options=options)
    except cistern.UsageError as e:
        assert "cannot take the place of torch.nn.MultiheadAttention" in str(
            e) and "use cistern.nn.Attention" in str(e)
        assert name in ("abc_mlp", "gated_slots", "rfa_gate",
                        "reuse") or cistern.mechanisms()[name]["memory"] != "none"
        return
    ours.load_state_dict(torch_mha().state_dict(), strict=False)
    layer = nn.TransformerEncoderLayer(DIM, HEADS, batch_first=True, dropout=0.0)
    layer.self_attn = ours
    x = torch.randn(2, LENGTH, DIM)
    layer.train()
    trained = layer(x)
    layer.eval()
    with torch.no_grad():
        evaluated = layer(x)  # torch's fused path would compute softmax attention here
    if not cistern.mechanisms()[name]["stochastic"]:
        assert error(evaluated, trained) < 1e-5


def test_drop_in_drops_its_output_where_the_mechanism_does():
    ours = cistern.nn.MultiheadAttention(DIM, HEADS, dropout=0.5, mechanism="latte",
                                         options={"dropout": "published"})
    x = torch.randn(LENGTH, 2, DIM)
    for causal in (True, False):  # the causal form alone
        dropped = ours.train()(x, x, x, is_causal=causal)[0] == 0
        assert bool(dropped.any()) == causal and not dropped.all()
    assert not (ours.eval()(x, x, x, is_causal=True)[0] == 0).any()


def test_drop_in_of_a_finished_encoder():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(DIM, HEADS, batch_first=True), 2)
    wanted = copy.deepcopy(encoder).eval()
    for layer in encoder.layers:
        own = cistern.nn.MultiheadAttention(DIM, HEADS, batch_first=True, mechanism="softmax")
        own.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = own
    x, hidden = torch.randn(2, LENGTH, DIM), torch.zeros(2, LENGTH, dtype=torch.bool)
    hidden[0, 7:] = True
    with torch.no_grad():
        with pytest.raises(cistern.UsageError, match="use_nested_tensor = False"):
            encoder.eval()(x, src_key_padding_mask=hidden)
        encoder.use_nested_tensor = False
        y = encoder(x, src_key_padding_mask=hidden)
        assert error(y[~hidden], wanted(x, src_key_padding_mask=hidden)[~hidden]) < 1e-5


def test_drop_in_refusals():
    ours = cistern.nn.MultiheadAttention(DIM, HEADS, batch_first=True, mechanism="latte")
    x = torch.randn(2, LENGTH, DIM)
    with pytest.raises(cistern.UsageError, match="no attention masks"):
        ours(x, x, x, attn_mask=torch.ones(LENGTH, LENGTH, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="causal mask"):
        ours(x, x, x, attn_mask=torch.zeros(LENGTH, LENGTH, dtype=torch.bool), is_causal=True)
    with pytest.raises(cistern.UsageError, match="kdim"):
        cistern.nn.MultiheadAttention(DIM, HEADS, kdim=8)

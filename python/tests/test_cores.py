"""The conformance properties on a sample of shapes, from Python: every mechanism, every form."""

import re

import cistern
import cistern.functional as CF
import pytest
import torch
from conftest import DIM, HEADS, LENGTH, MAX_LENGTH, error, forms, make_core, memories, tensors

CAUSAL = [p for p in forms() if p.values[2] == "causal"]


@pytest.mark.parametrize("name, options, form", forms())
def test_definition(name, options, form):
    core = make_core(name, options, form).double().eval()
    x = tensors(core, source=9 if form == "cross" else None, dtype=torch.float64)
    expected = torch.ops.cistern.definition(x, core.weights(), core.spec, form)
    assert error(core(*x), expected) < 1e-10
    core.float()
    assert error(core(*(t.float() for t in x)), expected) < 2e-5


@pytest.mark.parametrize("name, options, form", forms())
def test_padding_is_not_seen(name, options, form):
    core = make_core(name, options, form).eval()
    source = 9 if form == "cross" else None
    x = tensors(core, source=source)
    keys = source or LENGTH
    lengths = torch.tensor([keys, 5])
    y = core(*x, lengths=lengths)
    short = [t[1:, :, : (5 if t.shape[2] == keys else None)] for t in x]
    alone = core(*short)
    rows = alone.shape[2]
    assert error(y[1:, :, :rows], alone) < 2e-5
    if form != "cross" and core.memory_use != "latents":  # latents have no padding among them
        assert (y[1, :, 5:] == 0).all()


@pytest.mark.parametrize("name, options, form", CAUSAL)
@pytest.mark.parametrize("pieces", [(5, 7), (1, 3, 8), (1,) * LENGTH])
def test_pieces_are_the_whole(name, options, form, pieces):
    core = make_core(name, options, form).double().eval()
    x = tensors(core, dtype=torch.float64)
    whole, end = core.extend(*x)
    state, out, at = None, [], 0
    for n in pieces:
        with torch.no_grad():
            before = {k: v.clone() for k, v in state.items()} if state else None
            y, after = core.extend(*(t[:, :, at : at + n] for t in x), state=state)
            for k, v in (before or {}).items():
                assert torch.equal(state[k], v), f"{k} of the given state was changed"
        out.append(y)
        state, at = after, at + n
    assert error(torch.cat(out, 2), whole) < 1e-10
    assert error(core(*x), whole) < 1e-10
    assert set(state) == set(end)


@pytest.mark.parametrize("name, options, form", CAUSAL)
def test_a_state_can_branch(name, options, form):
    """Two continuations of one state do not disturb each other."""
    core = make_core(name, options, form).eval()
    with torch.no_grad():
        _, state = core.extend(*tensors(core))
        a, b = tensors(core, length=2), tensors(core, length=2)
        first, after_a = core.extend(*a, state=state)
        core.extend(*b, state=state)
        again, _ = core.extend(*a, state=state)
        assert torch.equal(first, again)
        y, _ = core.extend(*b, state=after_a)
        _, after_a2 = core.extend(*a, state=state)
        y2, _ = core.extend(*b, state=after_a2)
        assert torch.equal(y, y2)


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("name, options, form",
                         [p for p in forms() if p.values[2] != "bidirectional"])
def test_a_state_is_no_part_of_other_tensors(name, options, form, record):
    """Neither of the inputs nor of a larger tensor."""
    core = make_core(name, options, form).eval()
    x = tensors(core)
    if form == "cross":
        x = [t for t, p in zip(x, core.projections) if p["side"] == "key"]
    step = core.write if form == "cross" else lambda *x, state: core.extend(*x, state=state)[1]
    with torch.set_grad_enabled(record):
        state = None
        for piece in (slice(0, 7), slice(7, 8), slice(8, LENGTH)):
            given = [t[:, :, piece].clone() for t in x]
            state = step(*given, state=state)
            before = {k: v.detach().clone() for k, v in state.items()}
            for t in given:
                t.zero_()
            for k, v in state.items():
                assert torch.equal(v, before[k]), k
                assert v.untyped_storage().nbytes() == v.nbytes, k


# A ring of window takes a single token in place, also beside a cache that grows.
@pytest.mark.parametrize("grows", ["softmax", "latte"])
@pytest.mark.parametrize("name", ["window", "dilated", "abc_mlp"])
def test_head_groups_do_not_change_the_state_they_are_given(name, grows):
    core = cistern.nn.Core(f"{name}:1+{grows}:1", DIM, HEADS,
                           options={name: cistern.mechanisms()[name]["cases"][0]}).eval()
    with torch.no_grad():
        _, state = core.extend(*tensors(core))
        before = {k: v.clone() for k, v in state.items()}
        for length in (1, 2):
            core.extend(*tensors(core, length=length), state=state)
            for k, v in before.items():
                assert torch.equal(state[k], v), f"{k} of the given state was changed"


@pytest.mark.parametrize("name, options, form", CAUSAL)
def test_the_future_changes_no_bit(name, options, form):
    core = make_core(name, options, form).eval()
    x = tensors(core)
    other = [torch.cat([t[:, :, :7], 3 * torch.randn_like(t[:, :, 7:])], 2) for t in x]
    a, b = core(*x)[:, :, :7], core(*other)[:, :, :7]
    assert error(a, b) < 1e-6 if cistern.mechanisms()[name]["exact"] or name in (
        "window", "dilated") else torch.equal(a, b)


@pytest.mark.parametrize("name, options, form", [p for p in forms() if p.values[2] != "cross"])
def test_packed_rows_are_rows_of_their_own(name, options, form):
    core = make_core(name, options, form).double().eval()
    x = tensors(core, batch=1, dtype=torch.float64)
    starts = torch.zeros(1, LENGTH, dtype=torch.bool)
    starts[0, 5] = True
    if core.memory_use == "latents":  # they belong to a row, not to the documents in it
        with pytest.raises(RuntimeError, match="one document"):
            core(*x, starts=starts)
        return
    y = core(*x, starts=starts)
    alone = torch.cat([core(*(t[:, :, :5] for t in x)), core(*(t[:, :, 5:] for t in x))], 2)
    assert error(y, alone) < 1e-10


@pytest.mark.parametrize("name, options, form", [p for p in forms() if p.values[2] == "cross"])
def test_write_once_read_often(name, options, form):
    core = make_core(name, options, form).double().eval()
    x = tensors(core, source=9, dtype=torch.float64)
    queries = [t for t, p in zip(x, core.projections) if p["side"] == "query"]
    keys = [t for t, p in zip(x, core.projections) if p["side"] == "key"]
    state = core.write(*keys)
    in_two = core.write(*(t[:, :, 4:] for t in keys),
                        state=core.write(*(t[:, :, :4] for t in keys)))
    y = torch.cat([
        core.read(*(t[:, :, :1] for t in queries), state=state),
        core.read(*(t[:, :, 1:] for t in queries), state=in_two)
    ], 2)
    assert error(y, core(*x)) < 1e-10


@pytest.mark.parametrize("name, options, form", forms())
def test_functional(name, options, form):
    """The function gives what the module gives, in both layouts, without a copy of the inputs."""
    core = make_core(name, options, form).eval()
    x = tensors(core, source=9 if form == "cross" else None)
    weights = dict(zip(core._weights, core.weights()))
    kw = dict(causal=form == "causal", cross=form == "cross", weights=weights,
              max_length=MAX_LENGTH, options=options)
    f = getattr(CF, name)
    expected = core(*x)
    assert torch.equal(f(*x, **kw), expected)
    y = f(*(t.transpose(1, 2) for t in x), layout="bthd", **kw)
    assert torch.equal(y.transpose(1, 2), expected)
    assert y.is_contiguous()
    if form == "causal":
        y, state = f(*x, return_state=True, **kw)
        assert torch.equal(y, expected)
        assert f(*x, state=state, **kw)[0].shape == expected.shape


@pytest.mark.parametrize("name, options", memories())
def test_pack_and_unpack_are_the_core(name, options):
    core = make_core(name, options, "bidirectional").double().eval()
    torch.nn.init.normal_(core.memory)
    x, lengths = tensors(core, dtype=torch.float64), torch.tensor([LENGTH, 5])
    queries, keys = ([t for t, p in zip(x, core.projections) if p["side"] == side]
                     for side in ("query", "key"))
    learned = core.initial_memory()

    def split(memory):
        return [
            memory.unflatten(-1, (p["heads"], -1)).transpose(1, 2) for p in core.memory_projections
        ]

    for slots in ([], split(learned)):
        heads = core.pack(*keys, *slots, lengths=lengths)
        read = core.update(*keys, *slots, packed=heads, lengths=lengths)
        assert heads.shape == read.shape == (2, HEADS, options["slots"], DIM // HEADS)
        y = core.unpack(*queries, packed=[read] * len(core.packed_projections), lengths=lengths)
        assert error(y, core(*x, lengths=lengths)) < 1e-12
    other = torch.randn(2, *learned.shape[1:], dtype=torch.float64)
    assert error(core.pack(*keys, *split(other)), core.pack(*keys)) > 1e-3


def test_what_packs_nothing_says_so():
    x = torch.randn(2, HEADS, LENGTH, 8)
    for name, form in (("latte", "bidirectional"), ("perceiver", "bidirectional")):
        with pytest.raises(cistern.UsageError, match=rf"\[{name}\] has no memory to pack.*luna"):
            make_core(name, {}, form).pack(x, x)
    with pytest.raises(RuntimeError, match="use luna instead"):
        make_core("luna_causal", {"slots": 2}, "causal").pack(x, x)
    core = make_core("luna", {"slots": 2}, "bidirectional")
    with pytest.raises(
            RuntimeError,
            match=r"expected pq of shape \[B,2,M,8\] with B=2 or 1 and M=2, got \[3, 2, 2, 8\]"):
        core.pack(x, torch.randn(3, 2, 2, 8))
    with pytest.raises(RuntimeError, match="expected 1 or 2 tensors, got 3"):
        core.pack(x, x, x)


def test_sizes_come_from_the_tensors():
    q, k, v = torch.randn(1, 2, 6, 24), torch.randn(1, 2, 6, 24), torch.randn(1, 2, 6, 8)
    assert CF.latte(q, k, v, causal=True).shape == (1, 2, 6, 8)
    q, k, v, control = (torch.randn(1, 2, 6, w) for w in (8, 8, 8, 5))
    a = CF.abc(q, k, v, control, causal=True)
    assert torch.equal(a, CF.abc_mlp(q, k, v, control, causal=True, slots=5))
    memory = torch.randn(1, 5, 16)
    a = CF.luna(q, k, weights={"memory": memory})
    assert torch.equal(a, CF.luna(q, k, weights={"memory": memory}, slots=5))
    wide = torch.randn(1, 1, 6, 16)
    assert CF.luna(q, wide, weights={"memory": memory}, packing_heads=1).shape == (1, 2, 6, 8)
    assert CF.luna(wide, k, weights={"memory": memory}, packing_heads=2).shape == (1, 1, 6, 16)
    with pytest.raises(RuntimeError, match=r"expected k of shape \[B,2,T,24\]"):
        CF.latte(torch.randn(1, 2, 6, 24), torch.randn(1, 2, 6, 23), v, latents=48)


@pytest.mark.parametrize("name", ["latte", "abc_mlp", "softmax", "linear"])
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 1000])
def test_lengths(name, length):
    options = {"latte": {"latents": 16}, "abc_mlp": {"slots": 4}}.get(name, {})
    core = make_core(name, options, "causal").eval()
    x = tensors(core, batch=1, length=length, requires_grad=True)
    y = core(*x)
    assert y.shape == (1, HEADS, length, DIM // HEADS)
    y.sum().backward()
    if length > 0:
        expected = torch.ops.cistern.definition(x, core.weights(), core.spec, "causal")
        assert error(y, expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float(dtype):
    q, k, v = (torch.randn(1, 2, 50, 8).to(dtype) for _ in range(3))
    y, state = CF.latte(q, k, v, causal=True, return_state=True)
    assert y.dtype == dtype and state["memory"].dtype in (torch.float32, torch.float64)
    assert torch.equal(y, CF.latte(q.float(), k.float(), v.float(), causal=True).to(dtype))


def test_errors():
    q = k = v = torch.randn(1, 2, 6, 8)
    with pytest.raises(AttributeError, match="latte"):
        CF.late
    with pytest.raises(cistern.UsageError, match="did you mean 'latte'"):
        CF.attention("late", q, k, v)
    with pytest.raises(cistern.UsageError, match="latents"):
        CF.latte(q, k, v, latent=8)
    with pytest.raises(cistern.UsageError, match="cross"):
        CF.dilated_attention(q, k, v, cross=True)
    with pytest.raises(cistern.UsageError, match="weights of its own"):
        CF.t2r(q, k, v)
    with pytest.raises(cistern.UsageError, match="causal form"):
        CF.latte(q, k, v, return_state=True)
    with pytest.raises(RuntimeError, match=r"within 0\.\.6"):
        CF.latte(q, k, v, lengths=torch.tensor([7]))
    with pytest.raises(RuntimeError, match="int64"):
        CF.latte(q, k, v, lengths=torch.tensor([3], dtype=torch.int32))
    with pytest.raises(RuntimeError, match="expected the state's memory"):
        _, state = CF.latte(q, k, v, causal=True, return_state=True)
        CF.latte(*(t.expand(3, -1, -1, -1) for t in (q, k, v)), causal=True, state=state)


def refuses(*words):
    return pytest.raises(cistern.UsageError, match=".*".join(re.escape(w) for w in words))


def test_arguments_of_other_kinds():
    q = k = v = torch.randn(1, 2, 6, 8)
    with refuses("[latte] expected a torch.Tensor for tensor 2, got list"):
        CF.latte(q, k.tolist(), v)
    with refuses("expected a torch.Tensor for tensor 1, got ndarray"):
        CF.latte(q.numpy(), k, v)
    with refuses("[latte] expected as many heads of queries", "got 4 and 2", "repeat_interleave"):
        CF.latte(torch.randn(1, 4, 6, 8), k, v)
    wide = torch.randn(1, 2, 6, 64)
    with refuses("[softmax] expected as many heads"):
        CF.softmax(torch.randn(1, 8, 6, 64), wide, wide)
    core = cistern.nn.Core("rfa", 16, 2, form="causal")
    weights = dict(zip(core._weights, core.weights()))
    with refuses("[rfa] expected a finite number for tau, got nan"):
        CF.rfa(q, k, v, weights=weights, tau=float("nan"))
    with refuses("[latte] expected a number, a string or a bool for latents"):
        CF.latte(q, k, v, latents=torch.ones(1))
    with refuses("[rfa] has no weight 'sigmaa'; its weights: sigma, matrices"):
        CF.rfa(q, k, v, weights={**weights, "sigmaa": q})
    with refuses("[latte] has no weight 'memory'; its weights: none"):
        CF.latte(q, k, v, weights={"memory": q})
    with refuses("expected a torch.Tensor for the weight sigma, got float"):
        CF.rfa(q, k, v, weights={**weights, "sigma": 1.0})


def test_messages_name_what_python_has():
    q = k = v = torch.randn(1, 2, 6, 8)
    with refuses("[linear]", "that dropout=0.5 could drop; set dropout=0"):
        CF.linear(q, k, v, dropout=0.5)
    with refuses("head groups such as 'window:1+latte:1' are for cistern.nn.Core"):
        CF.attention("window:1+latte:1", q, k, v, causal=True)
    with refuses("[latte]: 'heads' is 0; expected an integer (1 .. 65536)"):
        cistern.nn.Attention("latte", DIM, 0)
    with refuses("[latte] expected a number, a string or a bool for dim, got"):
        cistern.nn.Attention("latte", torch.tensor(DIM), HEADS)


def test_states_of_other_kinds():
    q = k = v = torch.randn(1, 2, 6, 8)
    states = (({}, "got none"), ({"memory": q}, "got memory"), ([q], "got list"), (q, "got Tensor"))
    for state, found in states:
        with refuses("[latte] expected a state", "memory, z", found):
            CF.latte(q, k, v, causal=True, state=state)
    _, state = CF.latte(q, k, v, causal=True, return_state=True)
    with refuses("expected a torch.Tensor for the state's z, got list"):
        CF.latte(q, k, v, causal=True, state={**state, "z": state["z"].tolist()})
    with pytest.raises(RuntimeError, match="the state's memory of type Double, got Float"):
        CF.latte(q, k, v, causal=True, state={**state, "memory": state["memory"].float()})
    _, cache = CF.softmax(q, k, v, causal=True, return_state=True)
    with pytest.raises(RuntimeError, match="expected the state's k of type Double, got Float"):
        CF.softmax(q.double(), k.double(), v.double(), causal=True, state=cache)
    with pytest.raises(RuntimeError, match="expected the state's k of shape"):
        CF.softmax(q, k, v, causal=True, state={**cache, "k": cache["k"][..., :3]})
    with pytest.raises(RuntimeError, match="cache says that it holds 6 tokens, but k has 4"):
        CF.softmax(q, k, v, causal=True, state={**cache, "k": cache["k"][:, :, :4]})
    with refuses("expected a state"):
        cistern.nn.Attention("latte", 16, 2).extend(torch.randn(1, 6, 16), {})


def test_perceiver_has_as_many_queries_as_latents():
    q, k, v = torch.randn(2, 2, 4, 8), torch.randn(2, 2, 11, 8), torch.randn(2, 2, 11, 8)
    weights = {"latents": torch.randn(1, 4, 16)}
    for lengths in (None, torch.tensor([11, 5])):
        y = CF.perceiver(q, k, v, weights=weights, lengths=lengths, latents=4)
        assert y.shape == (2, 2, 4, 8)
        assert torch.equal(y, CF.softmax(q, k, v, cross=True, lengths=lengths))


def test_padding_that_is_not_finite_is_not_seen():
    lengths = torch.tensor([9, 5, 0])
    for name, info in cistern.mechanisms().items():
        for form in info["forms"]:
            if form == "cross" or info["memory"] == "latents":
                continue
            core = make_core(name, info["cases"][0], form).eval()
            x = tensors(core, batch=3, length=9)
            results = []
            for value in (0.0, float("nan"), float("inf")):
                y = [t.detach().clone() for t in x]
                for t in y:
                    t[1, :, 5:], t[2] = value, value
                    t.requires_grad_(True)
                out = core(*y, lengths=lengths)
                out.square().sum().backward()
                results.append([out.detach(), *(t.grad for t in y)])
            for other in results[1:]:
                for a, b in zip(results[0], other):
                    assert torch.allclose(a, b, rtol=1e-6, atol=1e-6), (name, form)


def test_rows_of_an_empty_state_draw_each_their_own():
    core = make_core("abc_random", {}, "causal").train()
    row = tensors(core, batch=1)
    x = [t.expand(4, -1, -1, -1).contiguous() for t in row]
    torch.manual_seed(2)
    whole = core(*x)
    torch.manual_seed(2)
    y, _ = core.extend(*x)
    assert torch.equal(y, whole) and not any(torch.equal(y[0], y[i]) for i in (1, 2, 3))
    assert len(set(core.empty_state(4, x[0])["draw"].tolist())) == 4


def test_questions_leave_random_numbers_alone():
    from cistern._library import describe, make_spec

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    describe(make_spec("linformer", {"slots": 9}, DIM, HEADS, MAX_LENGTH), "causal")
    assert torch.equal(torch.rand(3), expected)
    core = make_core("linformer", {"slots": 9}, "causal")
    torch.manual_seed(5)
    core(*tensors(core, batch=0))
    assert torch.equal(torch.rand(3), expected)

"""Masked tokens (valid): rows with padding on the left and holes give what they give without them."""

import cistern
import cistern.functional as CF
import pytest
import torch
from cistern.masks import TokenMap
from cistern.models import KINDS
from conftest import DIM, HEADS, LENGTH, error, forms, handles, make_core, make_layer
from test_models import make_config

VALID = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1],
                      [1] * 12]).bool()
NOT_RANDOM = [p for p in forms() if not cistern.mechanisms()[p.values[0]]["stochastic"]]


def rows(x, time):
    """Each row of x without its masked tokens, as a batch of one."""
    return [x[i:i + 1].index_select(time, VALID[i].nonzero().squeeze(1)) for i in range(3)]


@pytest.mark.parametrize("name, options, form", NOT_RANDOM)
def test_cores(name, options, form):
    core = make_core(name, options, form).eval()
    x = [
        torch.randn(3, p["heads"], LENGTH, p["width"] // p["heads"], requires_grad=True)
        for p in core.projections
    ]
    itself = form != "cross" and core.memory_use != "latents"
    y = core(*x, valid=VALID)
    grads = torch.autograd.grad(y.square().sum(), x, allow_unused=True)
    alone = [
        rows(t, 2) if itself or p["side"] == "key" else [t[i:i + 1] for i in range(3)]
        for p, t in zip(core.projections, x)
    ]
    for i in range(3):
        want = core(*[a[i] for a in alone])
        got = y[i:i + 1][:, :, VALID[i]] if itself else y[i:i + 1]
        assert error(got, want) < 1e-4
        if itself and not VALID[i].all():
            assert y[i][:, ~VALID[i]].abs().max() == 0
    for p, g in zip(core.projections, grads):
        if g is not None and (itself or p["side"] == "key"):
            assert g.transpose(1, 2)[~VALID].abs().max() == 0


@pytest.mark.parametrize("name, options, form", NOT_RANDOM)
def test_layers(name, options, form):
    conv = form == "causal" and cistern.mechanisms()[name]["memory"] == "none"
    layer = make_layer(name, options, form, conv=3 if conv else 0)
    layer.eval()
    x, source = torch.randn(3, LENGTH, DIM), torch.randn(3, LENGTH, DIM)
    cross = form == "cross"
    call = dict(source=source) if cross else {}
    taken = handles(layer, x, source if cross else None)
    y = layer(x, valid=VALID, **call, **taken)
    for i in range(3):
        queries = x[i:i + 1] if cross else rows(x, 1)[i]
        one = {"source": rows(source, 1)[i]} if cross else {}
        if taken:
            q, k = taken["handles"]
            one["handles"] = (q[i:i + 1] if cross else rows(q, 2)[i], rows(k, 2)[i])
        want = layer(queries, **one)
        latents = layer.core.memory_use == "latents" and not cross
        got = y[i:i + 1] if cross or latents else y[i:i + 1][:, VALID[i]]
        assert error(got, want) < 1e-4


def test_rotary_counts_real_tokens_and_states_go_on():
    layer = cistern.nn.Attention("softmax", DIM, HEADS, positions="rotary").eval()
    x, more = torch.randn(3, LENGTH, DIM), torch.randn(3, 2, DIM)
    y, state = layer.extend(x, valid=VALID)
    before = VALID.sum(1)
    positions = before.unsqueeze(1) + torch.arange(2)
    z, _ = layer.extend(more, state, positions=positions)
    for i in range(3):
        whole = layer(torch.cat([rows(x, 1)[i], more[i:i + 1]], 1))
        assert error(y[i:i + 1][:, VALID[i]], whole[:, :-2]) < 1e-5
        assert error(z[i:i + 1], whole[:, -2:]) < 1e-5


def test_functions():
    q, k, v = (torch.randn(3, HEADS, LENGTH, 8) for _ in range(3))
    for name in ("softmax", "latte", "linear"):
        causal = CF.attention(name, q, k, v, causal=True, valid=VALID)
        cross = CF.attention(name, q, k, v, cross=True, valid=VALID)
        for i in range(3):
            one = [rows(t, 2)[i] for t in (q, k, v)]
            want = CF.attention(name, *one, causal=True)
            assert error(causal[i:i + 1][:, :, VALID[i]], want) < 1e-5
            assert error(cross[i:i + 1], CF.attention(name, q[i:i + 1], *one[1:],
                                                      cross=True)) < 1e-5
    swapped = [t.transpose(1, 2) for t in (q, k, v)]
    y = CF.latte(*swapped, valid=VALID, layout="bthd")
    assert torch.equal(y.transpose(1, 2), CF.latte(q, k, v, valid=VALID))


def test_starts_at_masked_tokens_count_for_the_next_real_one():
    starts = torch.zeros(3, LENGTH, dtype=torch.bool)
    starts[0, 1] = starts[0, 6] = starts[1, 4] = starts[1, 5] = starts[2, 11] = True
    front = TokenMap(VALID, starts=starts)
    assert front.lengths.tolist() == [9, 8, 12]
    found = [row.nonzero().squeeze(1).tolist() for row in front.starts]
    assert found == [[0, 3], [3], [11]]
    q = torch.randn(3, HEADS, LENGTH, 8)
    y = CF.softmax(q, q, q, causal=True, starts=starts, valid=VALID)
    documents = starts.cumsum(1)
    for i in range(3):
        seen = (documents[i].unsqueeze(0) == documents[i].unsqueeze(1)) & VALID[i].unsqueeze(0)
        seen = seen.tril()
        scores = (q[i] @ q[i].transpose(1, 2) / 8**0.5).masked_fill(~seen, -torch.inf)
        want = scores.softmax(-1).nan_to_num(0) @ q[i]
        assert error(y[i][:, VALID[i]], want[:, VALID[i]]) < 1e-5


def test_a_start_that_a_piece_has_no_real_token_for_is_an_error():
    layer = cistern.nn.Attention("latte", DIM, HEADS, conv=3).eval()
    core = layer.core
    x = torch.randn(1, 6, DIM)
    heads = [torch.randn(1, p["heads"], 6, p["width"] // p["heads"]) for p in core.projections]
    q = torch.randn(1, HEADS, 6, 8)
    model = KINDS["decoder_lm"](make_config(attention=["latte"])).eval()
    ids = torch.randint(19, (1, 6))
    valid = torch.tensor([[1, 1, 1, 0, 0, 1]]).bool()
    starts = torch.tensor([[0, 0, 0, 1, 0, 0]]).bool()
    calls = (lambda t, **m: layer.extend(x[:, :t], **m),
             lambda t, **m: core.extend(*(h[:, :, :t] for h in heads), **m),
             lambda t, **m: CF.latte(*[q[:, :, :t]] * 3, causal=True, return_state=True, **m),
             lambda t, **m: model.extend(ids[:, :t], **m))
    for call in calls:
        call(6, valid=valid, starts=starts)  # the sixth token takes it up
        for t in (4, 5):
            with pytest.raises(cistern.UsageError, match="last start of row 0.*the next piece"):
                call(t, valid=valid[:, :t], starts=starts[:, :t])
            # Padding behind the row is none of its tokens.
            call(t, valid=valid[:, :t], starts=starts[:, :t], lengths=torch.tensor([3]))
        call(0, valid=valid[:, :0], starts=starts[:, :0])
    with torch.no_grad():
        layer(x[:, :5], valid=valid[:, :5], starts=starts[:, :5])  # hands on no state
        whole = layer(x, valid=valid, starts=starts)
        first, state = layer.extend(x[:, :5], valid=valid[:, :5])
        last, _ = layer.extend(x[:, 5:], state, starts=torch.ones(1, 1).bool())
        assert error(torch.cat([first, last], 1), whole) < 1e-5


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_models(kind):
    more = dict(kind=kind, positions="learned", max_length=64)
    if kind in ("encoder_classifier", "two_tower"):
        more["classes"] = 5
    if kind == "forecaster":
        more["forecaster"] = dict(inputs=4, outputs=3)
    config = make_config(attention=["latte"], **more)
    model = KINDS[kind](config).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    ids, other = torch.randint(19, (3, LENGTH)), torch.randint(19, (3, LENGTH))
    if kind == "forecaster":
        ids = torch.randn(3, LENGTH, 4)
    pairs = kind in ("two_tower", "encoder_decoder")
    with torch.no_grad():
        if kind == "two_tower":
            y = model(ids, other, valid=VALID, second_valid=VALID)
        elif kind == "encoder_decoder":
            y = model(ids, other, source_valid=VALID, valid=VALID)
        else:
            y = model(ids, valid=VALID)
        for i in range(3):
            one = [rows(t, 1)[i] for t in ((ids, other) if pairs else (ids,))]
            got = y[i:i + 1] if "classes" in more else y[i:i + 1][:, VALID[i]]
            assert error(got, model(*one)) < 1e-4


def test_padding_that_takes_part_cannot_be_masked():
    q = torch.randn(3, HEADS, LENGTH, 8)
    with pytest.raises(cistern.UsageError, match="sees padding"):
        CF.nystrom(q, q, q, valid=VALID, padding="zeroes")
    with pytest.raises(cistern.UsageError, match="dtype bool"):
        CF.latte(q, q, q, valid=VALID.float())
    with pytest.raises(cistern.UsageError, match="12 tokens"):
        CF.latte(q[:, :, :5], q[:, :, :5], q[:, :, :5], valid=VALID)
    config = make_config(kind="encoder_classifier", classes=5, padding="seen",
                         attention=["softmax"])
    with pytest.raises(cistern.UsageError, match="padding=seen"):
        KINDS["encoder_classifier"](config)(torch.randint(19, (3, LENGTH)), valid=VALID)


@pytest.mark.parametrize("given, message", [
    (dict(starts=VALID.long()), r"starts of shape \[3, 12\].*bool, got \[3, 12\] torch.int64"),
    (dict(starts=VALID[:, :5]), r"starts of shape \[3, 12\].*bool, got \[3, 5\] torch.bool"),
    (dict(starts=VALID[:1]), r"starts of shape \[3, 12\].*bool, got \[1, 12\] torch.bool"),
    (dict(starts=[0]), r"starts of shape \[3, 12\].*bool, got list"),
    (dict(lengths=torch.tensor([12])), r"lengths of shape \[3\].*int64, got \[1\] torch.int64"),
    (dict(lengths=torch.ones(3, 1).long()), r"lengths of shape \[3\].*got \[3, 1\]"),
    (dict(lengths=torch.ones(3)), r"lengths of shape \[3\].*int64, got \[3\] torch.float32"),
    (dict(lengths=12), r"lengths of shape \[3\].*int64, got int"),
    (dict(lengths=torch.tensor([12, 13, -2])), r"lengths within 0\.\.12.*got 13"),
    (dict(lengths=torch.tensor([12, 0, -2])), r"lengths within 0\.\.12.*got -2"),
])
def test_lengths_and_starts_beside_valid_are_checked(given, message):
    layer = cistern.nn.Attention("latte", DIM, HEADS)
    q = torch.randn(3, HEADS, LENGTH, 8)
    for call in (lambda: CF.latte(q, q, q, causal=True, valid=VALID, **given),
                 lambda: layer(torch.randn(3, LENGTH, DIM), valid=VALID, **given)):
        with pytest.raises(cistern.UsageError, match=message):
            call()


def test_cross_attention_has_one_source_a_row():
    layer = cistern.nn.Attention("latte", DIM, HEADS, form="cross")
    x = torch.randn(3, LENGTH, DIM)
    for mask in (dict(), dict(valid=VALID)):
        with pytest.raises(cistern.UsageError, match=r"latte.*starts.*one source a row"):
            layer(x, x, starts=VALID, **mask)


def test_lengths_beside_valid_are_those_without():
    x = torch.randn(3, LENGTH, DIM)
    layer, lengths = cistern.nn.Attention("latte", DIM, HEADS).eval(), torch.tensor([0, 7, 12])
    both = layer(x, valid=VALID, lengths=lengths)
    one = layer(x, valid=VALID & (torch.arange(LENGTH) < lengths.unsqueeze(1)))
    assert torch.equal(both, one)


def test_compiled_code_checks_lengths_beside_valid():
    layer = cistern.nn.Attention("latte", DIM, HEADS).eval()
    x, lengths = torch.randn(3, LENGTH, DIM), torch.tensor([12, 7, 0])

    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x, lengths):
            return self.layer(x, valid=VALID, lengths=lengths, starts=VALID)

    want = Masked()(x, lengths)
    compiled = torch.compile(Masked(), backend="aot_eager", fullgraph=True)
    exported = torch.export.export(Masked(), (x, lengths)).module()
    for run in (compiled, exported):
        assert error(run(x, lengths), want) < 1e-6
        with pytest.raises(RuntimeError, match="lengths within 0..T"):
            run(x, torch.tensor([12, 13, 0]))
    with pytest.raises(Exception, match=r"lengths of shape \[3\]"):
        compiled(x, lengths[:1])


def test_compiled_code_checks_starts_of_pieces():
    layer = cistern.nn.Attention("latte", DIM, HEADS).eval()
    x, ones = torch.randn(1, 4, DIM), torch.ones(1, 4).bool()
    state = layer.empty_state(1)

    def run(starts):
        return layer.extend(x, state, valid=ones & (torch.arange(4) < 3), starts=starts)[0]

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    starts = ones & (torch.arange(4) == 2)
    assert error(compiled(starts), run(starts)) < 1e-6
    with pytest.raises(RuntimeError, match="last start of a row"):
        compiled(ones)


def test_compile():
    layer = cistern.nn.Attention("latte", DIM, HEADS).eval()
    x = torch.randn(3, LENGTH, DIM)
    compiled = torch.compile(lambda x, valid: layer(x, valid=valid), backend="aot_eager",
                             fullgraph=True)
    assert error(compiled(x, VALID), layer(x, valid=VALID)) < 1e-6


@pytest.mark.parametrize("padding", ["masked", "zeros", "seen"])
def test_lengths_that_fit_no_row(padding):
    model = cistern.EncoderClassifier({"vocab_size": 19, "dim": DIM, "heads": HEADS,
                                       "classes": 3, "padding": padding})
    ids = torch.randint(19, (2, 7))
    for bad in torch.tensor([8, 3]), torch.tensor([-1, 3]), torch.tensor([3]), [7, 3]:
        with pytest.raises(cistern.UsageError, match="expected lengths"):
            model(ids, bad)

"""The core of a mechanism, a function of projected tensors, as calls and as a module. Everything runs in the C++ library."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import torch
from torch import Tensor, nn

from cistern._library import UsageError, describe, make_spec
from cistern.state import State

_HALF = (torch.float16, torch.bfloat16)
FORMS = ("bidirectional", "causal", "cross")


def _single(x: Tensor) -> Tensor:
    return x.float() if x.dtype in _HALF else x


def run(
    spec: str,
    names: Sequence[str],
    verb: str,
    x: Sequence[Tensor],
    weights: Sequence[Tensor],
    state: State | None = None,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    training: bool = False,
    keep_state: bool = False,
) -> tuple[Tensor, State]:
    """One call of cistern::attend. Half precision is computed in float32, and the output has the type of the input again.

    names: of the state's tensors. verb: bidirectional, extend, cross, write or read.
    """
    dtype = x[0].dtype
    given = [] if state is None else [state[name] for name in names]
    y, after = torch.ops.cistern.attend(
        [_single(t) for t in x], [_single(w) for w in weights], given, lengths, starts, spec, verb, training, keep_state
    )
    return (y.to(dtype) if dtype in _HALF else y), dict(zip(names, after))


def empty(spec: str, names: Sequence[str], like: Tensor, batch: int, training: bool) -> State:
    """The empty state of `batch` rows, in the type of `like` (float32 for half precision) and on its device."""
    row = torch.ops.cistern.empty_state(spec, _single(like), training)
    return {name: t.expand(batch, *t.shape[1:]).contiguous() for name, t in zip(names, row)}


class Core(nn.Module):
    """A mechanism without projections: y = core(*x), with tensors x of shape [B, H, T, w] in the order of `projections`.

    Weights of its own have the names that they have in a model file. Half-precision inputs are computed in float32.

    Args:
        mechanism: a name of `cistern.mechanisms()`, or shares of the heads: "window:2+latte:2".
        dim: width of the model; a head has dim / heads channels.
        heads: number of heads.
        form: "causal", "bidirectional" or "cross".
        max_length: longest sequence, for mechanisms whose weights depend on the position.
        dropout: on the attention probabilities, in training, where the mechanism forms them.
        layer: tells layers of one model apart where a mechanism draws at random.
        first: the Core of an earlier layer with the same mechanism: owns what the mechanism ties across layers.
        **options: of the mechanism: `cistern.mechanisms()[name]["help"]`.

    Raises:
        UsageError: with the reason and the nearest thing that works.
    """

    def __init__(
        self,
        mechanism: str,
        dim: int,
        heads: int,
        *,
        form: str = "causal",
        max_length: int = 0,
        dropout: float = 0.0,
        layer: int = 0,
        positions: str = "none",
        conv: int = 0,
        first: "Core | None" = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.mechanism, self.form, self.dim, self.heads = mechanism, form, dim, heads
        self.spec = make_spec(mechanism, options, dim, heads, max_length, layer, dropout)
        about = describe(self.spec, form, positions, conv)
        self.projections: list[dict[str, Any]] = about["projections"]
        self.state_names: list[str] = about["state"]
        self._weights: list[str] = [w["name"] for w in about["weights"]]
        self._tied = {w["name"] for w in about["weights"] if w["tied"]} if first is not None else set()
        self._first = [first]  # in a list, so that its weights are not registered here again
        for w, value in zip(about["weights"], torch.ops.cistern.initial_weights(self.spec)):
            if w["name"] in self._tied:
                continue
            *modules, leaf = w["name"].split(".")
            owner: nn.Module = self
            for name in modules:
                if not hasattr(owner, name):
                    owner.add_module(name, nn.Module())
                owner = getattr(owner, name)
            if w["trained"]:
                owner.register_parameter(leaf, nn.Parameter(value))
            else:
                owner.register_buffer(leaf, value)

    def weights(self) -> list[Tensor]:
        """Its weights in declared order, those tied to an earlier layer among them."""
        out = []
        for name in self._weights:
            value: Any = self._first[0] if name in self._tied else self
            for part in name.split("."):
                value = getattr(value, part)
            out.append(value)
        return out

    def _run(self, verb: str, x: Sequence[Tensor], state: State | None = None, **kw: Any) -> tuple[Tensor, State]:
        return run(self.spec, self.state_names, verb, x, self.weights(), state, training=self.training, **kw)

    def forward(self, *x: Tensor, lengths: Tensor | None = None, starts: Tensor | None = None) -> Tensor:
        """The whole sequence: [B, H, T, d].

        lengths: [B] int64, real tokens of each row, padding on its right (cross: of the source). starts: [B, T] bool, true where a document
        begins; nothing is seen across a start.
        """
        verb = "extend" if self.form == "causal" else self.form
        return self._run(verb, x, lengths=lengths, starts=starts)[0]

    def extend(
        self, *x: Tensor, state: State | None = None, lengths: Tensor | None = None, starts: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Causal: each token is written into the state, then reads. Returns the output and the state after; the given one is unchanged."""
        if state is None:
            state = self.empty_state(x[0].shape[0], x[0])
        return self._run("extend", x, state, lengths=lengths, starts=starts, keep_state=True)

    def write(self, *x: Tensor, state: State | None = None, lengths: Tensor | None = None) -> State:
        """Cross: writes the key-side tensors into the state."""
        if state is None:
            state = self.empty_state(x[0].shape[0], x[0])
        return self._run("write", x, state, lengths=lengths, keep_state=True)[1]

    def read(self, *x: Tensor, state: State) -> Tensor:
        """Cross: reads with the query-side tensors."""
        return self._run("read", x, state)[0]

    def empty_state(self, batch: int, like: Tensor) -> State:
        """The state of `batch` rows in which nothing is written, in the type and on the device of `like`."""
        return empty(self.spec, self.state_names, like, batch, self.training)

    def extra_repr(self) -> str:
        return f"{self.mechanism}, dim={self.dim}, heads={self.heads}, form={self.form}"


def check_form(causal: bool, cross: bool) -> str:
    """The name of the form that two flags ask for."""
    if causal and cross:
        raise UsageError("cross attention is not causal: give one of causal=True and cross=True")
    return "causal" if causal else "cross" if cross else "bidirectional"

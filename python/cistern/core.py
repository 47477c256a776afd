"""The core of a mechanism, a function of projected tensors, as calls and as a module. Everything
runs in the C++ library."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cistern._library import UsageError, describe, make_spec
from cistern.masks import TokenMap, move_sides, require_maskable
from cistern.state import State

_HALF = (torch.float16, torch.bfloat16)
FORMS = ("bidirectional", "causal", "cross")


def _single(x: Tensor) -> Tensor:
    return x.float() if x.dtype in _HALF else x


def check_tensors(mechanism: str, named: Mapping[str, Any]) -> None:
    """UsageError where one of these is no tensor."""
    for name, value in named.items():
        if not isinstance(value, Tensor):
            found = type(value).__name__
            raise UsageError(f"[{mechanism}] expected a torch.Tensor for {name}, got {found}")


def check_state(mechanism: str, names: Sequence[str], state: Any) -> None:
    """UsageError where `state` is not a dict that has tensors of these names."""
    wanted = ", ".join(names)
    if not isinstance(state, dict):
        found = type(state).__name__
        raise UsageError(
            f"[{mechanism}] expected a state, a dict of the tensors {wanted}, got {found}")
    if any(name not in state for name in names):
        found = ", ".join(map(str, state)) or "none"
        raise UsageError(
            f"[{mechanism}] expected a state of the tensors {wanted}, got {found}: "
            "give what an earlier call returned, or None to begin")
    check_tensors(mechanism, {f"the state's {name}": state[name] for name in names})


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
    """One call of cistern::attend. Half precision is computed in float32, and the output has the
    type of the input again.

    names: of the state's tensors. verb: bidirectional, extend, cross, write or read; of a memory
    stream pack, update or unpack.
    """
    dtype = x[0].dtype
    given = [] if state is None else [state[name] for name in names]
    y, after = torch.ops.cistern.attend([_single(t) for t in x], [_single(w) for w in weights],
                                        given, lengths, starts, spec, verb, training, keep_state)
    return (y.to(dtype) if dtype in _HALF else y), dict(zip(names, after))


def empty(spec: str, names: Sequence[str], like: Tensor, batch: int, training: bool) -> State:
    """The empty state of `batch` rows, in the type of `like` (float32 for half precision) and on
    its device."""
    return dict(zip(names, torch.ops.cistern.empty_state(spec, _single(like), batch, training)))


class Core(nn.Module):
    """A mechanism without projections: y = core(*x), with tensors x of shape [B, H, T, w] in the
    order of `projections`.

    Weights of its own have the names that they have in a model file. Half-precision inputs are
    computed in float32.

    A mechanism with a memory stream (`memory_use` is not "none") has the parts of its bidirectional
    form as well:

        heads = core.pack(*keys, *slots)              # what the slots found in the tokens
        heads = core.update(*keys, *slots, packed=heads)
        y = core.unpack(*queries, packed=[heads, ...])

    with the tensors of the key side, those made of the memory (`memory_projections`), the tensors
    of the query side and those made of what was packed (`packed_projections`). core(*x) is the same
    with the core's own memory and the packed heads in their places.

    Args:
        mechanism: a name of `cistern.mechanisms()`, or shares of the heads: "window:2+latte:2".
        dim: width of all heads together; a head has dim / heads channels.
        heads: number of heads.
        form: "causal", "bidirectional" or "cross".
        max_length: longest sequence, for mechanisms whose weights depend on the position.
        dropout: on the attention probabilities, in training; an error where the mechanism forms
            none.
        model_dim: width of the model; 0: dim.
        positions: "relative" adds T5's bias to the scores, from a table that the core owns, at
            first with standard deviation `relative_std`; other kinds are only checked.
        layer: tells layers of one model apart where a mechanism draws at random.
        first: the Core of an earlier layer with the same mechanism: owns what the mechanism ties
            across layers.
        options, **more: of the mechanism: `cistern.mechanisms()[name]["help"]`. Those with the name
            of another argument go into `options`, a mapping: options={"heads": 2}.

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
        model_dim: int = 0,
        relative_std: float = 0.02,
        first: "Core | None" = None,
        options: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        super().__init__()
        self.mechanism, self.form = mechanism, form
        sizes: dict[str, Any] = {} if model_dim in (0, dim) else {"model": model_dim}
        if positions == "relative":
            sizes |= {"relative": True, "relative_std": relative_std}
        self.spec = make_spec(mechanism, {**(options or {}), **more}, dim, heads, max_length, layer,
                              dropout, **sizes)
        about = describe(self.spec, form, positions, conv)
        # perceiver may have heads of its own
        self.dim: int = about["width"]
        self.heads: int = about["heads"]
        self.projections: list[dict[str, Any]] = [
            p for p in about["projections"] if p["side"] in ("query", "key")
        ]
        self.memory_projections: list[dict[str, Any]] = [
            p for p in about["projections"] if p["side"] == "memory"
        ]
        self.packed_projections: list[dict[str, Any]] = [
            p for p in about["projections"] if p["side"] == "packed"
        ]
        self.memory_use: str = about["memory"]  # none, fixed, stream, replaced or latents
        self.packed_output: str = about["packed_output"]
        self.leaves_scores: bool = about["leaves_scores"]
        self.sees_padding: bool = about["sees_padding"]  # an option lets padding take part
        self.state_names: list[str] = about["state"]
        self.output_dropout: float = about["output_dropout"]
        self.memory_dropout: float = about["memory_dropout"]
        self._weights: list[str] = [w["name"] for w in about["weights"]]
        self._redrawn = [w["redrawn"] for w in about["weights"]]
        self._tied = {w["name"]
                      for w in about["weights"] if w["tied"]} if first is not None else set()
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
            own = torch.empty(value.shape, dtype=value.dtype)  # where torch makes tensors now
            if own.untyped_storage().device.type != "meta":
                own.copy_(value)
            if w["trained"]:
                owner.register_parameter(leaf, nn.Parameter(own))
            else:
                owner.register_buffer(leaf, own)

    def weights(self) -> list[Tensor]:
        """Its weights in declared order, those tied to an earlier layer among them."""
        out = []
        for name in self._weights:
            value: Any = self._first[0] if name in self._tied else self
            for part in name.split("."):
                value = getattr(value, part)
            out.append(value)
        return out

    def _run(self, verb: str, x: Sequence[Tensor], state: State | None = None,
             **kw: Any) -> tuple[Tensor, State]:
        check_tensors(self.mechanism, {f"tensor {i + 1}": t for i, t in enumerate(x)})
        if state is not None:
            check_state(self.mechanism, self.state_names, state)
        weights = self.weights()
        redrawn = [w for w, r in zip(weights, self._redrawn) if r] if self.training else []
        if any(w.dtype in _HALF for w in redrawn):  # the library would redraw a float32 copy
            raise UsageError(
                f"[{self.mechanism}] redraws its features in training, which {redrawn[0].dtype} "
                "cannot hold: keep the module in float32 and use autocast, or give redraw=0")
        # a layer projects them to queries; the core itself does not see them
        if self.memory_use == "latents":
            weights = [w.detach() for w in weights]
        return run(self.spec, self.state_names, verb, x, weights, state, training=self.training,
                   **kw)

    # Whether the queries are the tokens that are attended to.
    @property
    def _itself(self) -> bool:
        return self.form != "cross" and self.memory_use != "latents"

    # The real tokens of each row first.
    def _front(self, x: Sequence[Tensor], sides: Sequence[str], valid: Tensor,
               lengths: Tensor | None, starts: Tensor | None,
               goes_on: bool = False) -> tuple[list[Tensor], TokenMap]:
        check_tensors(self.mechanism, {f"tensor {i + 1}": t for i, t in enumerate(x)})
        require_maskable(self.mechanism, self.sees_padding)
        front = TokenMap(valid, lengths, starts, goes_on)
        return move_sides(front, sides, x, self._itself), front

    def _sides(self) -> list[str]:
        return [p["side"] for p in self.projections]

    def forward(self, *x: Tensor, lengths: Tensor | None = None, starts: Tensor | None = None,
                valid: Tensor | None = None) -> Tensor:
        """The whole sequence: [B, H, T, d].

        lengths: [B] int64, real tokens of each row, padding on its right (cross: of the source).
        starts: [B, T] bool, true where a document begins; nothing is seen across a start.
        valid: [B, T] bool, false where a token is as if it were not there: padding on the left,
        holes (cross: of the source). What those tokens read is 0.
        """
        if valid is not None:
            moved, front = self._front(x, self._sides(), valid, lengths, starts)
            y = self(*moved, lengths=front.lengths, starts=front.starts)
            return front.back(y, 2) if self._itself else y
        verb = "extend" if self.form == "causal" else self.form
        if verb == "bidirectional" and self.memory_use == "latents":
            verb = "cross"  # there are as many queries as latents, and as many keys as tokens
        return self._run(verb, x, lengths=lengths, starts=starts)[0]

    def extend(self, *x: Tensor, state: State | None = None, lengths: Tensor | None = None,
               starts: Tensor | None = None,
               valid: Tensor | None = None) -> tuple[Tensor, State]:
        """Causal: each token is written into the state, then reads. Returns the output and the
        state after; the given one is unchanged.

        The tensors of the memory may follow those of the tokens. A start at a masked token needs a
        real one behind it in the piece, for the state could not hand it on.
        """
        if valid is not None:
            moved, front = self._front(x, self._sides(), valid, lengths, starts, goes_on=True)
            y, after = self.extend(*moved, state=state, lengths=front.lengths, starts=front.starts)
            return front.back(y, 2), after
        if state is None:
            state = self.empty_state(x[0].shape[0], x[0])
        return self._run("extend", x, state, lengths=lengths, starts=starts, keep_state=True)

    def write(self, *x: Tensor, state: State | None = None, lengths: Tensor | None = None,
              valid: Tensor | None = None) -> State:
        """Cross: writes the key-side tensors, which those of the memory may follow, into the
        state."""
        if valid is not None:
            keys = [side for side in self._sides() if side == "key"]
            moved, front = self._front(x, keys, valid, lengths, None)
            return self.write(*moved, state=state, lengths=front.lengths)
        if state is None:
            state = self.empty_state(x[0].shape[0], x[0])
        return self._run("write", x, state, lengths=lengths, keep_state=True)[1]

    def read(self, *x: Tensor, state: State) -> Tensor:
        """Cross: reads with the query-side tensors, which those of the packed memory may follow."""
        return self._run("read", x, state)[0]

    def _run_memory(self, verb: str, x: Sequence[Tensor], lengths: Tensor | None) -> Tensor:
        if not self.memory_projections:
            raise UsageError(
                f"[{self.mechanism}] has no memory to {verb}: that is for mechanisms with a memory "
                "stream such as luna")
        return self._run(verb, x, lengths=lengths)[0]

    def pack(self, *x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Tokens into the memory: [B, H, M, d]. x: tensors of the key side, then those of the
        memory, [1 or B, H, M, w], if not its own."""
        return self._run_memory("pack", x, lengths)

    def update(self, *x: Tensor, packed: Tensor, lengths: Tensor | None = None) -> Tensor:
        """What the tokens read in place of the packed heads: they themselves, or where `memory_use`
        is "replaced" the next memory. x: as in pack."""
        return self._run_memory("update", (*x, packed), lengths)

    def unpack(self, *x: Tensor, packed: Sequence[Tensor], lengths: Tensor | None = None) -> Tensor:
        """Tokens read what was packed: [B, H, T, d]. x: tensors of the query side; packed: one for
        each of `packed_projections`."""
        return self._run_memory("unpack", (*x, *packed), lengths)

    def initial_memory(self, rows: int = 1) -> Tensor:
        """The learned memory or latents before the first layer, [1, M, dim]; in training with the
        dropout that the mechanism's options ask for, [rows, M, dim], each row by draws of its
        own."""
        memory = torch.ops.cistern.initial_memory(self.weights(), self.spec)
        if not self.training or self.memory_dropout <= 0:
            return memory
        return F.dropout(memory.expand(rows, -1, -1), self.memory_dropout)

    def empty_state(self, batch: int, like: Tensor) -> State:
        """The state of `batch` rows in which nothing is written, in the type and on the device of
        `like`."""
        return empty(self.spec, self.state_names, like, batch, self.training)

    def extra_repr(self) -> str:
        return f"{self.mechanism}, dim={self.dim}, heads={self.heads}, form={self.form}"


def check_form(causal: bool, cross: bool) -> str:
    """The name of the form that two flags ask for."""
    if causal and cross:
        raise UsageError("cross attention is not causal: give one of causal=True and cross=True")
    return "causal" if causal else "cross" if cross else "bidirectional"

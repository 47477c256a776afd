"""Modules: attention layers for every mechanism, with the weight names of the C++ models."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cistern._library import UsageError
from cistern.core import Core, check_state
from cistern.masks import TokenMap, require_maskable
from cistern.multihead import MultiheadAttention
from cistern.state import State

__all__ = ["Attention", "Core", "Handles", "MultiheadAttention", "rotate"]

# queries and keys [B, h, T, d] of the heads of a layer, as they meet
Handles = tuple[Tensor, Tensor]


def rotate(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """Rotary positions, halves convention. x [B, H, T, d], positions [1 or B, T] int64. Angles are
    computed in double."""
    half = x.shape[-1] // 2
    exponents = torch.arange(half, dtype=torch.float64, device=x.device) * (-math.log(base) / half)
    angles = (positions.to(torch.float64).unsqueeze(-1) * exponents.exp()).unsqueeze(1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def piece_positions(before: Tensor, length: int, starts: Tensor | None) -> Tensor:
    """[B, T]: where each token stands in its document, after `before` [B] tokens of the one that
    each row is in."""
    t = torch.arange(length, device=before.device)
    running = before.unsqueeze(1) + t
    if starts is None or length == 0:
        return running
    last = torch.where(starts, t, -1).cummax(1).values
    return torch.where(last >= 0, t - last, running)


def positions_after(before: Tensor, positions: Tensor, lengths: Tensor | None) -> Tensor:
    """[B]: one past each row's last token."""
    if positions.shape[1] == 0:
        return before
    if lengths is None:
        return positions[:, -1] + 1
    last = (lengths - 1).clamp_min(0).unsqueeze(1)
    return torch.where(lengths > 0, positions.gather(1, last).squeeze(1) + 1, before)


class _Convolution(nn.Module):
    """The filter of one projection, [width, taps]; begins as the identity with small noise on the
    tokens before."""

    def __init__(self, width: int, taps: int) -> None:
        super().__init__()
        weight = torch.randn(width, taps) * 0.02
        weight[:, -1] += 1
        self.weight = nn.Parameter(weight)


# Whether calling the map is its weight and bias alone: nothing was put around it or in its place
# (hooks, adapters, parametrizations).
def _plain(linear: nn.Module) -> bool:
    return type(linear) is nn.Linear and "forward" not in linear.__dict__ and not (
        linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks
        or linear._backward_pre_hooks)


# What all of these maps make of x, side by side: in one product where they are plain.
def _product(x: Tensor, maps: list[nn.Linear]) -> Tensor:
    if not all(_plain(m) for m in maps):
        return torch.cat([m(x) for m in maps], -1)
    bias = None
    if any(m.bias is not None for m in maps):
        bias = torch.cat([m.weight.new_zeros(m.weight.shape[0]) if m.bias is None else m.bias
                          for m in maps])
    return F.linear(x, torch.cat([m.weight for m in maps]), bias)


class Attention(nn.Module):
    """Multi-head attention with any mechanism: declared projections, short convolution, rotary
    positions, core, output projection.

        layer = cistern.nn.Attention("latte", dim=512, heads=8)
        y = layer(x)                                # x, y [B, T, 512]
        y, state = layer.extend(x)                  # the same, and the state
        y, state = layer.extend(next_token, state)  # decoding, any number of tokens

    Mechanisms with a memory stream (luna, conv_luna, shared_workspace) pack the tokens into slots,
    which the tokens then read:

        layer = cistern.nn.Attention("luna", dim=512, heads=8, form="bidirectional", slots=16)
        y = layer(x)  # from the learned memory, layer.core.memory [1, 16, 512]
        # From the memory that an earlier layer returned; both without a residual.
        y, packed = layer(x, memory=memory, return_memory=True)
        memory = norm(memory + packed)  # for the next layer, as the models do it

    Reuse attention copies scores of the previous layer, which passes on its queries and keys:

        y, handles = cistern.nn.Attention("softmax", dim=512, heads=8)(x, return_handles=True)
        reuse = cistern.nn.Attention("reuse", dim=512, heads=8, options={"heads": 4})
        z = reuse(y, handles=handles)

    Weights are named as in models of the C++ program (q_proj.weight, ..., core.*, o_proj.weight).
    Under autocast the projections run in half precision, the core in float32.

    Args:
        mechanism: a name of `cistern.mechanisms()`, or shares of the heads: "window:2+latte:2".
        dim, heads: width of the model and number of heads.
        qkv_dim: width of queries, keys and values, all heads together; 0: dim.
        form: "causal", "bidirectional" or "cross" (layer(x, source)).
        positions: "rotary" rotates the projections of mechanisms that allow it; "relative" adds
            T5's bias to the scores of softmax; else "none": positions of embeddings are a model's.
        conv: taps of the causal short convolution on every projection; 0 for none.
        bias: biases in all projections.
        source_dim: cross: width of the source; 0: dim.
        init_std, out_std: standard deviations of the initial input and output projections.
        tokens_out: False if only the packed memory is needed, as in the last layer of a classifier
            that sees the memory: computes nothing for the tokens, and y is None.
        first: an earlier Attention with the same mechanism: owns what is tied across layers.
        max_length, dropout, layer, options, **more: as in `Core`.

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
        positions: str = "none",
        conv: int = 0,
        bias: bool = False,
        source_dim: int = 0,
        qkv_dim: int = 0,
        init_std: float = 0.02,
        out_std: float = 0.02,
        tokens_out: bool = True,
        first: "Attention | None" = None,
        **core: Any,
    ) -> None:
        super().__init__()
        owner = None if first is None else first.core
        self.core: Core = Core(mechanism, qkv_dim or dim, heads, form=form, positions=positions,
                               conv=conv, model_dim=dim, first=owner, **core)
        if positions not in ("none", "rotary", "relative"):
            raise UsageError(
                f"positions={positions} are added to embeddings, which a layer does not have: add "
                "them to x, and give the layer rotary, relative or none")
        if positions == "relative" and mechanism == "reuse":
            raise UsageError("[reuse] the Python package does not pass on the bias of relative "
                             "positions with copied scores; run such a model with the program")
        width = self.core.dim
        self.dim, self.form, self.rotary = dim, form, positions == "rotary"
        self.conv, self.tokens_out = conv, tokens_out
        if not tokens_out and not self.core.memory_projections:
            raise UsageError(f"[{mechanism}] has no memory, so its tokens are all that comes out: "
                             "tokens_out=True")
        # Those of tokens, except copied ones, which come from the previous layer.
        self.projections = [p for p in self.core.projections if not p["copied"]]
        self.copied: int = max((p["heads"] for p in self.core.projections if p["copied"]),
                               default=0)
        self._first = [first]  # in a list, so that its weights are not registered here again
        wanted = [p for p in self.projections if tokens_out or p["side"] == "key"]
        wanted += self.core.memory_projections
        for p in wanted + (self.core.packed_projections if tokens_out else []):
            name = p["map"] + "_proj"
            tied = p["tied"] and first is not None
            if not p["identity"] and not tied and not hasattr(self, name):
                given = source_dim or dim if p["side"] == "key" else dim
                biased = bias if p["bias"] is None else p["bias"]
                self.add_module(name, self._linear(given, p["width"], biased, init_std))
        for p in self.projections if conv > 0 else []:
            self.add_module(p["name"] + "_conv", _Convolution(p["width"], conv))
        if tokens_out or self.core.packed_output == "shared":
            self.o_proj = self._linear(width, dim, bias, out_std)
        if self.core.packed_output == "own":
            self.packed_o_proj = self._linear(dim, dim, bias, out_std)

    @staticmethod
    def _linear(inputs: int, outputs: int, bias: bool, std: float) -> nn.Linear:
        linear = nn.Linear(inputs, outputs, bias=bias)
        nn.init.normal_(linear.weight, std=std)
        if bias:
            nn.init.zeros_(linear.bias)
        return linear

    def _map(self, p: dict[str, Any]) -> nn.Linear:
        owner = self._first[0] if p["tied"] and self._first[0] is not None else self
        return getattr(owner, p["map"] + "_proj")

    def _split(self, y: Tensor, p: dict[str, Any]) -> Tensor:
        return y.unflatten(-1, (p["heads"], -1)).transpose(1, 2)

    # The projections of these sides in one product (and one convolution), then split into heads:
    # views, no copies.
    def _project(
        self,
        x: Tensor,
        sides: tuple[str, ...],
        positions: Tensor | None = None,
        starts: Tensor | None = None,
        lengths: Tensor | None = None,
        conv: Tensor | None = None,
    ) -> tuple[list[Tensor], Tensor | None]:
        chosen = [p for p in self.projections if p["side"] in sides]
        mapped = [p for p in chosen if not p["identity"]]
        parts: dict[str, Tensor] = {}
        if mapped:
            maps = [self._map(p) for p in mapped]
            given = x
            if mapped[0]["normalised"]:
                given = x / torch.linalg.vector_norm(x, dim=2, keepdim=True).clamp_min(1e-12)
            y = _product(given, maps)
            if self.conv > 0:
                filters = torch.cat([getattr(self, p["name"] + "_conv").weight for p in mapped])
                y, conv = torch.ops.cistern.short_conv(y.to(filters.dtype), filters, conv, starts,
                                                       lengths)
            parts = dict(zip([p["name"] for p in mapped], y.split([p["width"] for p in mapped],
                                                                  -1)))
        out = []
        for p in chosen:
            part = self._split(x if p["identity"] else parts[p["name"]], p)
            if self.rotary and p["rotary"]:
                part = rotate(
                    part, positions if positions is not None else torch.arange(
                        x.shape[1], device=x.device).unsqueeze(0))
            out.append(part)
        return out, conv

    # [1 or B, M, dim] -> the tensors made of the memory or of what was packed, [1 or B, H, M, w].
    def _of_memory(self, projections: list[dict[str, Any]], memory: Tensor) -> list[Tensor]:
        return [
            self._split(memory if p["identity"] else self._map(p)(memory), p) for p in projections
        ]

    def _merge(self, y: Tensor) -> Tensor:
        out = self.o_proj(y.transpose(1, 2).flatten(2))
        return F.dropout(out, self.core.output_dropout, self.training)

    # What was packed after its linear map, [B, M, dim].
    def _packed(self, heads: Tensor) -> Tensor:
        merged = heads.transpose(1, 2).flatten(2)
        if self.core.packed_output == "none":
            return merged
        out = self.packed_o_proj if self.core.packed_output == "own" else self.o_proj
        return out(merged)

    def _positions(self, x: Tensor, positions: Tensor | None,
                   starts: Tensor | None) -> Tensor | None:
        if positions is not None or not self.rotary:
            return positions
        before = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        return piece_positions(before, x.shape[1], starts)

    # A tensor of the type and on the device of its weights; quantized maps read float32.
    def _weight(self) -> Tensor:
        for weight in [getattr(self.o_proj, "weight", None), *self.parameters()]:
            if isinstance(weight, Tensor) and weight.is_floating_point():
                return weight
        return torch.empty(0, dtype=torch.float32)

    def _empty_conv(self, batch: int, like: Tensor) -> Tensor:
        channels = sum(p["width"] for p in self.projections)
        return torch.zeros(batch, self.conv - 1, channels, dtype=self._weight().dtype,
                           device=like.device)

    def _check_handles(self, handles: Handles | None, leave: bool) -> None:
        given = 0 if handles is None else handles[0].shape[1]
        if given < self.copied:
            raise UsageError(
                f"[{self.core.mechanism}] takes over the scores of {self.copied} heads of the "
                f"layer before, got those of {given}: give handles=, which a layer returns with "
                "return_handles=True")
        if handles is not None and self.copied == 0:
            raise UsageError(
                f"[{self.core.mechanism}] takes over no scores: handles= are for reuse attention")
        if leave and not self.core.leaves_scores:
            raise UsageError(
                f"[{self.core.mechanism}] leaves no scores to the next layer; softmax and reuse do")

    # The tensors of the core, copied ones included, and the next layer's handles if `leave`.
    def _share(self, parts: list[Tensor], handles: Handles | None,
               leave: bool) -> tuple[list[Tensor], Handles | None]:
        copied = [] if handles is None else [h[:, : self.copied] for h in handles]
        left = []
        for i, name in enumerate(("q", "k") if leave else ()):
            groups = [t for p, t in zip(self.projections, parts) if p["name"] == name]
            groups += copied[i:i + 1]
            left.append(groups[0] if len(groups) == 1 else torch.cat(groups, 1))
        return [*parts, *copied], (left[0], left[1]) if leave else None

    # Packs tokens, then unpacks to them: [B, T, dim] or None, and the packed [B, M, dim].
    def _through_memory(self, x: Tensor, memory: Tensor | None,
                        lengths: Tensor | None) -> tuple[Tensor | None, Tensor]:
        core = self.core
        sides = ("query", "key") if self.tokens_out else ("key",)
        parts = list(
            zip([p["side"] for p in self.projections if p["side"] in sides],
                self._project(x, sides)[0]))
        keys = [t for side, t in parts if side == "key"]
        slots = self._of_memory(core.memory_projections,
                                core.initial_memory(x.shape[0]) if memory is None else memory)
        heads = core.pack(*keys, *slots, lengths=lengths)
        found = self._packed(heads).unflatten(-1, (core.heads, -1)).transpose(1, 2)
        packed = core.update(*keys, *slots, packed=found, lengths=lengths)
        packed = packed.transpose(1, 2).flatten(2)
        if not self.tokens_out:
            return None, packed
        queries = [t for side, t in parts if side == "query"]
        return self._merge(
            core.unpack(*queries, packed=self._of_memory(core.packed_projections, packed),
                        lengths=lengths)), packed

    # What a layer of a model computes: its output, its packed memory, the scores that it leaves.
    def _attend(
        self,
        x: Tensor,
        source: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        starts: Tensor | None = None,
        positions: Tensor | None = None,
        memory: Tensor | None = None,
        handles: Handles | None = None,
        leave: bool = False,
    ) -> tuple[Tensor | None, Tensor | None, Handles | None]:
        core = self.core
        self._check_handles(handles, leave)
        if self.form == "cross":
            if source is None:
                raise UsageError("cross attention needs a source: layer(x, source)")
            if core.memory_projections:
                state = self.write(source, lengths=lengths)
                y = self.read(x, state, positions=self._positions(x, positions, None))
                return y, None, None
            queries = iter(self._project(x, ("query",), positions)[0])
            keys = iter(self._project(source, ("key",))[0])
            parts, left = self._share(
                [next(queries if p["side"] == "query" else keys) for p in self.projections],
                handles, leave)
            return self._merge(core(*parts, lengths=lengths)), None, left
        if source is not None:
            raise UsageError(
                f"the {self.form} form attends to x itself; make the layer with form='cross' for a "
                "source")
        one_memory = self.form == "bidirectional" and core.memory_use != "none"
        if one_memory and starts is not None:
            raise UsageError(
                f"[{core.mechanism}] has one memory for each row, and every document needs its "
                "own: give each document a row")
        if one_memory and core.memory_use == "latents":
            latents = core.initial_memory(x.shape[0]) if memory is None else memory
            latents = latents.expand(x.shape[0], -1, -1)
            parts = self._project(latents, ("query",))[0] + self._project(x, ("key",))[0]
            return self._merge(core._run("cross", parts, lengths=lengths)[0]), None, None
        if one_memory:
            return *self._through_memory(x, memory, lengths), None
        conv = self._empty_conv(x.shape[0], x) if self.conv > 0 else None
        parts, _ = self._project(x, ("query", "key"), self._positions(x, positions, starts), starts,
                                 lengths, conv)
        parts, left = self._share(parts, handles, leave)
        return self._merge(core(*parts, *self._own_memory(x.shape[0]), lengths=lengths,
                                starts=starts)), None, left

    # The tensors of a memory that is the same in every layer, if there is one.
    def _own_memory(self, rows: int) -> list[Tensor]:
        needed = self.core.memory_projections
        return self._of_memory(needed, self.core.initial_memory(rows)) if needed else []

    def forward(
        self,
        x: Tensor,
        source: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        starts: Tensor | None = None,
        valid: Tensor | None = None,
        positions: Tensor | None = None,
        memory: Tensor | None = None,
        return_memory: bool = False,
        handles: Handles | None = None,
        return_handles: bool = False,
    ) -> Any:
        """The whole sequence: x [B, T, dim] -> y [B, T, dim]. Cross attention takes keys and values
        from source [B, S, dim].

        lengths: [B] int64, real tokens of each row, padding on its right (cross: of the source).
        starts: [B, T] bool, true where a document begins. positions: [1 or B, T] int64 for rotary
        positions; by default counted from each document's start.
        valid: [B, T] bool, false where a token is as if it were not there: padding on the left,
        holes (cross: of the source). It is not counted in positions either.

        memory: [1 or B, M, dim] instead of the learned one, for mechanisms that pass it on;
        return_memory: (y, packed), where packed [B, M, dim] is to be added to the memory, or is the
        next memory itself if `layer.core.memory_use` is "replaced" (shared_workspace). For
        bidirectional perceiver, the memory is the latents, which attend to x: y [B, M, dim].

        handles: of the previous layer, for reuse attention; return_handles: (y, handles), for the
        next layer.
        """
        use = self.core.memory_use if self.form == "bidirectional" else "none"
        streams = ("stream", "replaced")
        if (return_memory and use not in streams
                or memory is not None and use not in (*streams, "latents")):
            raise UsageError(
                f"[{self.core.mechanism}], {self.form}, hands no memory on: memory= and "
                "return_memory= are for mechanisms such as luna")
        if not self.tokens_out and not return_memory:
            raise UsageError(
                "a layer with tokens_out=False gives its memory alone: layer(x, return_memory=True)"
            )
        if self.form == "cross" and starts is not None:
            raise UsageError(
                f"[{self.core.mechanism}] several documents in a row (starts) are for self "
                "attention; cross attention takes one source a row")
        given = dict(memory=memory, leave=return_handles)
        if valid is None:
            y, packed, left = self._attend(x, source, lengths=lengths, starts=starts,
                                           positions=positions, handles=handles, **given)
        elif self.form == "cross":
            front = self._front(valid, lengths)
            if handles is not None:
                handles = handles[0], front.move(handles[1], 2)
            source = None if source is None else front.move(source, 1)
            y, packed, left = self._attend(x, source, lengths=front.lengths, positions=positions,
                                           handles=handles, **given)
            left = None if left is None else (left[0], front.back(left[1], 2))
        else:
            front = self._front(valid, lengths, starts)
            positions, handles = self._moved(front, x, positions, handles)
            y, packed, left = self._attend(front.move(x, 1), lengths=front.lengths,
                                           starts=front.starts, positions=positions,
                                           handles=handles, **given)
            if y is not None and use != "latents":
                y = front.back(y, 1)
            left = None if left is None else (front.back(left[0], 2), front.back(left[1], 2))
        return (y, packed) if return_memory else (y, left) if return_handles else y

    def _front(self, valid: Tensor, lengths: Tensor | None, starts: Tensor | None = None,
               goes_on: bool = False) -> TokenMap:
        require_maskable(self.core.mechanism, self.core.sees_padding)
        return TokenMap(valid, lengths, starts, goes_on)

    # What stands beside the tokens of x.
    @staticmethod
    def _moved(front: TokenMap, x: Tensor, positions: Tensor | None,
               handles: Handles | None) -> tuple[Tensor | None, Handles | None]:
        if positions is not None:
            positions = front.move(positions.expand(x.shape[0], -1), 1)
        if handles is not None:
            handles = front.move(handles[0], 2), front.move(handles[1], 2)
        return positions, handles

    def extend(
        self,
        x: Tensor,
        state: State | None = None,
        *,
        lengths: Tensor | None = None,
        starts: Tensor | None = None,
        valid: Tensor | None = None,
        positions: Tensor | None = None,
        handles: Handles | None = None,
        return_handles: bool = False,
    ) -> Any:
        """Causal, in pieces of any length: x [B, T, dim] -> ([B, T, dim], the state after). The
        given state is unchanged. A start at a masked token needs a real one behind it in the piece,
        for the state could not hand it on.

        With rotary positions give `positions`, those of the piece's tokens. handles,
        return_handles: of the piece, as in forward; those that are returned are the third result.
        """
        if valid is not None:
            front = self._front(valid, lengths, starts, goes_on=True)
            positions, handles = self._moved(front, x, positions, handles)
            y, *rest = self.extend(front.move(x, 1), state, lengths=front.lengths,
                                   starts=front.starts, positions=positions, handles=handles,
                                   return_handles=return_handles)
            if return_handles:
                rest[1] = tuple(front.back(h, 2) for h in rest[1])
            return (front.back(y, 1), *rest)
        if self.form != "causal":
            raise UsageError(f"extend is causal; this layer is {self.form}")
        if self.rotary and state is not None and positions is None:
            raise UsageError(
                "rotary positions of a later piece have to be given: extend(x, state, "
                "positions=...)")
        self._check_handles(handles, return_handles)
        if state is None:
            state = self.empty_state(x.shape[0], x)
        names = self.core.state_names + (["conv"] if self.conv > 0 else [])
        check_state(self.core.mechanism, names, state)
        parts, conv = self._project(x, ("query", "key"), self._positions(x, positions, starts),
                                    starts, lengths, state.get("conv"))
        parts, left = self._share(parts, handles, return_handles)
        memory = self._own_memory(x.shape[0])
        y, after = self.core.extend(*parts, *memory, state=state, lengths=lengths,
                                    starts=starts)
        if conv is not None:
            after["conv"] = conv
        return (self._merge(y), after, left) if return_handles else (self._merge(y), after)

    def _check_cross(self) -> None:
        if self.form != "cross":
            raise UsageError(f"write and read are for cross attention; this layer is {self.form}")
        if self.copied > 0:
            raise UsageError(
                f"[{self.core.mechanism}] takes over scores of the layer before: use layer(x, "
                "source, handles=...)")

    def write(self, source: Tensor, state: State | None = None, *, lengths: Tensor | None = None,
              valid: Tensor | None = None, positions: Tensor | None = None) -> State:
        """Cross: writes source [B, S, dim] into the state, to be read any number of times.

        With rotary positions give `positions` of a later piece, [1 or B, S] int64.
        """
        self._check_cross()
        if valid is not None:
            front = self._front(valid, lengths)
            positions, _ = self._moved(front, source, positions, None)
            return self.write(front.move(source, 1), state, lengths=front.lengths,
                              positions=positions)
        if self.rotary and state is not None and positions is None:
            raise UsageError(
                "rotary positions of a later piece have to be given: write(source, state, "
                "positions=...)")
        return self.core.write(*self._project(source, ("key", ), positions)[0],
                               *self._own_memory(source.shape[0]), state=state, lengths=lengths)

    def read(self, x: Tensor, state: State, *, positions: Tensor | None = None) -> Tensor:
        """Cross: x [B, T, dim] reads what was written. With rotary positions give those of x,
        [1 or B, T] int64: x may be a part of what reads."""
        self._check_cross()
        if self.rotary and positions is None:
            raise UsageError(
                "rotary positions of what reads have to be given: read(x, state, positions=...), "
                "torch.arange(T).unsqueeze(0) for a whole sequence")
        parts, _ = self._project(x, ("query",), positions)
        if self.core.packed_projections:
            check_state(self.core.mechanism, self.core.state_names, state)
            parts = parts + self._of_memory(
                self.core.packed_projections,
                self._packed(state["memory"].to(self._weight().dtype)))
        return self._merge(self.core.read(*parts, state=state))

    def empty_state(self, batch: int, like: Tensor | None = None) -> State:
        """The state of `batch` rows in which nothing is written; the core's, and with a convolution
        "conv" [B, taps-1, widths]."""
        weight = self._weight()
        like = weight if like is None else like.to(weight.dtype)
        state = self.core.empty_state(batch, like)
        if self.conv > 0:
            state["conv"] = self._empty_conv(batch, like)
        return state

"""Modules: attention layers for every mechanism, with the weight names of the C++ models."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cistern._library import UsageError
from cistern.core import FORMS, Core
from cistern.state import State

__all__ = ["Attention", "Core", "MultiheadAttention", "rotate"]


def rotate(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """Rotary positions, halves convention. x [B, H, T, d], positions [1 or B, T] int64. Angles are computed in double."""
    half = x.shape[-1] // 2
    exponents = torch.arange(half, dtype=torch.float64, device=x.device) * (-math.log(base) / half)
    angles = (positions.to(torch.float64).unsqueeze(-1) * exponents.exp()).unsqueeze(1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def piece_positions(before: Tensor, length: int, starts: Tensor | None) -> Tensor:
    """[B, T]: where each token stands in its document, after `before` [B] tokens of the one that each row is in."""
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
    """The filter of one projection, [width, taps]; begins as the identity with small noise on the tokens before."""

    def __init__(self, width: int, taps: int) -> None:
        super().__init__()
        weight = torch.randn(width, taps) * 0.02
        weight[:, -1] += 1
        self.weight = nn.Parameter(weight)


class Attention(nn.Module):
    """Multi-head attention with any mechanism: declared projections, short convolution, rotary positions, core, output projection.

        layer = cistern.nn.Attention("latte", dim=512, heads=8)
        y = layer(x)                                # x, y [B, T, 512]
        y, state = layer.extend(x)                  # the same, and what is needed to go on
        y, state = layer.extend(next_token, state)  # decoding: any number of tokens, the state stays as small as it was

    Weights are named as in models of the C++ program (q_proj.weight, ..., core.*, o_proj.weight). Under autocast the projections run in half
    precision, the core in float32.

    Args:
        mechanism: a name of `cistern.mechanisms()`, or shares of the heads: "window:2+latte:2".
        dim, heads: width of the model and number of heads.
        form: "causal", "bidirectional" or "cross" (layer(x, source)).
        positions: "rotary" turns the projections of mechanisms that allow it; else "none".
        conv: taps of the causal short convolution on every projection; 0 for none.
        bias: biases in all projections.
        max_length: longest sequence, for mechanisms whose weights depend on the position.
        dropout: on the attention probabilities, where the mechanism forms them.
        init_std, out_std: standard deviations of the first weights of the input and the output projections.
        layer: tells layers of one model apart where a mechanism draws at random.
        first: the Attention of an earlier layer with the same mechanism: owns what the mechanism ties across layers.
        **parameters: of the mechanism, such as latents=256 or slots=32: `cistern.mechanisms()[name]["help"]`.

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
        max_length: int = 0,
        dropout: float = 0.0,
        init_std: float = 0.02,
        out_std: float = 0.02,
        layer: int = 0,
        first: "Attention | None" = None,
        **parameters: Any,
    ) -> None:
        super().__init__()
        self.core: Core = Core(
            mechanism,
            dim,
            heads,
            form=form,
            max_length=max_length,
            dropout=dropout,
            layer=layer,
            positions=positions,
            conv=conv,
            first=None if first is None else first.core,
            **parameters,
        )
        self.dim, self.form, self.rotary, self.conv = dim, form, positions == "rotary", conv
        self.projections = self.core.projections
        if any(p["name"].startswith("copied_") for p in self.projections):
            raise UsageError(
                f"[{mechanism}] takes over scores of the layer before, which a layer of its own does not have; cistern.nn.Core takes them as tensors"
            )
        self._first = [first]  # in a list, so that its weights are not registered here again
        for p in self.projections:
            if not (p["tied"] and first is not None):
                self.add_module(p["name"] + "_proj", self._linear(dim, p["width"], bias, init_std))
            if conv > 0:
                self.add_module(p["name"] + "_conv", _Convolution(p["width"], conv))
        self.o_proj = self._linear(dim, dim, bias, out_std)

    @staticmethod
    def _linear(inputs: int, outputs: int, bias: bool, std: float) -> nn.Linear:
        linear = nn.Linear(inputs, outputs, bias=bias)
        nn.init.normal_(linear.weight, std=std)
        if bias:
            nn.init.zeros_(linear.bias)
        return linear

    def _map(self, p: dict[str, Any]) -> nn.Linear:
        owner = self._first[0] if p["tied"] and self._first[0] is not None else self
        return getattr(owner, p["name"] + "_proj")

    # The projections of one side in one product (and one convolution), then split into heads: views, no copies.
    def _project(
        self, x: Tensor, side: str, positions: Tensor | None, starts: Tensor | None, lengths: Tensor | None, conv: Tensor | None
    ) -> tuple[list[Tensor], Tensor | None]:
        chosen = [p for p in self.projections if side in (p["side"], "both")]
        maps = [self._map(p) for p in chosen]
        bias = None if maps[0].bias is None else torch.cat([m.bias for m in maps])
        y = F.linear(x, torch.cat([m.weight for m in maps]), bias)
        if self.conv > 0:
            filters = torch.cat([getattr(self, p["name"] + "_conv").weight for p in chosen])
            y, conv = torch.ops.cistern.short_conv(y.to(filters.dtype), filters, conv, starts, lengths)
        out = []
        for p, part in zip(chosen, y.split([p["width"] for p in chosen], -1)):
            part = part.unflatten(-1, (p["heads"], -1)).transpose(1, 2)
            if self.rotary and p["rotary"]:
                part = rotate(part, positions if positions is not None else torch.arange(x.shape[1], device=x.device).unsqueeze(0))
            out.append(part)
        return out, conv

    def _merge(self, y: Tensor) -> Tensor:
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def _positions(self, x: Tensor, positions: Tensor | None, starts: Tensor | None) -> Tensor | None:
        if positions is not None or not self.rotary:
            return positions
        return piece_positions(torch.zeros(x.shape[0], dtype=torch.int64, device=x.device), x.shape[1], starts)

    def _empty_conv(self, batch: int, like: Tensor) -> Tensor:
        channels = sum(p["width"] for p in self.projections)
        return torch.zeros(batch, self.conv - 1, channels, dtype=self.o_proj.weight.dtype, device=like.device)

    def forward(
        self,
        x: Tensor,
        source: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        starts: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """The whole sequence: x [B, T, dim] -> [B, T, dim]. Cross attention takes keys and values from source [B, S, dim].

        lengths: [B] int64, real tokens of each row, padding on its right (cross: of the source). starts: [B, T] bool, true where a document
        begins. positions: [1 or B, T] int64 for rotary positions; by default counted from each document's start.
        """
        if self.form == "cross":
            if source is None:
                raise UsageError("cross attention needs a source: layer(x, source)")
            queries = iter(self._project(x, "query", positions, None, None, None)[0])
            keys = iter(self._project(source, "key", None, None, None, None)[0])
            parts = [next(queries if p["side"] == "query" else keys) for p in self.projections]
            return self._merge(self.core(*parts, lengths=lengths))
        if source is not None:
            raise UsageError(f"the {self.form} form attends to x itself; make the layer with form='cross' for a source")
        conv = self._empty_conv(x.shape[0], x) if self.conv > 0 else None
        parts, _ = self._project(x, "both", self._positions(x, positions, starts), starts, lengths, conv)
        return self._merge(self.core(*parts, lengths=lengths, starts=starts))

    def extend(
        self,
        x: Tensor,
        state: State | None = None,
        *,
        lengths: Tensor | None = None,
        starts: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Causal, in pieces of any length: x [B, T, dim] -> ([B, T, dim], the state after). The given state is unchanged.

        With rotary positions give `positions`, those of the piece's tokens.
        """
        if self.form != "causal":
            raise UsageError(f"extend is causal; this layer is {self.form}")
        if self.rotary and state is not None and positions is None:
            raise UsageError("rotary positions of a later piece have to be given: extend(x, state, positions=...)")
        if state is None:
            state = self.empty_state(x.shape[0], x)
        parts, conv = self._project(x, "both", self._positions(x, positions, starts), starts, lengths, state.get("conv"))
        y, after = self.core.extend(*parts, state=state, lengths=lengths, starts=starts)
        if conv is not None:
            after["conv"] = conv
        return self._merge(y), after

    def write(self, source: Tensor, state: State | None = None, *, lengths: Tensor | None = None) -> State:
        """Cross: writes source [B, S, dim] into the state, to be read any number of times."""
        if self.form != "cross":
            raise UsageError(f"write and read are for cross attention; this layer is {self.form}")
        parts, _ = self._project(source, "key", None, None, None, None)
        return self.core.write(*parts, state=state, lengths=lengths)

    def read(self, x: Tensor, state: State, *, positions: Tensor | None = None) -> Tensor:
        """Cross: x [B, T, dim] reads what was written."""
        parts, _ = self._project(x, "query", positions, None, None, None)
        return self._merge(self.core.read(*parts, state=state))

    def empty_state(self, batch: int, like: Tensor | None = None) -> State:
        """The state of `batch` rows in which nothing is written; the core's, and with a convolution "conv" [B, taps-1, widths]."""
        like = self.o_proj.weight if like is None else like.to(self.o_proj.weight.dtype)
        state = self.core.empty_state(batch, like)
        if self.conv > 0:
            state["conv"] = self._empty_conv(batch, like)
        return state


class MultiheadAttention(nn.Module):
    """torch.nn.MultiheadAttention with another mechanism inside: the same arguments, the same weights by the same names.

    It takes the mechanisms whose projections are q, k and v of the model's width; a state dict of torch.nn.MultiheadAttention loads (with
    strict=False where the mechanism has weights of its own). `is_causal=True` is the causal form, keys that are not the queries are cross
    attention, else the form is bidirectional.

    What it cannot do is refused: attention masks other than the causal one, padding that is not on the right, attention weights
    (`need_weights` is ignored and None is returned in their place: no mechanism here forms them), bias_kv, zero_attn, kdim and vdim.

    Args:
        embed_dim, num_heads, dropout, bias, batch_first, device, dtype: as in torch.nn.MultiheadAttention.
        mechanism: a name of `cistern.mechanisms()`.
        max_length: longest sequence, for mechanisms whose weights depend on the position.
        **parameters: of the mechanism.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        mechanism: str = "latte",
        max_length: int = 0,
        **parameters: Any,
    ) -> None:
        super().__init__()
        if add_bias_kv or add_zero_attn or kdim not in (None, embed_dim) or vdim not in (None, embed_dim):
            raise UsageError("add_bias_kv, add_zero_attn, kdim and vdim are of softmax attention alone; use torch.nn.MultiheadAttention")
        self.embed_dim, self.num_heads, self.dropout, self.batch_first = embed_dim, num_heads, dropout, batch_first
        self._qkv_same_embed_dim = False  # keeps torch's encoder layer from its fused softmax attention on these weights
        self.core = self._core(mechanism, max_length, dropout, parameters)
        widths = {p["name"]: p["width"] for p in self.core.projections}
        if widths != {"q": embed_dim, "k": embed_dim, "v": embed_dim}:
            raise UsageError(
                f"[{mechanism}] cannot take the place of torch.nn.MultiheadAttention: its projections are "
                f"{', '.join(f'{name} ({width})' for name, width in widths.items())}, not q, k, v of {embed_dim} each; use cistern.nn.Attention"
            )
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim))
        nn.init.xavier_uniform_(self.in_proj_weight)
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * embed_dim)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        if bias:
            nn.init.zeros_(self.out_proj.bias)
        self.to(device=device, dtype=dtype)

    def _core(self, mechanism: str, max_length: int, dropout: float, parameters: dict[str, Any]) -> Core:
        reasons = []
        for form in FORMS:  # any form will do: which one is needed is known in forward
            try:
                return Core(mechanism, self.embed_dim, self.num_heads, form=form, max_length=max_length, dropout=dropout, **parameters)
            except UsageError as e:
                reasons.append(str(e))
        raise UsageError(reasons[0])

    @staticmethod
    def _lengths(key_padding_mask: Tensor | None) -> Tensor | None:
        if key_padding_mask is None:
            return None
        pad = key_padding_mask if key_padding_mask.dtype == torch.bool else key_padding_mask != 0
        if key_padding_mask.dtype != torch.bool:
            torch._assert_async(((key_padding_mask == 0) | torch.isneginf(key_padding_mask)).all(), "a float key_padding_mask must be 0 or -inf")
        torch._assert_async((pad[:, 1:] >= pad[:, :-1]).all(), "padding must be on the right of each row")
        return (~pad).sum(1)

    @staticmethod
    def _check_mask(attn_mask: Tensor | None, is_causal: bool, length: int) -> None:
        if attn_mask is None:
            return
        if not is_causal:
            raise UsageError("no attention masks but the causal one: give is_causal=True, or use key_padding_mask for padding")
        seen = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask == 0
        causal = torch.ones(length, length, dtype=torch.bool, device=attn_mask.device).tril()
        torch._assert_async((seen == causal).all(), "with is_causal=True, attn_mask must be the causal mask")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """As torch.nn.MultiheadAttention.forward, but for the second result, which is None."""
        itself = query is key and key is value
        self._check_mask(attn_mask, is_causal, query.shape[-2] if self.batch_first or query.dim() == 2 else query.shape[0])
        if is_causal and not itself:
            raise UsageError("is_causal=True is self attention: query, key and value must be the same tensor")
        x = [query] if itself else [query, key, value]
        batched = query.dim() == 3
        if not batched:
            x = [t.unsqueeze(0) for t in x]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            x = [t.transpose(0, 1) for t in x]
        if itself:
            parts = list(F.linear(x[0], self.in_proj_weight, self.in_proj_bias).chunk(3, -1))
        else:
            biases = [None] * 3 if self.in_proj_bias is None else list(self.in_proj_bias.chunk(3))
            parts = [F.linear(t, w, b) for t, w, b in zip(x, self.in_proj_weight.chunk(3), biases)]
        heads = [t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in parts]
        verb = "extend" if is_causal else "bidirectional" if itself else "cross"
        y, _ = self.core._run(verb, heads, lengths=self._lengths(key_padding_mask))
        y = self.out_proj(y.transpose(1, 2).flatten(2))
        if not batched:
            return y.squeeze(0), None
        return (y if self.batch_first else y.transpose(0, 1)), None

"""Blocks of the C++ models: what passes between them, and the stack that runs them."""

from __future__ import annotations

import json
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cistern.nn import Attention, Handles
from cistern.parts import FeedForward, fourier, norm_of


class Stream(NamedTuple):
    """The data passed from block to block: tokens [B, T, dim], a memory, and the scores that
    the next layer may copy."""

    x: Tensor | None
    positions: Tensor
    lengths: Tensor | None = None
    starts: Tensor | None = None
    memory: Tensor | None = None  # [1 or B, M, dim]
    # where x holds latents: the tokens that they attend to, their lengths and positions
    source: tuple[Tensor, Tensor | None, Tensor] | None = None
    handles: Handles | None = None
    cross_handles: Handles | None = None


class Block(nn.Module):
    """Attention and feed-forward, each with a residual and a norm before or after it. A memory that
    is handed on has them as well.

    attention and cross_attention, which comes between, are None where a placement of reuse
    attention leaves them out; most blocks have no cross_attention at all.
    """

    def __init__(self, config: dict[str, Any], stack: dict[str, Any], about: dict[str, Any],
                 first: Attention | None, cross: Attention | None) -> None:
        super().__init__()
        dim, options = stack["dim"], about["attention"]
        self.norm_first, self.dropout = config["norm"] == "pre", stack["dropout"]
        out = config.get("ffn_out_dropout", -1)
        self.ffn_out_dropout: float = self.dropout if out < 0 else out
        self.leaves: bool = about["leaves"]
        self.cross_leaves: bool = about["cross_leaves"]
        self.attention = None if options is None else Attention(first=first, **options)
        self.memory_use = "none" if self.attention is None else self.attention.core.memory_use
        self.memory_out: bool = about["memory_out"] and self.memory_use == "stream"
        tokens = self.attention is None or self.attention.tokens_out
        if tokens:
            self.ffn = FeedForward(dim, stack["ffn_dim"], config["activation"], config["bias"]
                                    or config["ffn_bias"], stack["ffn_dropout"])
        self.cross_attention = None if about["cross"] is None else Attention(
            first=cross, **about["cross"])
        needed = {
            "attention_norm": self.attention is not None and (tokens or self.norm_first),
            "ffn_norm": tokens,
            "memory_norm": self.memory_out or (self.memory_use == "stream" and self.norm_first),
            "source_norm": self.memory_use == "latents" and self.norm_first,
            "cross_attention_norm": self.cross_attention is not None,
        }
        own = {} if options is None else options["options"]
        self.fourier: tuple[int, float, int] | None = None
        if self.memory_use == "latents" and own.get("fourier_bands", 0) > 0:
            self.fourier = own["fourier_bands"], own.get("fourier_max_freq",
                                                         10.0), options["max_length"]
        for name in [name for name in needed if needed[name]]:
            wide = options["source_dim"] if name == "source_norm" else 0
            self.add_module(name, norm_of(config, wide or dim))

    def _before(self, x: Tensor, norm: str) -> Tensor:
        return getattr(self, norm)(x) if self.norm_first else x

    def _add(self, x: Tensor, y: Tensor, norm: str, dropout: float | None = None) -> Tensor:
        total = x + F.dropout(y, self.dropout if dropout is None else dropout, self.training)
        return total if self.norm_first else getattr(self, norm)(total)

    # Latents in the place of the tokens, which become their source.
    def _to_latents(self, attention: Attention, stream: Stream) -> Stream:
        if stream.source is None:
            rows = stream.x.shape[0]
            latents = attention.core.initial_memory(rows).expand(rows, -1, -1)
            positions = torch.arange(latents.shape[1], device=latents.device).unsqueeze(0)
            stream = Stream(latents, positions, memory=stream.memory,
                            source=(stream.x, stream.lengths, stream.positions))
        source, lengths, places = stream.source
        if self.fourier is not None:
            source = torch.cat([source, fourier(places, *self.fourier).to(source.dtype).expand(
                source.shape[0], -1, -1)], 2)
        y, _, _ = attention._attend(self._before(source, "source_norm"), lengths=lengths,
                                    memory=self._before(stream.x, "attention_norm"))
        return stream._replace(x=self._add(stream.x, y, "attention_norm"))

    def _attend(self, attention: Attention, stream: Stream, state: Any,
                keep: bool) -> tuple[Stream, Any]:
        x, memory = stream.x, stream.memory
        h = self._before(x, "attention_norm")
        mask: dict[str, Any] = dict(lengths=stream.lengths, starts=stream.starts,
                                    positions=stream.positions)
        mask["handles"] = stream.handles if attention.copied > 0 else None
        if keep:
            y, state, left = (*attention.extend(h, state, return_handles=self.leaves, **mask),
                              None)[:3]
            return stream._replace(x=self._add(x, y, "attention_norm"), handles=left), state
        given = None
        if self.memory_use in ("stream", "replaced"):
            if memory is None:
                memory = attention.core.initial_memory(h.shape[0])
            given = self._before(memory, "memory_norm") if self.memory_use == "stream" else memory
        y, packed, left = attention._attend(h, memory=given, leave=self.leaves, **mask)
        if self.memory_use == "replaced":
            memory = packed
        elif self.memory_out:
            memory = self._add(memory, packed, "memory_norm")
        return stream._replace(x=None if y is None else self._add(x, y, "attention_norm"),
                               memory=memory, handles=left), state

    def write(self, source: Tensor, lengths: Tensor | None, keep: bool) -> Any:
        """What cross attention needs of the source: its state, or the source itself where nothing
        is kept, or where scores go from layer to layer."""
        cross = self.cross_attention
        if cross is None:
            return {}
        if keep and cross.copied == 0 and not self.cross_leaves:
            return cross.write(source, lengths=lengths)
        return {"source": source} if lengths is None else {"source": source, "lengths": lengths}

    def _read(self, stream: Stream, written: Any) -> Stream:
        cross, x = self.cross_attention, stream.x
        if cross is None:
            return stream
        h = self._before(x, "cross_attention_norm")
        left = None
        if "source" in written:
            handles = stream.cross_handles if cross.copied > 0 else None
            y, _, left = cross._attend(h, written["source"], lengths=written.get("lengths"),
                                       positions=stream.positions, handles=handles,
                                       leave=self.cross_leaves)
        else:
            y = cross.read(h, written, positions=stream.positions)
        return stream._replace(x=self._add(x, y, "cross_attention_norm"), cross_handles=left)

    def forward(self, stream: Stream, state: Any = None, keep: bool = False,
                written: Any = None) -> tuple[Stream, Any]:
        if self.memory_use == "latents":
            stream = self._to_latents(self.attention, stream)
        elif self.attention is not None:
            stream, state = self._attend(self.attention, stream, state, keep)
        if stream.x is None:  # only the memory is asked for
            return stream, state
        stream = self._read(stream, written)
        return stream._replace(
            x=self._add(stream.x, self.ffn(self._before(stream.x, "ffn_norm")), "ffn_norm",
                        self.ffn_out_dropout)), state


class Blocks(nn.Module):
    """The blocks of a stack by their numbers. A tied layer is the block of the layer whose
    parameters it has."""

    def __init__(self, config: dict[str, Any], stack: dict[str, Any]) -> None:
        super().__init__()
        first: dict[str, Attention] = {}  # of each mechanism with its options
        self.owners: list[int] = stack["owners"]
        self.layer_drop: float = config.get("layer_drop", 0.0)

        def alike(options: dict[str, Any] | None, which: str) -> str:
            return "" if options is None else json.dumps(
                [which, options["mechanism"], self._given(options)], sort_keys=True)

        for i, about in enumerate(stack["blocks"]):
            if self.owners[i] != i:
                continue
            keys = alike(about["attention"], "self"), alike(about["cross"], "cross")
            block = Block(config, stack, about, first.get(keys[0]), first.get(keys[1]))
            self.add_module(str(i), block)
            for key, attention in zip(keys, (block.attention, block.cross_attention)):
                if attention is not None:
                    first.setdefault(key, attention)

    # The options without what a placement says of single layers.
    @staticmethod
    def _given(options: dict[str, Any]) -> dict[str, Any]:
        return {
            key: value
            for key, value in options["options"].items()
            if options["mechanism"] != "reuse" or key != "heads"
        }

    def each(self) -> list[Block]:
        """The block of each layer."""
        return [cast(Block, getattr(self, str(i))) for i in self.owners]

    def left_out(self) -> list[bool]:
        """For each layer, whether this pass leaves it out (layer_drop, in training)."""
        if not self.training or self.layer_drop == 0:
            return [False] * len(self.owners)
        return (torch.rand(len(self.owners)) < self.layer_drop).tolist()

    def kept(self) -> list[Block]:
        """The blocks of the layers that this pass does not leave out."""
        return [block for block, out in zip(self.each(), self.left_out()) if not out]

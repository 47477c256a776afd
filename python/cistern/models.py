"""Models of the C++ program: the same config.json and model.safetensors, the same numbers, as modules to look into and to change."""

from __future__ import annotations

import math
import os
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cistern._library import UsageError, answer, model_blocks
from cistern.nn import Attention, Handles, piece_positions, positions_after

# Keys of config.json that these modules know. A file with another one that is not at its default is refused.
_KNOWN = set(
    "kind version vocab_size classes attention attention_options dim layers heads ffn_dim max_length conv norm final_norm norm_eps activation "
    "positions pooling head norm_pooled bias ffn_bias head_bias tie_embeddings dropout attention_dropout ffn_dropout init_std "
    "embedding_std position_std embedding_norm tied_layers".split()
)


class _Positions(nn.Module):
    """Learned or sinusoidal positions, added to embeddings."""

    def __init__(self, kind: str, dim: int, max_length: int) -> None:
        super().__init__()
        self.kind, self.max_length = kind, max_length
        if kind == "learned":
            self.weight = nn.Parameter(torch.zeros(max_length, dim))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.kind == "learned":
            if not torch.compiler.is_compiling() and positions.numel() > 0 and int(positions.max()) >= self.max_length:
                raise UsageError(f"position {int(positions.max())} is beyond the learned table of max_length={self.max_length}")
            return x + F.embedding(positions, self.weight)
        if self.kind == "sinusoidal":
            half = x.shape[-1] // 2
            exponents = torch.arange(half, dtype=torch.float64, device=x.device) * (-math.log(10000.0) / half)
            angles = positions.to(torch.float64).unsqueeze(-1) * exponents.exp()
            return x + torch.stack([angles.sin(), angles.cos()], -1).flatten(-2).to(x.dtype)
        return x


class _FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int, activation: str, bias: bool, dropout: float) -> None:
        super().__init__()
        self.activation, self.dropout = activation, dropout
        self.up_proj = nn.Linear(dim, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up_proj(x)
        h = F.relu(h) if self.activation == "relu" else F.gelu(h, approximate="tanh" if self.activation == "gelu_tanh" else "none")
        return self.down_proj(F.dropout(h, self.dropout, self.training))


class Stream(NamedTuple):
    """What goes from block to block: tokens [B, T, dim], a memory beside them, and the scores that the next layer may take over."""

    x: Tensor | None
    positions: Tensor
    lengths: Tensor | None = None
    starts: Tensor | None = None
    memory: Tensor | None = None  # [1 or B, M, dim]
    source: tuple[Tensor, Tensor | None] | None = None  # where x holds latents: the tokens that they attend to, and their lengths
    handles: Handles | None = None


class Block(nn.Module):
    """Attention and feed-forward, each with a residual and a norm before or after it. A memory that is handed on has them as well.

    attention is None where a placement of reuse attention leaves it out.
    """

    def __init__(self, config: dict[str, Any], about: dict[str, Any], form: str, first: Attention | None) -> None:
        super().__init__()
        dim, options = config["dim"], about["attention"]
        self.norm_first, self.dropout = config["norm"] == "pre", config["dropout"]
        self.leaves: bool = about["leaves"]
        self.attention = None if options is None else Attention(dim=dim, heads=config["heads"], form=form, first=first, **options)
        self.memory_use = "none" if self.attention is None else self.attention.core.memory_use
        self.memory_out: bool = about["memory_out"] and self.memory_use == "stream"
        tokens = self.attention is None or self.attention.tokens_out
        if tokens:
            self.ffn = _FeedForward(dim, config["ffn_dim"] or 4 * dim, config["activation"], config["bias"] or config["ffn_bias"], config["ffn_dropout"])
        needed = {
            "attention_norm": self.attention is not None and (tokens or self.norm_first),
            "ffn_norm": tokens,
            "memory_norm": self.memory_out or (self.memory_use == "stream" and self.norm_first),
            "source_norm": self.memory_use == "latents" and self.norm_first,
        }
        for name in [name for name in needed if needed[name]]:
            self.add_module(name, nn.LayerNorm(dim, config["norm_eps"]))

    def _before(self, x: Tensor, norm: str) -> Tensor:
        return getattr(self, norm)(x) if self.norm_first else x

    def _add(self, x: Tensor, y: Tensor, norm: str) -> Tensor:
        total = x + F.dropout(y, self.dropout, self.training)
        return total if self.norm_first else getattr(self, norm)(total)

    # Latents in the place of the tokens, which become their source.
    def _to_latents(self, attention: Attention, stream: Stream) -> Stream:
        if stream.source is None:
            latents = attention.core.initial_memory().expand(stream.x.shape[0], -1, -1)
            positions = torch.arange(latents.shape[1], device=latents.device).unsqueeze(0)
            stream = Stream(latents, positions, memory=stream.memory, source=(stream.x, stream.lengths))
        source, lengths = stream.source
        y, _, _ = attention._attend(
            self._before(source, "source_norm"), lengths=lengths, memory=self._before(stream.x, "attention_norm")
        )
        return stream._replace(x=self._add(stream.x, y, "attention_norm"))

    def _attend(self, attention: Attention, stream: Stream, state: Any, keep: bool) -> tuple[Stream, Any]:
        x, memory = stream.x, stream.memory
        h = self._before(x, "attention_norm")
        mask: dict[str, Any] = dict(lengths=stream.lengths, starts=stream.starts, positions=stream.positions)
        mask["handles"] = stream.handles if attention.copied > 0 else None
        if keep:
            y, state, left = (*attention.extend(h, state, return_handles=self.leaves, **mask), None)[:3]
            return stream._replace(x=self._add(x, y, "attention_norm"), handles=left), state
        given = None
        if self.memory_use in ("stream", "replaced"):
            memory = attention.core.initial_memory() if memory is None else memory
            given = self._before(memory, "memory_norm") if self.memory_use == "stream" else memory
        y, packed, left = attention._attend(h, memory=given, leave=self.leaves, **mask)
        if self.memory_use == "replaced":
            memory = packed
        elif self.memory_out:
            memory = self._add(memory, packed, "memory_norm")
        return stream._replace(x=None if y is None else self._add(x, y, "attention_norm"), memory=memory, handles=left), state

    def forward(self, stream: Stream, state: Any = None, keep: bool = False) -> tuple[Stream, Any]:
        if self.memory_use == "latents":
            stream = self._to_latents(self.attention, stream)
        elif self.attention is not None:
            stream, state = self._attend(self.attention, stream, state, keep)
        if stream.x is None:  # only the memory is asked for
            return stream, state
        return stream._replace(x=self._add(stream.x, self.ffn(self._before(stream.x, "ffn_norm")), "ffn_norm")), state


class _Head(nn.Module):
    def __init__(self, kind: str, dim: int, hidden: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.kind, self.dropout = kind, dropout
        if kind != "linear":
            self.dense = nn.Linear(dim, hidden)
        self.out_proj = nn.Linear(dim if kind == "linear" else hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "linear":
            return self.out_proj(x)
        h = self.dense(x)
        return self.out_proj(F.dropout(F.gelu(h) if self.kind == "gelu" else F.relu(h), self.dropout, self.training))


class _Blocks(nn.Module):
    """The blocks of a model by their numbers. A tied layer is the block of the layer whose parameters it has."""

    def __init__(self, config: dict[str, Any], form: str) -> None:
        super().__init__()
        first: dict[str, Attention] = {}  # of each mechanism
        self.owners: list[int] = config["tied_layers"] or list(range(config["layers"]))
        for i, about in enumerate(model_blocks(config, form)):
            if self.owners[i] != i:
                continue
            mechanism = "" if about["attention"] is None else about["attention"]["mechanism"]
            block = Block(config, about, form, first.get(mechanism))
            self.add_module(str(i), block)
            if block.attention is not None:
                first.setdefault(mechanism, block.attention)

    def each(self) -> list[Block]:
        """The block of each layer."""
        return [cast(Block, getattr(self, str(i))) for i in self.owners]


class DecoderLM(nn.Module):
    """A causal language model. model(ids) -> logits; model.extend(ids, state) goes on from a state.

    config: as in config.json (`load` reads one).
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        dim, vocab = config["dim"], config["vocab_size"]
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.embed_positions = _Positions(config["positions"], dim, config["max_length"])
        self.embed_norm = nn.LayerNorm(dim, config["norm_eps"]) if config["embedding_norm"] else None
        self.layers = _Blocks(config, "causal")
        self.norm = nn.LayerNorm(dim, config["norm_eps"]) if config["final_norm"] else None
        self.lm_head = None if config["tie_embeddings"] else nn.Linear(dim, vocab, bias=config["bias"] or config["head_bias"])

    def _run(self, ids: Tensor, state: Any, keep: bool, lengths: Tensor | None, starts: Tensor | None) -> tuple[Tensor, Any]:
        positions = piece_positions(state["positions"], ids.shape[1], starts)
        x = self.embed_positions(self.embed_tokens(ids), positions)
        x = F.dropout(x if self.embed_norm is None else self.embed_norm(x), self.config["dropout"], self.training)
        layers, stream = [], Stream(x, positions, lengths, starts)
        for block, before in zip(self.layers.each(), state["layers"]):
            stream, after = block(stream, before, keep)
            layers.append(after)
        x = stream.x if self.norm is None else self.norm(stream.x)
        logits = F.linear(x, self.embed_tokens.weight) if self.lm_head is None else self.lm_head(x)
        return logits, {"layers": layers, "positions": positions_after(state["positions"], positions, lengths)}

    def forward(self, ids: Tensor, *, lengths: Tensor | None = None, starts: Tensor | None = None) -> Tensor:
        """ids [B, T] int64 -> logits [B, T, V]. lengths, starts: as in `Attention`."""
        before = torch.zeros(ids.shape[0], dtype=torch.int64, device=ids.device)
        return self._run(ids, {"layers": [None] * len(self.layers.owners), "positions": before}, False, lengths, starts)[0]

    def extend(
        self, ids: Tensor, state: Any = None, *, lengths: Tensor | None = None, starts: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """The same from a state on, and the state after; the given one is unchanged."""
        return self._run(ids, self.empty_state(ids.shape[0]) if state is None else state, True, lengths, starts)

    def empty_state(self, batch: int) -> Any:
        """The state before the first token: {"layers": [state of each layer], "positions": [B]}."""
        positions = torch.zeros(batch, dtype=torch.int64, device=self.embed_tokens.weight.device)
        attention = [block.attention for block in self.layers.each()]
        return {"layers": [{} if a is None else a.empty_state(batch) for a in attention], "positions": positions}


class EncoderClassifier(nn.Module):
    """A bidirectional encoder with a pooled classification head: model(ids, lengths) -> logits [B, classes]."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        dim, self.cls = config["dim"], config["pooling"] == "cls"
        self.embed_tokens = nn.Embedding(config["vocab_size"], dim)
        if self.cls:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.embed_positions = _Positions(config["positions"], dim, config["max_length"] + self.cls)
        self.embed_norm = nn.LayerNorm(dim, config["norm_eps"]) if config["embedding_norm"] else None
        self.layers = _Blocks(config, "bidirectional")
        self.norm = nn.LayerNorm(dim, config["norm_eps"]) if config["final_norm"] else None
        self.classifier = _Head(config["head"], dim, config["ffn_dim"] or 4 * dim, config["classes"], config["dropout"])

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """ids [B, T] int64, lengths [B] int64: padding on the right is never seen."""
        if lengths is None:
            lengths = torch.full((ids.shape[0],), ids.shape[1], dtype=torch.int64, device=ids.device)
        x = self.embed_tokens(ids)
        if self.cls:
            x = torch.cat([self.cls_token.expand(ids.shape[0], 1, -1), x], 1)
        seen = lengths + int(self.cls)
        positions = torch.arange(x.shape[1], device=ids.device).unsqueeze(0)
        x = self.embed_positions(x, positions)
        x = F.dropout(x if self.embed_norm is None else self.embed_norm(x), self.config["dropout"], self.training)
        stream = Stream(x, positions, seen)
        for block in self.layers.each():
            stream, _ = block(stream)
        slots = self.config["pooling"] == "memory"
        x = stream.memory if slots else stream.x
        if self.norm is not None and not self.config["norm_pooled"]:
            x = self.norm(x)
        if slots or stream.source is not None:  # slots or latents: no padding among them
            pooled = x.mean(1)
        elif self.cls:
            pooled = x[:, 0]
        else:
            real = positions < lengths.unsqueeze(1)
            pooled = x.masked_fill(~real.unsqueeze(-1), 0).sum(1) / lengths.clamp_min(1).unsqueeze(1).to(x.dtype)
        if self.norm is not None and self.config["norm_pooled"]:
            pooled = self.norm(pooled)
        return self.classifier(pooled)


def load(folder: str | os.PathLike[str]) -> DecoderLM | EncoderClassifier:
    """A model that the C++ program trained: a folder with config.json and model.safetensors, in evaluation mode.

    To save one back, with the package safetensors: save_file(model.state_dict(), folder + "/model.safetensors").

    Raises:
        UsageError: a config that is not valid, or that asks for what these modules lack; weights that are not those of the config.
        RuntimeError: a file that cannot be read. All of them name the file.
    """
    folder = os.fspath(folder)
    path = os.path.join(folder, "config.json")
    read = answer(torch.ops.cistern.read_model_config(path))
    config, defaults = read["config"], read["defaults"]
    lacking = [f"{key}={config[key]}" for key in config if key not in _KNOWN and config[key] != defaults[key]]
    if config["kind"] not in ("decoder_lm", "encoder_classifier"):
        lacking.append(f"kind={config['kind']}")
    if lacking:
        raise UsageError(f"{path}: the Python package lacks {', '.join(lacking)}; run this model with the program")
    file = os.path.join(folder, "model.safetensors")
    weights = torch.ops.cistern.load_tensors(file)
    model = DecoderLM(config) if config["kind"] == "decoder_lm" else EncoderClassifier(config)
    model.to(next((w.dtype for w in weights.values()), torch.float32))
    try:
        model.load_state_dict(weights)
    except RuntimeError as e:
        raise UsageError(f"{file}: {e}") from None
    model.eval()
    return model

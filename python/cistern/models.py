"""Models of the C++ program: the same config.json and model.safetensors, the same numbers, as modules to look into and to change."""

from __future__ import annotations

import math
import os
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cistern._library import UsageError, answer
from cistern.nn import Attention, piece_positions, positions_after

# Keys of config.json that these modules know. A file with another one that is not at its default is refused.
_KNOWN = set(
    "kind version vocab_size classes attention attention_options dim layers heads ffn_dim max_length conv norm final_norm norm_eps activation "
    "positions pooling bias ffn_bias head_bias tie_embeddings dropout attention_dropout init_std embedding_std".split()
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
    def __init__(self, dim: int, hidden: int, activation: str, bias: bool) -> None:
        super().__init__()
        self.activation = activation
        self.up_proj = nn.Linear(dim, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up_proj(x)
        h = F.relu(h) if self.activation == "relu" else F.gelu(h, approximate="tanh" if self.activation == "gelu_tanh" else "none")
        return self.down_proj(h)


class Block(nn.Module):
    """Attention and feed-forward, each with a residual and a norm before or after it."""

    def __init__(self, config: dict[str, Any], layer: int, form: str, first: Attention | None) -> None:
        super().__init__()
        dim, mechanism = config["dim"], _mechanism(config, layer)
        options = config["attention_options"] if ":" in mechanism else config["attention_options"].get(mechanism, {})
        self.norm_first, self.dropout = config["norm"] == "pre", config["dropout"]
        self.attention = Attention(
            mechanism,
            dim,
            config["heads"],
            form=form,
            positions=config["positions"],
            conv=config["conv"],
            bias=config["bias"],
            max_length=config["max_length"],
            dropout=config["attention_dropout"],
            init_std=config["init_std"],
            out_std=config["init_std"] / math.sqrt(2 * config["layers"]),
            layer=layer,
            first=first,
            **options,
        )
        self.ffn = _FeedForward(dim, config["ffn_dim"] or 4 * dim, config["activation"], config["bias"] or config["ffn_bias"])
        self.attention_norm = nn.LayerNorm(dim, config["norm_eps"])
        self.ffn_norm = nn.LayerNorm(dim, config["norm_eps"])

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)

    def forward(self, x: Tensor, state: Any = None, keep: bool = False, **mask: Any) -> tuple[Tensor, Any]:
        h = self.attention_norm(x) if self.norm_first else x
        if keep:
            y, state = self.attention.extend(h, state, **mask)
        else:
            y = self.attention(h, **mask)
        if self.norm_first:
            a = x + self._drop(y)
            return a + self._drop(self.ffn(self.ffn_norm(a))), state
        a = self.attention_norm(x + self._drop(y))
        return self.ffn_norm(a + self._drop(self.ffn(a))), state


def _mechanism(config: dict[str, Any], layer: int) -> str:
    names = config["attention"]
    return names[0] if len(names) == 1 else names[layer]


class _Head(nn.Module):
    def __init__(self, dim: int, hidden: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.dense = nn.Linear(dim, hidden)
        self.out_proj = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(F.dropout(F.relu(self.dense(x)), self.dropout, self.training))


def _blocks(config: dict[str, Any], form: str) -> nn.ModuleList:
    blocks: list[Block] = []
    for i in range(config["layers"]):
        same = [b for j, b in enumerate(blocks) if _mechanism(config, j) == _mechanism(config, i)]
        blocks.append(Block(config, i, form, same[0].attention if same else None))
    return nn.ModuleList(blocks)


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
        self.layers = _blocks(config, "causal")
        self.norm = nn.LayerNorm(dim, config["norm_eps"]) if config["final_norm"] else None
        self.lm_head = None if config["tie_embeddings"] else nn.Linear(dim, vocab, bias=config["bias"] or config["head_bias"])

    def _run(self, ids: Tensor, state: Any, keep: bool, lengths: Tensor | None, starts: Tensor | None) -> tuple[Tensor, Any]:
        positions = piece_positions(state["positions"], ids.shape[1], starts)
        x = self.embed_positions(self.embed_tokens(ids), positions)
        x = F.dropout(x, self.config["dropout"], self.training)
        layers = []
        for block, before in zip(self.layers, state["layers"]):
            x, after = block(x, before, keep, lengths=lengths, starts=starts, positions=positions)
            layers.append(after)
        x = x if self.norm is None else self.norm(x)
        logits = F.linear(x, self.embed_tokens.weight) if self.lm_head is None else self.lm_head(x)
        return logits, {"layers": layers, "positions": positions_after(state["positions"], positions, lengths)}

    def forward(self, ids: Tensor, *, lengths: Tensor | None = None, starts: Tensor | None = None) -> Tensor:
        """ids [B, T] int64 -> logits [B, T, V]. lengths, starts: as in `Attention`."""
        before = torch.zeros(ids.shape[0], dtype=torch.int64, device=ids.device)
        return self._run(ids, {"layers": [None] * len(self.layers), "positions": before}, False, lengths, starts)[0]

    def extend(
        self, ids: Tensor, state: Any = None, *, lengths: Tensor | None = None, starts: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """The same from a state on, and the state after; the given one is unchanged."""
        return self._run(ids, self.empty_state(ids.shape[0]) if state is None else state, True, lengths, starts)

    def empty_state(self, batch: int) -> Any:
        """The state before the first token: {"layers": [state of each layer], "positions": [B]}."""
        positions = torch.zeros(batch, dtype=torch.int64, device=self.embed_tokens.weight.device)
        return {"layers": [cast(Block, block).attention.empty_state(batch) for block in self.layers], "positions": positions}


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
        self.layers = _blocks(config, "bidirectional")
        self.norm = nn.LayerNorm(dim, config["norm_eps"]) if config["final_norm"] else None
        self.classifier = _Head(dim, config["ffn_dim"] or 4 * dim, config["classes"], config["dropout"])

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """ids [B, T] int64, lengths [B] int64: padding on the right is never seen."""
        if lengths is None:
            lengths = torch.full((ids.shape[0],), ids.shape[1], dtype=torch.int64, device=ids.device)
        x = self.embed_tokens(ids)
        if self.cls:
            x = torch.cat([self.cls_token.expand(ids.shape[0], 1, -1), x], 1)
        seen = lengths + int(self.cls)
        positions = torch.arange(x.shape[1], device=ids.device).unsqueeze(0)
        x = F.dropout(self.embed_positions(x, positions), self.config["dropout"], self.training)
        for block in self.layers:
            x, _ = block(x, lengths=seen, positions=positions)
        x = x if self.norm is None else self.norm(x)
        if self.cls:
            pooled = x[:, 0]
        else:
            real = positions < lengths.unsqueeze(1)
            pooled = x.masked_fill(~real.unsqueeze(-1), 0).sum(1) / lengths.clamp_min(1).unsqueeze(1).to(x.dtype)
        return self.classifier(pooled)


def load(folder: str | os.PathLike[str]) -> DecoderLM | EncoderClassifier:
    """A model that the C++ program trained: a folder with config.json and model.safetensors, in evaluation mode.

    Needs the package safetensors. To save one back: save_file(model.state_dict(), folder + "/model.safetensors").

    Raises:
        UsageError: a config that is not valid, or that asks for what these modules lack.
    """
    from safetensors.torch import load_file

    folder = os.fspath(folder)
    path = os.path.join(folder, "config.json")
    read = answer(torch.ops.cistern.read_model_config(path))
    config, defaults = read["config"], read["defaults"]
    lacking = [f"{key}={config[key]}" for key in config if key not in _KNOWN and config[key] != defaults[key]]
    if config["kind"] not in ("decoder_lm", "encoder_classifier"):
        lacking.append(f"kind={config['kind']}")
    if config["pooling"] not in ("mean", "cls"):
        lacking.append(f"pooling={config['pooling']}")
    if lacking:
        raise UsageError(f"{path}: the Python package lacks {', '.join(lacking)}; run this model with the program")
    weights = load_file(os.path.join(folder, "model.safetensors"))
    model = DecoderLM(config) if config["kind"] == "decoder_lm" else EncoderClassifier(config)
    model.to(next(iter(weights.values())).dtype)
    model.load_state_dict(weights)
    model.eval()
    return model

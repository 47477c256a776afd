"""What blocks and models are made of besides attention: positions, norms, the feed-forward,
heads."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cistern._library import UsageError


class Positions(nn.Module):
    """Learned or sinusoidal positions, added to embeddings."""

    def __init__(self, kind: str, dim: int, max_length: int) -> None:
        super().__init__()
        self.kind, self.max_length = kind, max_length
        if kind == "learned":
            self.weight = nn.Parameter(torch.zeros(max_length, dim))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.kind == "learned":
            if not torch.compiler.is_compiling() and positions.numel() > 0 and int(
                    positions.max()) >= self.max_length:
                raise UsageError(
                    f"position {int(positions.max())} is beyond the learned table of "
                    f"max_length={self.max_length}")
            return x + F.embedding(positions, self.weight)
        if self.kind == "sinusoidal":
            half = x.shape[-1] // 2
            exponents = torch.arange(half, dtype=torch.float64,
                                     device=x.device) * (-math.log(10000.0) / half)
            angles = positions.to(torch.float64).unsqueeze(-1) * exponents.exp()
            return x + torch.stack([angles.sin(), angles.cos()], -1).flatten(-2).to(x.dtype)
        if self.kind == "sinusoidal_halves":
            half = x.shape[-1] // 2
            exponents = torch.arange(half, dtype=torch.float64, device=x.device)
            rates = (exponents * (-math.log(10000.0) / max(1, half - 1))).exp()
            angles = positions.to(torch.float64).unsqueeze(-1) * rates
            return x + torch.cat([angles.sin(), angles.cos()], -1).to(x.dtype)
        return x


# [.., T] int64 -> [.., T, 2 bands + 1]: sines, cosines and the position itself in [-1, 1].
def fourier(positions: Tensor, bands: int, max_freq: float, length: int) -> Tensor:
    x = positions.to(torch.float64) * (2 / max(1, length - 1)) - 1
    scales = torch.linspace(1, max_freq / 2, bands, dtype=torch.float64, device=x.device)
    angles = x.unsqueeze(-1) * scales * math.pi
    return torch.cat([angles.sin(), angles.cos(), x.unsqueeze(-1)], -1)


def norm_of(config: dict[str, Any], dim: int) -> nn.Module:
    kind = nn.RMSNorm if config.get("norm_kind") == "rms" else nn.LayerNorm
    return kind(dim, config["norm_eps"])


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int, activation: str, bias: bool, dropout: float) -> None:
        super().__init__()
        self.activation, self.dropout = activation, dropout
        rows = 2 * hidden if activation == "geglu" else hidden
        self.up_proj = nn.Linear(dim, rows, bias=bias)
        self.down_proj = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up_proj(x)
        if self.activation == "geglu":
            values, gates = h.chunk(2, -1)
            h = values * F.gelu(gates)
        else:
            h = F.relu(h) if self.activation == "relu" else F.gelu(
                h, approximate="tanh" if self.activation == "gelu_tanh" else "none")
        return self.down_proj(F.dropout(h, self.dropout, self.training))


class Head(nn.Module):
    def __init__(self, config: dict[str, Any], dim: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.kind: str = config["head"]
        given: float = config.get("head_dropout", -1)
        self.dropout = given if given >= 0 else dropout
        widths = config.get("head_dims") or [dim if self.kind == "tanh" else hidden]
        self.hidden: list[str] = []
        for width in [] if self.kind == "linear" else widths:
            self.hidden.append(f"dense_{len(self.hidden) + 1}" if self.hidden else "dense")
            self.add_module(self.hidden[-1], nn.Linear(dim, width))
            dim = width
        self.out_proj = nn.Linear(dim, config["classes"])

    def forward(self, x: Tensor) -> Tensor:
        for i, name in enumerate(self.hidden):
            x = getattr(self, name)(x)
            x = F.gelu(x) if self.kind == "gelu" else x.tanh() if self.kind == "tanh" else F.relu(x)
            if len(self.hidden) == 1 or i + 1 < len(self.hidden):
                x = F.dropout(x, self.dropout, self.training)
        return self.out_proj(x)


class MatchHead(nn.Module):
    """Two pooled vectors to logits: what `match` of the config names."""

    def __init__(self, kind: str, dim: int, hidden: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.kind, self.dropout = kind, dropout
        width = dim * (2 if kind in ("lra", "conv_luna") else 4)
        widths = {"luna": [], "latte": [dim], "nystrom": [hidden]}.get(kind, [hidden, hidden // 2])
        for name, out in zip(("dense", "dense_2"), widths):
            self.add_module(name, nn.Linear(width, out))
            width = out
        self.hidden = len(widths)
        self.out_proj = nn.Linear(width, classes, bias=kind != "luna")

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        features = {
            "lra": [a, b],
            "conv_luna": [a, b],
            "latte": [a, b, a - b, a * b],
        }.get(self.kind, [a, b, a * b, a - b])
        x = torch.cat(features, 1)
        if self.kind == "luna":
            x = F.dropout(x, self.dropout, self.training)
        for name in ("dense", "dense_2")[:self.hidden]:
            x = getattr(self, name)(x)
            if self.kind in ("lra", "nli", "nystrom"):
                x = F.relu(x)
            else:
                x = F.gelu(x, approximate="tanh" if self.kind == "latte" else "none")
        return self.out_proj(x)

"""Adaptive embeddings and the adaptive softmax of a language model (cistern/models/adaptive.h)."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cistern._library import UsageError


def bands_of(config: dict[str, Any], own: dict[str, Any], dim: int) -> list[tuple[int, int]]:
    """Size and width of each band of token ids."""
    ends = [*own["cutoffs"], config["vocab_size"]]
    factor = own.get("embedding_factor", 4)
    sizes = [end - begin for begin, end in zip([0, *ends], ends)]
    return [(size, dim // factor**i) for i, size in enumerate(sizes)]


class AdaptiveEmbedding(nn.Module):
    """Token ids in bands, the rarer the narrower: embedding=adaptive."""

    def __init__(self, bands: list[tuple[int, int]], dim: int) -> None:
        super().__init__()
        self.bands = nn.ModuleList(nn.Embedding(size, width) for size, width in bands)
        self.projections = nn.ModuleList(nn.Linear(width, dim, bias=False) for _, width in bands)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] int64 -> [..., dim]."""
        vocab = sum(cast(nn.Embedding, table).num_embeddings for table in self.bands)
        if not (torch.compiler.is_compiling() or ids.is_meta) and bool(
                ((ids < 0) | (ids >= vocab)).any()):
            raise UsageError(f"[embedding] a token id is outside of the vocabulary of {vocab}")
        parts, begin = [], 0
        for table, projection in zip(self.bands, self.projections):
            end = begin + cast(nn.Embedding, table).num_embeddings
            other = (ids < begin) | (ids >= end)
            own = table(ids.clamp(begin, end - 1) - begin).masked_fill(other.unsqueeze(-1), 0)
            parts.append(projection(own))
            begin = end
        return torch.stack(parts).sum(0)


class AdaptiveSoftmax(nn.Module):
    """Its output layer: the first band's words and an entry for each other band, whose words share
    what the entry gets. Dropout is the program's alone (adaptive_dropout acts on its loss)."""

    def __init__(self, config: dict[str, Any], own: dict[str, Any], dim: int) -> None:
        super().__init__()
        bands = bands_of(config, own, dim)
        self.clusters = nn.Linear(dim, len(bands) - 1, bias=False)
        self.bands = None if config["tie_embeddings"] else nn.ModuleList(
            nn.Embedding(size, width) for size, width in bands)
        self.projections = None if own.get("tie_projections", True) else nn.ModuleDict(
            {str(i + 1): nn.Linear(dim, width, bias=False)
             for i, (_, width) in enumerate(bands[1:])})

    def forward(self, x: Tensor, embedding: AdaptiveEmbedding) -> Tensor:
        """x [..., dim] -> log-probabilities [..., V]."""
        tables = [cast(nn.Embedding, table).weight
                  for table in (embedding.bands if self.bands is None else self.bands)]
        words = tables[0].shape[0]
        head = F.linear(x, torch.cat([tables[0], self.clusters.weight])).log_softmax(-1)
        parts = [head[..., :words]]
        for i, table in enumerate(tables[1:], 1):
            z = (x @ cast(nn.Linear, embedding.projections[i]).weight
                 if self.projections is None else self.projections[str(i)](x))
            parts.append(
                F.linear(z, table).log_softmax(-1) + head[..., words + i - 1:words + i])
        return torch.cat(parts, -1)

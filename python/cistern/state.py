"""States: everything needed to go on with a sequence.

A state is a plain dict of tensors whose first size is the batch, in nests of dicts and lists for
models: torch.save, pickle, deepcopy and torch.utils._pytree know what to do with it. It is a value:
calls return a new one and leave the given one as it was.
"""

from __future__ import annotations

from typing import Any, Callable

from torch import Tensor
from torch.utils import _pytree

State = dict[str, Tensor]


def _map(f: Callable[[Tensor], Tensor], state: Any) -> Any:
    return _pytree.tree_map(lambda t: f(t) if isinstance(t, Tensor) else t, state)


def detach(state: Any) -> Any:
    """Without the graph that made it, for truncated back-propagation."""
    return _map(lambda t: t.detach(), state)


def reorder(state: Any, rows: Tensor) -> Any:
    """Row i of the result is row rows[i] of the state; rows: [B'] int64. For beam search."""
    return _map(lambda t: t.index_select(0, rows.to(t.device)), state)


def state_bytes(state: Any) -> int:
    """Bytes of all its tensors."""
    return sum(t.numel() * t.element_size() for t in _pytree.tree_leaves(state)
               if isinstance(t, Tensor))

"""Masked tokens: padding anywhere in a row, and holes."""

from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor

from cistern._library import UsageError

__all__ = ["TokenMap"]


class TokenMap:
    """The real tokens of each row first, in their order, as the library wants them: what was masked
    stands behind them, and counts as padding.

    Args:
        valid: [B, T] bool, false where a token is as if it were not there.
        lengths: [B] int64: tokens from there on are masked, too.
        starts: [B, T] bool, true where a document begins. A start at a masked token counts for the
            row's next real one; those from `lengths` on count for none.
        goes_on: the tokens are a piece, which a state hands on to the next one: a start at a masked
            token has to have its real one in the piece.

    Attributes:
        lengths: [B] int64, the real tokens of each row.
        starts: [B, T] bool, the starts of the tokens where they are now; None without starts.

    O(T log T) a row.
    """

    def __init__(self, valid: Tensor, lengths: Tensor | None = None,
                 starts: Tensor | None = None, goes_on: bool = False) -> None:
        if not isinstance(valid, Tensor) or valid.dtype != torch.bool or valid.dim() != 2:
            raise UsageError(f"expected valid of shape [B, T] and dtype bool, got {_found(valid)}")
        _check_beside(valid, lengths, starts)
        length = valid.shape[1]
        real = valid
        if lengths is not None:
            within = torch.arange(length, device=valid.device) < lengths.unsqueeze(1)
            real = real & within
            starts = None if starts is None else starts & within
        if starts is not None and goes_on:
            _check_taken_up(starts, real)
        self.order = torch.argsort(real.logical_not().to(torch.uint8), dim=1, stable=True)
        self.back_order = torch.argsort(self.order, dim=1)
        self.lengths = real.sum(1)
        self.starts: Tensor | None = None
        if starts is not None:
            documents = starts.cumsum(1).gather(1, self.order)
            before = torch.cat([torch.zeros_like(documents[:, :1]), documents[:, :-1]], 1)
            self.starts = documents > before
            self.starts = self.starts & (torch.arange(length, device=valid.device)
                                         < self.lengths.unsqueeze(1))

    def move(self, x: Tensor, time: int) -> Tensor:
        """x with the rows in dimension 0 and the T tokens in dimension `time`."""
        return self._pick(x, self.order, time)

    def back(self, x: Tensor, time: int) -> Tensor:
        """The tokens in their places again."""
        return self._pick(x, self.back_order, time)

    @staticmethod
    def _pick(x: Tensor, order: Tensor, time: int) -> Tensor:
        if x.shape[0] != order.shape[0] or x.shape[time] != order.shape[1]:
            raise UsageError(
                f"valid is of {order.shape[0]} rows of {order.shape[1]} tokens, the tensor "
                f"{list(x.shape)} has {x.shape[0]} of {x.shape[time]}")
        shape = [1] * x.dim()
        shape[0], shape[time] = order.shape
        return torch.take_along_dim(x, order.view(shape), time)


def _found(x: object) -> str:
    return f"{list(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__


# The operators see only what a TokenMap makes of them.
def _check_beside(valid: Tensor, lengths: Tensor | None, starts: Tensor | None) -> None:
    rows, length = valid.shape
    if starts is not None and (not isinstance(starts, Tensor) or starts.dtype != torch.bool
                               or starts.shape != valid.shape):
        raise UsageError(
            f"expected starts of shape [{rows}, {length}], that of valid, and dtype bool, got "
            f"{_found(starts)}")
    if lengths is not None:
        check_lengths(lengths, rows, length, " of valid")


def check_lengths(lengths: Tensor, rows: int, length: int, of: str = "") -> None:
    """UsageError where these are not the lengths of rows of `length` tokens."""
    if (not isinstance(lengths, Tensor) or lengths.dtype != torch.int64
            or lengths.shape != (rows, )):
        raise UsageError(
            f"expected lengths of shape [{rows}], the rows{of}, and dtype int64, got "
            f"{_found(lengths)}")
    within = (lengths >= 0) & (lengths <= length)
    if torch.compiler.is_compiling() or lengths.untyped_storage().device.type == "meta":
        torch._assert_async(within.all(), f"expected lengths within 0..T, the tokens{of}")
    elif not bool(within.all()):
        raise UsageError(
            f"expected lengths within 0..{length}, the tokens{of}, got "
            f"{int(lengths[~within][0])}")


# A state has no place for a start without a token.
def _check_taken_up(starts: Tensor, real: Tensor) -> None:
    lost = (starts & (real.flip(1).cumsum(1).flip(1) == 0)).any(1)
    why = ("at a masked token, with no real one behind it in this piece: give the start with the "
           "first real token of the next piece")
    if torch.compiler.is_compiling() or lost.is_meta:
        torch._assert_async(lost.any().logical_not(), f"the last start of a row is {why}")
    elif bool(lost.any()):
        raise UsageError(f"the last start of row {int(lost.nonzero()[0])} is {why}")


def require_maskable(mechanism: str, sees_padding: bool) -> None:
    """UsageError where padding takes part in a core."""
    if sees_padding:
        raise UsageError(
            f"[{mechanism}] sees padding like any token with these options, so that no token can "
            "be masked: leave out valid, or use mask=tokens (nystrom: padding=tokens)")


def move_sides(front: TokenMap, sides: Sequence[str], x: Sequence[Tensor],
               queries: bool) -> list[Tensor]:
    """Tensors [B, H, T, w] of these sides with their tokens moved; those of queries only if
    `queries`. What follows them, of a memory, stays."""
    moved = [front.move(t, 2) if queries or side != "query" else t for side, t in zip(sides, x)]
    return [*moved, *x[len(moved):]]

"""torch.nn.MultiheadAttention with another mechanism inside."""

from __future__ import annotations

from typing import Any, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cistern._library import UsageError, describe
from cistern.core import FORMS, Core
from cistern.masks import TokenMap, move_sides, require_maskable

__all__ = ["MultiheadAttention"]


class MultiheadAttention(nn.Module):
    """torch.nn.MultiheadAttention with another mechanism inside: the same arguments, the same
    weights by the same names.

    It supports mechanisms whose projections are q, k and v of the model's width; a state dict of
    torch.nn.MultiheadAttention loads (with strict=False where the mechanism has weights of its
    own). `is_causal=True` is the causal form, keys that are not the queries are cross attention,
    else the form is bidirectional.

    In self attention, tokens that key_padding_mask hides are as if they were not there: as queries,
    too, they read 0, and their output is the bias of out_proj. torch.nn.MultiheadAttention hides
    them as keys alone, and so does cross attention here.

    Unsupported: attention masks other than the causal one, attention weights (`need_weights` is
    ignored and None is returned instead: no mechanism here computes them), bias_kv, zero_attn,
    kdim, vdim and nested tensors (in a finished nn.TransformerEncoder set use_nested_tensor =
    False).

    Args:
        embed_dim, num_heads, dropout, bias, batch_first, device, dtype: as in
            torch.nn.MultiheadAttention.
        mechanism: a name of `cistern.mechanisms()`.
        max_length, options, **more: as in `Core`.
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
        options: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        super().__init__()
        if (add_bias_kv or add_zero_attn or kdim not in (None, embed_dim)
                or vdim not in (None, embed_dim)):
            raise UsageError(
                "add_bias_kv, add_zero_attn, kdim and vdim are of softmax attention alone; use "
                "torch.nn.MultiheadAttention")
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.dropout, self.batch_first = dropout, batch_first
        # keeps torch's encoder layer from its fused softmax attention on these weights
        self._qkv_same_embed_dim = False
        self.core = self._core(mechanism, max_length, dropout, {**(options or {}), **more})
        widths = {p["name"]: p["width"] for p in self.core.projections}
        if self.core.memory_use != "none":
            raise UsageError(
                f"[{mechanism}] cannot take the place of torch.nn.MultiheadAttention: it has a "
                "memory; use cistern.nn.Attention")
        if widths != {"q": embed_dim, "k": embed_dim, "v": embed_dim}:
            raise UsageError(
                f"[{mechanism}] cannot take the place of torch.nn.MultiheadAttention: its "
                "projections are "
                f"{', '.join(f'{name} ({width})' for name, width in widths.items())}, not q, k, v "
                f"of {embed_dim} each; use cistern.nn.Attention")
        self._causal_dropout = self._output_dropout()
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim))
        nn.init.xavier_uniform_(self.in_proj_weight)
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * embed_dim)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        if bias:
            nn.init.zeros_(self.out_proj.bias)
        self.to(device=device, dtype=dtype)

    def _core(self, mechanism: str, max_length: int, dropout: float,
              options: dict[str, Any]) -> Core:
        reasons = []
        for form in FORMS:  # any form will do: which one is needed is known in forward
            try:
                return Core(mechanism, self.embed_dim, self.num_heads, form=form,
                            max_length=max_length, dropout=dropout, options=options)
            except UsageError as e:
                reasons.append(str(e))
        raise UsageError(reasons[0])

    # After out_proj in the causal form; the core need not be described as that form.
    def _output_dropout(self) -> float:
        try:
            return describe(self.core.spec, "causal")["output_dropout"]
        except UsageError:  # it has no causal form
            return 0.0

    @staticmethod
    def _valid(key_padding_mask: Tensor | None) -> Tensor | None:
        if key_padding_mask is None:
            return None
        if key_padding_mask.dtype == torch.bool:
            return ~key_padding_mask
        torch._assert_async(((key_padding_mask == 0) | torch.isneginf(key_padding_mask)).all(),
                            "a float key_padding_mask must be 0 or -inf")
        return key_padding_mask == 0

    @staticmethod
    def _check_mask(attn_mask: Tensor | None, is_causal: bool, length: int) -> None:
        if attn_mask is None:
            return
        if not is_causal:
            raise UsageError(
                "no attention masks but the causal one: give is_causal=True, or use "
                "key_padding_mask for padding")
        seen = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask == 0
        causal = torch.ones(length, length, dtype=torch.bool, device=attn_mask.device).tril()
        torch._assert_async((seen == causal).all(),
                            "with is_causal=True, attn_mask must be the causal mask")

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
        if query.is_nested:
            raise UsageError(
                "nested tensors are for torch's attention alone; where nn.TransformerEncoder makes "
                "them of padded rows, set its use_nested_tensor = False, or give it "
                "enable_nested_tensor=False")
        itself = query is key and key is value
        self._check_mask(
            attn_mask, is_causal,
            query.shape[-2] if self.batch_first or query.dim() == 2 else query.shape[0])
        if is_causal and not itself:
            raise UsageError(
                "is_causal=True is self attention: query, key and value must be the same tensor")
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
        lengths, front, valid = None, None, self._valid(key_padding_mask)
        if valid is not None:
            require_maskable(self.core.mechanism, self.core.sees_padding)
            front = TokenMap(valid)
            heads = move_sides(front, ("query", "key", "key"), heads, itself)
            lengths = front.lengths
        y, _ = self.core._run(verb, heads, lengths=lengths)
        if front is not None and itself:
            y = front.back(y, 2)
        y = self.out_proj(y.transpose(1, 2).flatten(2))
        y = F.dropout(y, self._causal_dropout if is_causal else 0.0, self.training)
        if not batched:
            return y.squeeze(0), None
        return (y if self.batch_first else y.transpose(0, 1)), None

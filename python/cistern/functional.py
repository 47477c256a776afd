"""The core of every mechanism as a function of projected tensors.

The calls are like scaled_dot_product_attention:

    import cistern.functional as CF
    y = CF.latte(q, k, v, causal=True)                          # [B, H, T, d]
    y, state = CF.latte(q, k, v, causal=True, return_state=True)
    y, state = CF.latte(q2, k2, v2, causal=True, state=state)   # continues

There is one function for each mechanism, with the same name: latte, abc_mlp, linear, ... Names that
are adjectives have an alias with `_attention`: softmax_attention, linear_attention,
efficient_attention, window_attention, dilated_attention. `abc` is abc_mlp. `dir()` lists them, and
help(CF.latte) shows tensors, options and definition. All take the arguments of `attention` except
the first.
"""

from __future__ import annotations

import inspect
import operator
import sys
from typing import Any, Callable, Mapping

import torch
from torch import Tensor

from cistern._library import UsageError, describe, make_spec, mechanisms
from cistern.core import check_form, check_state, check_tensors, empty, run
from cistern.masks import TokenMap, move_sides, require_maskable
from cistern.state import State

_ADJECTIVES = ("softmax", "linear", "efficient", "window", "dilated")
_ALIASES = {f"{name}_attention": name for name in _ADJECTIVES} | {"abc": "abc_mlp"}
_SIZES = ("latents", "slots")  # options that the tensors themselves tell
_BETWEEN = "\n"  # torch.compile takes one string for a constant, but no tuple


@torch.compiler.assume_constant_result
def _resolve(
    mechanism: str,
    form: str,
    options: tuple[tuple[str, Any], ...],
    shapes: tuple[tuple[int, int], ...],
    own: tuple[tuple[str, tuple[int, ...]], ...],
    max_length: int,
    dropout: float,
) -> str:
    """The specification of a core for tensors of these (heads, width), with the names of its
    weights and of its state, the use of its memory, the sides of the tensors and whether padding
    takes part, in one string.

    Where the caller does not give the size that sets the width of a tensor or the shape of a weight
    (latents, slots), these do.
    """
    if ":" in mechanism:
        raise UsageError(f"head groups such as '{mechanism}' are for cistern.nn.Core")
    if mechanism not in mechanisms():
        describe(make_spec(mechanism, {}, 1, 1), form)  # says which name is near
    given = dict(options)
    known = mechanisms()[mechanism]["options"]
    values = shapes[min(2, len(shapes) - 1)]  # the third, or the last where keys are values
    dim = values[0] * values[1]

    def about(more: dict[str, int]) -> tuple[str, dict[str, Any]]:
        text = make_spec(mechanism, given | more, dim, heads, max_length, 0, dropout)
        return text, describe(text, form)

    counts = [h for h, _ in shapes]
    grouped = len(counts) >= 3 and counts[0] != counts[1] == counts[2]
    grouped = grouped and "packing_heads" not in known
    # those of the layer; some tensors may have others. If none fits, the call says so
    for heads in sorted({h for h, _ in shapes}):
        try:
            spec, core = about({})
        except UsageError:
            if heads == max(h for h, _ in shapes) and not grouped:
                raise
            continue
        if [p["heads"] for p in core["projections"]
                if p["side"] in ("query", "key")] == [h for h, _ in shapes]:
            break
    else:
        if grouped:
            raise UsageError(
                f"[{mechanism}] expected as many heads of queries as of keys and values, got "
                f"{counts[0]} and {counts[1]}: grouped keys and values have to be repeated, as "
                "torch.repeat_interleave(k, n, 1) does")
    width = dim // heads
    for name in _SIZES:
        if name not in known or name in given:
            continue
        size = 2 * heads * int(known[name] or width)
        larger = about({name: size})[1]
        told = [
            shapes[i][1] * (heads if name == "latents" else 1)
            for i, (a, b) in enumerate(zip(core["projections"], larger["projections"]))
            if a["width"] != b["width"] and i < len(shapes)
        ]
        for a, b in zip(core["weights"], larger["weights"]):
            axes = [i for i, (m, n) in enumerate(zip(a["shape"], b["shape"])) if m != n]
            if len(axes) == 1 and b["shape"][axes[0]] == size:
                told += [shape[axes[0]] for owner, shape in own if owner == a["name"]]
        if told:
            spec, core = about({name: told[0]})
    names = ",".join(w["name"] for w in core["weights"])
    sides = ",".join(p["side"] for p in core["projections"] if p["side"] in ("query", "key"))
    sees_padding = "yes" if core["sees_padding"] else ""
    return _BETWEEN.join([spec, names, ",".join(core["state"]), core["memory"], sides,
                          sees_padding])


# The number itself: under torch.compile one that changes from call to call is a symbol.
def _constant(value: Any) -> Any:
    if type(value) is int:
        return operator.index(value)
    return float(f"{value}") if type(value) is float else value


def attention(
    mechanism: str,
    *tensors: Tensor,
    causal: bool = False,
    cross: bool = False,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    valid: Tensor | None = None,
    state: State | None = None,
    return_state: bool = False,
    weights: dict[str, Tensor] | None = None,
    layout: str = "bhtd",
    max_length: int = 0,
    dropout: float = 0.0,
    options: Mapping[str, Any] | None = None,
    **more: Any,
) -> Any:
    """A mechanism's core on projected tensors.

    Args:
        mechanism: a name of `cistern.mechanisms()`.
        *tensors: [B, H, T, w] each, in the order that the mechanism declares: q, k, v, then any
            others. Mechanisms with a memory stream take those of the tokens; their slots are
            `weights`, and `cistern.nn.Core` has the parts pack and unpack.
        causal: each token sees itself and the tokens before; else every token sees every token.
        cross: keys and values come from another sequence, of its own length S.
        lengths: [B] int64, real tokens of each row, padding on its right (cross: of the keys).
            Padding is never seen and reads 0.
        starts: [B, T] bool, true where a document begins: nothing is seen across a start.
            One at a masked token counts for the row's next real one, which has to be in the same
            piece.
        valid: [B, T] bool, false where a token is as if it were not there: padding on the left,
            holes (cross: of the keys). What those tokens read is 0.
        state: causal: the state after earlier pieces; the given state is unchanged.
        return_state: causal: return the state even if none is given.
        weights: of the core, by name, if it has any (t2r, rfa, performer, linformer, abc_cluster,
            luna): those of a `cistern.nn.Core`.
        layout: "bhtd", or "bthd" for tensors [B, T, H, w], which are not copied; the output has it
            too.
        max_length: for mechanisms whose weights depend on the position.
        dropout: on the attention probabilities; an error where the mechanism computes none. It is
            always applied: pass 0 in evaluation.
        options, **more: of the mechanism. Pass options with the name of another argument in the
            mapping `options`.

    Returns:
        y [B, H, T, d], or (y, state) with a state or return_state. float16 and bfloat16 are
            computed in float32.

    Raises:
        UsageError: unknown names, forms and options; RuntimeError: tensors that do not fit.
    """
    if layout not in ("bhtd", "bthd"):
        raise UsageError(f"unknown layout '{layout}'; expected bhtd or bthd")
    check_tensors(mechanism, {f"tensor {i + 1}": t for i, t in enumerate(tensors)})
    check_tensors(mechanism, {f"the weight {name}": w for name, w in (weights or {}).items()})
    if len(tensors) < 2 or any(t.dim() != 4 for t in tensors):
        raise UsageError(
            f"[{mechanism}] expected queries, keys and values of shape [B,H,T,d], got "
            f"{[list(t.shape) for t in tensors]}")
    if layout == "bthd":
        tensors = tuple(t.transpose(1, 2) for t in tensors)
    form = check_form(causal, cross)
    if (state is not None or return_state) and not causal:
        raise UsageError(
            f"[{mechanism}] a state in and out belongs to the causal form; cistern.nn.Core has "
            "write and read for cross attention")
    shapes = tuple((_constant(t.shape[1]), _constant(t.shape[3])) for t in tensors)
    given = tuple((name, _constant(value)) for name, value in {**(options or {}), **more}.items())
    sizes = tuple((name, tuple([_constant(n) for n in w.shape]))
                  for name, w in (weights or {}).items())
    resolved = _resolve(mechanism, form, given, shapes, sizes, _constant(max_length),
                        _constant(dropout))
    spec, own_names, state_names, memory, sides, sees_padding = resolved.split(_BETWEEN)
    names = own_names.split(",") if own_names else []
    unknown = [name for name in weights or {} if name not in names]
    if unknown:
        known = ", ".join(names) or "none"
        raise UsageError(f"[{mechanism}] has no weight '{unknown[0]}'; its weights: {known}")
    missing = [name for name in names if weights is None or name not in weights]
    if missing:
        wanted = ", ".join(f"'{name}': ..." for name in missing)
        raise UsageError(
            f"[{mechanism}] has weights of its own: give weights={{{wanted}}}, or use "
            "cistern.nn.Core")
    own = [weights[name] for name in names] if weights is not None else []
    of_state = state_names.split(",") if state_names else []
    keep = state is not None or return_state
    if state is not None:
        check_state(mechanism, of_state, state)
    elif keep:
        state = empty(spec, of_state, tensors[0], tensors[0].shape[0], dropout > 0)
    # Of latents there are as many as queries, and as many keys as tokens.
    verb = "extend" if causal else "cross" if memory == "latents" else form
    if valid is not None:
        require_maskable(mechanism, bool(sees_padding))
        front = TokenMap(valid, lengths, starts, goes_on=keep)
        tensors = tuple(move_sides(front, sides.split(","), tensors, verb != "cross"))
        lengths, starts = front.lengths, front.starts
    y, after = run(spec, of_state, verb, tensors, own, state, lengths, starts, dropout > 0, keep)
    if valid is not None and verb != "cross":
        y = front.back(y, 2)
    if layout == "bthd":
        y = y.transpose(1, 2)
    return (y, after) if keep else y


def _tensors(name: str, form: str) -> str:
    """A function's tensors in their order, by name, with what by default is not as in q."""
    heads, width = 4, 16
    core = describe(make_spec(name, {}, heads * width, heads, max_length=width), form)
    texts = []
    for p in core["projections"]:
        if p["side"] not in ("query", "key"):
            continue
        own = p["width"] // p["heads"]
        notes = ["one head"] if p["heads"] == 1 else []
        notes += [f"w = {own}"] if own != width else []
        texts.append(p["name"] + (f" ({', '.join(notes)})" if notes else ""))
    return ", ".join(texts)


def _function(name: str) -> Callable[..., Any]:
    info = mechanisms()[name]

    def call(*tensors: Tensor, **kw: Any) -> Any:
        return attention(name, *tensors, **kw)

    signature = inspect.signature(attention)
    parameters = list(signature.parameters.values())[1:]
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__name__ = call.__qualname__ = name
    call.__doc__ = (
        f"{info['title']} ({info['source']}). {info['summary']}\n\n    {info['definition']}\n\n"
        f"Tensors [B, H, T, w], by default: {_tensors(name, info['forms'][0])}.\n"
        f"Forms: {', '.join(info['forms'])}. " + "".join(f"Not {r}. " for r in info["refusals"]) +
        f"Time {info['time']}, state {info['state']}.\n"
        f"Arguments: those of `attention`, and the options\n\n{info['help']}"
    )
    return call


def __getattr__(name: str) -> Callable[..., Any]:
    mechanism = _ALIASES.get(name, name)
    if mechanism not in mechanisms():
        raise AttributeError(f"cistern.functional has no '{name}'; it has {', '.join(__dir__())}")
    # An alias is the same function, which has one name to be pickled by.
    globals()[name] = _function(name) if name == mechanism else getattr(sys.modules[__name__],
                                                                        mechanism)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted(["attention", *mechanisms(), *_ALIASES])

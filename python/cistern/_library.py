"""Loads the C++ library and asks it about mechanisms."""

from __future__ import annotations

import functools
import json
import os
from typing import Any, Mapping

import torch


class UsageError(ValueError):
    """Wrong options or sizes: the message says what was expected, what was found, and the nearest
    thing that works."""


def _check_torch(built: str, running: str) -> None:
    if running.split("+")[0] != built:
        raise ImportError(
            f"cistern was built for torch {built}, and this is torch {running}, whose C++ library "
            "may differ. Build it for this one, in the "
            "folder of its source: pip install --no-build-isolation --force-reinstall --no-deps .")


def _load() -> str:
    try:
        from cistern import _build
    except ImportError:
        raise ImportError(
            "this is the source of the package, without its library; in the folder of the source: "
            "pip install --no-build-isolation ."
        ) from None
    _check_torch(_build.TORCH_VERSION, torch.__version__)
    folder = os.path.join(os.path.dirname(__file__), "lib")
    torch.ops.load_library(os.path.join(folder, "libcistern_python.so"))
    return _build.VERSION


VERSION = _load()


def answer(text: str) -> Any:
    """An answer of the library, which is JSON; raises UsageError where it is an error."""
    value = json.loads(text)
    if isinstance(value, dict) and set(value) == {"error"}:
        raise UsageError(value["error"])
    return value


@functools.lru_cache(maxsize=None)
def mechanisms() -> dict[str, dict[str, Any]]:
    """All mechanisms by name, as the C++ library declares them: title, source, summary, forms,
    refusals, options with defaults, help."""
    return answer(torch.ops.cistern.mechanisms())


def _plain(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values as JSON has them, those of numpy too; UsageError names one that it cannot have."""

    def known(value: Any) -> Any:
        if hasattr(value, "tolist") and not isinstance(value, torch.Tensor):
            return value.tolist()
        raise TypeError

    out = {}
    for name, value in values.items():
        try:
            out[name] = json.loads(json.dumps(value, allow_nan=False, default=known))
        except (TypeError, ValueError) as e:
            wanted = ("a finite number" if isinstance(e, ValueError) else
                      "a number, a string or a bool")
            raise UsageError(f"{where} expected {wanted} for {name}, got {value!r}") from None
    return out


def make_spec(mechanism: str, options: dict[str, Any], dim: int, heads: int, max_length: int = 0,
              layer: int = 0, dropout: float = 0.0, **more: Any) -> str:
    """What names a core to the library: its mechanism, options and sizes. `more`: model, the width
    of the model if it is not `dim`; relative, relative_std."""
    sizes = {
        "dim": dim, "heads": heads, "max_length": max_length, "layer": layer, "dropout": dropout
    }
    return json.dumps(
        {
            "mechanism": mechanism,
            "options": _plain(options, f"[{mechanism}]"),
            **_plain(sizes, f"[{mechanism}]"),
            **more,
        }
    )


def complete_config(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """The config of a model of that kind with every key, those that it leaves out at their
    defaults."""
    if not isinstance(config, Mapping):
        raise UsageError(f"expected a config, a dict as in config.json, got {config!r}; "
                         "cistern.load(folder) opens a folder")
    found = config.get("kind", kind)
    if found != kind:
        raise UsageError(f"expected the config of a model of kind {kind}, got one of {found}")
    given = _plain({**config, "kind": kind}, "config:")
    return answer(torch.ops.cistern.complete_model_config(json.dumps(given)))


def model_stack(config: dict[str, Any], form: str) -> dict[str, Any]:
    """The stack of that form of a model with this config: its settings, and the arguments of its
    blocks."""
    return answer(torch.ops.cistern.model_stack(json.dumps(config), form))


@functools.lru_cache(maxsize=4096)
def describe(spec: str, form: str, positions: str = "none", conv: int = 0) -> dict[str, Any]:
    """Projections, weights and state of a core, after all checks; UsageError where it cannot be
    made."""
    try:
        return answer(torch.ops.cistern.describe_core(spec, form, positions, conv))
    except UsageError as e:  # configs have attention_dropout, and dropout for what a layer gives
        said = str(e).replace("and dropout for the output of the layer",
                              "and apply torch's dropout to the output")
        raise UsageError(said.replace("attention_dropout", "dropout")) from None

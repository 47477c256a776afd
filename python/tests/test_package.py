"""The package itself: what it links, how it refuses another torch, its documentation and its
types."""

import inspect
import pathlib
import pickle
import re
import subprocess
import sys

import cistern
import cistern.functional as CF
import pytest
import torch
from cistern import _library

FOLDER = pathlib.Path(cistern.__file__).parent


def test_links_torch_cpu_and_c10_only():
    for name in ("libcistern_python.so", "libcistern.so.0"):
        text = subprocess.run(["readelf", "-d", FOLDER / "lib" / name], capture_output=True,
                              text=True, check=True).stdout
        needed = set(re.findall(r"NEEDED.*\[(.*)\]", text))
        assert {"libtorch_cpu.so", "libc10.so"} <= needed | {"libc10.so"}
        assert not [n for n in needed if "python" in n and n != "libcistern_python.so"
                    ] and "libtorch_cuda.so" not in needed
        assert not [n for n in needed if n.startswith("libtorch") and n != "libtorch_cpu.so"]


def test_another_torch_is_refused():
    with pytest.raises(
            ImportError, match=
            r"built for torch 2\.11\.0, and this is torch 2\.15\.1.*pip install "
            r"--no-build-isolation"
    ):
        _library._check_torch("2.11.0", "2.15.1")
    _library._check_torch("2.15.0", "2.15.0+cpu")


def test_source_folder_says_how_to_install():
    source = FOLDER.parent / "copy_without_library"
    code = f"import sys; sys.modules['cistern._build'] = None; import cistern"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          cwd=FOLDER.parent)
    assert done.returncode != 0 and "pip install --no-build-isolation ." in done.stderr, source


def test_everything_is_documented_and_typed():
    assert (FOLDER / "py.typed").exists()
    for module in (cistern, cistern.core, cistern.functional, cistern.models, cistern.nn,
                   cistern.state):
        assert module.__doc__
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
                continue
            if inspect.isclass(value) or inspect.isfunction(value):
                assert value.__doc__, f"{module.__name__}.{name} has no docstring"
            if inspect.isfunction(value):
                unannotated = [
                    p for p, q in inspect.signature(value).parameters.items()
                    if q.annotation is inspect.Parameter.empty
                ]
                assert not unannotated, f"{name}: {unannotated}"


def test_every_mechanism_is_a_function_with_help():
    names = set(dir(CF))
    for name, info in cistern.mechanisms().items():
        assert name in names
        assert info["definition"] in getattr(CF, name).__doc__
        assert re.search(r"Tensors \[B, H, T, w\], by default: \w", getattr(CF, name).__doc__)
        assert [*inspect.signature(getattr(CF, name)).parameters
                ] == [*inspect.signature(CF.attention).parameters][1:]
    assert "by default: q, k, v, control (w = 32).\n" in CF.abc_mlp.__doc__
    assert "by default: q, k, v, gate (w = 1).\n" in CF.rfa_gate.__doc__
    for name in ("softmax_attention", "linear_attention", "efficient_attention", "window_attention",
                 "abc"):
        assert callable(getattr(CF, name))
        assert pickle.loads(pickle.dumps(getattr(CF, name))) is getattr(CF, name)


def test_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", cistern.__version__)
    assert torch.__version__.split("+")[0] == __import__("cistern._build",
                                                         fromlist=["x"]).TORCH_VERSION

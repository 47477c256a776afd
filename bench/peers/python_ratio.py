#!/usr/bin/env python3
"""Compares cistern.functional with the best plain PyTorch composition, eager and compiled.

Causal ABC, Latte and linear attention, forward and forward + backward. All candidates take the same
projected tensors and alternate. Prints JSON lines and a table for the README."""
import argparse
import json
import os
import statistics
import sys
import time

import torch
import torch.nn.functional as F

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cores_pytorch as cores  # noqa: E402

import cistern.functional as CF  # noqa: E402


def elu(x):
    return F.elu(x) + 1


PLAIN = {
    "abc_mlp": {"chunked": cores.abc_causal, "short": cores.abc_short},
    "latte": {
        "chunked": lambda q, k, v, C: cores.latte_causal(torch.softmax(q, -1), k, v, C),
        "short": lambda q, k, v, C: cores.latte_short(torch.softmax(q, -1), k, v, C),
    },
    "linear": {
        "chunked": lambda q, k, v, C: cores.linear_causal(elu(q), elu(k), v, C),
        "short": lambda q, k, v, C: cores.linear_short(elu(q), elu(k), v, C),
    },
}


def contestants(mechanism, o):
    ours = getattr(CF, mechanism)
    ways = {"cistern": lambda *x: ours(*x, causal=True)}
    for form, f in PLAIN[mechanism].items():
        eager = lambda *x, f=f: f(*x, C=o.chunk)  # noqa: E731
        ways[f"{form}, eager"] = eager
        if not o.no_compile:
            ways[f"{form}, compiled"] = torch.compile(eager)
    return ways


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--mechanisms", default="abc_mlp,latte,linear")
    for name, value in (("T", 4096), ("d", 64), ("n", 64), ("heads", 8), ("chunk", 64),
                        ("threads", 2), ("rounds", 15)):
        p.add_argument("--" + name, type=int, default=value)
    p.add_argument("--no-compile", action="store_true")
    o = p.parse_args()
    cores.keep_pages()
    # all contestants are one code object to it; beyond the limit it falls back to eager
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch.set_num_threads(o.threads)
    torch.manual_seed(0)
    rows = []
    for mechanism in o.mechanisms.split(","):
        widths = {
            "abc_mlp": (o.d, o.d, o.d, o.n), "latte": (o.n, o.n, o.d), "linear": (o.d, o.d, o.d)
        }[mechanism]
        args = [torch.randn(1, o.heads, o.T, w) for w in widths]
        grads = [x.clone().requires_grad_() for x in args]
        g = torch.randn(1, o.heads, o.T, o.d)
        ways = contestants(mechanism, o)
        expected = ways["cistern"](*args)
        times = {way: ([], []) for way in ways}
        for way, f in ways.items():  # warm up, compile, and refuse to time what is wrong
            error = cores.distance(f(*args), expected.double())
            if error > 1e-3:
                sys.exit(f"{mechanism}, {way}: differs by {error:.1e}")
            for _ in range(2):
                torch.autograd.grad(f(*grads), grads, g)
        for _ in range(o.rounds):
            for way, f in ways.items():
                a = time.perf_counter()
                with torch.no_grad():
                    f(*args)
                b = time.perf_counter()
                torch.autograd.grad(f(*grads), grads, g)
                times[way][0].append(b - a)
                times[way][1].append(time.perf_counter() - b)
        medians = {way: [statistics.median(t) * 1e3 for t in both] for way, both in times.items()}
        for i, what in enumerate(("forward", "forward + backward")):
            best = {
                k: min((m[i], way) for way, m in medians.items() if k in way)
                for k in ("eager", "compiled") if any(k in w for w in medians)
            }
            mine = medians["cistern"][i]
            print(
                json.dumps({
                    "mechanism": mechanism, "what": what, "T": o.T, "cistern_ms": round(mine, 2),
                    "load": os.getloadavg()[0], **{
                        k: {"ms": round(ms, 2), "form": way, "ratio": round(ms / mine, 2)}
                        for k, (ms, way) in best.items()
                    }
                }), flush=True)
            rows.append((mechanism, what, f"{mine:.1f} ms", *(f"{ms:.1f} ms ({ms / mine:.1f} x)"
                                                              for ms, _ in best.values())))
    print(
        f"\nT = {o.T}, {o.heads} heads, d = {o.d}, n = {o.n}, {o.threads} threads, torch "
        f"{torch.__version__}\n"
    )
    print("| mechanism | | cistern | best eager | best compiled |\n|---|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()

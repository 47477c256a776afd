#!/usr/bin/env python3
"""Times cores of attention mechanisms in PyTorch, eager and compiled.

Forward, and forward + backward: medians in ms, as JSON lines. Checks each form against a token loop
in double first and refuses to time a wrong one. The forms: `chunked` is our fastest form, and safe
at any length; `short` is what a user would write (a global maximum, torch.cumsum); `full` is the
bidirectional form, with the softmax or feature map of the queries inside."""
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

FORMS = {
    "abc": (cores.abc_loop, {"chunked": cores.abc_causal, "short": cores.abc_short}),
    "latte": (cores.latte_loop, {"chunked": cores.latte_causal, "short": cores.latte_short}),
    "linear": (cores.linear_loop, {"chunked": cores.linear_causal, "short": cores.linear_short}),
    "rfa": (cores.rfa_loop, {"chunked": cores.rfa_causal}),
    "performer": (cores.performer_loop, {"chunked": cores.performer_causal}),
}

FULL = {
    "abc": (cores.abc_full_loop, cores.abc_full),
    "latte": (cores.latte_full_loop, cores.latte_full),
    "linear": (cores.linear_full_loop, cores.linear_full),
    "rfa": (cores.rfa_full_loop, cores.rfa_full),
    "performer": (cores.performer_full_loop, cores.performer_full),
    "nystrom": (cores.nystrom_full_loop, cores.nystrom_full),
}


SIZES = {
    "rfa": 2 * cores.RFA_FEATURES,
    "performer": cores.FAVOR_FEATURES,
    "nystrom": cores.LANDMARKS
}


def inputs(mechanism, form, BH, T, d, n):
    R = torch.randn
    q, k, v = R(BH, T, d), R(BH, T, d), R(BH, T, d)
    if mechanism == "abc":
        return q, k, v, R(BH, T, n)
    if mechanism in ("rfa", "performer", "nystrom"):
        return q, k, v
    if form == "full":
        return (R(BH, T, n), 2 * R(BH, T, n), v) if mechanism == "latte" else (q, k, v)
    if mechanism == "latte":
        return torch.softmax(R(BH, T, n), -1), 2 * R(BH, T, n), v
    return F.elu(q) + 1, F.elu(k) + 1, v


def gradients(f, args, g):
    a = [x.clone().requires_grad_() for x in args]
    y = f(*a)
    return [y.detach(), *torch.autograd.grad(y, a, g.to(y.dtype))]


def error(f, loop, mechanism, form, o):
    args = inputs(mechanism, form, 2, o.check_t, o.d, o.n)
    g = torch.randn(2, o.check_t, o.d)
    got = gradients(f, args, g)
    want = gradients(loop, [x.double() for x in args], g.double())
    return max(cores.distance(a, b) for a, b in zip(got, want))


def measure(f, budget):
    f()
    f()
    times, begin = [], time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - begin < budget and len(times) < 200):
        a = time.perf_counter()
        f()
        times.append(time.perf_counter() - a)
    return dict(median_ms=round(statistics.median(times) * 1e3, 3),
                best_ms=round(min(times) * 1e3, 3), runs=len(times))


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--mechanisms", default="abc,latte,linear")
    p.add_argument("--forms", default="chunked,short", help="chunked, short, full")
    p.add_argument("--T", default="1024,4096", help="lengths, multiples of the chunk")
    for name, value in (("d", 64), ("n", 64), ("bh", 8), ("chunk", 64), ("threads", 2),
                        ("check-t", 256)):
        p.add_argument("--" + name, type=int, default=value)
    p.add_argument("--budget", type=float, default=1.0, help="seconds for each figure")
    p.add_argument("--compile", action="store_true",
                   help="time torch.compile's version beside the eager one")
    p.add_argument("--check", action="store_true", help="check only")
    o = p.parse_args()
    cores.keep_pages()
    torch.set_num_threads(o.threads)
    torch.manual_seed(0)
    for mechanism in o.mechanisms.split(","):
        for form in o.forms.split(","):
            loop, core = FULL[mechanism] if form == "full" else (FORMS[mechanism][0],
                                                                 FORMS[mechanism][1][form])
            eager = lambda *a, f=core: f(*a, C=o.chunk)  # noqa: E731
            ways = {"eager": eager}
            if o.compile:
                ways["compiled"] = torch.compile(eager)
            for way, f in ways.items():
                # eager is what compiled has to agree with too; the double loop is the judge of both
                err = error(f, loop, mechanism, form, o)
                what = dict(mechanism=mechanism, form=form, way=way, d=o.d,
                            n=SIZES.get(mechanism, o.d if mechanism == "linear" else o.n),
                            bh=o.bh, chunk=o.chunk,
                            error=float(f"{err:.2e}"), torch=torch.__version__,
                            threads=torch.get_num_threads())
                if not err < 2e-4:
                    print(json.dumps(dict(event="wrong", **what)), flush=True)
                    return 1
                if o.check:
                    print(json.dumps(dict(event="check", **what)), flush=True)
                    continue
                for T in (int(t) for t in o.T.split(",")):
                    if T % o.chunk:
                        sys.exit("T must be a multiple of the chunk")
                    args = inputs(mechanism, form, o.bh, T, o.d, o.n)
                    grads = [x.clone().requires_grad_() for x in args]
                    g = torch.randn(o.bh, T, o.d)
                    load = round(os.getloadavg()[0], 2)
                    with torch.no_grad():
                        fwd = measure(lambda: f(*args), o.budget)
                    both = measure(lambda: torch.autograd.grad(f(*grads), grads, g), o.budget)
                    print(
                        json.dumps(
                            dict(event="time", T=T, forward=fwd, forward_backward=both,
                                 load_before=load, load_after=round(os.getloadavg()[0],
                                                                    2), **what)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

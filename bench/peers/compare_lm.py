#!/usr/bin/env python3
"""Alternates two shell commands (A B, B A, A B, ...) and compares their speed.

Each command prints JSON lines; the last one with "tokens_per_s" counts. Prints medians, their
ratio, and the facts needed to trust it. Needs no torch itself; the peer's line names its version.

  compare_lm.py --a 'COMMAND of ours' --b 'COMMAND of the peer' [--times 5]
"""
import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys


def last_figure(text, key):
    found = None
    for line in text.splitlines():
        line = line.strip()
        if line.startswith("{"):
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get(key), (int, float)):
                found = row
    return found


def git(*args):
    here = os.path.dirname(os.path.abspath(__file__))
    r = subprocess.run(["git", "-C", here, *args], capture_output=True, text=True)
    return r.stdout.strip() if r.returncode == 0 else ""


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--a", required=True, help="our command")
    p.add_argument("--b", required=True, help="the peer's command")
    p.add_argument("--times", type=int, default=5, help="runs of each")
    p.add_argument("--key", default="tokens_per_s")
    o = p.parse_args()
    if o.times < 1:
        p.error("--times must be positive")
    before = os.getloadavg()
    figures, rows = {"a": [], "b": []}, {}
    for i in range(o.times):
        for which in ("ab", "ba")[i % 2]:
            command = o.a if which == "a" else o.b
            r = subprocess.run(command, shell=True, capture_output=True, text=True)
            row = last_figure(r.stdout, o.key)
            if r.returncode or row is None:
                sys.stderr.write(r.stderr[-2000:])
                sys.stderr.write(f"compare_lm: '{command}' ended with {r.returncode}" +
                                 ("" if row else f" and printed no {o.key}") + "\n")
                return 1
            rows[which] = row
            figures[which].append(row[o.key])
            print(
                json.dumps(
                    dict(event="run", round=i + 1, which=which, load=round(os.getloadavg()[0], 2),
                         **{o.key: row[o.key]})), flush=True)
    a, b = (statistics.median(figures[w]) for w in "ab")
    ratios = [x / y for x, y in zip(figures["a"], figures["b"])]
    pick = ("mechanism", "conv", "layers", "width", "length", "batch", "parameters", "dtype",
            "torch", "threads", "loss_first", "loss_last", "train_loss")
    print(
        json.dumps(
            dict(event="comparison", key=o.key, times=o.times, a_median=a, b_median=b,
                 ratio_of_medians=round(a / b, 4), ratio_each_round=[round(x, 4) for x in ratios],
                 median_of_ratios=round(statistics.median(ratios), 4), a_all=figures["a"],
                 b_all=figures["b"], a_says={k: rows["a"][k]
                                             for k in pick if k in rows["a"]},
                 b_says={k: rows["b"][k]
                         for k in pick if k in rows["b"]}, a_command=o.a, b_command=o.b,
                 commit=git("rev-parse", "--short",
                            "HEAD"), dirty=bool(git("status", "--porcelain")), cores=os.cpu_count(),
                 load_before=[round(x, 2)
                              for x in before], load_after=[round(x, 2) for x in os.getloadavg()],
                 when=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"))),
        flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compares mechanisms on one text in equal time, and plots their cost and quality.

python compare.py my.txt. Needs matplotlib. Every mechanism gets the same small model and the same
seconds of training. Then the program measures held-out loss, training speed, and the time per token
and the size of the state after 4,096 tokens.
"""

import argparse
import time

import cistern
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, mechanism: str, dim: int, heads: int, layer: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = cistern.nn.Attention(mechanism, dim, heads, conv=4, max_length=1 << 16,
                                              layer=layer)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(
            self, x: torch.Tensor,
            state: cistern.state.State | None = None) -> tuple[torch.Tensor, cistern.state.State]:
        y, state = self.attention.extend(self.norm1(x), state)
        x = x + y
        return x + self.mlp(self.norm2(x)), state


class Model(nn.Module):
    def __init__(self, mechanism: str, dim: int = 128, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, dim)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(mechanism, dim, heads, i) for i in range(layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, ids: torch.Tensor, states: list | None = None) -> tuple[torch.Tensor, list]:
        x, after = self.tokens(ids), []
        for block, state in zip(self.blocks, states or [None] * len(self.blocks)):
            x, state = block(x, state)
            after.append(state)
        return F.linear(self.norm(x), self.tokens.weight), after


def batch_of(data: torch.Tensor, length: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    at = torch.randint(len(data) - length - 1, (rows,))
    batch = torch.stack([data[i : i + length + 1] for i in at])
    return batch[:, :-1], batch[:, 1:]


def run(mechanism: str, train: torch.Tensor, test: torch.Tensor, seconds: float,
        length: int) -> dict[str, float]:
    torch.manual_seed(0)
    model = Model(mechanism)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    begin, steps = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        x, y = batch_of(train, length, 4)
        loss = F.cross_entropy(model(x)[0].flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
    speed = steps * 4 * length / (time.perf_counter() - begin)
    model.eval()
    with torch.no_grad():
        x, y = batch_of(test, length, 16)
        held_out = F.cross_entropy(model(x)[0].flatten(0, 1), y.flatten()).item()
        _, states = model(test[:4096].unsqueeze(0))
        token = test[:1].unsqueeze(0)
        times = []
        for _ in range(30):
            start = time.perf_counter()
            _, states = model(token, states)
            times.append(time.perf_counter() - start)
    return {
        "bits per byte": held_out / 0.6931,
        "training, tokens/s": speed,
        "a token after 4,096, ms": sorted(times)[15] * 1e3,
        "state, bytes": cistern.state.state_bytes(states),
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("text", help="a file; its bytes are the tokens")
    p.add_argument("--mechanisms", default="softmax,window,linear,latte,abc_mlp")
    p.add_argument("--seconds", type=float, default=30, help="of training, for each mechanism")
    p.add_argument("--length", type=int, default=512)
    p.add_argument("--out", default="compare.png")
    o = p.parse_args()
    with open(o.text, "rb") as f:
        data = torch.frombuffer(bytearray(f.read()), dtype=torch.uint8).long()
    cut = len(data) * 9 // 10
    rows = {}
    for name in o.mechanisms.split(","):
        rows[name] = run(name, data[:cut], data[cut:], o.seconds, o.length)
        print(f"{name:12s}", "  ".join(f"{k} {v:,.2f}" for k, v in rows[name].items()), flush=True)
    figures = list(next(iter(rows.values())))
    _, axes = plt.subplots(1, len(figures), figsize=(4 * len(figures), 3.5), layout="constrained")
    for axis, figure in zip(axes, figures):
        axis.barh(list(rows), [r[figure] for r in rows.values()])
        axis.set_title(figure)
        axis.invert_yaxis()
    plt.savefig(o.out, dpi=120)
    print(f"plot: {o.out}")


if __name__ == "__main__":
    main()

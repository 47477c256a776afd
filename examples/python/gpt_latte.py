"""The GPT of gpt.py with Latte in place of softmax attention: python gpt_latte.py my.txt.

`diff gpt.py gpt_latte.py` shows what using Latte takes.
"""

import argparse
import time

import cistern.functional as CF
import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                   for t in self.qkv(x).chunk(3, -1))
        y = CF.latte(q, k, v, causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, length: int, dim: int = 128, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, dim), nn.Embedding(length, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(dim)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("text", help="a file; its bytes are the tokens")
    p.add_argument("--steps", type=int, default=300)
    p.add_argument("--length", type=int, default=1024)
    o = p.parse_args()
    torch.manual_seed(0)
    with open(o.text, "rb") as f:
        data = torch.frombuffer(bytearray(f.read()), dtype=torch.uint8).long()
    model = GPT(o.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    begin = time.perf_counter()
    for step in range(1, o.steps + 1):
        at = torch.randint(len(data) - o.length - 1, (4,))
        batch = torch.stack([data[i : i + o.length + 1] for i in at])
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0:
            print(
                f"step {step}  loss {loss.item():.3f} nats per byte  "
                f"{step / (time.perf_counter() - begin):.2f} steps/s",
                flush=True)


if __name__ == "__main__":
    main()

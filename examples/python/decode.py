"""Decodes 100,000 tokens one by one, and shows that time per token and memory stay constant.

python decode.py [--mechanism latte]
"""

import argparse
import resource
import time

import cistern
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, mechanism: str, vocab: int = 256, dim: int = 128, layers: int = 2,
                 heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(layers))
        self.layers = nn.ModuleList(
            cistern.nn.Attention(mechanism, dim, heads, layer=i) for i in range(layers))

    def forward(self, ids: torch.Tensor, states: list) -> tuple[torch.Tensor, list]:
        x, after = self.tokens(ids), []
        for norm, layer, state in zip(self.norms, self.layers, states):
            y, state = layer.extend(norm(x), state)
            x = x + y
            after.append(state)
        return x @ self.tokens.weight.T, after


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--mechanism", default="latte")
    p.add_argument("--tokens", type=int, default=100_000)
    o = p.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # one token is too little work to share
    model = Model(o.mechanism).eval()
    with torch.inference_mode():
        states = [layer.empty_state(1) for layer in model.layers]
        token = torch.zeros(1, 1, dtype=torch.int64)
        begin, every = time.perf_counter(), max(1, o.tokens // 10)
        for t in range(1, o.tokens + 1):
            logits, states = model(token, states)
            token = torch.multinomial(logits[:, -1].softmax(-1), 1)
            if t % every == 0:
                now = time.perf_counter()
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
                size = cistern.state.state_bytes(states)
                print(
                    f"{t:8d} tokens  {(now - begin) / every * 1e6:7.1f} us per token  state "
                    f"{size:,} bytes  peak memory {peak:.0f} MiB",
                    flush=True)
                begin = now


if __name__ == "__main__":
    main()

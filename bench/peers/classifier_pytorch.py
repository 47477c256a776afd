#!/usr/bin/env python3
"""The peer of `cistern train` with ConvLuna: the same classifier in current PyTorch (eager, fp32),
tuned for speed.

Times training steps (forward, backward, fused AdamW) on ListOps files or on random tokens of random
lengths. Six post-norm blocks, a memory of M slots, a convolution of K tokens shared by keys and
values, values without a map, the head on the mean of the memory; padding is masked. The last block
computes the memory alone, as nothing else in it affects the loss. Prints JSON lines, the last with
`tokens_per_s` (real tokens).

  classifier_pytorch.py --data FOLDER --layers 2 --batch 8 --seconds 30
"""
import argparse
import csv
import json
import os
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


def emit(**fields):
    print(json.dumps(fields), flush=True)


class Block(nn.Module):
    def __init__(self, o, last):
        super().__init__()
        d = o.width
        self.heads, self.kernel, self.last, self.dropout = o.heads, o.kernel, last, o.dropout
        self.q, self.k, self.o = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.filter = nn.Parameter(
            torch.empty(o.heads, o.kernel).uniform_(-(o.kernel**-0.5), o.kernel**-0.5))
        self.tau = nn.Parameter(torch.zeros(()))
        self.memory_norm = nn.LayerNorm(d, eps=1e-6)
        if not last:
            self.norm1, self.norm2 = nn.LayerNorm(d, eps=1e-6), nn.LayerNorm(d, eps=1e-6)
            self.ffn = nn.Sequential(nn.Linear(d, o.ffn), nn.GELU(), nn.Linear(o.ffn, d))

    def split(self, x):
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def filtered(self, x):  # [B,T,D], one depthwise convolution in channels-last memory
        weight = self.filter.repeat_interleave(x.size(2) // self.heads, 0).unsqueeze(1)
        left = (self.kernel - 1) // 2
        x = F.pad(x, (0, 0, left, self.kernel - 1 - left)).transpose(1, 2)
        return F.conv2d(x.unsqueeze(3), weight.unsqueeze(3),
                        groups=x.size(1)).squeeze(3).transpose(1, 2)

    def attend(self, q, k, v, bias=None, scale=None):
        p = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, bias, p, scale=scale).transpose(1,
                                                                                       2).flatten(2)

    def forward(self, x, memory, real, bias):
        if self.last:
            q, k = None, self.k(x)
        else:  # both maps in one product
            q, k = F.linear(x, torch.cat([self.q.weight, self.k.weight]),
                            torch.cat([self.q.bias, self.k.bias])).chunk(2, 2)
        fk, fv = self.filtered(k * real), self.filtered(x * real)
        mq = self.split(self.q(memory) * torch.exp(-self.tau)).expand(x.size(0), -1, -1, -1)
        packed = self.o(self.attend(mq, self.split(fk), self.split(fv), bias, 1.0))
        new_memory = self.memory_norm(memory + packed)
        if self.last:
            return None, new_memory
        y = self.o(self.attend(self.split(q), self.split(self.k(packed)), self.split(packed)))
        x = self.norm1(x + y)
        return self.norm2(x + self.ffn(x)), new_memory


class Classifier(nn.Module):
    def __init__(self, o):
        super().__init__()
        self.embedding = nn.Embedding(o.vocab, o.width)
        self.positions = nn.Parameter(torch.zeros(1, o.length, o.width))
        self.memory = nn.Parameter(torch.randn(1, o.slots, o.width))
        self.blocks = nn.ModuleList(Block(o, i == o.layers - 1) for i in range(o.layers))
        self.norm = nn.LayerNorm(o.width, eps=1e-6)
        self.head = nn.Sequential(nn.Linear(o.width, o.ffn), nn.GELU(), nn.Linear(o.ffn, 10))

    def forward(self, ids, lengths):
        t = ids.size(1)
        real = torch.arange(t).unsqueeze(0) < lengths.unsqueeze(1)
        bias = torch.zeros(real.shape).masked_fill_(~real, float("-inf"))[:, None, None, :].expand(
            -1, 1, self.memory.size(1), -1)
        x, memory = self.embedding(ids) + self.positions[:, :t], self.memory
        for block in self.blocks:
            x, memory = block(x, memory, real.unsqueeze(2).to(x.dtype), bias)
        return self.head(self.norm(memory).mean(1))


def rows_of(o):
    if not o.data:
        lengths = torch.randint(o.length // 4, o.length + 1, (512,))
        return [(torch.randint(1, o.vocab, (int(n), )), int(torch.randint(0, 10, ())))
                for n in lengths]
    known, rows = {}, []
    with open(os.path.join(o.data, "basic_train.tsv"), newline="") as f:
        for row in list(csv.DictReader(f, delimiter="\t"))[:4096]:
            words = row["Source"].replace("(", "").replace(")", "").split()[: o.length]
            rows.append((torch.tensor([known.setdefault(w,
                                                        len(known) + 1)
                                       for w in words]), int(row["Target"])))
    return rows


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", default="", help="folder with basic_train.tsv; empty: random tokens")
    for name, value in dict(layers=6, width=128, heads=4, ffn=512, slots=16, kernel=32, length=2000,
                            batch=32, vocab=20, threads=0, seed=1).items():
        p.add_argument("--" + name, type=int, default=value)
    p.add_argument("--dropout", type=float, default=0.1, help="on the attention probabilities")
    p.add_argument("--seconds", type=float, default=30)
    o = p.parse_args()
    torch.manual_seed(o.seed)
    if o.threads:
        torch.set_num_threads(o.threads)
    torch.set_flush_denormal(True)
    rows, model = rows_of(o), Classifier(o)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    order = torch.randperm(len(rows)).tolist()
    rates, losses, begin, step = [], [], time.perf_counter(), 0
    while time.perf_counter() - begin < o.seconds or step < 4:
        picked = [rows[order[(step * o.batch + i) % len(order)]] for i in range(o.batch)]
        lengths = torch.tensor([len(ids) for ids, _ in picked])
        ids = nn.utils.rnn.pad_sequence([ids for ids, _ in picked], batch_first=True)
        targets = torch.tensor([label for _, label in picked])
        start = time.perf_counter()
        loss = F.cross_entropy(model(ids, lengths), targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step >= 2:  # the first steps allocate
            rates.append((int(lengths.sum()) / (time.perf_counter() - start),
                          1 / (time.perf_counter() - start)))
        step += 1
    emit(event="bench", mechanism="conv_luna", layers=o.layers, width=o.width, length=o.length,
         batch=o.batch, slots=o.slots, kernel=o.kernel,
         parameters=sum(p.numel() for p in model.parameters()), dtype="float32",
         torch=torch.__version__, threads=torch.get_num_threads(), steps=step, loss_first=losses[0],
         loss_last=losses[-1], steps_per_s=statistics.median(r[1] for r in rates),
         tokens_per_s=statistics.median(r[0] for r in rates))


if __name__ == "__main__":
    main()

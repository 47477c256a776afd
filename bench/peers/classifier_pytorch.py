#!/usr/bin/env python3
"""The peer of `cistern train` with ConvLuna: the same classifier in current PyTorch, tuned for
speed: eager or compiled, in float32 or with autocast, in one process or in several (DDP).

Times training steps (forward, backward, fused AdamW) on ListOps files or on random tokens of random
lengths. Six post-norm blocks, a memory of M slots, a convolution of K tokens shared by keys and
values, values without a map, the head on the mean of the memory; padding is masked. The last block
computes the memory alone, as nothing else in it affects the loss. Prints JSON lines, the last with
`tokens_per_s` (real tokens).

  classifier_pytorch.py --data FOLDER --layers 2 --batch 8 --seconds 30
  classifier_pytorch.py --layers 2 --batch 8 --losses 5 --processes 2     # agree with one process
"""
import argparse
import csv
import json
import os
import socket
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

from cores_pytorch import keep_pages


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
            self.ffn = nn.Sequential(nn.Linear(d, o.ffn), nn.GELU(), nn.Dropout(o.ffn_dropout),
                                     nn.Linear(o.ffn, d))

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
        y = F.scaled_dot_product_attention(q, k, v, bias, p, scale=scale)
        return y.transpose(1, 2).flatten(2)

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


class Trainer:
    """The same batches in every process, of which each takes its share of the rows."""

    def __init__(self, o):
        torch.manual_seed(o.seed)
        self.o, self.rows, self.model = o, rows_of(o), Classifier(o)
        self.run = torch.compile(self.model, dynamic=True) if o.compile else self.model
        if o.processes > 1:
            self.run = nn.parallel.DistributedDataParallel(self.run)
        self.adam = torch.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=0.01,
                                      fused=True)
        self.order, self.steps = torch.randperm(len(self.rows)).tolist(), 0

    def step(self):
        """Seconds, real tokens of the whole batch and the loss of a step."""
        o, n = self.o, len(self.order)
        picked = [self.rows[self.order[(self.steps * o.batch + i) % n]] for i in range(o.batch)]
        self.steps += 1
        tokens = sum(len(ids) for ids, _ in picked)
        if o.processes > 1:
            picked = picked[torch.distributed.get_rank()::o.processes]
        lengths = torch.tensor([len(ids) for ids, _ in picked])
        ids = nn.utils.rnn.pad_sequence([ids for ids, _ in picked], batch_first=True)
        targets = torch.tensor([label for _, label in picked])
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=o.autocast):
            logits = self.run(ids, lengths)
        loss = F.cross_entropy(logits.float(), targets)
        self.adam.zero_grad(set_to_none=True)
        loss.backward()
        self.adam.step()
        seconds = time.perf_counter() - start
        if o.processes > 1 and o.losses:
            torch.distributed.all_reduce(loss.detach_())
            loss /= o.processes
        return seconds, tokens, loss.item()


def time_steps(o):
    t = Trainer(o)
    about = dict(mechanism="conv_luna", layers=o.layers, width=o.width, length=o.length,
                 batch=o.batch, slots=o.slots, kernel=o.kernel, dropout=o.dropout,
                 ffn_dropout=o.ffn_dropout, dtype="bfloat16" if o.autocast else "float32",
                 compiled=o.compile, processes=o.processes, torch=torch.__version__,
                 threads=torch.get_num_threads(),
                 parameters=sum(p.numel() for p in t.model.parameters()))
    if o.losses:
        return emit(event="losses", losses=[t.step()[2] for _ in range(o.losses)], **about)
    done, begin = [], time.perf_counter()

    def goes_on():
        more = torch.tensor(float(time.perf_counter() - begin < o.seconds or len(done) < 4))
        if o.processes > 1:  # as the first process says
            torch.distributed.broadcast(more, 0)
        return more.item() > 0

    while goes_on():
        done.append(t.step())
    timed = done[2:]  # the first steps allocate
    return emit(event="bench", steps=len(done), loss_first=done[0][2], loss_last=done[-1][2],
                steps_per_s=statistics.median(1 / d[0] for d in timed),
                tokens_per_s=statistics.median(d[1] / d[0] for d in timed), **about)


def prepare(o):
    keep_pages()
    torch.set_num_threads(max(1, (o.threads or torch.get_num_threads()) // o.processes))
    torch.set_flush_denormal(True)


def in_process(rank, o, port):
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
                                         world_size=o.processes)
    prepare(o)
    if rank > 0:
        globals()["emit"] = lambda **_: None
    time_steps(o)
    torch.distributed.destroy_process_group()


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", default="", help="folder with basic_train.tsv; empty: random tokens")
    for name, value in dict(layers=6, width=128, heads=4, ffn=512, slots=16, kernel=32, length=2000,
                            batch=32, vocab=20, threads=0, seed=1, processes=1).items():
        p.add_argument("--" + name, type=int, default=value)
    p.add_argument("--dropout", type=float, default=0.1, help="on the attention probabilities")
    p.add_argument("--ffn-dropout", type=float, default=0.1, help="after the activation")
    p.add_argument("--seconds", type=float, default=30)
    p.add_argument("--autocast", action="store_true", help="bfloat16")
    p.add_argument("--compile", action="store_true")
    p.add_argument("--losses", type=int, default=0,
                   help="print the losses of the first steps, without dropout, in place of times")
    o = p.parse_args()
    if o.losses:
        o.dropout = o.ffn_dropout = 0.0
    if o.batch % o.processes:
        p.error("--processes has to divide --batch")
    if o.processes == 1:
        prepare(o)
        return time_steps(o)
    with socket.socket() as s:  # a free port
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    return torch.multiprocessing.spawn(in_process, (o, port), nprocs=o.processes)


if __name__ == "__main__":
    main()

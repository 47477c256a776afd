#!/usr/bin/env python3
"""The peer of `cistern train`: a small decoder LM in PyTorch (eager, fp32), tuned for speed.

Protocol (the same as `cistern compare`): a text file; 90/5/5 % of its bytes (--split); a byte-level
BPE learned on the 90 %; training on windows of --length tokens of that part. The figure is bits per
byte on the test, in consecutive blocks of --length tokens without carried context: a block reads
tokens i .. i+length-1 and predicts i+1 .. i+length. So every token but the first of each piece is
predicted exactly once; the bytes counted are those of the predicted tokens.

Windows: by default each piece of the training part is cut into consecutive windows at a random
phase and visited in shuffled order, with a new cut each epoch (nothing is seen twice before
everything has been seen once). --sampling random draws starting points independently.

Prints JSON lines. See README.md next to this file.
"""
import argparse
import copy
import json
import math
import os
import statistics
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import cores_pytorch as cores  # noqa: E402


def emit(**fields):
    print(json.dumps(fields), flush=True)


# --------------------------------------------------------------------------------------------- data
def split_text(data, split):
    """Training, validation and test, each as a list of pieces: as cistern's task.split. "spread"
    cuts the text into 20 equal parts, fewer where 5 % of a part were below 8 KiB, and each of them
    90/5/5 %; "tail" is one part. A cut moves forward to the next line within 4 KiB, or else to the
    next character."""
    def cut(share):
        at = int(len(data) * share)
        if at == 0 or at >= len(data):
            return at
        line = data.find(b"\n", at - 1, at + 4096)
        if line >= 0:
            return line + 1
        while at < len(data) and data[at] & 0xC0 == 0x80:
            at += 1
        return at

    parts = 1 if split == "tail" else min(20, max(1, len(data) // 20 // 8192))
    pieces, begin = ([], [], []), 0
    for i in range(parts):
        ends = [cut((i + s) / parts) for s in (0.90, 0.95)]
        ends.append(cut((i + 1) / parts) if i + 1 < parts else len(data))
        for piece, end in zip(pieces, ends):
            piece.append(data[begin:end])
            begin = end
    return pieces


def load(path, vocab, split):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    with open(path, "rb") as f:
        parts = [[p.decode("utf-8") for p in pieces] for pieces in split_text(f.read(), split)]
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  show_progress=False)
    lines = [line for p in parts[0] for line in p.splitlines(keepends=True)]
    tok.train_from_iterator(lines, trainer)
    ids = [[torch.tensor(tok.encode(p).ids) for p in pieces] for pieces in parts]
    # one character stands for one byte
    size = torch.tensor([len(tok.id_to_token(i)) for i in range(tok.get_vocab_size())])
    for p, i in zip(sum(parts, []), sum(ids, [])):
        assert size[i].sum().item() == len(p.encode("utf-8")), "the tokens do not cover the text"
    return ids, size


class Windows:
    """No window crosses the border of a piece."""

    def __init__(self, pieces, length, batch, sampling, seed):
        self.tokens, self.length = torch.cat(pieces), length
        self.batch, self.sampling = batch, sampling
        begins = torch.tensor([0] + [len(p) for p in pieces]).cumsum(0)
        # of each piece the first and the last place where a window can begin
        self.places = [(b.item(), b.item() + len(p) - length - 1) for b, p in zip(begins, pieces)
                       if len(p) > length]
        self.rng = torch.Generator().manual_seed(seed)
        self.reach, self.todo = torch.arange(length + 1), torch.empty(0, dtype=torch.long)
        if not self.places:
            sys.exit("the text is too short for this length")

    def _starts(self):
        if self.sampling == "random":
            choice = torch.cat([torch.arange(first, last + 1) for first, last in self.places])
            return choice[torch.randint(len(choice), (self.batch,), generator=self.rng)]
        while len(self.todo) < self.batch:
            phase = torch.randint(self.length, (1,), generator=self.rng).item()
            fresh = torch.cat([
                torch.arange(first + min(phase, last - first), last + 1, self.length)
                for first, last in self.places
            ])
            order = torch.randperm(len(fresh), generator=self.rng)
            self.todo = torch.cat((self.todo, fresh[order]))
        starts, self.todo = self.todo[: self.batch], self.todo[self.batch :]
        return starts

    def __call__(self):
        w = self.tokens[self._starts().unsqueeze(1) + self.reach]
        return w[:, :-1], w[:, 1:]


# -------------------------------------------------------------------------------------------- model
class ShortConv(torch.autograd.Function):
    """Causal depthwise convolution over positions, x [B, T, D], w [K, D], w[0] the current
    position. Written out because F.conv1d wants [B, D, T]: two transposed copies, and a slow weight
    gradient on the CPU."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        y = x * w[0]
        for j in range(1, min(len(w), x.shape[1])):
            y[:, j:].addcmul_(x[:, :-j], w[j])
        return y

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        dx, dw = g * w[0], torch.zeros_like(w)
        dw[0] = (g * x).sum((0, 1))
        for j in range(1, min(len(w), x.shape[1])):
            dx[:, :-j].addcmul_(g[:, j:], w[j])
            dw[j] = (g[:, j:] * x[:, :-j]).sum((0, 1))
        return dx, dw


class HeadLoss(torch.autograd.Function):
    """Mean cross-entropy of h W^T, with its gradient written out: a softmax and one pass in place,
    where F.cross_entropy also fills and reads the gradient of nll_loss. --loss plain is
    F.cross_entropy, to compare."""

    @staticmethod
    def forward(ctx, h, w, y):
        p = torch.softmax(h @ w.t(), -1)
        ctx.save_for_backward(h, w, y, p)
        return -p.gather(1, y.unsqueeze(1)).clamp_min(1e-38).log().mean()

    @staticmethod
    def backward(ctx, g):
        h, w, y, p = ctx.saved_tensors
        p.mul_(g / len(y))  # in place: one backward pass only, which is all there is
        p.scatter_add_(1, y.unsqueeze(1), (-g / len(y)).expand(len(y), 1))
        return p @ w, p.t() @ h, None


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Attention(nn.Module):
    """Projections fused in one product: q, k, v and, for ABC, the log weights of its slots. Latte
    has as many latents in all as the width (width / heads a head), so q and k are its two
    projections and the parameters are those of softmax."""

    def __init__(self, o):
        super().__init__()
        self.o, self.d = o, o.width // o.heads
        self.extra = o.heads * o.slots if o.mechanism == "abc" else 0
        self.qkv = nn.Linear(o.width, 3 * o.width + self.extra, bias=False)
        self.out = nn.Linear(o.width, o.width, bias=False)
        if o.conv:
            w = torch.zeros(o.conv, 3 * o.width)
            w[0] = 1
            self.conv = nn.Parameter(w)

    def forward(self, x, turn):
        o, (B, T, D) = self.o, x.shape
        x, s = self.qkv(x), None
        if self.extra:
            x, s = x.split((3 * D, self.extra), -1)
            s = s.view(B, T, o.heads, o.slots).transpose(1, 2).contiguous()
        if o.conv:
            x = ShortConv.apply(x, self.conv)
        x = x.reshape(B, T, 3, o.heads, self.d)
        if o.mechanism == "softmax":
            # strided views: the flash kernel takes them as they are
            q, k, v = x.transpose(1, 3).unbind(2)
        else:
            q, k, v = x.permute(2, 0, 3, 1, 4).contiguous().unbind(0)
        if turn is not None:
            q, k = rotate(q, *turn), rotate(k, *turn)
        if o.mechanism == "softmax":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif o.mechanism == "latte":
            y = cores.latte_causal(torch.softmax(q, -1), k, v, o.chunk)
        else:
            y = cores.abc_causal(q, k, v, s, o.chunk)
        return self.out(y.transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    def __init__(self, o):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(o.width), Attention(o)
        self.norm2 = nn.LayerNorm(o.width)
        self.up, self.down = nn.Linear(o.width, 4 * o.width), nn.Linear(4 * o.width, o.width)
        self.gelu = o.gelu

    def forward(self, x, turn):
        x = x + self.attention(self.norm1(x), turn)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate=self.gelu))


class LM(nn.Module):
    def __init__(self, o, vocab):
        super().__init__()
        self.o, self.embed, self.norm = o, nn.Embedding(vocab, o.width), nn.LayerNorm(o.width)
        self.blocks = nn.ModuleList(Block(o) for _ in range(o.layers))
        if o.positions == "learned":
            self.place = nn.Parameter(0.5 * o.embed_std * torch.randn(o.length, o.width))
        if o.positions == "rotary":
            half = o.width // o.heads // 2
            angle = torch.outer(torch.arange(o.length).float(), 10000**(-torch.arange(half) / half))
            self.turn = angle.cos(), angle.sin()
        # 0.02 drowns in what the blocks add: 0.15 bits per byte worse after 400 steps
        nn.init.normal_(self.embed.weight, std=o.embed_std)
        for name, p in self.blocks.named_parameters():
            if p.dim() == 2 and "conv" not in name:
                std = p.shape[1] ** -0.5
                if name.endswith(("out.weight", "down.weight")):
                    std /= math.sqrt(2 * o.layers)
                nn.init.normal_(p, std=std)

    def forward(self, ids, targets=None):
        x, turn, T = self.embed(ids), None, ids.shape[1]
        if self.o.positions == "learned":
            x = x + self.place[:T]
        if self.o.positions == "rotary":
            turn = self.turn[0][:T], self.turn[1][:T]
        for b in self.blocks:
            x = b(x, turn)
        x = self.norm(x)
        if targets is not None:
            return HeadLoss.apply(x.flatten(0, 1), self.embed.weight, targets.flatten())
        return F.linear(x, self.embed.weight)


# ----------------------------------------------------------------------------------------- training
class Trainer:
    def __init__(self, o, vocab, windows):
        torch.manual_seed(o.seed)
        self.o, self.model, self.windows = o, LM(o, vocab), windows
        self.params = list(self.model.parameters())
        self.run = torch.compile(self.model) if o.compile else self.model
        if o.processes > 1:  # gradients are averaged while the backward pass goes on
            self.run = nn.parallel.DistributedDataParallel(self.run)
        groups = [{
            "params": [p for p in self.params if p.dim() >= 2], "weight_decay": o.weight_decay
        }, {"params": [p for p in self.params if p.dim() < 2], "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(groups, lr=o.lr, betas=(0.9, o.beta2), fused=True)

    def step(self, lr):
        for g in self.adam.param_groups:
            g["lr"] = lr
        x, y = self.windows()
        if self.o.processes > 1:  # every process draws the same windows and takes its share
            x, y = (t[torch.distributed.get_rank() :: self.o.processes] for t in (x, y))
        if self.o.loss == "written":
            loss = self.run(x, y)
        else:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.o.autocast):
                logits = self.run(x)
            loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
        self.adam.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.params, self.o.clip)
        self.adam.step()
        if self.o.processes > 1 and self.o.losses:
            torch.distributed.all_reduce(loss.detach_())
            loss /= self.o.processes
        return loss.item()

    def timed(self, lr):
        a = time.perf_counter()
        loss = self.step(lr)
        return time.perf_counter() - a, loss

    def calibrate(self):
        """Median time of a step, on the model itself, which is put back as it was. The data is not
        put back: no matter."""
        model, adam = copy.deepcopy(self.model.state_dict()), copy.deepcopy(self.adam.state_dict())
        times = [self.timed(self.o.lr * 0.1)[0] for _ in range(15)][5:]
        self.model.load_state_dict(model)
        self.adam.load_state_dict(adam)
        return statistics.median(times)


def rate(o, step, steps):
    warm = min(o.warmup, max(1, steps // 10))
    if step < warm:
        return o.lr * (step + 1) / warm
    u = (step - warm) / max(1, steps - warm)
    return o.lr * (o.final + (1 - o.final) * 0.5 * (1 + math.cos(math.pi * u)))


@torch.inference_mode()
def bits_per_byte(model, pieces, size, length, batch=16):
    total, count = 0.0, 0
    for tokens in pieces:
        n = len(tokens) - 1
        full = n // length * length
        blocks = list(
            zip(tokens[:full].view(-1, length).split(batch),
                tokens[1:full + 1].view(-1, length).split(batch)))
        if full < n:
            blocks.append((tokens[None, full:-1], tokens[None, full + 1 :]))
        for x, y in blocks:
            total += F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").item()
        count += size[tokens[1:]].sum().item()
    return total / math.log(2) / count


def about(o, trainer):
    return dict(mechanism=o.mechanism, conv=o.conv, layers=o.layers, width=o.width, heads=o.heads,
                length=o.length, batch=o.batch, positions=o.positions,
                parameters=sum(p.numel() for p in trainer.params), torch=torch.__version__,
                threads=torch.get_num_threads(), dtype="bf16 autocast" if o.autocast else "fp32",
                compiled=o.compile, loss=o.loss)


def train(o, ids, size):
    t = Trainer(o, len(size), Windows(ids[0], o.length, o.batch, o.sampling, o.seed))
    load0, begin = os.getloadavg()[0], time.perf_counter()
    steps = o.steps
    if not steps:
        per_step = t.calibrate()
        steps = max(1, int((o.seconds - (time.perf_counter() - begin)) / per_step))
        emit(event="calibrated", step_ms=round(per_step * 1e3, 2), steps=steps)
    times, recent = [], []
    first = time.perf_counter()
    for i in range(steps):
        dt, loss = t.timed(rate(o, i, steps))
        if not math.isfinite(loss):
            sys.exit(f"the loss is not finite at step {i}")
        times.append(dt)
        recent = (recent + [loss])[-50:]
        if (i + 1) % o.log_every == 0:
            emit(event="step", step=i + 1, steps=steps, loss=round(statistics.mean(recent), 4),
                 seconds=round(time.perf_counter() - begin, 1))
    train_s, total_s = time.perf_counter() - first, time.perf_counter() - begin
    t.model.eval()
    emit(
        event="result", tokens_per_s=round(steps * o.batch * o.length / train_s, 1),
        tokens_per_s_median=round(o.batch * o.length / statistics.median(times), 1), steps=steps,
        tokens=steps * o.batch * o.length,
        epochs=round(steps * o.batch * o.length / sum(map(len, ids[0])), 2),
        train_seconds=round(train_s, 2),
        seconds_with_calibration=round(total_s, 2), train_loss=round(statistics.mean(recent), 4),
        bits_per_byte_valid=round(bits_per_byte(t.model, ids[1], size, o.length), 4),
        bits_per_byte_test=round(bits_per_byte(t.model, ids[2], size, o.length), 4),
        lr=o.lr, seed=o.seed, sampling=o.sampling, split=o.split, blocks=len(ids[2]),
        train_tokens=sum(map(len, ids[0])), test_tokens=sum(map(len, ids[2])),
        **about(o, t), load_before=round(load0, 2), load_after=round(os.getloadavg()[0], 2))


def first_losses(o, ids, vocab):
    """The losses of the first steps, of the whole batch: what one process, several, and a compiled
    model have to agree in."""
    t = Trainer(o, vocab, Windows(ids, o.length, o.batch, o.sampling, o.seed))
    emit(event="losses", losses=[t.step(1e-3) for _ in range(o.losses)], processes=o.processes,
         **about(o, t))


def in_process(rank, o, ids, vocab, port):
    """One of the processes of --processes, with its share of the threads."""
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
                                         world_size=o.processes)
    prepare(o)
    if rank > 0:
        globals()["emit"] = lambda **_: None
    (first_losses if o.losses else bench)(o, ids, vocab)
    torch.distributed.destroy_process_group()


def bench(o, ids, vocab):
    """Training steps only, the named variants in turn, medians. One model each, all at the same
    constant rate."""
    variants = []
    for name in o.variants.split(",") if o.variants else [f"{o.mechanism}:{o.conv}"]:
        v = copy.copy(o)
        mech, conv, loss = (name.split(":") + ["", ""])[:3]  # mechanism[:convolution[:loss]]
        v.mechanism, v.conv, v.loss = mech, int(conv or 0), loss or o.loss
        check_options(v)
        variants.append((v, Trainer(v, vocab, Windows(ids, v.length, v.batch, v.sampling,
                                                      v.seed)), [], []))
    load0 = os.getloadavg()[0]
    for v, t, _, _ in variants:
        for _ in range(3):
            t.step(1e-3)
    rounds, begin = 0, time.perf_counter()

    def goes_on():
        if rounds < 3:
            return True
        more = torch.tensor(float(time.perf_counter() - begin < o.seconds * len(variants)))
        if o.processes > 1:  # as the first process says
            torch.distributed.broadcast(more, 0)
        return more.item() > 0

    while goes_on():
        for v, t, times, losses in variants[:: 1 if rounds % 2 else -1]:
            for _ in range(o.steps or 8):
                dt, loss = t.timed(1e-3)
                times.append(dt)
                losses.append(loss)
        rounds += 1
    for v, t, times, losses in variants:
        emit(event="bench", tokens_per_s=round(v.batch * v.length / statistics.median(times), 1),
             tokens_per_s_best=round(v.batch * v.length / min(times),
                                     1), step_ms=round(statistics.median(times) * 1e3,
                                                       2), steps_timed=len(times),
             rounds=rounds, processes=o.processes, loss_first=round(losses[0], 4),
             loss_last=round(losses[-1], 4),
             **about(v, t), chunk=v.chunk, load_before=round(load0, 2),
             load_after=round(os.getloadavg()[0], 2))


# -------------------------------------------------------------------------------------------- check
def check():
    torch.manual_seed(0)
    worst, bad = {}, False

    def note(name, err, limit):
        nonlocal bad
        worst[name] = float(f"{err:.2e}")
        bad = bad or not err < limit

    R = torch.randn
    # the last has more than 64 chunks: the loop of carry()
    for T, C in ((256, 64), (100, 32), (7, 64), (70 * 8, 8)):
        q, k, v, s = R(2, 3, T, 16), R(2, 3, T, 16), R(2, 3, T, 16), 2 * R(2, 3, T, 24)
        # a drift that, over many chunks, a global maximum does not survive
        s = s + 20.0 / C * torch.arange(T).unsqueeze(-1)
        p = torch.softmax(R(2, 3, T, 24), -1)
        for name, fast, loop, args in (("latte", cores.latte_causal, cores.latte_loop, (p, s, v)),
                                       ("abc", cores.abc_causal, cores.abc_loop, (q, k, v, s))):
            g = R(2, 3, T, 16).double()
            a = [x.clone().requires_grad_() for x in args]
            b = [x.double().requires_grad_() for x in args]
            y, want = fast(*a, C=C), loop(*b)
            note(f"{name} T={T} C={C} forward", cores.distance(y, want), 2e-5)
            for i, (d, e) in enumerate(
                    zip(torch.autograd.grad(y, a, g.float()), torch.autograd.grad(want, b, g))):
                note(f"{name} T={T} C={C} gradient {i}", cores.distance(d, e), 2e-4)
    x = R(2, 9, 6, dtype=torch.double, requires_grad=True)
    w = R(4, 6, dtype=torch.double, requires_grad=True)
    want = F.conv1d(F.pad(x.transpose(1, 2), (3, 0)),
                    w.flip(0).t().unsqueeze(1), groups=6).transpose(1, 2)
    note("convolution", (ShortConv.apply(x, w) - want).abs().max().item(), 1e-12)
    torch.autograd.gradcheck(ShortConv.apply, (x, w))
    h, w, y = R(12, 6, dtype=torch.double,
                requires_grad=True), R(9, 6, dtype=torch.double,
                                       requires_grad=True), torch.randint(9, (12, ))
    ours = torch.autograd.grad(3 * HeadLoss.apply(h, w, y), (h, w))
    want = torch.autograd.grad(3 * F.cross_entropy(h @ w.t(), y), (h, w))
    note("loss", (HeadLoss.apply(h, w, y) - F.cross_entropy(h @ w.t(), y)).abs().item(), 1e-12)
    note("loss gradients", max((a - b).abs().max().item() for a, b in zip(ours, want)), 1e-12)
    for mechanism in ("softmax", "latte", "abc"):  # a model must not look ahead
        for positions in ("learned", "rotary"):
            if positions == "rotary" and mechanism == "latte":
                continue
            o = options([
                "-", "--mechanism", mechanism, "--conv", "4", "--length", "96", "--width", "32",
                "--slots", "8", "--positions", positions
            ])
            model = LM(o, 50)
            a = torch.randint(50, (2, 96))
            b = a.clone()
            b[:, 60:] = torch.randint(50, (2, 36))
            with torch.no_grad():
                note(f"{mechanism} {positions} looks ahead by",
                     (model(a) - model(b))[:, :60].abs().max().item(), 1e-5)
    emit(event="check", passed=not bad, errors=worst, torch=torch.__version__)
    return 1 if bad else 0


def check_options(o):
    if o.mechanism not in ("softmax", "latte", "abc"):
        sys.exit(f"unknown mechanism {o.mechanism}")
    if o.width % o.heads or min(o.width, o.heads, o.layers, o.length, o.batch, o.chunk) < 1:
        sys.exit("sizes must be positive and the width divisible by the heads")
    if o.positions == "rotary" and o.mechanism == "latte":
        sys.exit("rotary positions do not fit Latte: its q and k are logits of latents")


def options(argv):
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("text", nargs="?", default="-",
                   help="a text file (with --check or --bench-only it may be left out)")
    p.add_argument("--mechanism", default="softmax", help="softmax, latte or abc")
    p.add_argument("--conv", type=int, default=0,
                   help="taps of the causal depthwise convolution on q, k, v; 0: none")
    p.add_argument("--positions", default="learned", choices=("learned", "rotary", "none"))
    p.add_argument("--gelu", default="none", choices=("none", "tanh"),
                   help="approximation; none is the erf form")
    for name, value in (("width", 128), ("layers", 2), ("heads", 4), ("slots", 32), ("length", 256),
                        ("batch", 8), ("vocab", 2048), ("chunk", 64), ("steps", 0), ("threads", 2),
                        ("seed", 0), ("warmup", 50), ("log-every", 200)):
        p.add_argument("--" + name, type=int, default=value)
    for name, value in (("lr", 4e-3), ("seconds", 120.0), ("final", 0.0), ("embed-std", 0.1),
                        ("beta2", 0.95), ("weight-decay", 0.01), ("clip", 1.0)):
        p.add_argument("--" + name, type=float, default=value)
    p.add_argument("--split", default="spread", choices=("spread", "tail"),
                   help="validation and test: blocks spread over the text, or its last tenth")
    p.add_argument("--sampling", default="shuffled", choices=("shuffled", "random"))
    p.add_argument(
        "--bench-only", action="store_true",
        help="time training steps only; --seconds for each variant, --steps in a row (8)")
    p.add_argument("--variants", default="",
                   help="with --bench-only: in turn, such as softmax,softmax:4,latte,latte:4,abc")
    p.add_argument("--loss", default="written", choices=("written", "plain"),
                   help="plain: F.cross_entropy (always with --autocast, --compile)")
    p.add_argument("--autocast", action="store_true",
                   help="bf16 autocast (context; the protocol is fp32)")
    p.add_argument("--compile", action="store_true",
                   help="torch.compile (context; the protocol is eager)")
    p.add_argument("--processes", type=int, default=1,
                   help="with --bench-only: DistributedDataParallel over gloo; rows and threads "
                   "are shared out")
    p.add_argument("--losses", type=int, default=0,
                   help="with --bench-only: the losses of the first N steps instead of times")
    p.add_argument("--check", action="store_true")
    o = p.parse_args(argv)
    if o.processes > 1 and (not o.bench_only or o.batch % o.processes):
        sys.exit("--processes needs --bench-only and a batch that divides")
    if o.autocast or o.compile:
        o.loss = "plain"
    check_options(o)
    return o


def prepare(o):
    cores.keep_pages()
    torch.set_num_threads(max(1, o.threads // o.processes))
    torch.set_flush_denormal(True)


def time_steps(o, ids, vocab):
    if o.processes == 1:
        return (first_losses if o.losses else bench)(o, ids, vocab)
    import socket
    with socket.socket() as s:  # a free port
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(in_process, (o, ids, vocab, port), nprocs=o.processes)


def main():
    o = options(sys.argv[1:])
    prepare(o)
    if o.check:
        return check()
    if o.text == "-" and not o.bench_only:
        sys.exit("which text? give a file, or --check, or --bench-only")
    if o.text == "-":
        made_up = torch.randint(o.vocab, (500_000, ), generator=torch.Generator().manual_seed(0))
        time_steps(o, [made_up], o.vocab)
        return 0
    ids, size = load(o.text, o.vocab, o.split)
    if o.bench_only:
        time_steps(o, ids[0], len(size))
    else:
        train(o, ids, size)
    return 0


if __name__ == "__main__":
    sys.exit(main())

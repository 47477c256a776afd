"""Cores of ABC, Latte, linear, random feature (RFA), FAVOR+ and Nystrom attention in plain PyTorch,
tuned for speed: causal ones, chunked, and at the end the bidirectional ones.

Shared by lm_pytorch.py and attention_pytorch.py. A token loop in double precision next to each core
checks it.

Shapes: q, k, v [..., T, d]; log weights s [..., T, n]; any number of leading dimensions,
contiguous. T is cut into chunks of C positions. Between chunks a running maximum per slot carries
the scale (safe over any length); within one chunk the reference is the maximum seen up to its end,
so the result is exact unless the log weights of one slot rise by more than about 40 within one
chunk (the clamp of z keeps even that finite). Our own kernels do without that restriction.

What matters for speed: one batched product over all chunks instead of a Python loop; torch.cumsum
over positions is slow and does not use the second thread, so sums inside a chunk are products with
a triangle of ones; keys and values carried in one state; malloc set to keep freed pages (see
keep_pages).
"""
import ctypes
import math

import torch
import torch.nn.functional as F


def keep_pages():
    """Stops glibc from returning big temporaries to the kernel at each free: fewer page faults, a
    large effect on the CPU."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD; 1 GiB, as a C int allows
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD
        return True
    except OSError:
        return False


_ones = {}


def triangle(C, dtype):
    key = (C, dtype)
    if key not in _ones:
        _ones[key] = torch.ones(C, C, dtype=dtype).tril()
    return _ones[key]


def chunked(x, C):
    return x.unflatten(-2, (x.shape[-2] // C, C))


def pad_to(C, *xs):
    """Zero rows at the end up to a multiple of C: causal, so they change nothing before them."""
    T = xs[0].shape[-2]
    extra = -T % C
    return T, [F.pad(x, (0, 0, 0, extra)) if extra else x for x in xs]


def carry(total, m):
    """total [..., N, n, d]: sums of each chunk at the scale exp(m_c), m [..., N, n] not decreasing.
    Returns the sums of all earlier chunks at the scale of each chunk: sum over j < c of exp(m_j -
    m_c) total_j."""
    N = m.shape[-2]
    if N == 1:
        return torch.zeros_like(total)
    if N <= 64:
        mt = m.transpose(-1, -2)  # [..., n, N]
        # [c, j] = exp(m_j - m_c)
        decay = (mt.unsqueeze(-2) - mt.unsqueeze(-1)).clamp_(max=0).exp_().tril_(-1)
        return (decay @ total.transpose(-3, -2)).transpose(-3, -2)
    rate = torch.exp(m[..., :-1, :] - m[..., 1:, :]).unsqueeze(-1).unbind(-3)
    sums = total.unbind(-3)
    state, out = torch.zeros_like(sums[0]), []
    out.append(state)
    for c in range(N - 1):
        state = (state + sums[c]) * rate[c]
        out.append(state)
    return torch.stack(out, -3)


def slot_weights(s):
    """Log weights in chunks [..., N, C, n] -> e = exp(s - m), running sum z [..., N, C, n] at the
    same scale, m [..., N, n]."""
    with torch.no_grad():
        m = s.amax(-2)
        if m.shape[-2] > 1:
            m = m.cummax(-2)[0]
    e = torch.exp(s - m.unsqueeze(-2))
    z = triangle(s.shape[-2], s.dtype) @ e
    if m.shape[-2] > 1:
        before = carry(z[..., -1, :].unsqueeze(-1), m).squeeze(-1)
        z = z + before.unsqueeze(-2)
    return e, z.clamp_min(1e-19), m


def latte_causal(p, s, v, C=64):
    """p: what reads (after its softmax over slots), s: log weights. y_t = sum_l p_tl M_tl, M the
    running softmax mean of v."""
    T, (p, s, v) = pad_to(C, p, s, v)
    p, s, v = chunked(p, C), chunked(s, C), chunked(v, C)
    e, z, m = slot_weights(s)
    w = p / z
    et = e.transpose(-1, -2)
    y = (w @ et).tril() @ v
    if m.shape[-2] > 1:
        y = y + w @ carry(et @ v, m)
    return y.flatten(-3, -2)[..., :T, :]


def abc_causal(q, k, v, s, C=64, scale=None):
    """ABC-MLP with exp weights, normalised by the running sum (form B.1): match over keys, softmax
    over slots, read over values."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    d = q.shape[-1]
    T, (q, k, v, s) = pad_to(C, q, k, v, s)
    q, k, v, s = chunked(q, C), chunked(k, C), chunked(v, C), chunked(s, C)
    e, z, m = slot_weights(s)
    et = e.transpose(-1, -2)
    x = (q @ k.transpose(-1, -2)).tril() @ e
    if m.shape[-2] > 1:
        before = carry(et @ torch.cat((k, v), -1), m)
        x = x + q @ before[..., :d].transpose(-1, -2)
    w = torch.softmax(x * scale / z, -1) / z
    y = (w @ et).tril() @ v
    if m.shape[-2] > 1:
        y = y + w @ before[..., d:]
    return y.flatten(-3, -2)[..., :T, :]


def linear_causal(q, k, v, C=64, divisor=lambda z: z + 1e-6):
    """Linear attention with positive features q, k, normalised by the running sum."""
    T, (q, k, v) = pad_to(C, q, k, v)
    q, k, v = chunked(q, C), chunked(k, C), chunked(v, C)
    a = (q @ k.transpose(-1, -2)).tril()
    total, ksum = k.transpose(-1, -2) @ v, k.sum(-2)
    before = total.cumsum(-3) - total
    kbefore = (ksum.cumsum(-2) - ksum).unsqueeze(-1)
    y = (a @ v + q @ before) / divisor(a.sum(-1, keepdim=True) + q @ kbefore)
    return y.flatten(-3, -2)[..., :T, :]


_drawn = {}


def drawn(rows, d, dtype=torch.float):
    """Random directions of RFA and FAVOR+, the same for all heads; no gradient."""
    if (rows, d) not in _drawn:
        _drawn[rows, d] = torch.randn(rows, d, generator=torch.Generator().manual_seed(5))
    return _drawn[rows, d].to(dtype)


RFA_FEATURES, FAVOR_FEATURES = 64, 256  # the first gives twice as many: sines and cosines


def rfa_features(x):
    x = x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + 1e-3)
    y = x @ drawn(RFA_FEATURES, x.shape[-1], x.dtype).t()
    return torch.cat((y.sin(), y.cos()), -1) * RFA_FEATURES**-0.5


def away_from_zero(z, least=1e-3):
    return torch.where(z < 0, z.clamp_max(-least), z.clamp_min(least))


def rfa_causal(q, k, v, C=64):
    return linear_causal(rfa_features(q), rfa_features(k), v, C, away_from_zero)


def favor_logits(x):
    x = x * x.shape[-1]**-0.25
    W = drawn(FAVOR_FEATURES, x.shape[-1], x.dtype)
    return x @ W.t() - x.square().sum(-1, keepdim=True) / 2


def favor_features(q, k):
    """Of queries and keys, relative to the largest of the row, and of all: not safe."""
    x, s = favor_logits(q), favor_logits(k)
    return (torch.exp(x - x.amax(-1, keepdim=True).detach()),
            torch.exp(s - s.amax((-2, -1), keepdim=True).detach()))


def performer_causal(q, k, v, C=64):
    return linear_causal(*favor_features(q, k), v, C, lambda z: z)


# The shortest forms a user would write. Weights e = exp(s - global maximum): not safe.
def _lin(q, k, v, C):
    qc, kc, vc = chunked(q, C), chunked(k, C), chunked(v, C)
    st = kc.transpose(-1, -2) @ vc
    st = st.cumsum(-3) - st
    return ((qc @ kc.transpose(-1, -2)).tril() @ vc + qc @ st).flatten(-3, -2)


def latte_short(p, s, v, C=64):
    e = torch.exp(s - s.amax(-2, keepdim=True).detach())
    return _lin(p / e.cumsum(-2), e, v, C)


def abc_short(q, k, v, s, C=64):
    e = torch.exp(s - s.amax(-2, keepdim=True).detach())
    z = e.cumsum(-2)
    w = torch.softmax(_lin(q, k, e, C) * q.shape[-1] ** -0.5 / z, -1)
    return _lin(w / z, e, v, C)


def linear_short(q, k, v, C=64):
    return _lin(q, k, v, C) / ((q * k.cumsum(-2)).sum(-1, keepdim=True) + 1e-6)


# Token loops in double: the references (spec.md 2.19: z in the log domain, M the running mean).
def _means(s, x):
    s, x = s.double(), x.double()
    z = torch.full_like(s[..., 0, :], -math.inf)
    M = torch.zeros(*s.shape[:-2], s.shape[-1], x.shape[-1], dtype=torch.double)
    for t in range(s.shape[-2]):
        z = torch.logaddexp(z, s[..., t, :])
        M = M + torch.exp(s[..., t, :] - z).unsqueeze(-1) * (x[..., t, None, :] - M)
        yield M


def latte_loop(p, s, v):
    return torch.stack([(p[..., t, None, :].double() @ M).squeeze(-2)
                        for t, M in enumerate(_means(s, v))], -2)


def abc_loop(q, k, v, s):
    d, out = q.shape[-1], []
    for t, M in enumerate(_means(s, torch.cat((k, v), -1))):
        x = (M[..., :d] @ q[..., t, :, None].double()).squeeze(-1) * d**-0.5
        out.append((torch.softmax(x, -1).unsqueeze(-2) @ M[..., d:]).squeeze(-2))
    return torch.stack(out, -2)


def linear_loop(q, k, v):
    q, k, v = q.double(), k.double(), v.double()
    S, z, out = 0.0, 0.0, []
    for t in range(q.shape[-2]):
        S = S + k[..., t, :, None] * v[..., t, None, :]
        z = z + k[..., t, :]
        out.append((q[..., t, None, :] @ S).squeeze(-2) /
                   ((q[..., t, :] * z).sum(-1, keepdim=True) + 1e-6))
    return torch.stack(out, -2)


def rfa_loop(q, k, v):
    """Sines and cosines of y_q and y_k weigh a key by the cosine of the difference."""
    W, rows = drawn(RFA_FEATURES, q.shape[-1], torch.double), []
    unit = lambda x: x / (x.square().sum(-1, keepdim=True).sqrt() + 1e-3)  # noqa: E731
    yq, yk, v = unit(q.double()) @ W.t(), unit(k.double()) @ W.t(), v.double()
    for t in range(q.shape[-2]):
        w = torch.cos(yq[..., t, None, :] - yk[..., :t + 1, :]).mean(-1)
        rows.append((w.unsqueeze(-1) * v[..., :t + 1, :]).sum(-2) /
                    away_from_zero(w.sum(-1, keepdim=True)))
    return torch.stack(rows, -2)


def performer_loop(q, k, v):
    s, rows = favor_logits(k.double()), []
    x = favor_logits(q.double())
    for t in range(q.shape[-2]):
        w = torch.exp(x[..., t, None, :] + s[..., :t + 1, :]).sum(-1)
        rows.append((w.unsqueeze(-1) * v[..., :t + 1, :].double()).sum(-2) /
                    w.sum(-1, keepdim=True))
    return torch.stack(rows, -2)


def distance(got, want):
    """Largest difference over the largest magnitude of what is wanted."""
    return ((got.double() - want).abs().max() / want.abs().max()).item()


# Bidirectional: every token is written before any reads. C is not used.


def latte_full(q, s, v, C=0):
    return torch.softmax(q, -1) @ (torch.softmax(s, -2).transpose(-1, -2) @ v)


def abc_full(q, k, v, s, C=0):
    p = torch.softmax(s, -2).transpose(-1, -2)
    return torch.softmax(q @ (p @ k).transpose(-1, -2) * q.shape[-1]**-0.5, -1) @ (p @ v)


def linear_full(q, k, v, C=0):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    z = q @ k.sum(-2).unsqueeze(-1)
    return q @ (k.transpose(-1, -2) @ v) / (z + 1e-6)


def rfa_full(q, k, v, C=0):
    q, k = rfa_features(q), rfa_features(k)
    return q @ (k.transpose(-1, -2) @ v) / away_from_zero(q @ k.sum(-2).unsqueeze(-1))


def performer_full(q, k, v, C=0):
    q, k = favor_features(q, k)
    return q @ (k.transpose(-1, -2) @ v) / (q @ k.sum(-2).unsqueeze(-1))


LANDMARKS = 64


def nystrom_full(q, k, v, C=0, inverse=None):
    """Nystromformer's iterative inverse of six steps."""
    d, T = q.shape[-1], q.shape[-2]
    q = q * d**-0.5
    ql, kl = (x.unflatten(-2, (LANDMARKS, T // LANDMARKS)).mean(-2) for x in (q, k))
    a = torch.softmax(ql @ kl.transpose(-1, -2), -1)
    z = a.transpose(-1, -2) / a.sum(-2).amax(-1)[..., None, None]
    one = torch.eye(LANDMARKS, dtype=q.dtype)
    for _ in range(6):
        az = a @ z
        z = 0.25 * z @ (13 * one - az @ (15 * one - az @ (7 * one - az)))
    read = F.scaled_dot_product_attention(ql, k, v, scale=1.0)
    return torch.softmax(q @ kl.transpose(-1, -2), -1) @ (z @ read)


def written(s, v):
    """The mean of v weighed by e^s, token by token."""
    total, weight = 0, 0
    for t in range(s.shape[-2]):
        w = torch.exp(s[..., t, :] - s.amax(-2))
        total = total + w.unsqueeze(-1) * v[..., t, :].unsqueeze(-2)
        weight = weight + w
    return total / weight.unsqueeze(-1)


def latte_full_loop(q, s, v):
    M = written(s, v)
    return torch.stack([(torch.softmax(q[..., t, :], -1).unsqueeze(-1) * M).sum(-2)
                        for t in range(q.shape[-2])], -2)


def abc_full_loop(q, k, v, s):
    K, V = written(s, k), written(s, v)
    rows = []
    for t in range(q.shape[-2]):
        x = (q[..., t, :].unsqueeze(-2) * K).sum(-1) / math.sqrt(q.shape[-1])
        rows.append((torch.softmax(x, -1).unsqueeze(-1) * V).sum(-2))
    return torch.stack(rows, -2)


def linear_full_loop(q, k, v):
    phi = lambda x: torch.where(x > 0, x + 1, x.exp())  # noqa: E731
    rows = []
    for t in range(q.shape[-2]):
        w = (phi(q[..., t, :]).unsqueeze(-2) * phi(k)).sum(-1)
        rows.append((w.unsqueeze(-1) * v).sum(-2) / (w.sum(-1, keepdim=True) + 1e-6))
    return torch.stack(rows, -2)


def rfa_full_loop(q, k, v):
    W = drawn(RFA_FEATURES, q.shape[-1], torch.double)
    yq, yk = (x / (x.square().sum(-1, keepdim=True).sqrt() + 1e-3) @ W.t() for x in (q, k))
    rows = []
    for t in range(q.shape[-2]):
        w = torch.cos(yq[..., t, None, :] - yk).mean(-1)
        rows.append((w.unsqueeze(-1) * v).sum(-2) / away_from_zero(w.sum(-1, keepdim=True)))
    return torch.stack(rows, -2)


def performer_full_loop(q, k, v):
    x, s, rows = favor_logits(q), favor_logits(k), []
    for t in range(q.shape[-2]):
        w = torch.exp(x[..., t, None, :] + s).sum(-1)
        rows.append((w.unsqueeze(-1) * v).sum(-2) / w.sum(-1, keepdim=True))
    return torch.stack(rows, -2)


def nystrom_full_loop(q, k, v):
    d, T, rows = q.shape[-1], q.shape[-2], []
    of = lambda x, i: x[..., i * T // LANDMARKS:(i + 1) * T // LANDMARKS, :].mean(-2)  # noqa: E731
    ql = torch.stack([of(q, i) for i in range(LANDMARKS)], -2)
    kl = torch.stack([of(k, i) for i in range(LANDMARKS)], -2)
    attend = lambda x, y: torch.softmax((x @ y.transpose(-1, -2)) / math.sqrt(d), -1)  # noqa: E731
    a = attend(ql, kl)
    one = torch.eye(LANDMARKS, dtype=q.dtype)
    z = a.transpose(-1, -2) / a.sum(-2).amax(-1)[..., None, None]
    for _ in range(6):
        z = z @ (13 * one - a @ z @ (15 * one - a @ z @ (7 * one - a @ z))) / 4
    read = z @ (attend(ql, k) @ v)
    for t in range(T):
        rows.append((attend(q[..., t, None, :], kl) @ read).squeeze(-2))
    return torch.stack(rows, -2)

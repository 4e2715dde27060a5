"""The search for the settings of linear recipes: fixed features, full-batch DP gradient descent, held-out images.

    python benchmarks/frontier_search.py mnist|fashion-mnist|cifar10 FOLDER SECONDS [WEIGHTS]

FOLDER holds NAME.npz with the training images x (N, C, H, W; uint8) and labels y; the last 8,000 are for validation.
With WEIGHTS, features are those of a network that learned from synthetic images (`dp-randp`). Many settings are trained
side by side, a column each, with noise for the mu of Gaussian differential privacy that (epsilon, 1e-5) allows and a
release of the features' mean at sigma 16. It is a search, in bfloat16 and without the engine: what it finds is
then trained by `dphero train --recipe`. OUT names the folder for its lines.
Logs: benchmarks/results/frontier/search-*.log.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F

from dphero import models
from dphero.guidance.prior.processes import PROCESSES
from dphero.methods.trainers.head import headless, with_head
from dphero.models.scattering import Scattering

dev = "cuda" if torch.cuda.is_available() else "cpu"
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True
MU = {1: 0.26805, 2: 0.50155, 3: 0.71912, 8: 1.66603}
SMALL = dev == "cpu"
OUT = os.environ.get("OUT", "/tmp")
START = time.time()
SIGMA_MEAN = 16.0


def synth(kind, n, shape, seed=1):
    g = torch.Generator(dev).manual_seed(seed)
    if kind == "mix":
        return torch.cat([synth(k, n // 2, shape, seed) for k in ("leaves", "spectrum")])
    return torch.cat([PROCESSES[kind](min(512, n), shape, g) for _ in range(-(-n // 512))])[:n]


def scatter(shape, J=2):
    s = Scattering(shape[1], shape[2]).to(dev)
    return lambda x: s(x)


class Patches:
    def __init__(
        self, shape, M, k, g, kind="leaves", dic="leaves", act="both", q=0.8, floor=1e-2, norm=1.0, seed=0, pad=0
    ):
        torch.manual_seed(seed)
        c = shape[0]
        d = c * k * k

        def take(kind, n):
            im = synth(kind, max(512, n // 16), shape)
            u = F.unfold(im, k).transpose(1, 2).reshape(-1, d)
            return u[torch.randperm(len(u), device=dev)[:n]]

        P = take(kind, 60000 if not SMALL else 5000)
        P = P - P.mean(1, keepdim=True)
        P = P[P.norm(dim=1) > 0.05 * P.norm(dim=1).median()]
        cov = (P.T @ P / len(P)).double()
        ev, U = torch.linalg.eigh(cov)
        self.Wz = ((U * (ev.clamp(min=0) + floor * ev.mean()).rsqrt()) @ U.T).float()
        self.Wz = self.Wz - self.Wz.mean(1, keepdim=True)  # takes away the patch's mean
        self.c, self.k, self.g, self.act, self.norm, self.pad = c, k, g, act, norm, pad
        if dic == "gauss":
            D = torch.randn(M, d, device=dev)
        else:
            Q = take(dic, 4 * M)
            Q = Q - Q.mean(1, keepdim=True)
            Q = Q[Q.norm(dim=1).argsort(descending=True)[: 2 * M]]
            D = (Q @ self.Wz.T)[torch.randperm(2 * M, device=dev)[:M]]
        self.D = F.normalize(D)
        z = self.z(synth(kind, 128, shape))
        self.med = 1.0
        r = self.r(z)
        self.b = (
            r[:, :, ::2, ::2].flatten()[:4000000].abs().quantile(q).item()
            if act == "both"
            else r[:, :, ::2, ::2].flatten()[:4000000].quantile(q).item()
        )

    def z(self, x):
        if self.pad:
            x = F.pad(x, [self.pad] * 4, mode="reflect")
        z = F.conv2d(x, self.Wz.view(-1, self.c, self.k, self.k))
        n = z.norm(dim=1, keepdim=True)
        if not hasattr(self, "n0"):
            self.n0 = n.median().item() * self.norm
        return z / (n + self.n0)

    def r(self, z):
        return F.conv2d(
            z.half() if dev == "cuda" else z,
            self.D[:, :, None, None].half() if dev == "cuda" else self.D[:, :, None, None],
        ).float()

    def __call__(self, x):
        out = []
        for part in x.split(256):
            r = self.r(self.z(part))
            a = torch.cat([F.relu(r - self.b), F.relu(-r - self.b)], 1) if self.act == "both" else F.relu(r - self.b)
            out.append(F.adaptive_avg_pool2d(a, self.g))
        return torch.cat(out)


def feats(f, x):
    return torch.cat([f(p) for p in x.split(1024)])


def dpgd(X, y, Xv, yv, N, epses, lrs, clips, T, mom=0.9, seed=0, K=10, spent=0.0, decay=False):
    g = torch.Generator(dev).manual_seed(seed)
    n, d = X.shape
    runs = [(e, rate, c) for e in epses for rate in lrs for c in clips]
    R = len(runs)
    lr, C = (torch.tensor([r[i] for r in runs], device=dev) for i in (1, 2))
    s = torch.tensor([math.sqrt(T / (MU[e] ** 2 - spent)) / N for e, _, _ in runs], device=dev).repeat_interleave(K)
    W, V, A, L = (torch.zeros(d, R * K, device=dev) for _ in range(4))
    Y = F.one_hot(y, K).float()
    CH = max(2000, 40_000_000 // (R * K))
    for t in range(T):
        G = torch.empty_like(W)
        G.normal_(generator=g)
        G *= s
        for a in range(0, n, CH):
            x = X[a : a + CH]
            P = F.softmax((x @ W.to(x.dtype)).float().view(len(x), R, K), 2)
            P -= Y[a : a + CH, None]
            P *= ((C / P.norm(dim=2)).clamp(max=1) / C / n)[:, :, None]
            G += (x.T @ (P.view(len(x), R * K) * n).to(x.dtype)).float() / n
        V.mul_(mom).add_(G)
        W -= (lr * (2 * (1 - t / T) if decay else 1)).repeat_interleave(K) * V
        A.lerp_(W, 9 / (t + 9))
        L.lerp_(W, 1 - min(0.9999, (1 + t) / (10 + t)))

    def acc(Q):
        return [
            round(v, 2)
            for v in (
                ((Xv @ Q.to(Xv.dtype)).float().view(len(Xv), R, K).argmax(2) == yv[:, None]).float().mean(0) * 100
            ).tolist()
        ]

    la, lt = acc(W), acc(A)
    return [dict(eps=e, lr=rate, C=c, T=T, last=la[i], late=lt[i]) for i, (e, rate, c) in enumerate(runs)]


def centred(X, Xv, N, seed=0):
    X, Xv = F.normalize(X), F.normalize(Xv)
    g = torch.Generator(dev).manual_seed(seed)
    m = X.mean(0) + SIGMA_MEAN / N * torch.randn(X.shape[1], device=dev, generator=g)
    return F.normalize(X - m), F.normalize(Xv - m)


def report(log, data, name, res, epses, t0, d):
    for e in epses:
        b = max((r for r in res if r["eps"] == e), key=lambda r: max(r["late"], r["last"]))
        log.write(json.dumps(dict(data=data, name=name, d=d, all=[r for r in res if r["eps"] == e])) + "\n")
        log.flush()
        print(
            f"{name:44s} d{d:<6d}T{b['T']} e{e} late {b['late']:.2f} last {b['last']:.2f} "
            f"(lr {b['lr']:g} C {b['C']:g}) [{time.time() - t0:.1f}s]",
            flush=True,
        )


def scaled(S, mode):
    if mode == "group":
        return lambda f: F.group_norm(f, 27 if f.shape[1] % 27 == 0 else 1).flatten(1)
    if mode == "plain":
        return lambda f: f.flatten(1)
    if mode == "std":
        sd = S.std(0, keepdim=True)
        sd = sd + 0.1 * sd.mean()
        m = S.mean(0, keepdim=True)
        return lambda f: ((f - m) / sd).flatten(1)
    if mode == "map":
        sd = S.std((0, 2, 3), keepdim=True)
        sd = sd + 0.05 * sd.mean()
        m = S.mean((0, 2, 3), keepdim=True)
        return lambda f: ((f - m) / sd).flatten(1)
    if mode.startswith("white"):
        a = float(mode[5:])
        m = S.mean(0, keepdim=True)
        c = (S - m).flatten(1)
        sd = c.std(0) + 0.05 * c.std(0).mean()
        c = c / sd
        ev, U = torch.linalg.eigh(c.T @ c / len(c))
        M = (U * (ev.clamp(min=0) + 0.03 * ev.mean()) ** -a) @ U.T
        return lambda f: ((f - m).flatten(1) / sd) @ M


class RFF:
    def __init__(self, d, D, s, kind="cos", seed=0):
        g = torch.Generator(dev).manual_seed(seed)
        self.W = torch.randn(d, D, device=dev, generator=g) * (s if kind == "cos" else 1.0)
        self.b = torch.rand(D, device=dev, generator=g) * 2 * math.pi
        self.kind = kind

    def __call__(self, X):
        def f(x):
            return torch.cos(x @ self.W + self.b) if self.kind == "cos" else F.relu(x @ self.W)

        return torch.cat([f(x) for x in X.split(8192)])


class Trial:
    def __init__(self, which, path, limit, epses):
        self.which, self.limit, self.epses = which, limit, epses
        z = np.load(f"{path}/{which}.npz")
        x = torch.from_numpy(z["x"]).to(dev).float() / 127.5 - 1
        y = torch.from_numpy(z["y"]).to(dev).long()
        v = int(os.environ.get("VAL", 8000))
        self.x, self.y, self.xv, self.yv = x[:-v], y[:-v], x[-v:], y[-v:]
        self.N = len(x) - v
        self.log = open(f"{OUT}/search-{which}.jsonl", "a")  # noqa: SIM115 (open as long as the process)
        print(which, self.x.shape, self.xv.shape)

    def late(self):
        return time.time() - START > self.limit

    def raw(self, f, sym=False):
        both = (lambda x: feats(f, x) + feats(f, x.flip(3))) if sym else (lambda x: feats(f, x))
        S = both(synth("mix", 2048 if dev == "cuda" else 128, tuple(self.x.shape[1:])))
        return both(self.x), both(self.xv), S

    def go(
        self,
        name,
        raw,
        modes,
        top=(None,),
        lrs=(1.0, 2.0, 4.0, 8.0, 16.0, 32.0),
        clips=(1.0, 0.3, 0.1),
        T=150,
        half=True,
        mom=0.9,
        decay=False,
        centre=True,
    ):
        for mode in modes:
            for t in top:
                if self.late():
                    return
                t0 = time.time()
                try:
                    f = scaled(raw[2], mode)
                    X = torch.cat([f(p) for p in raw[0].split(4096)])
                    Xv = f(raw[1])
                    X, Xv = centred(X, Xv, self.N) if centre else (F.normalize(X), F.normalize(Xv))
                    if t is not None:
                        r = RFF(X.shape[1], *t)
                        X, Xv = r(X), r(Xv)
                        X, Xv = centred(X, Xv, self.N, 1)
                    if half and dev == "cuda":
                        X, Xv = X.bfloat16(), Xv.bfloat16()
                    res = dpgd(
                        X,
                        self.y,
                        Xv,
                        self.yv,
                        self.N,
                        self.epses,
                        lrs,
                        clips,
                        T,
                        mom,
                        spent=(1 + (t is not None)) / SIGMA_MEAN**2 * centre,
                        decay=decay,
                    )
                    report(
                        self.log,
                        self.which,
                        f"{name} {mode} {t or ''} m{mom} {'decay' if decay else ''}",
                        res,
                        self.epses,
                        t0,
                        X.shape[1],
                    )
                except Exception as err:
                    print(name, mode, t, "FAILED", repr(err)[:200], flush=True)


@torch.no_grad()
def main():
    which, path, limit = sys.argv[1:4]
    tiny = dev == "cpu"
    D = 64 if tiny else 16384
    M = 16 if tiny else 2048
    tr = Trial(which, path, float(limit), (1, 3, 8) if which == "cifar10" else (1, 2, 3))
    shape = tuple(tr.x.shape[1:])
    T = 3 if tiny else 150
    if which != "cifar10":
        sym = which != "mnist"
        r = tr.raw(scatter(shape), sym)
        tr.go("scatter", r, ["group", "map", "white0.25", "white0.125"], T=T)
        tr.go("scatter", r, ["group", "white0.25"], top=[(D, 1.0, "cos"), (D, 2.0, "cos"), (D, 1.0, "relu")], T=T)
        tr.go("scatter", r, ["white0.25"], T=T, decay=True)
        tr.go("scatter", r, ["white0.25"], T=2 * T)
        tr.go("scatter", r, ["white0.25"], T=2 * T, mom=0.95)
        if sym:
            r = tr.raw(scatter(shape))
            tr.go("scatter unsym", r, ["white0.25"], T=T)
        g = 5
        kw = dict(q=0.95, norm=0.1)
        for k in (6, 9):
            r = tr.raw(Patches(shape, M, k, g, **kw), sym)
            tr.go(f"patch k{k}", r, ["std"], T=T)
        tr.go("patch k9", r, ["std"], top=[(D, 1.0, "cos")], T=T)
    else:
        r = tr.raw(scatter(shape), True)
        tr.go("scatter sym", r, ["group", "map"], T=T)
        tr.go("scatter sym", r, ["group"], T=2 * T, decay=True)
        tr.go("scatter sym", r, ["group"], top=[(D, 1.0, "cos"), (D, 2.0, "cos")], T=T)
        p4 = tuple(F.adaptive_avg_pool2d(F.group_norm(v, 27), 4) for v in r)
        tr.go("scatter sym pool4", p4, ["plain", "white0.25"], T=T)
        del p4
        B = dict(M=M, k=6, g=3, q=0.9)
        for kw in (
            {},
            dict(dic="gauss"),
            dict(norm=0.1, q=0.97),
            dict(M=2 * M, g=2),
            dict(g=4, M=M // 2),
            dict(floor=0.1),
        ):
            if tr.late():
                break
            q = tr.raw(Patches(shape, **{**B, **kw}), True)
            tr.go(f"patch {kw}", q, ["std"], T=T)
        q = tr.raw(Patches(shape, **B), True)
        tr.go("patch", q, ["std"], top=[(D, 1.0, "cos")], T=T)
        tr.go("patch", q, ["std"], T=2 * T)
        g = tuple(
            torch.cat([F.normalize(F.group_norm(a, 27).flatten(1)), F.normalize(b.flatten(1))], 1)[:, :, None, None]
            for a, b in zip(r, q, strict=False)
        )
        tr.go("patch+scatter", g, ["plain"], T=T)


@torch.no_grad()
def learned(path, weights, limit):
    tr = Trial("cifar10", path, limit, (1, 3, 8))
    T = 3 if dev == "cpu" else 150
    D = 64 if dev == "cpu" else 16384
    while not os.path.exists(weights):
        if tr.late():
            return print("no weights")
        time.sleep(0.5)
    body = headless(with_head(models.build("wrn-16-4", (3, 32, 32), 10)))
    body.load_state_dict({k: v.float() for k, v in torch.load(weights).items()})
    body = body.to(dev).eval()
    sc = scatter((3, 32, 32))

    def f(x):
        a = body[:5](x)
        b = body[5:9](a)
        body[9:](b)
        return torch.cat([F.adaptive_avg_pool2d(F.relu(a), 4).flatten(1), F.adaptive_avg_pool2d(b, 4).flatten(1)], 1)[
            :, :, None, None
        ]

    r = tr.raw(f, True)
    last = tuple(v[:, 2048:] for v in r)
    pooled = tuple(v.view(len(v), 256, 16).mean(2)[:, :, None, None] for v in last)
    tr.go("wrn pooled", pooled, ["std", "white0.5"], T=T)
    tr.go("wrn stage3 4x4", last, ["std", "white0.25"], T=T)
    tr.go("wrn stages 4x4", r, ["std", "white0.25"], T=T)
    tr.go("wrn stages 4x4", r, ["std"], top=[(D, 1.0, "cos")], T=T)
    s = tr.raw(sc, True)
    g = tuple(
        torch.cat([F.normalize(F.group_norm(a, 27).flatten(1)), F.normalize(b.flatten(1))], 1)[:, :, None, None]
        for a, b in zip(s, r, strict=False)
    )
    tr.go("wrn+scatter", g, ["plain", "std"], T=T)


if __name__ == "__main__":
    if len(sys.argv) > 4:
        learned(sys.argv[2], sys.argv[4], float(sys.argv[3]))
    else:
        main()

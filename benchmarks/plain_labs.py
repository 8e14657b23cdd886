"""LAB 06 and LAB 07 in the plainest form: one image after another, nothing prepared in advance.

The labs of `mocokit.studies` do the same arithmetic for a whole epoch at once; this is what they are compared with, bit
for bit in `tests/test_labs.py` and for speed in `benchmarks/labs.py`. It is kept short and slow on purpose.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn import functional as F

TRAIN = np.flatnonzero(np.arange(840) % 140 < 100)
TEST = np.flatnonzero(np.arange(840) % 140 >= 100)
TARGETS = {"shape": np.repeat(np.arange(3), 280), "color": np.tile(np.repeat([0, 1], 140), 3)}


def draw_images(seed: int) -> np.ndarray:
    """The data set, one picture at a time: float32 [840, 3, 16, 16]."""
    generator = np.random.default_rng(seed)
    down, across = np.mgrid[:16, :16]
    pictures = []
    for kind, hue in zip(TARGETS["shape"], TARGETS["color"], strict=True):
        x, y = generator.uniform(6, 10, 2)
        radius = generator.uniform(3.0, 4.7)
        dx, dy = across - x, down - y
        inside = (
            dx * dx + dy * dy <= radius * radius,
            np.maximum(abs(dx), abs(dy)) <= radius,
            abs(dx) + abs(dy) <= radius * 1.35,
        )[kind]
        paint = np.array([0.9, 0.15, 0.15] if hue == 0 else [0.15, 0.15, 0.9])
        background = generator.uniform(0.015, 0.075, (16, 16, 1))
        picture = np.where(inside[..., None], paint * generator.uniform(0.8, 1), background)
        picture += generator.normal(0, 0.012, picture.shape)
        pictures.append(np.clip(picture, 0, 1).transpose(2, 0, 1))
    return np.asarray(pictures, dtype="float32")


class Network(nn.Module):
    """[N, 3, 16, 16] -> h [N, 48], z [N, 24]."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            *(nn.Conv2d(3, 12, 3, 1, 1), nn.ReLU(), nn.Conv2d(12, 24, 3, 2, 1), nn.ReLU()),
            *(nn.Conv2d(24, 24, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(384, 48)),
        )
        self.head = nn.Sequential(nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 24))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(images)
        return h, self.head(h)


def first_weights(seed: int) -> Network:
    torch.manual_seed(seed)
    return Network()


def augment(images: Tensor, swap_hue: bool = False) -> Tensor:
    """One view of each image, image after image, from torch's global generator."""
    out = images.clone()
    for row, (down, right) in enumerate(torch.randint(-1, 2, (len(out), 2)).tolist()):
        out[row] = torch.roll(out[row], (down, right), (-2, -1))
    out = out * torch.empty(len(out), 1, 1, 1).uniform_(0.8, 1.2)
    out = out + torch.randn_like(out) * 0.025
    swapped = torch.rand(len(out)) < 0.5
    if swap_hue:
        out[swapped] = out[swapped][:, [2, 1, 0]]
    return out.clamp(0, 1)


def batches() -> tuple[Tensor, ...]:
    return torch.as_tensor(TRAIN)[torch.randperm(len(TRAIN))].split(60)


def train_in_batch(
    initial: Network, x: Tensor, seed: int, swap_hue: bool = False, epochs: int = 40
) -> tuple[Network, list[float]]:
    torch.manual_seed(seed)
    network = copy.deepcopy(initial)
    adam = torch.optim.Adam(network.parameters(), lr=0.002)
    curve = []
    for _ in range(epochs):
        losses = []
        for ids in batches():
            view_a, view_b = augment(x[ids], swap_hue), augment(x[ids], swap_hue)
            z = F.normalize(torch.cat([network(view_a)[1], network(view_b)[1]]), dim=1)
            logits = (z @ z.T / 0.2).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
            loss = F.cross_entropy(logits, (torch.arange(len(z)) + len(ids)) % len(z))
            adam.zero_grad()
            loss.backward()
            adam.step()
            losses.append(float(loss.detach()))
        curve.append(float(np.mean(losses)))
    return network, curve


def train_queue(
    initial: Network, x: Tensor, seed: int, epochs: int = 15
) -> tuple[Network, Network, Tensor, Tensor, list[float]]:
    """Query network, key network, queue, its source ids, losses."""
    torch.manual_seed(seed)
    query, key = copy.deepcopy(initial), copy.deepcopy(initial).requires_grad_(False)
    adam = torch.optim.Adam(query.parameters(), lr=0.002)
    queue, owners = torch.empty(0, 24), torch.empty(0, dtype=torch.long)
    curve = []
    for _ in range(epochs):
        losses = []
        for ids in batches():
            view_q, view_k = augment(x[ids]), augment(x[ids])
            q = F.normalize(query(view_q)[1], dim=1)
            with torch.no_grad():
                for slow, fast in zip(key.parameters(), query.parameters(), strict=True):
                    slow.mul_(0.95).add_(fast, alpha=1 - 0.95)
                k = F.normalize(key(view_k)[1], dim=1)
            if len(queue) == 0:
                loss = F.cross_entropy(q @ k.T / 0.2, torch.arange(len(ids)))
            else:
                negative = (q @ queue.T).masked_fill(ids[:, None] == owners[None], -1e9)
                logits = torch.cat([(q * k).sum(1, keepdim=True), negative], 1) / 0.2
                loss = F.cross_entropy(logits, torch.zeros(len(ids), dtype=torch.long))
            adam.zero_grad()
            loss.backward()
            adam.step()
            queue, owners = torch.cat([queue, k])[-240:], torch.cat([owners, ids])[-240:]
            losses.append(float(loss.detach()))
        curve.append(float(np.mean(losses)))
    return query, key, queue, owners, curve


def read_out(network: Network, x: Tensor) -> dict[str, float]:
    network.eval()
    scores: dict[str, float] = {}
    with torch.no_grad():
        plain = dict(zip("hz", network(x), strict=True))
        swapped = dict(zip("hz", network(x[TEST][:, [2, 1, 0]]), strict=True))
    for space, features in plain.items():
        unit = F.normalize(features, dim=1).numpy()
        for target, y in TARGETS.items():
            knn = KNeighborsClassifier(5, metric="cosine").fit(unit[TRAIN], y[TRAIN])
            linear: Any = make_pipeline(StandardScaler(), LogisticRegression(C=1, max_iter=1000))
            linear.fit(unit[TRAIN], y[TRAIN])
            scores[f"{space}_{target}_knn"] = float(knn.score(unit[TEST], y[TEST]))
            scores[f"{space}_{target}_linear"] = float(linear.score(unit[TEST], y[TEST]))
        cosine = F.cosine_similarity(features[TEST], swapped[space])
        scores[f"{space}_hue_swap_cosine"] = float(cosine.mean())
    return scores


def lab06(seed: int) -> dict[str, dict[str, float]]:
    x, initial = torch.from_numpy(draw_images(seed)), first_weights(seed)
    keep, swap = (train_in_batch(initial, x, seed + 1, swap_hue)[0] for swap_hue in (False, True))
    return {
        name: read_out(network, x) for name, network in (("random", initial), ("keep-hue", keep), ("swap-hue", swap))
    }


def lab07(seed: int) -> dict[str, dict[str, float]]:
    x, initial = torch.from_numpy(draw_images(seed)), first_weights(seed)
    in_batch = train_in_batch(initial, x, seed + 1)[0]
    moco = train_queue(initial, x, seed + 2)[0]
    return {
        name: read_out(network, x) for name, network in (("random", initial), ("simclr", in_batch), ("moco-toy", moco))
    }

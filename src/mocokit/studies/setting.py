"""What LAB 06 and LAB 07 have in common: the network, the random streams, the optimiser and the thread count.

The published figures hang on the last bit of hundreds of chaotic steps, so in these two studies every operation is in
the published order and every random number comes from the published stream. Where that differs from what the library
does elsewhere the line says `Deviation:`, and a test compares both. On x86-64 with AVX-512, torch 2.14.1 and two
threads the digits are exact.

Shapes: N = 60 images of a batch, H = 48 and D = 24 dimensions of h and z, K = 240 keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from mocokit.contrast.encoders import Backbone, Encoder
from mocokit.data.generated_shapes import seed_of
from mocokit.training.allocator import keep_freed_memory

BATCH = 60
T = 0.2
LEARNING_RATE = 0.002
H_DIM, Z_DIM = 48, 24
THREADS = 2
NEVER = -1e9
"""The logit of a pair that must not be compared: its softmax weight is exactly 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Streams:
    """The seeds of one repetition's independent random streams."""

    data: int
    """numpy: the 840 sources."""
    init: int
    """torch: the network's first weights."""
    in_batch: int
    """torch: order and views of in-batch training; both arms of LAB 06 share it."""
    moco: int
    """torch: order and views of MoCo."""
    pictures: int
    """torch: the views shown in views.png."""


def streams(repetition: int = 0) -> Streams:
    """Repetition 0 is the published run (seed 20260922); repetition k starts 1000 k higher."""
    seed = seed_of(repetition)
    return Streams(data=seed, init=seed, in_batch=seed + 1, moco=seed + 2, pictures=seed + 6)


@contextmanager
def two_threads() -> Iterator[None]:
    """Pin the thread count that the digits depend on, torch's and that of the probes' linear algebra; restore it."""
    keep_freed_memory()
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        with threadpool_limits(THREADS, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(before)


def why_other_digits() -> str:
    """Why the published digits need not come out on this machine; empty where they must."""
    reasons = []
    if (capability := torch.backends.cpu.get_cpu_capability()) != "AVX512":
        reasons.append(f"this processor offers {capability}, not AVX-512")
    if (version := torch.__version__.partition("+")[0]) != "2.14.1":
        reasons.append(f"this is torch {version}, not 2.14.1")
    return " and ".join(reasons)


def first_encoder(seed: int) -> Encoder:
    """The network that every arm starts from: [N, 3, 16, 16] -> h [N, 48] -> z [N, 24].

    Three convolutions and a linear layer make h, the representation that is kept; a head with one hidden layer makes
    z, which the loss compares. The global generator is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        trunk = nn.Sequential(
            nn.Conv2d(3, 12, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(12, 24, kernel_size=3, stride=2, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(24, 24, kernel_size=3, stride=2, padding=1),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.Linear(24 * 4 * 4, H_DIM),
        )
        head = nn.Sequential(nn.Linear(H_DIM, H_DIM), nn.ReLU(inplace=True), nn.Linear(H_DIM, Z_DIM))
    return Encoder(Backbone(trunk, spatial=False), head, H_DIM, Z_DIM)


def as_one_vector_(parameters: Sequence[Tensor], *, gradient: bool = False) -> Tensor:
    """theta: one vector that the parameters are views into from now on, and with `gradient` their gradients too.

    One addition over 40,000 numbers in place of twelve small ones; the same bits, since Adam and the EMA treat every
    number alone.
    """
    theta = parameters_to_vector(parameters).detach()
    vector_to_parameters(theta, parameters)
    if gradient:
        theta.grad = torch.zeros_like(theta)
        parts = torch.split(theta.grad, [parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
    return theta


def adam(theta: Tensor) -> torch.optim.Adam:
    """Deviation: Adam operation by operation. The library's optimisers are fused, which rounds differently."""
    return torch.optim.Adam([theta], lr=LEARNING_RATE, foreach=False, fused=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """What a training leaves: the encoder that is read out, and evidence that it was trained."""

    encoder: Encoder
    loss_history: list[float]
    """Mean loss of each epoch."""
    first_layer_change: float
    """L2 norm of the change of the first convolution's weights."""

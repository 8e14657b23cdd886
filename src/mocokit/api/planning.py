"""What a run would do, without doing it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mocokit.data.loader import BatchLoader, BatchPlan
from mocokit.data.pixels import build_pixel_store
from mocokit.data.sources import ImageSource
from mocokit.options import PretrainOptions
from mocokit.training.precision import Execution, apply_execution, choose_execution, num_threads
from mocokit.training.run import make_encoder, pick_device
from mocokit.training.settings import ExecutionConfig, RunConfig

if TYPE_CHECKING:
    pass
from mocokit.api.opening import configure, options_from, read_config


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run would do, without doing it. seconds: an estimate from a few timed steps."""

    config: RunConfig
    images: int
    steps_per_epoch: int
    total_steps: int
    queue_life_steps: float
    chance_loss: float
    masked_share: float
    parameters: int
    state_bytes: int
    pixel_bytes: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return plain | {"config": self.config.to_dict()}


def plan(
    data: str | Path,
    *,
    options: PretrainOptions | None = None,
    config_file: Path | None = None,
    **flags: Any,
) -> Plan:
    """What `pretrain` would do with these arguments: the whole configuration, steps, memory, a time estimate.

    Opens the index and decodes one batch; writes nothing.
    """
    source, config = configure(str(data), options_from(options, flags), read_config(config_file))
    rows = np.arange(min(config.train.batch_size, len(source.index)))
    sample = ImageSource(name=source.name, index=source.index.subset(rows), read=source.read)
    store = build_pixel_store(sample, side=config.data.side, cache=None, max_bad=1.0, workers=2)
    device = pick_device(config.execution.device)
    encoder = make_encoder(config.encoder, config.views.size, config.train.seed).to(device)
    loader = BatchLoader(store, sample.index, config.views, BatchPlan(sample.index.ids, len(rows), 0), workers=0)
    batch = loader.make(0)
    execution = config.execution
    chosen = choose_execution(
        encoder, batch.x_q.to(device), precision=execution.precision, layout=execution.layout, threads=execution.threads
    )
    apply_execution(encoder, chosen)
    with num_threads(chosen.threads):
        seconds = _time_step(encoder, batch.x_q.to(device))
    steps = config.data.images // config.train.batch_size
    K, S, D = config.contrast.K, config.data.images, config.encoder.dim
    parameters = sum(p.numel() for p in encoder.parameters())
    return Plan(
        config=dataclasses.replace(config, execution=settled(chosen, device)),
        images=S,
        steps_per_epoch=steps,
        total_steps=steps * config.train.epochs,
        queue_life_steps=K / config.train.batch_size,
        chance_loss=math.log1p(K),
        masked_share=masked_share(K, S),
        parameters=parameters,
        state_bytes=3 * 4 * parameters + K * (4 * D + 24),
        pixel_bytes=3 * config.data.side**2 * S,
        seconds=seconds * steps * config.train.epochs,
    )


def _time_step(encoder: torch.nn.Module, x: Tensor) -> float:
    import time

    encoder.train()
    best = math.inf
    for _ in range(3):
        start = time.perf_counter()
        torch.autograd.backward(encoder(x).square().mean())
        with torch.no_grad():
            encoder(x)
        best = min(best, time.perf_counter() - start)
    return best


def masked_share(K: int, S: int) -> float:
    """The share of queries with an own older key in the queue, averaged over an epoch (K <= S: K^2 / 2 S^2)."""
    return min(K * K / (2 * S * S), 1.0) if K <= S else 1.0 - S / (2 * K)


def settled(execution: Execution, device: torch.device) -> ExecutionConfig:
    return ExecutionConfig(
        device=str(device),
        threads=execution.threads,
        precision=execution.precision,
        layout=execution.layout,
        reason=execution.reason,
    )

"""What a run would do, without doing it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mocokit.data.clips import ClipSource, first_clips
from mocokit.data.index import SampleIndex
from mocokit.data.loader import BatchLoader, BatchPlan
from mocokit.data.sources import ImageSource
from mocokit.options import PretrainOptions
from mocokit.training.settings import RunConfig

if TYPE_CHECKING:
    pass
from mocokit.api.opening import Source, Store, build_store, configure, options_from, read_config
from mocokit.training.checkpoint import state_bytes
from mocokit.training.precision import choose_execution, num_threads, time_step
from mocokit.training.state import make_encoder, make_state, pick_device


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run would do, without doing it. seconds: an estimate from a few timed steps.

    queue_life_steps, masked_share: None without a queue. chance_loss: None for BYOL. parameters: of one encoder.
    """

    config: RunConfig
    images: int
    steps_per_epoch: int
    total_steps: int
    queue_life_steps: float | None
    chance_loss: float | None
    masked_share: float | None
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
    store, index = _sample(source, rows, config.data.side)
    device = pick_device(config.execution.device)
    encoder = make_encoder(config.encoder, config.views.size, config.train.seed).to(device)
    loader = BatchLoader(store, index, config.views, BatchPlan(index.ids, len(rows), 0), workers=0)
    x = loader.make(0).x_q.to(device)
    steps = config.data.images // config.train.batch_size
    config = dataclasses.replace(
        config, execution=choose_execution(encoder, x, config.execution, steps=steps * config.train.epochs)
    )
    state = make_state(config, encoder)
    contrast = config.contrast
    with num_threads(config.execution.threads or 1):
        seconds = time_step(encoder, x, keys=contrast.has_momentum)
    if contrast.symmetric or not contrast.has_queue:
        seconds *= 2  # both views are queries
    return Plan(
        config=config,
        images=config.data.images,
        steps_per_epoch=steps,
        total_steps=steps * config.train.epochs,
        queue_life_steps=key_life(config),
        chance_loss=contrast.chance(config.train.batch_size),
        masked_share=masked_share(contrast.K, config.data.images) if contrast.has_queue else None,
        parameters=sum(p.numel() for p in encoder.parameters()),
        state_bytes=state_bytes(state),
        pixel_bytes=3 * config.data.side**2 * _pictures(source),
        seconds=seconds * steps * config.train.epochs,
    )


def _sample(source: Source, rows: npt.NDArray[np.int64], side: int) -> tuple[Store, SampleIndex]:
    """The pixels of the first rows alone, and their table."""
    if isinstance(source, ClipSource):
        source = first_clips(source, len(rows))
        return build_store(source, side=side, cache=None, max_bad=1.0), source.index
    sample = ImageSource(name=source.name, index=source.index.subset(rows), read=source.read)
    return build_store(sample, side=side, cache=None, max_bad=1.0), sample.index


def _pictures(source: Source) -> int:
    return len(source.frames.index) if isinstance(source, ClipSource) else len(source.index)


def key_life(config: RunConfig) -> float | None:
    """Steps that a key stays in the queue; None without a queue. A symmetric loss enqueues two keys of each image."""
    contrast = config.contrast
    if not contrast.has_queue:
        return None
    return contrast.K / (config.train.batch_size * (2 if contrast.symmetric else 1))


def masked_share(K: int, S: int) -> float:
    """The share of queries with an own older key in the queue, averaged over an epoch (K <= S: K^2 / 2 S^2)."""
    return min(K * K / (2 * S * S), 1.0) if K <= S else 1.0 - S / (2 * K)

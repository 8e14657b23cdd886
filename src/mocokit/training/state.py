"""Everything that training changes, and how it is built from a run's configuration."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mocokit.contrast.encoders import (
    Encoder,
    EncoderConfig,
    EncoderPair,
    UnknownBackboneError,
    build_encoder,
    build_predictor,
)
from mocokit.contrast.key_queue import KeyQueue
from mocokit.errors import UsageError, is_out_of_memory
from mocokit.training.optim import build_optimizer
from mocokit.training.precision import apply_execution, compile_
from mocokit.training.settings import RunConfig


@dataclass(slots=True)
class TrainState:
    """Everything that training changes. `step` is the number of updates done so far; queue: None without one."""

    pair: EncoderPair
    queue: KeyQueue | None
    optimizer: torch.optim.Optimizer
    step: int = 0

    def modules(self) -> dict[str, nn.Module]:
        """The networks by name: `query`, `key` (unless f_k is f_q), `predictor` (where there is one)."""
        found: dict[str, nn.Module] = {"query": self.pair.query}
        if self.pair.key is not self.pair.query:
            found["key"] = self.pair.key
        if self.pair.predictor is not None:
            found["predictor"] = self.pair.predictor
        return found

    def model_tensors(self) -> dict[str, Tensor]:
        """All networks and the queue, by name: `query.*`, `key.*`, `predictor.*`, `queue.*`."""
        named = {
            f"{part}.{name}": tensor
            for part, module in self.modules().items()
            for name, tensor in module.state_dict().items()
        }
        if self.queue is not None:
            named |= {f"queue.{name}": tensor for name, tensor in self.queue.tensors().items()}
        return named

    def fingerprint(self) -> str:
        """A hash of everything that every rank must hold alike: all parameters that move, and the queue."""
        found = hashlib.sha256(f"{self.step} {sorted(self.counters().items())}".encode())
        queue = self.queue.tensors().values() if self.queue is not None else ()
        for tensor in (*self.pair.trained.values(), *self.pair.theta_k, *queue):
            found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()

    def counters(self) -> dict[str, int]:
        """The queue's integers; none without a queue."""
        return {} if self.queue is None else self.queue.counters()


def make_state(config: RunConfig, encoder: Encoder) -> TrainState:
    """The state before the first step. encoder: `make_encoder`'s, on the device where training happens.

    config.execution must be settled. Raises UsageError where the configuration asks for what the encoder can't do.
    """
    contrast, device = config.contrast, next(encoder.parameters()).device
    apply_execution(encoder, config.execution)
    try:
        encoder.normalise_in_groups_(contrast.bn_groups)
    except ValueError as error:
        raise UsageError(str(error)) from error
    predictor = build_predictor(config.encoder, feature_dim=encoder.feature_dim, seed=config.train.seed)
    if predictor is not None:
        predictor = predictor.to(device)
    pair = EncoderPair(encoder, predictor, momentum=contrast.has_momentum)
    if config.execution.compile == "on":
        for network in {id(e): e for e in (pair.query, pair.key)}.values():
            compile_(network)
    queue = None
    if contrast.has_queue:
        queue = KeyQueue(contrast.K, config.encoder.dim, device)
        if contrast.queue_init == "random":
            queue.fill_random_(config.train.seed)
    return TrainState(pair, queue, build_optimizer(config.optim, pair.trained))


def make_encoder(config: EncoderConfig, image_size: int, seed: int) -> Encoder:
    """`build_encoder`, with its errors as the command line reports them."""
    try:
        return build_encoder(config, image_size=image_size, seed=seed)
    except UnknownBackboneError as error:
        raise UsageError(str(error)) from error
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        if is_out_of_memory(error):
            raise
        # A network that shrinks its input below one pixel, a transformer whose patches do not fit, and so on.
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"The backbone {config.backbone} can't be built for views of {image_size} px ({reason}). "
            "Choose another --backbone or --image-size."
        ) from error


def pick_device(name: str) -> torch.device:
    """`auto`, or a device by name. Raises UsageError when it is unknown or not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"'{name}' is not a device. Use cpu, cuda or cuda:0.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA device on this machine. Use --device cpu.")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name} is not supported. Use cpu or cuda.")
    return device

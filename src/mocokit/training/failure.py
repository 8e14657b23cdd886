"""What a run leaves when a number is not finite: which step, which images, and statistics of everything in it.

The state itself is not copied. The update was not made, and everything before it is a function of the last
checkpoint, so `replay` comes to the same step again from there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from mocokit import files
from mocokit.errors import DamagedError, DivergedError, RankLostError, StorageError, UsageError
from mocokit.training.checkpoint import checkpoint_steps
from mocokit.training.distributed import Ranks
from mocokit.training.loop import LoadedBatch
from mocokit.training.runfolder import RunFolder
from mocokit.training.runlog import utc_now
from mocokit.training.settings import RunConfig
from mocokit.training.state import TrainState

FAILURE = "failure/failure.json"
FORMAT = 1


class FailureCapture:
    """Around a training: writes `failure/failure.json` when it ends in a DivergedError, which goes on its way.

    names: the name of every image by id. `remember` must be given each batch before the step it is for; `forget` lets
    go of it afterwards. Every rank has one: all diverge in the same step and tell what was in their batches; rank 0
    writes.
    """

    def __init__(
        self, run: RunFolder, config: RunConfig, state: TrainState, names: Mapping[int, str], ranks: Ranks
    ) -> None:
        self.run, self.config, self.state, self.names, self.ranks = run, config, state, names, ranks
        self._batch: LoadedBatch | None = None

    def remember(self, batch: LoadedBatch) -> None:
        """The batch that the next step is taken with."""
        self._batch = batch

    def forget(self) -> None:
        """The step is done."""
        self._batch = None

    def __enter__(self) -> FailureCapture:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if not isinstance(error, DivergedError) or self._batch is None:
            return
        hint = f"`mocokit replay {self.run.path}` says where it began."
        batch = self._batch
        own = {"images": batch.ids.tolist(), "views": {"x_q": statistics(batch.x_q), "x_k": statistics(batch.x_k)}}
        try:
            told = self.ranks.tell_all(own)
            if not self.ranks.first:
                return
            files.make_folder((self.run.path / FAILURE).parent)
            files.write_json(self.run.path / FAILURE, self._facts(error, told))
        except (StorageError, RankLostError) as problem:
            hint = f"What was in the step could not be written down: {problem}"
        error.args = (f"{error} {hint}",)

    def _facts(self, error: DivergedError, told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """told: each rank's image ids and its views' statistics, in rank order."""
        state = self.state
        trained = state.pair.trained
        return {
            "format": FORMAT,
            "step": state.step,
            "seed": self.config.train.seed,
            "config": self.config.digest(),
            "torch": torch.__version__,
            "ranks": len(told),
            "checkpoint": max((s for s in checkpoint_steps(self.run.checkpoints) if s <= state.step), default=None),
            "loss": as_json(error.loss),
            "gradient_norm": as_json(error.gradient_norm),
            "message": str(error),
            "utc": utc_now(),
            "images": [
                {"id": i, "name": self.names.get(i, ""), "rank": rank}
                for rank, one in enumerate(told)
                for i in one["images"]
            ],
            "views": [one["views"] for one in told],
            "gradients": {name: statistics(p.grad) for name, p in trained.items() if p.grad is not None},
            "weights": {name: statistics(tensor) for name, tensor in state.model_tensors().items()},
        }


def statistics(tensor: Tensor) -> dict[str, Any]:
    """Count, numbers that are not finite, and smallest, largest, mean and 2-norm of the finite ones, as JSON values."""
    values = tensor.detach().flatten()
    finite = values[torch.isfinite(values)].double()
    found: dict[str, Any] = {"count": values.numel(), "not_finite": values.numel() - finite.numel()}
    if finite.numel():
        measured = {"min": finite.min(), "max": finite.max(), "mean": finite.mean(), "norm": finite.norm()}
        found |= {name: as_json(float(value)) for name, value in measured.items()}
    return found


def as_json(value: float) -> float | str:
    """A number, or the word for one that JSON has none for: nan, inf, -inf."""
    return value if math.isfinite(value) else str(value)


def read_failure(run: RunFolder) -> dict[str, Any]:
    """The captured failure of a run. Raises UsageError when there is none, DamagedError when it was changed."""
    path = run.path / FAILURE
    if not path.exists():
        raise UsageError(
            f"{run.path} holds no captured failure (failure/failure.json): it never stopped on a number that is not "
            "finite. There is nothing to replay."
        )
    facts = files.read_json(path)
    if (
        not isinstance(facts, dict)
        or facts.get("format") != FORMAT
        or not isinstance(facts.get("step"), int)
        or not isinstance(facts.get("ranks", 1), int)
    ):
        raise DamagedError(f"{path} is not what mocokit wrote; it was changed, or is of another version.")
    return facts

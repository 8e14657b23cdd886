"""Rows of numbers sent to an experiment tracker: TensorBoard, Weights & Biases (offline) or MLflow (files).

Every tracker here writes into the run folder and nothing leaves the machine. Each library is imported only when it is
asked for, and its own reporting of usage to its maker is switched off before that.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mocokit import files
from mocokit.errors import MissingDependencyError, UsageError, did_you_mean

INSTALL = "pip install 'mocokit[track]'"


class Tracker(Protocol):
    """Where rows of numbers go."""

    def log(self, row: Mapping[str, Any]) -> None:
        """Send the numbers of a row; `step` says where they belong. Texts and lists are left out."""

    def close(self) -> None:
        """Write out what is still held. Doing so again is fine."""


def open_trackers(
    names: Sequence[str], folder: Path, *, run_name: str, config: Mapping[str, Any], step: int = 0
) -> Tracker:
    """One tracker for all `names` (of tensorboard, wandb, mlflow), each in `folder/NAME`.

    config: the run's settings, nested as in config.yaml, kept beside the numbers. step: where a resumed run goes on;
    TensorBoard forgets what the interrupted run logged behind it, the others
    begin another run.

    Raises as `check_trackers` does.
    """
    check_trackers(names)
    opened: list[Tracker] = []
    try:
        for name in dict.fromkeys(names):
            place = files.make_folder(folder / name)
            opened.append(_OPENERS[name](place, run_name, flat(config), step))
    except BaseException:
        _All(opened).close()
        raise
    return _All(opened)


def check_trackers(names: Sequence[str]) -> None:
    """Raise UsageError for an unknown name, MissingDependencyError with the install line where a library is missing."""
    for name in names:
        if name not in _OPENERS:
            raise UsageError(
                f"No tracker is called {name!r}.{did_you_mean(name, _OPENERS)} Choose of: {', '.join(_OPENERS)}."
            )
        if importlib.util.find_spec(name) is None:
            raise MissingDependencyError(
                f"The {name} tracker needs a package that isn't installed ({name}). Install it: {INSTALL}"
            )


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a row by name, nested ones as `outer/inner`; without `step`, texts, lists and booleans."""
    return {
        name: float(value)
        for name, value in _walk(row, "")
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def flat(config: Mapping[str, Any]) -> dict[str, str]:
    """Settings by dotted name, as text."""
    return {name.replace("/", "."): str(value) for name, value in _walk(config, "")}


def _walk(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _walk(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


class _All:
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def log(self, row: Mapping[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.log(row)

    def close(self) -> None:
        while self._trackers:
            self._trackers.pop().close()


def _imported(module: str, package: str) -> Any:
    """A module of an optional package. Raises MissingDependencyError with the line that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"The {package} tracker needs a package that isn't installed ({error.name}). Install it: {INSTALL}"
        ) from error


class TensorBoardTracker:
    """Event files for `tensorboard --logdir RUN/trackers/tensorboard`."""

    def __init__(self, folder: Path, run_name: str, config: Mapping[str, str], step: int) -> None:
        _imported("tensorboard", "tensorboard")  # torch's own message names a command that may not fit
        module = _imported("torch.utils.tensorboard", "tensorboard")
        with files.storage_errors(folder, "write"):
            self._writer = module.SummaryWriter(str(folder), purge_step=step or None)
        table = "\n".join(f"| {name} | {value} |" for name, value in config.items())
        self._writer.add_text("config", f"**{run_name}**\n\n| setting | value |\n|---|---|\n{table}", 0)

    def log(self, row: Mapping[str, Any]) -> None:
        """Every number as a scalar at the row's step."""
        step = int(row["step"])
        with files.storage_errors(Path(self._writer.log_dir), "write"):
            for name, value in numbers(row).items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """An offline run, for `wandb sync` whenever the user wants to."""

    def __init__(self, folder: Path, run_name: str, config: Mapping[str, str], step: int) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read at import
        wandb = _imported("wandb", "wandb")
        settings = wandb.Settings(
            mode="offline",
            silent=True,
            console="off",
            disable_code=True,
            disable_git=True,
            save_code=False,
            x_disable_stats=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
        )
        with files.storage_errors(folder, "write"):
            self._run = wandb.init(
                project="mocokit",
                name=run_name,
                dir=str(folder),
                config=dict(config),
                mode="offline",
                settings=settings,
            )

    def log(self, row: Mapping[str, Any]) -> None:
        """One wandb step for each row."""
        self._run.log(numbers(row), step=int(row["step"]))

    def close(self) -> None:
        self._run.finish()


class MLflowTracker:
    """A file store, for `mlflow ui --backend-store-uri RUN/trackers/mlflow`."""

    def __init__(self, folder: Path, run_name: str, config: Mapping[str, str], step: int) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read at import
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # its file store is off by default
        logging.getLogger("mlflow").setLevel(logging.ERROR)
        self._folder = folder
        tracking = _imported("mlflow.tracking", "mlflow")
        with files.storage_errors(folder, "write"):
            self._client = tracking.MlflowClient(tracking_uri=folder.resolve().as_uri())
            found = self._client.get_experiment_by_name("mocokit")
            experiment = found.experiment_id if found else self._client.create_experiment("mocokit")
            self._run = self._client.create_run(experiment, run_name=run_name).info.run_id
            for name, value in config.items():
                self._client.log_param(self._run, name, value[:500])
        self._open = True

    def log(self, row: Mapping[str, Any]) -> None:
        """Every number as a metric at the row's step."""
        with files.storage_errors(self._folder, "write"):
            for name, value in numbers(row).items():
                self._client.log_metric(self._run, name, value, step=int(row["step"]))

    def close(self) -> None:
        if self._open:
            self._client.set_terminated(self._run)
        self._open = False


_OPENERS: dict[str, Callable[[Path, str, Mapping[str, str], int], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MLflowTracker,
}
TRACKERS = tuple(_OPENERS)
"""The names that `open_trackers` takes."""

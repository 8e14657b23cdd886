"""The whole state of a training run, to bytes and back, and the folder of checkpoints.

A checkpoint is a folder `step-N` that exists whole or not at all (`files.commit_folder`):
`model.safetensors` (the networks and the queue), `optim.safetensors` (the optimiser's buffers), `state.json` (the
step and the queue's counters) and a manifest. No random state is stored because none is used. No pickle.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from mocokit import files
from mocokit.errors import DamagedError, StorageError
from mocokit.training.optim import buffers_per_parameter, load_optimizer_tensors_, optimizer_tensors
from mocokit.training.runfolder import CHECKPOINT_FILES
from mocokit.training.state import TrainState

FORMAT = 1


def save_checkpoint(state: TrainState, folder: Path, facts: Mapping[str, Any], *, keep: int = 2) -> Path:
    """Commit `folder/step-N`, then prune all but the newest `keep` (at least 2) that verify.

    facts: JSON values for the manifest (configuration hash, log lengths, versions). Saving the same step again is
    a no-op when the one there verifies; a damaged one, which a resume passed over, is replaced. Raises StorageError;
    the earlier checkpoints are untouched then.
    """
    final = folder / f"step-{state.step}"
    if final.exists():
        try:
            files.verify_folder(final)
        except DamagedError as error:
            if foreign := _foreign(final):
                raise StorageError(f"{final / foreign[0]} is in the way of a checkpoint. Move it away.") from error
            files.remove_folder_by_rename(final)
        else:
            return final
    contents = {
        "model.safetensors": _to_bytes(state.model_tensors()),
        "optim.safetensors": _to_bytes(optimizer_tensors(state.optimizer, state.pair.trained)),
        "state.json": files.to_json({"step": state.step, "queue": state.counters()}).encode(),
    }
    files.commit_folder(final, contents, {"format": FORMAT, "step": state.step, **facts})
    _prune(folder, max(keep, 2), newest=state.step)
    return final


def state_bytes(state: TrainState) -> int:
    """What the tensors of a checkpoint take: the networks, the queue and the optimiser's buffers, which come later."""
    buffers = buffers_per_parameter(state.optimizer) * sum(p.nbytes for p in state.pair.trained.values())
    return sum(t.nbytes for t in state.model_tensors().values()) + buffers


def check_room(state: TrainState, folder: Path, *, keep: int = 2) -> None:
    """Raise StorageError unless the checkpoints that will lie in `folder` at once fit: those kept and a new one.

    What earlier checkpoints take there counts as free, since they are pruned or replaced.
    """
    size = state_bytes(state)
    free = files.free_bytes(folder)
    with files.storage_errors(folder, "read"):
        taken = sum(path.lstat().st_size for path in folder.glob("step-*/*"))
    needed = (keep + 1) * size
    if free is not None and free + taken < needed:
        raise StorageError(
            f"{folder} has room for {free + taken:,} bytes, but the run's checkpoints need {needed:,}: {keep} are kept "
            f"while another of {size:,} is written. Free some space, or choose another --out."
        )


def _to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return bytes(safetensors.torch.save(plain))


def _prune(folder: Path, keep: int, newest: int) -> None:
    """Remove all but `keep` checkpoints: `newest`, whose bytes were hashed a moment ago, and older ones that verify."""
    verified = 1
    for step in sorted(checkpoint_steps(folder), reverse=True):
        if step == newest:
            continue
        path = folder / f"step-{step}"
        if verified >= keep:
            if not _foreign(path):
                files.remove_folder_by_rename(path)
            continue
        try:
            files.verify_folder(path)
        except DamagedError:
            continue  # not counted as one of those to keep, and left for the user to look at
        verified += 1


def _foreign(path: Path) -> list[str]:
    """What somebody else put into a checkpoint's folder: reason enough to leave it alone."""
    with files.storage_errors(path, "read"):
        return sorted({entry.name for entry in path.iterdir()} - set(CHECKPOINT_FILES))


def checkpoint_steps(folder: Path) -> list[int]:
    """The step numbers of the checkpoint folders present, ascending; not verified."""
    if not folder.is_dir():
        return []
    names = [path.name.removeprefix("step-") for path in folder.glob("step-*") if path.is_dir()]
    return sorted(int(name) for name in names if name.isascii() and name.isdigit() and name == str(int(name)))


@dataclass(frozen=True, slots=True)
class Found:
    """A verified checkpoint: where it lies, its manifest, and why newer ones (if any) were passed over."""

    path: Path
    manifest: dict[str, Any]
    passed_over: tuple[str, ...] = ()


def find_checkpoint(folder: Path, step: int | None = None) -> Found:
    """The newest checkpoint that verifies, or exactly `step`.

    A damaged newest one is passed over with its reason in `passed_over`; a damaged one asked for by name is an
    error. Raises DamagedError when none verifies.
    """
    if step is not None:
        return _verified(folder, step)
    passed_over: list[str] = []
    for number in sorted(checkpoint_steps(folder), reverse=True):
        try:
            return _verified(folder, number, tuple(passed_over))
        except DamagedError as error:
            passed_over.append(str(error))
    reasons = " ".join(passed_over)
    raise DamagedError(f"No usable checkpoint in {folder}. {reasons or 'There is none.'} Start again with --overwrite.")


def _verified(folder: Path, step: int, passed_over: tuple[str, ...] = ()) -> Found:
    path = folder / f"step-{step}"
    manifest = files.verify_folder(path)
    if manifest.get("format") != FORMAT or manifest.get("step") != step:
        raise DamagedError(f"{path} is the checkpoint of another step or format; the folder was renamed or changed.")
    return Found(path, manifest, passed_over)


MOST_HEADER_BYTES = 4 * 2**20
"""A header of more says so many tensors that their names alone would fill the memory; real ones have 1 MB at most."""


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises DamagedError when it can't be parsed."""
    try:
        with path.open("rb") as stream:
            header = int.from_bytes(stream.read(8), "little")
        if header > MOST_HEADER_BYTES:
            raise DamagedError(
                f"{path} is not a readable safetensors file (a header of {header:,} bytes, more than the limit of "
                f"{MOST_HEADER_BYTES:,})."
            )
        if not _is_unicode(path):  # the library opens by name, and only names that are UTF-8
            return dict(safetensors.torch.load(path.read_bytes()))
        return dict(safetensors.torch.load_file(path))
    except SafetensorError as error:
        raise DamagedError(f"{path} is not a readable safetensors file ({error}).") from error
    except OSError as error:
        raise StorageError(f"Could not read {path}: {error.strerror}.") from error


def _is_unicode(path: Path) -> bool:
    return str(path).encode("utf-8", "replace") == os.fsencode(path)


def load_checkpoint(state: TrainState, found: Found) -> None:
    """Put a verified checkpoint into `state`, in place. Raises DamagedError when names or shapes do not fit."""
    stored = read_tensors(found.path / "model.safetensors")
    counters = files.read_json(found.path / "state.json")
    try:
        for part, module in state.modules().items():
            module.load_state_dict(_under(stored, f"{part}."))
        if state.queue is not None:
            state.queue.load(_under(stored, "queue."), counters["queue"])
        step = int(counters["step"])
    except (RuntimeError, KeyError, ValueError, TypeError) as error:
        raise DamagedError(f"{found.path} does not fit this run's configuration: {error}") from error
    optim_path = found.path / "optim.safetensors"
    try:
        load_optimizer_tensors_(state.optimizer, state.pair.trained, read_tensors(optim_path))
    except ValueError as error:
        raise DamagedError(f"{optim_path} does not fit this run's configuration: {error}") from error
    state.step = step


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

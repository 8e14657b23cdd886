"""How a run begins and goes on: weights that it starts from, and data that may have changed since."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from mocokit import files
from mocokit.api.opening import VIDEO_TABLES, Source, reopen
from mocokit.contrast.encoders import Encoder
from mocokit.data.index import SampleIndex
from mocokit.errors import DamagedError, DataError, UsageError
from mocokit.training.checkpoint import Found, checkpoint_steps
from mocokit.training.foreign import as_safetensors, load_weights
from mocokit.training.runfolder import RunFolder
from mocokit.training.runlog import Progress, utc_now
from mocokit.training.settings import RunConfig, to_yaml


def begin_from_weights(
    config: RunConfig, encoder: Encoder, run: RunFolder, progress: Progress, *, resume: bool
) -> RunConfig:
    """Put the weights that `data.init` names into the encoder's backbone; the head stays random.

    Nothing is done where no weights are named, or where a run goes on from a checkpoint. Returns the configuration with
    the file's SHA-256. Raises UsageError (no such file, other architecture), DataError (a pickle that is refused, or a
    file that is not the one the configuration is about).
    """
    named = config.data
    if named.init is None:
        if named.allow_partial:
            raise UsageError("--allow-partial has no effect without --init. Leave it out.")
        return config
    if resume and checkpoint_steps(run.checkpoints):
        return config
    path = Path(named.init)
    weights, remark = as_safetensors(path, run.path / "cache" / "init.safetensors")
    found = files.sha256_file(path)
    if named.init_sha256 not in (None, found):
        raise DataError(
            f"{path} is not the file that the configuration names (SHA-256 {found[:16]}..., expected "
            f"{str(named.init_sha256)[:16]}...). Restore it, or start another run."
        )
    report = load_weights(weights, encoder.backbone, allow_partial=named.allow_partial, source=path)
    progress.say(f"Starting from {path}: {report.told()}, {len(report.unexpected)} not used.")
    if remark:
        progress.say(f"{path.name}: {remark}.")
    return dataclasses.replace(config, data=dataclasses.replace(named, init_sha256=found))


# ------------------------------------------------------------------------------------------------- changed data


def same_images(
    data: str, config: RunConfig, run: RunFolder, *, accept_change: bool = False
) -> tuple[Source, RunConfig]:
    """The images of a run that goes on.

    Raises DataError with a list of what differs unless they are those it started with, or `accept_change`: then the
    configuration returned is about the images there are now (`note_change` writes that down).
    """
    source = reopen(data, config.data, tables=run.path / "cache" / VIDEO_TABLES)
    if source.index.hash == config.data.index_hash:
        return source, config
    if not accept_change:
        changes = _differences(run, source.index)
        raise DataError(
            f"The images of {source.name} are not those the run started with ({config.data.images} then, "
            f"{len(source.index)} now{changes}). Restore them, start another run with another --out, or go on with "
            "them as they are: --accept-data-change."
        )
    if len(source.index) < config.train.batch_size:
        raise DataError(f"{source.name} has {len(source.index)} images left, fewer than a batch. Restore them.")
    now = dataclasses.replace(config.data, images=len(source.index), index_hash=source.index.hash)
    return source, dataclasses.replace(config, data=now)


def remember_images(run: RunFolder, index: SampleIndex) -> None:
    """images.npy: ids, sizes and times of the run's images, so that a change can be told by name."""
    held = io.BytesIO()
    np.save(held, np.stack([index.ids, index.sizes, index.mtimes]), allow_pickle=False)
    files.write_bytes(run.path / "images.npy", held.getvalue())


def _differences(run: RunFolder, index: SampleIndex) -> str:
    """`: 2 added (first 'a.png'), ...`; says less where the list of the first images is gone or damaged."""
    try:
        table = np.load(run.path / "images.npy", allow_pickle=False)
        ids, sizes, mtimes = (row.astype(np.int64) for row in table)
    except (OSError, ValueError, TypeError):
        return ", or changed files"
    before = {int(i): (int(size), int(time)) for i, size, time in zip(ids, sizes, mtimes, strict=True)}
    now = zip(index.ids.tolist(), index.sizes.tolist(), index.mtimes.tolist(), index.names, strict=True)
    added, changed, kept = [], [], 0
    for i, size, time, name in now:
        if i not in before:
            added.append(name)
            continue
        kept += 1
        if before[i] != (size, time):
            changed.append(name)
    told = [
        f"{len(names)} {word} (first {names[0]!r})" for word, names in (("added", added), ("changed", changed)) if names
    ]
    if missing := len(before) - kept:
        told.append(f"{missing} missing")
    return f": {', '.join(told)}" if told else ", with other contents"


CHANGES = "data-changes.jsonl"
PASSED_OVER = "passed-over.jsonl"


def note_change(run: RunFolder, before: RunConfig, now: RunConfig, index: SampleIndex, step: int) -> None:
    """Write down that the run goes on with other images: a line in data-changes.jsonl, config.yaml, images.npy."""
    line = {
        "utc": utc_now(),
        "step": step,
        "images": [before.data.images, now.data.images],
        "index_hash": [before.data.index_hash, now.data.index_hash],
        "config": [before.digest(), now.digest()],
    }
    told = "".join(json.dumps(one) + "\n" for one in [*_changes(run), line])
    files.write_text(run.path / CHANGES, told)  # first: config.yaml may be behind it, never ahead
    files.write_text(run.config, to_yaml(now))
    remember_images(run, index)


def note_passed_over(run: RunFolder, found: Found) -> None:
    """Write down, in passed-over.jsonl, which checkpoints a resume found damaged, and what it goes on from."""
    if not found.passed_over:
        return
    line = {"utc": utc_now(), "step": found.manifest["step"], "passed_over": found.passed_over}
    with contextlib.closing(files.AppendLog(run.path / PASSED_OVER)) as log:
        log.append(json.dumps(line))
        log.sync()


def digests(run: RunFolder, config: RunConfig) -> set[str]:
    """The digest of a run's configuration, and those from before its images were changed with the user's consent."""
    return {config.digest(), *(str(line["config"][0]) for line in _changes(run))}


def _changes(run: RunFolder) -> list[dict[str, Any]]:
    path = run.path / CHANGES
    if not path.exists():
        return []
    with files.storage_errors(path, "read"):
        lines = path.read_text("utf-8").splitlines()
    try:
        found = [json.loads(line) for line in lines]
        assert all(len(line["config"]) == 2 for line in found)
    except (ValueError, KeyError, TypeError, AssertionError, RecursionError) as error:
        raise DamagedError(f"{path} is not what mocokit wrote; it was changed.") from error
    return found

"""What a lab leaves on disk: inputs, configuration, weights, pictures, trace, figures; one file per further seed.

results.json is written last, so where it is, the rest is. Results are only ever put into one table when they were
made by the same code, versions, threads and processor.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import hashlib
import importlib.metadata
import io
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from mocokit import files
from mocokit.contrast import encoders, key_queue, losses, momentum
from mocokit.data import generated_shapes
from mocokit.errors import DamagedError, UsageError
from mocokit.evaluation import counterfactual, features
from mocokit.reporting.plots import save_figure
from mocokit.studies import lab06, lab07, lab_run, lab_views, setting
from mocokit.studies.lab07 import TrainedMoco, check_queue, queue_trace
from mocokit.studies.lab_figures import training_figure, views_figure
from mocokit.studies.lab_run import LabRun
from mocokit.studies.published import SECOND, SECOND_RAN_ON
from mocokit.training.environment import environment

KIND = "trained in full on the CPU; frozen readouts on held-out images"
OWNED = (
    "inputs.npz",
    "config.json",
    "random-init.safetensors",
    "keep-hue.safetensors",
    "swap-hue.safetensors",
    "simclr.safetensors",
    "moco-toy.safetensors",
    "views.png",
    "training-and-probes.png",
    "queue-trace.json",
    "trace.json",
    "moco-steps.html",
    "results.json",
    "seeds.json",
    "seeds.txt",
    "seeds.png",
    "seeds/*.json",
    ".lock",
    ".tmp-*",
    "seeds/.tmp-*",
)
"""Every file a lab writes, as patterns relative to its folder."""
MEASUREMENT = (
    "lab",
    "code_sha256",
    "python",
    "torch",
    "numpy",
    "scikit_learn",
    "scipy",
    "threads",
    "processor",
    "cores",
    "cpu_capability",
    "system",
)
"""What must be equal for two results to belong to one measurement."""


def claim(out: Path, lab: str, *, overwrite: bool, add_seeds: bool) -> files.RunLock:
    """Make or reopen a lab's folder and lock it.

    Raises UsageError when the folder holds files that no lab writes, or a result that neither `overwrite` (which
    removes it) nor `add_seeds` (which goes on from it) allows for; LockedError, StorageError.
    """
    with files.storage_errors(out, "use"):
        _refuse(out, lab, overwrite=overwrite, add_seeds=add_seeds)
        files.make_folder(out)
        lock = files.RunLock(out)
        try:
            _refuse(out, lab, overwrite=overwrite, add_seeds=add_seeds)
            files.make_folder(out / "seeds")
            for folder in (out, out / "seeds"):
                files.sweep_temporaries(folder)
            if overwrite:
                for name in ["results.json", *_present(out)]:  # the one that says that the rest is whole goes first
                    if name != ".lock":
                        files.remove_path(out / name)
        except BaseException:
            lock.release()
            raise
    return lock


def _refuse(out: Path, lab: str, *, overwrite: bool, add_seeds: bool) -> None:
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; --out needs a folder.")
    foreign = [name for name in _present(out) if not any(_matches(name, pattern) for pattern in OWNED)]
    if foreign:
        raise UsageError(f"{out} holds {foreign[0]!r}, which no lab writes. Choose another --out.")
    if overwrite or not (out / "results.json").exists():
        return
    if not add_seeds:
        raise UsageError(f"{out} already holds a result. Replace it with --overwrite, or choose another --out.")
    there = read_results(out / "results.json")["lab"]
    if there != lab:
        raise UsageError(f"{out} holds LAB {there}, not LAB {lab}. Choose another --out.")


def _present(out: Path) -> list[str]:
    found = []
    for folder, names, file_names in os.walk(out):
        links = [name for name in names if (Path(folder) / name).is_symlink()]
        found += [(Path(folder) / name).relative_to(out).as_posix() for name in [*file_names, *links]]
    return sorted(found)


def _matches(name: str, pattern: str) -> bool:
    return name.count("/") == pattern.count("/") and fnmatch.fnmatchcase(name, pattern)


# -------------------------------------------------------------------------------------------------- results


def measurement(lab: str) -> dict[str, Any]:
    """What a result made here and now is measured with: the keys of `MEASUREMENT`."""
    facts = environment()
    packages = facts["packages"]
    return {
        "lab": lab,
        "code_sha256": code_sha256(),
        "python": facts["python"],
        "torch": torch.__version__,
        "numpy": packages["numpy"],
        "scikit_learn": packages["scikit-learn"],
        "scipy": importlib.metadata.version("scipy"),
        "threads": setting.THREADS,
        "processor": facts["processor"],
        "cores": facts["cores"],
        "cpu_capability": facts["cpu_capability"],
        "system": facts["system"],
    }


def payload(run: LabRun, seconds: float) -> dict[str, Any]:
    """results.json: the figures under their published names, and what they were measured with."""
    results = {
        **measurement(run.lab),
        "kind": KIND,
        "seed": run.seeds.data,
        "seeds": dataclasses.asdict(run.seeds),
        "utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "seconds": seconds,
        "digits_not_expected_because": setting.why_other_digits(),
        **run.results(),
    }
    moco = run.trained.get("moco-toy")
    if isinstance(moco, TrainedMoco):
        results["queue_trace"] = queue_trace(moco.steps)
        results["queue_checks"] = check_queue(moco.steps)
    if SECOND[run.lab]:
        results["another_measurement"] = {"ran_on": SECOND_RAN_ON, "percent": SECOND[run.lab]}
    return results


@functools.cache
def code_sha256() -> str:
    """SHA-256 over the source of everything that decides a figure, as it is when first asked for."""
    modules = (
        *(generated_shapes, encoders, key_queue, losses, momentum, counterfactual, features),
        *(setting, lab_views, lab_run, lab06, lab07),
    )
    digest = hashlib.sha256()
    for module in modules:
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.hexdigest()


def read_results(path: Path) -> dict[str, Any]:
    """A results.json or seed file of ours. Raises DamagedError when it is something else."""
    results = files.read_json(path)
    if not isinstance(results, dict) or not {*MEASUREMENT, "scores", "loss_history", "seed"} <= set(results):
        raise DamagedError(f"{path} is no result of a lab; it was changed.")
    return results


def refuse_to_merge(results: Mapping[str, Any], mine: Mapping[str, Any], path: Path) -> None:
    """Raise UsageError naming what differs when two results are not of one measurement."""
    for name in MEASUREMENT:
        if results[name] != mine[name]:
            raise UsageError(
                f"{path} was made with another {name.replace('_', ' ')} ({str(results[name])[:16]}, here "
                f"{str(mine[name])[:16]}), and different measurements are never put into one table. Use another --out, "
                "or --overwrite."
            )


# ------------------------------------------------------------------------------------------------ artefacts


def write_artefacts(out: Path, run: LabRun, results: dict[str, Any]) -> dict[str, Any]:
    """Write everything a repetition leaves, results.json last. Returns `results` with the hash of inputs.npz."""
    inputs = _inputs(run)
    results = results | {"inputs_sha256": hashlib.sha256(inputs).hexdigest()}
    files.write_bytes(out / "inputs.npz", inputs)
    files.write_json(out / "config.json", _config(run))
    _write_weights(out / "random-init.safetensors", {"": run.initial})
    for name, trained in run.trained.items():
        if isinstance(trained, TrainedMoco):
            order = trained.queue.oldest_first()
            extra = {
                "queue": trained.queue.vectors[order],
                "queue_ids": trained.queue.ids[order],
                "queue_births": trained.queue.births[order],
            }
            both = {"query.": trained.encoder, "key.": trained.key_encoder}
            _write_weights(out / f"{name}.safetensors", both, extra)
            files.write_json(out / "queue-trace.json", queue_trace(trained.steps))
            if trained.trace is not None:
                files.write_text(out / "trace.json", files.to_json(trained.trace, indent=None))
        else:
            _write_weights(out / f"{name}.safetensors", {"": trained.encoder})
    save_figure(views_figure(run), out / "views.png")
    save_figure(training_figure(results), out / "training-and-probes.png")
    files.write_json(out / "results.json", results)
    return results


def _inputs(run: LabRun) -> bytes:
    """The data set as the bytes of an npz: images float32 [840, 3, 16, 16], shape, color, train_ids, test_ids."""
    data = run.data
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        images=data.images,
        shape=data.shape,
        color=data.color,
        train_ids=data.train_ids,
        test_ids=data.test_ids,
    )
    return buffer.getvalue()


def _config(run: LabRun) -> dict[str, Any]:
    return {
        "lab": run.lab,
        "seed": run.seeds.data,
        "image_shape": [3, generated_shapes.SIDE, generated_shapes.SIDE],
        "train_n": len(run.data.train_ids),
        "test_n": len(run.data.test_ids),
        "batch_size": setting.BATCH,
        "epochs": {name: len(one.loss_history) for name, one in run.trained.items()},
        "temperature": setting.T,
        "adam_lr": setting.LEARNING_RATE,
        **({"queue_size": lab07.K, "momentum": lab07.MOMENTUM} if run.lab == "07" else {}),
        "h_dim": setting.H_DIM,
        "z_dim": setting.Z_DIM,
        "threads": setting.THREADS,
        "knn": {"k": 5, "metric": "cosine", "votes": "equal"},
        "linear_probe": {"C": 1, "standardised_on": "training images"},
        "labels_used_for": "frozen readouts only",
        "tuning_on_test_images": "none: the protocol was fixed before the first run",
    }


def _write_weights(path: Path, networks: Mapping[str, nn.Module], extra: Mapping[str, Tensor] | None = None) -> None:
    tensors = {
        prefix + name: tensor.detach().clone().contiguous()  # the parameters are views into one vector
        for prefix, network in networks.items()
        for name, tensor in network.state_dict().items()
    }
    files.write_bytes(path, safetensors.torch.save({**tensors, **(extra or {})}))

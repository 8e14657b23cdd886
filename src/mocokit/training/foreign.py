"""Weights from elsewhere: which of a file's tensors fit a backbone, and how a pickle is read without trusting it.

Only safetensors files are read in this process. A .pt or .pth file is a pickle, which can run any code when it is
read: a child process with no network and with limits reads it with `weights_only=True` and writes the tensors back as
safetensors (`foreign_child.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from mocokit import files
from mocokit.errors import DataError, UsageError
from mocokit.training.checkpoint import read_tensors

PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".tar", ".th")
LEAST_SHARE = 0.9
"""Of the backbone's tensors that a file must hold, by name and shape, to count as its weights."""
_PREFIXES = (
    "",
    "query.backbone.trunk.",
    "backbone.trunk.",
    "trunk.",
    "query.backbone.",
    "backbone.",
    "encoder.",
    "model.",
    "module.",
    "module.encoder_q.",
    "module.base_encoder.",
    "module.backbone.",
)
_CHILD = Path(__file__).with_name("foreign_child.py")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Which tensors of a backbone came from a file, by the backbone's own names."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    """In the backbone, but not in the file (or of another shape there). Batch norm's step counters are not counted."""
    unexpected: tuple[str, ...]
    """In the file, but not in the backbone: a head, as a rule."""

    @property
    def share(self) -> float:
        """The share of the backbone's tensors that were loaded, in 0..1."""
        return len(self.loaded) / max(len(self.loaded) + len(self.missing), 1)

    def told(self) -> str:
        """In words."""
        text = f"{len(self.loaded)} of the backbone's {len(self.loaded) + len(self.missing)} tensors"
        return text + (f" ({self.missing[0]!r} is the first of those missing)" if self.missing else "")


def load_weights(
    path: Path,
    backbone: nn.Module,
    *,
    allow_partial: bool = False,
    source: Path | None = None,
    flag: str = "--backbone",
) -> LoadReport:
    """Put a safetensors file's weights into a backbone (an `Encoder.backbone`), in place.

    Names may carry the prefix of a checkpoint of mocokit's or of the usual wrappers (`backbone.`, `module.encoder_q.`);
    the one under which most tensors fit is taken. source: the file that the user named, where `path` was made from it.
    flag: names another backbone, for the message. Raises UsageError when less than 90 % of the backbone's tensors are
    in the file (unless allow_partial; one at least must be), DamagedError when the file can't be parsed. Nothing is
    changed then.
    """
    stored = read_tensors(path)
    trunk: nn.Module = getattr(backbone, "trunk", backbone)
    own = trunk.state_dict()
    counted = {name for name in own if not name.endswith("num_batches_tracked")}

    def fitting(prefix: str) -> list[str]:
        return [
            name for name in own if (there := stored.get(prefix + name)) is not None and there.shape == own[name].shape
        ]

    prefix = max(_PREFIXES, key=lambda one: len(fitting(one)))
    found = fitting(prefix)
    loaded = tuple(name for name in found if name in counted)
    used = {prefix + name for name in found}
    report = LoadReport(
        loaded, tuple(sorted(counted - set(loaded))), tuple(sorted(name for name in stored if name not in used))
    )
    if not loaded or (report.share < LEAST_SHARE and not allow_partial):
        few = "" if not loaded else "; the missing ones would stay random. --allow-partial takes it all the same"
        raise UsageError(
            f"{source or path} holds {report.told()}{few}. Name the backbone that the file was made for: {flag}."
        )
    trunk.load_state_dict({name: stored[prefix + name] for name in found}, strict=False)
    return report


@dataclass(frozen=True, slots=True)
class Converted:
    """What a child process took out of a pickle. under: the key it lay under; other: what was no tensor."""

    tensors: int
    under: str
    other: tuple[str, ...]
    network: str
    """How the child was kept from the network."""


def safe_load_pt(source: Path, target: Path, *, seconds: int = 120, spare_mb: int = 1024) -> Converted:
    """Turn a .pt / .pth file into a safetensors file, without trusting it.

    The child may use 4 x the file's size + `spare_mb` MiB of memory beyond torch's own, and `seconds` of processor
    time (twice as much by the clock). Raises UsageError when there is no such file, DataError with the reason when it
    is refused: code in it, too large, too slow, no tensors. `target` is then as it was before.
    """
    if not source.is_file():
        raise UsageError(f"The weights {source} are no file. Check the path.")
    megabytes = -(-4 * source.stat().st_size // 2**20) + spare_mb
    found: list[Converted] = []
    files.make_folder(target.parent)
    files.write_with(target, lambda temporary: found.append(_convert(source, temporary, megabytes, seconds)))
    return found[0]


def _convert(source: Path, temporary: Path, megabytes: int, seconds: int) -> Converted:
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    words = [
        sys.executable,
        "-I",
        str(_CHILD),
        str(source.resolve()),
        str(temporary.resolve()),
        str(megabytes),
        str(seconds),
    ]
    with tempfile.TemporaryDirectory() as nowhere:
        try:
            done = subprocess.run(
                words,
                cwd=nowhere,
                env={**kept, "OMP_NUM_THREADS": "1", "HOME": nowhere},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=2 * seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise _refused(source, f"reading it took longer than {2 * seconds} s") from error
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()
        reason = (
            last[-1][:400] if done.returncode > 0 and last else f"its reader was ended by signal {-done.returncode}"
        )
        raise _refused(source, reason)
    if not temporary.exists():
        raise _refused(source, "its reader wrote nothing")
    facts = json.loads(done.stdout)
    read_tensors(temporary)  # what a child wrote is believed no more than any other file
    return Converted(int(facts["tensors"]), str(facts["under"]), tuple(map(str, facts["other"])), str(facts["network"]))


def _refused(source: Path, reason: str) -> DataError:
    return DataError(
        f"{source} could not be read safely ({reason}). Only tensors in plain dictionaries are taken; save them with "
        "safetensors.torch.save_file where the file was made, and name that file."
    )


def as_safetensors(path: Path, converted: Path) -> tuple[Path, str]:
    """The safetensors file for a file of weights, and a remark: itself, or what a .pt holds, put into `converted`.

    Raises UsageError for a missing file or another kind of file, DataError for a pickle that is refused.
    """
    suffix = path.suffix.lower()
    if not path.is_file():
        raise UsageError(f"The weights {path} are no file. Check the path.")
    if suffix == ".safetensors":
        return path, ""
    if suffix not in PICKLES:
        raise UsageError(f"{path} is no file of weights that can be read. Name a .safetensors, .pt or .pth file.")
    done = safe_load_pt(path, converted)
    where = f" under {done.under!r}" if done.under else ""
    return converted, f"{done.tensors} tensors{where}, read in a process of its own ({done.network})"

"""Files changed at random: `python -m attacks.fuzz --seconds 60 [--target NAME] [--seeds FOLDER OF PICTURES]`.

Every reader of what comes from outside gets valid files with bytes flipped, cut, doubled and exchanged. It may return
or raise one of mocokit's own errors; anything else, a hang of more than ten seconds, and the end of the interpreter are
findings, and the bytes that led there are kept. A finding comes again with the same --seed and the number told.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import json
import multiprocessing
import random
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.numpy

from attacks.images import seed_pictures
from mocokit import files
from mocokit.config import read_yaml
from mocokit.data.decode import decode, picture_facts
from mocokit.data.sources import open_source
from mocokit.errors import MocokitError
from mocokit.training.checkpoint import find_checkpoint, read_tensors
from mocokit.training.settings import from_yaml

MOST_SECONDS = 10.0
_INTERESTING = (
    b"\x00",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\xff\xff\xff\xff",
    b"\x00\x00\x00\x80",
    b"0",
    b"-1",
    b"1e999",
    b'"',
    b"\n",
)
_EXTENSIONS = {".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff", ".gif", ".bmp"}
_MOST_BYTES = 200_000


def mutate(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """One to eight changes of a valid file."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        at = rng.randrange(len(changed) + 1)
        if rng.random() < 0.3:  # near the start, where sizes and tables are
            at = min(at, rng.randrange(64))
        length = min(rng.choice((1, 2, 4, 16, 512)), max(len(changed) - at, 0))
        way = rng.randrange(7)
        if way == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif way == 1:
            value = rng.choice(_INTERESTING)
            changed[at : at + len(value)] = value
        elif way == 2:
            changed[at : at + length] = rng.randbytes(length)
        elif way == 3:
            del changed[at : at + length]
        elif way == 4:
            changed[at:at] = changed[at : at + length] * rng.choice((1, 2, 50))
        elif way == 5:
            del changed[at:]
        else:
            other = rng.choice(others)
            start = rng.randrange(len(other) + 1)
            changed[at : at + length] = other[start : start + rng.choice((length, 512))]
    return bytes(changed[:_MOST_BYTES])


# ------------------------------------------------------------------------------------------------------- readers


def _image(data: bytes, place: Path) -> None:
    picture_facts(data)
    decode(data)


def _read_all(path: Path) -> None:
    source = open_source(str(path))
    for row in range(min(len(source.index), 5)):
        source.read(row)


def _tar(data: bytes, place: Path) -> None:
    (place / "x.tar").write_bytes(data)
    _read_all(place / "x.tar")


def _table(data: bytes, place: Path) -> None:
    if not (place / "a.png").exists():
        (place / "a.png").write_bytes(seed_pictures()["PNG"])
    (place / "x.csv").write_bytes(data)
    _read_all(place / "x.csv")


def _arrays(data: bytes, place: Path) -> None:
    (place / "x.npz").write_bytes(data)
    _read_all(place / "x.npz")


def _manifest(data: bytes, place: Path) -> None:
    folder = place / "checkpoints"
    if not folder.exists():
        files.commit_folder(files.make_folder(folder) / "step-4", {"state.json": b"{}"}, {"format": 1, "step": 4})
    (folder / "step-4" / files.MANIFEST).write_bytes(data)
    find_checkpoint(folder)


def _json(data: bytes, place: Path) -> None:
    (place / "state.json").write_bytes(data)
    files.read_json(place / "state.json")


def _tensors(data: bytes, place: Path) -> None:
    (place / "x.safetensors").write_bytes(data)
    read_tensors(place / "x.safetensors")


def _config(data: bytes, place: Path) -> None:
    (place / "config.yaml").write_bytes(data)
    for read in (read_yaml, from_yaml):
        with contextlib.suppress(MocokitError):
            read(place / "config.yaml")


TARGETS: Mapping[str, Callable[[bytes, Path], None]] = {
    "image": _image,
    "tar": _tar,
    "table": _table,
    "arrays": _arrays,
    "manifest": _manifest,
    "json": _json,
    "tensors": _tensors,
    "config": _config,
}


def valid_files(target: str, pictures: Path | None = None) -> list[bytes]:
    """What a target's mutations begin with; with `pictures`, real files of that folder too."""
    drawn = seed_pictures()
    if target == "image":
        found = sorted(p for p in pictures.rglob("*") if p.suffix.lower() in _EXTENSIONS) if pictures else []
        return [*drawn.values(), *(p.read_bytes() for p in found if 0 < p.stat().st_size <= _MOST_BYTES)]
    if target == "tar":
        return [_tar_of(drawn, kind) for kind in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)]
    if target == "table":
        return [
            b"path,label,group,split\na.png,cat,1,train\na.png,dog,2,test\n",
            b"a.png\n",
            b'"path"\t"label"\na.png\t1\n',
        ]
    if target == "arrays":
        out = io.BytesIO()
        np.savez(out, images=np.zeros((3, 8, 8, 3), np.uint8), labels=np.arange(3))
        return [out.getvalue()]
    if target == "manifest":
        return [files.manifest_text({"state.json": b"{}"}, {"format": 1, "step": 4}).encode()]
    if target == "json":
        return [
            b'{"step": 4, "queue": {"pointer": 0, "fill": 15}}\n',
            json.dumps([[[{"a": [1.5, None]}]]] * 9).encode(),
        ]
    if target == "tensors":
        return [safetensors.numpy.save({"a": np.zeros((2, 3), np.float32), "b": np.arange(4)}, {"format": "pt"})]
    return [
        b"recipe: moco-v2-small\ntrain:\n  epochs: 3\n  batch_size: 8\n"
        b"contrast: {K: 64, m: 0.9}\nviews: {mean: [0.1, 0.2, 0.3]}\n"
    ]


def _tar_of(members: Mapping[str, bytes], kind: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=kind) as tar:
        for number, (name, data) in enumerate(members.items()):
            extension = name.split()[0].lower().replace("jpeg", "jpg")
            for suffix, body in ((extension, data), ("cls", b"1"), ("json", b'{"label": "a"}')):
                info = tarfile.TarInfo(f"{'long/' * 30 if number == 1 else ''}{number:05d}.{suffix}")
                info.size = len(body)
                tar.addfile(info, io.BytesIO(body))
    return out.getvalue()


# ------------------------------------------------------------------------------------------------------- running


@dataclass(frozen=True)
class Fuzzed:
    """How many inputs a reader got, how many of them it refused, and what went wrong."""

    inputs: int
    refused: int
    findings: tuple[str, ...]


def inputs_of(target: str, seed: int, pictures: Path | None = None) -> Iterator[bytes]:
    """Endless mutations; the same ones for the same seed."""
    rng, begin = random.Random(f"{target} {seed}"), valid_files(target, pictures)  # noqa: S311
    yield from begin
    while True:
        yield mutate(rng, rng.choice(begin), begin)


def _work(target: str, seed: int, seconds: float, count: int, pictures: Path | None, keep: Path, told: Path) -> None:
    """In a child: feed the reader until the time or the count is over. The input in hand lies in `keep` meanwhile."""
    faulthandler.enable()
    deadline, number, refused, findings = time.monotonic() + seconds, 0, 0, []
    in_hand = keep / f"{target}-in-hand"
    with tempfile.TemporaryDirectory() as place:
        for number, data in enumerate(inputs_of(target, seed, pictures)):
            if number >= count or time.monotonic() > deadline:
                break
            in_hand.write_bytes(data)
            faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)
            try:
                TARGETS[target](data, Path(place))
            except MocokitError:
                refused += 1
            except BaseException as error:  # noqa: BLE001 whatever it is, it is what is looked for
                kept = keep / f"{target}-{seed}-{number}"
                kept.write_bytes(data)
                last = traceback.extract_tb(error.__traceback__)[-1]
                findings.append(
                    f"input {number}, kept in {kept.name}: {type(error).__name__} at {last.name}: {error}"[:300]
                )
            finally:
                faulthandler.cancel_dump_traceback_later()
    in_hand.unlink(missing_ok=True)
    told.write_text(json.dumps([number, refused, findings]))


def fuzz(
    target: str, keep: Path, *, seed: int = 0, seconds: float = 60.0, count: int = 2**62, pictures: Path | None = None
) -> Fuzzed:
    """Feed one reader in a process of its own. What is found is kept in the folder `keep`."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as aside:
        told = Path(aside) / "told.json"
        process = context.Process(target=_work, args=(target, seed, seconds, count, pictures, keep, told))
        process.start()
        process.join()
        if told.exists():
            number, refused, findings = json.loads(told.read_text())
            return Fuzzed(number, refused, tuple(findings))
    how = f"the interpreter ended with {process.exitcode} (a crash, or more than {MOST_SECONDS:g} s)"
    return Fuzzed(0, 0, (f"{how}; the input is kept in {target}-in-hand",))


def main() -> int:
    """1 when there was a finding."""
    parser = argparse.ArgumentParser(prog="python -m attacks.fuzz")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("--target", choices=[*TARGETS, "all"], default="all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=Path, help="a folder of real pictures to begin with")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"), help="where inputs with a finding are put")
    options = parser.parse_args()
    options.keep.mkdir(parents=True, exist_ok=True)
    found = 0
    for target in TARGETS if options.target == "all" else [options.target]:
        done = fuzz(target, options.keep, seed=options.seed, seconds=options.seconds, pictures=options.seeds)
        found += len(done.findings)
        print(f"{target}: {done.inputs} inputs, {done.refused} refused, {len(done.findings)} findings", flush=True)
        for line in done.findings[:20]:
            print(f"  {line}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

"""Resident pixels: every picture decoded once, fitted into one small canvas, kept as uint8.

Training draws views from this canvas, so no picture is decoded twice and a batch is one indexing operation. The
canvas lies in memory, or in a cache file that a second run uses again: [replaced int64 S][extents int32 S x 2]
[pixels uint8 S x 3 x side x side], with a JSON file beside it that is written last and names what it was made of.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL
import torch
from PIL import Image
from torch import Tensor

from mocokit import files
from mocokit.data.decode import FORMATS, UnreadableImageError, decode, picture_size
from mocokit.data.index import SampleIndex
from mocokit.data.randomness import hash_words, permutation, word
from mocokit.data.sources import ImageSource
from mocokit.data.threads import in_order
from mocokit.errors import DamagedError, DataError, UsageError

UInt8Array = npt.NDArray[np.uint8]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

IN_MEMORY_BYTES = 256 * 2**20
"""A cache up to this size is read into memory; a larger one is mapped."""
_CHUNK = 32  # rows per task: enough to hide a task's own cost, few enough to keep all workers busy
_ATTEMPTS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedSample:
    """A row that couldn't be read, and why."""

    row: int
    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PixelStore:
    """The pixels of S samples, each in the top-left corner of a square, zero elsewhere."""

    pixels: UInt8Array
    """[S, 3, side, side] RGB; in memory or mapped read-only from a file."""
    extents: Int32Array
    """[S, 2] height and width of the picture inside its square."""
    replaced: Int64Array
    """[S] the row whose picture row s shows: s itself when it was readable."""
    skipped: tuple[SkippedSample, ...]
    """The unreadable rows, ascending."""

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def side(self) -> int:
        """Side of the square in pixels."""
        return int(self.pixels.shape[2])

    @property
    def readable(self) -> npt.NDArray[np.bool_]:
        """[S] True where a row shows its own picture. Evaluation uses these rows only."""
        shown: npt.NDArray[np.bool_] = self.replaced == np.arange(len(self.replaced))
        return shown

    def statistics(self) -> dict[str, tuple[float, float, float]]:
        """`mean` and `std` per channel in 0..1, over evenly spread rows (all, up to 50 million values).

        From exact counts of the 256 values, so the same on every machine. A `std` below 1/255 is given as 1/255.
        """
        number = max(1, min(len(self), 50_000_000 // (3 * self.side**2)))
        rows = np.unique(np.linspace(0, len(self) - 1, number).astype(np.int64))
        counts = np.zeros((3, 256), np.int64)
        for start in range(0, len(rows), 256):
            part = self.pixels[rows[start : start + 256]]
            counts += [np.bincount(part[:, channel].ravel(), minlength=256) for channel in range(3)]
        inside = int(self.extents[rows].astype(np.int64).prod(axis=1).sum())
        counts[:, 0] -= len(rows) * self.side**2 - inside  # what lies outside the pictures is zero
        values = np.arange(256) / 255
        mean = counts @ values / inside
        std = np.sqrt(np.maximum(counts @ values**2 / inside - mean**2, 0)).clip(1 / 255)
        return {
            "mean": (round(float(mean[0]), 6), round(float(mean[1]), 6), round(float(mean[2]), 6)),
            "std": (round(float(std[0]), 6), round(float(std[1]), 6), round(float(std[2]), 6)),
        }

    def batch(self, rows: npt.NDArray[np.integer]) -> tuple[Tensor, Tensor]:
        """Copies of some rows: uint8 [B, 3, side, side] and their extents, int64 [B, 2]."""
        return torch.from_numpy(self.pixels[rows]), torch.from_numpy(self.extents[rows].astype(np.int64))


def store_bytes(rows: int, side: int) -> int:
    """Bytes that a store of `rows` pictures takes in memory or on disk."""
    return rows * (3 * side * side + 16)


def side_for(source: ImageSource, size: int, *, sample: int = 256) -> int:
    """The canvas side for training at `size` pixels: 1.5 x `size`, rounded up to a multiple of 8.

    Less where the pictures are smaller (CIFAR stays at 32): the largest longer side among up to `sample` rows,
    chosen by hash.
    """
    limit = canvas_limit(size)
    rows = permutation(0, 0, source.index.ids)[:sample]
    native = [longer for longer in (_longer_side(source, int(row)) for row in rows) if longer]
    return min(limit, max(native, default=limit))


def canvas_limit(size: int) -> int:
    """The side up to which pictures are kept for views of `size` pixels: 1.5 x `size`, up to a multiple of 8."""
    return -(-3 * size // 16) * 8


def _longer_side(source: ImageSource, row: int) -> int:
    """From the header where there is one; 0 when unreadable."""
    if source.frames is not None:
        return max(source.frames.size_of(row))
    try:
        if source.read_bytes is not None:
            return max(picture_size(source.read_bytes(row), source.limits))
        height, width, _ = source.read(row).shape
        return int(max(height, width))
    except UnreadableImageError:
        return 0


def fit_picture(rgb: UInt8Array, side: int) -> UInt8Array:
    """Shrink [H, W, 3] until its longer side is at most `side` (antialiased, bicubic); smaller ones stay.

    Down to a quarter by torch, in integers: the same bits whatever instructions the processor has, at a fifth of
    Pillow's time or less and within 1 of its levels (but for hard edges in tall pictures, which Pillow shrinks in the
    other order). Further by Pillow, which takes means over whole pixels first, and down to a line, where torch's plain
    kernel is wrong.
    """
    height, width = rgb.shape[:2]
    longer = max(height, width)
    if longer <= side:
        return rgb
    rows, columns = max(1, round(height * side / longer)), max(1, round(width * side / longer))
    if longer >= 4 * side or min(rows, columns) == 1:
        picture = Image.fromarray(rgb).resize((columns, rows), Image.Resampling.BICUBIC, reducing_gap=2.0)
        return np.asarray(picture)
    pixels = torch.from_numpy(np.require(rgb, requirements=["C", "W"])).permute(2, 0, 1)[None]
    shrunk = torch.nn.functional.interpolate(pixels, (rows, columns), mode="bicubic", antialias=True)
    return np.ascontiguousarray(shrunk[0].permute(1, 2, 0).numpy())


def build_pixel_store(
    source: ImageSource,
    *,
    side: int,
    cache: Path | None = None,
    max_bad: float = 0.01,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PixelStore:
    """Decode every row once and keep it as uint8 in squares of `side` pixels. Nothing is enlarged.

    cache: file to keep the pixels in; used again when it was made from the same rows in the same way, and made
    anew otherwise. None keeps them in memory.
    max_bad: largest share of unreadable rows, 0..1. Each of them shows another row of the same split, chosen by
    a hash of its id, so the choice depends on no worker count, seed or other file.
    workers: decoding threads; None is one for each core. progress: called with (rows done, rows).

    Raises DataError when too many rows are unreadable, UsageError for settings out of range, StorageError when
    the cache can't be written.
    """
    if side < 1 or not 0 <= max_bad <= 1:
        raise UsageError(f"side is {side} and max_bad {max_bad}; side must be at least 1, max_bad a share from 0 to 1.")
    made_of = _made_of(source, side)
    workers = workers or len(os.sched_getaffinity(0))
    if cache is None:
        return _decode_all(source, side, None, max_bad, workers, progress)
    with files.turn(cache.parent):  # another process may be filling the same cache
        return _from_cache(cache, made_of, source, side, max_bad, workers, progress)


def _from_cache(
    cache: Path,
    made_of: dict[str, Any],
    source: ImageSource,
    side: int,
    max_bad: float,
    workers: int,
    progress: Callable[[int, int], None] | None,
) -> PixelStore:
    """The store in `cache`, which is filled first where it doesn't hold just that."""
    if (store := _open_cache(cache, made_of, source.index)) is not None:
        _check_bad(source, store.skipped, len(store), max_bad)
        return store
    store = _decode_all(source, side, cache, max_bad, workers, progress)
    _seal_cache(cache, made_of, store)
    sealed = _open_cache(cache, made_of, source.index)
    if sealed is None:
        raise DamagedError(f"{cache} is not what was just written there. Check the disk.")
    return sealed


def open_pixel_store(source: ImageSource, *, side: int, cache: Path, max_bad: float = 0.01) -> PixelStore:
    """The store that another process built in `cache` from the same rows in the same way; nothing is written.

    Raises DataError when it is not there.
    """
    store = _open_cache(cache, _made_of(source, side), source.index)
    if store is None:
        raise DataError(
            f"{cache} does not hold the pixels of {source.name} as this process sees them. All processes of a run "
            "need the same data, the same versions, and --out on a file system that they share."
        )
    _check_bad(source, store.skipped, len(store), max_bad)
    return store


def write_skipped(path: Path, skipped: Sequence[SkippedSample]) -> None:
    """One JSON object a line: row, name, reason. Names with odd bytes or control characters are escaped."""
    files.write_text(path, "".join(files.to_json(asdict(sample), indent=None) for sample in skipped))


def read_skipped(path: Path) -> list[SkippedSample]:
    """What `write_skipped` wrote; nothing where there is no file. Raises DamagedError naming the line."""
    found: list[SkippedSample] = []
    if not path.exists():
        return found
    with files.storage_errors(path, "read"):
        lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            one = json.loads(line)
            found.append(SkippedSample(row=int(one["row"]), name=str(one["name"]), reason=str(one["reason"])))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise DamagedError(f"Line {number} of {path} is not what mocokit wrote; the file was changed.") from error
    return found


# -------------------------------------------------------------------------------------------------- decoding


def _decode_all(
    source: ImageSource,
    side: int,
    cache: Path | None,
    max_bad: float,
    workers: int,
    progress: Callable[[int, int], None] | None,
) -> PixelStore:
    rows = len(source.index)
    pixels = _room(rows, side, cache)
    extents = np.zeros((rows, 2), np.int32)

    def work(part: range) -> list[SkippedSample]:
        bad = []
        for row in part:
            try:
                picture = fit_picture(read_fitting(source, row, side), side)
            except UnreadableImageError as error:
                bad.append(SkippedSample(row=row, name=source.index.names[row], reason=error.reason))
                continue
            height, width = picture.shape[:2]
            pixels[row, :, :height, :width] = picture.transpose(2, 0, 1)
            extents[row] = height, width
        return bad

    skipped: list[SkippedSample] = []
    parts = _parts(source, rows)
    with contextlib.closing(in_order(work, parts, workers=workers, ahead=4 * workers, name="decode")) as results:
        for part, bad in zip(parts, results, strict=True):
            done = part.stop
            skipped += bad
            # Results come in the order of rows, so stopping early stops at the same place with any worker count.
            _check_bad(source, skipped, done, max_bad)
            if progress is not None:
                progress(done, rows)
    replaced = replacements(source.index, [sample.row for sample in skipped])
    for sample in skipped:
        shown = replaced[sample.row]
        pixels[sample.row], extents[sample.row] = pixels[shown], extents[shown]
    return PixelStore(pixels=pixels, extents=extents, replaced=replaced, skipped=tuple(skipped))


def _parts(source: ImageSource, rows: int) -> list[range]:
    """The rows in the parts that one worker reads: chunks of pictures, stretches of video."""
    if source.frames is None:
        return [range(start, min(start + _CHUNK, rows)) for start in range(0, rows, _CHUNK)]
    cuts = [0, *(np.flatnonzero(np.diff(source.frames.run_of)) + 1).tolist(), rows]
    return [range(start, stop) for start, stop in itertools.pairwise(cuts)]


def read_fitting(source: ImageSource, row: int, side: int) -> UInt8Array:
    """A row's picture, to be fitted into `side` pixels: a JPEG may come at 1/2, 1/4 or 1/8 of its size (see `decode`).

    Raises UnreadableImageError.
    """
    if source.frames is not None:
        return source.frames.fitted(row, side)
    if source.read_bytes is None:
        return source.read(row)
    return decode(source.read_bytes(row), source.limits, fit=side)


def _room(rows: int, side: int, cache: Path | None) -> UInt8Array:
    """Zeroed pixels in memory, or in a new cache file without its JSON file: it counts for nothing until sealed."""
    shape = (rows, 3, side, side)
    needed = store_bytes(rows, side)
    if cache is not None:
        files.make_folder(cache.parent)
        files.remove_path(_sidecar(cache))
        files.sweep_leftovers(_sidecar(cache))
        files.create_memmap(cache, needed)
        return np.asarray(np.memmap(cache, np.uint8, "r+", offset=16 * rows, shape=shape))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory * 0.8:
        raise DataError(
            f"The pixels of {rows:,} pictures at {side} x {side} take {needed / 1e9:.1f} GB, this machine has "
            f"{memory / 1e9:.1f} GB of memory. Name a cache file, or choose a smaller size."
        )
    return np.zeros(shape, np.uint8)


def _check_bad(source: ImageSource, skipped: Sequence[SkippedSample], done: int, max_bad: float) -> None:
    """Raise DataError when more rows are unreadable than allowed, or all are."""
    rows = len(source.index)
    if len(skipped) <= max_bad * rows and len(skipped) < rows:
        return
    first = "; ".join(f"{sample.name!r} ({sample.reason})" for sample in skipped[:5])
    where = f"{rows:,} pictures" if done == rows else f"the first {done:,} of {rows:,} pictures"
    limit = f", more than the {max_bad:.2%} of all that is allowed" if len(skipped) < rows else ""
    raise DataError(
        f"{len(skipped):,} of {where} in {source.name} can't be read{limit}. First: {first}. "
        "Remove or exclude them (`mocokit check` lists all), or raise --max-bad."
    )


def replacements(index: SampleIndex, bad: Sequence[int]) -> Int64Array:
    """[S] the row that each row shows. A bad row shows a readable one of its own split, so that no test picture
    slips into training."""
    replaced = np.arange(len(index), dtype=np.int64)
    readable = np.ones(len(index), np.bool_)
    readable[list(bad)] = False
    for row in bad:
        pool = np.flatnonzero(index.splits == index.splits[row])
        if not readable[pool].any():
            pool = np.flatnonzero(readable)
        draws = hash_words(word("replacement"), int(index.ids[row]), np.arange(_ATTEMPTS, dtype=np.int64))
        candidates = pool[(draws % np.uint64(len(pool))).astype(np.int64)]
        good = candidates[readable[candidates]]
        # Only where nearly everything is unreadable do all the draws miss; then the list of readable rows decides.
        spare = pool[readable[pool]]
        replaced[row] = good[0] if len(good) else spare[int(draws[0] % np.uint64(len(spare)))]
    return replaced


# ----------------------------------------------------------------------------------------------------- cache


def _made_of(source: ImageSource, side: int) -> dict[str, Any]:
    """Everything that decides what the pixels are; a cache made of anything else isn't used."""
    return {
        "format": "mocokit pixels 2",
        "index": source.index.hash,
        "rows": len(source.index),
        "side": side,
        "decode": {**asdict(source.limits), "background": list(source.limits.background), "formats": list(FORMATS)},
        "pillow": PIL.__version__,
        "torch": torch.__version__,
        **({} if source.frames is None else {"video": source.frames.decoder}),
    }


def _sidecar(cache: Path) -> Path:
    return cache.with_name(cache.name + ".json")


def _seal_cache(cache: Path, made_of: dict[str, Any], store: PixelStore) -> None:
    """Write the two tables and flush everything to disk; only then the JSON file that makes the cache count."""
    tables = np.concatenate([store.replaced.view(np.uint8), store.extents.ravel().view(np.uint8)])
    with files.storage_errors(cache, "write", store_bytes(len(store), store.side)):
        mapped = np.memmap(cache, np.uint8, "r+")
        mapped[: len(tables)] = tables
        mapped.flush()
    facts = {
        "made_of": made_of,
        "tables_sha256": hashlib.sha256(tables.data).hexdigest(),
        "pixels_sha256": hashlib.sha256(mapped[len(tables) :].data).hexdigest() if _small(store) else None,
        "skipped": [[sample.row, sample.reason] for sample in store.skipped],
    }
    files.write_json(_sidecar(cache), facts)


def cache_damage(cache: Path) -> str:
    """What is wrong with a cache file, whatever it was made of: one sentence, "" when it is whole. A missing one is."""
    if not cache.exists():
        return ""
    try:
        facts = files.read_json(_sidecar(cache))
        rows, side = int(facts["made_of"]["rows"]), int(facts["made_of"]["side"])
        if cache.stat().st_size != store_bytes(rows, side):
            return f"{cache} has another size than it should"
        raw = np.memmap(cache, np.uint8, "r")
        if hashlib.sha256(raw[: 16 * rows].data).hexdigest() != facts["tables_sha256"]:
            return f"{cache} does not match its recorded SHA-256"
        if facts["pixels_sha256"] not in (None, hashlib.sha256(raw[16 * rows :].data).hexdigest()):
            return f"{cache} does not match its recorded SHA-256"
    except (DamagedError, OSError, KeyError, TypeError, ValueError) as error:
        return f"{cache} can't be checked ({' '.join(str(error).split())[:200]})"
    return ""


def _small(store: PixelStore) -> bool:
    return store_bytes(len(store), store.side) <= IN_MEMORY_BYTES


def _open_cache(cache: Path, made_of: dict[str, Any], index: SampleIndex) -> PixelStore | None:
    """The store in `cache`, or None when it is missing, unfinished, damaged or made of something else."""
    rows, side = made_of["rows"], made_of["side"]
    needed = store_bytes(rows, side)
    try:
        facts = files.read_json(_sidecar(cache))
        if facts["made_of"] != made_of or cache.stat().st_size != needed:
            return None
        skipped = tuple(
            SkippedSample(row=int(row), name=index.names[row], reason=str(reason)) for row, reason in facts["skipped"]
        )
        raw = np.fromfile(cache, np.uint8) if needed <= IN_MEMORY_BYTES else np.asarray(np.memmap(cache, np.uint8, "r"))
        tables, pixels = raw[: 16 * rows], raw[16 * rows :]
        if hashlib.sha256(tables.data).hexdigest() != facts["tables_sha256"]:
            return None
        if needed <= IN_MEMORY_BYTES and hashlib.sha256(pixels.data).hexdigest() != facts["pixels_sha256"]:
            return None
    except (DamagedError, OSError, KeyError, TypeError, ValueError, IndexError):
        return None  # whatever is wrong with it, it is made anew
    return PixelStore(
        pixels=pixels.reshape(rows, 3, side, side),
        extents=tables[8 * rows :].view(np.int32).reshape(rows, 2).copy(),
        replaced=tables[: 8 * rows].view(np.int64).copy(),
        skipped=skipped,
    )

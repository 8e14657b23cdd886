"""Pictures in an array, in memory or in an npz file -> sample table and row -> pixels.

An npz file can't run code: it is read with `allow_pickle=False`.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mocokit.data.index import SampleIndex, column_labels, column_texts, make_index
from mocokit.errors import DataError

UInt8Array = npt.NDArray[np.uint8]


def open_npz(path: Path) -> tuple[SampleIndex, npt.NDArray[np.generic]]:
    """The table of an npz file, and its pictures as they are stored.

    Arrays: `images` or `x` (also `X`); `labels` or `y` with, if wanted, `class_names`; `split`; `group`. Raises
    DataError for anything else, for arrays that are Python objects, and for headers that claim more than is there.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            _check_headers(path.name, archive)
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, MemoryError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise DataError(f"{path.name} is not a readable npz file: {' '.join(reason.split())[:200]}") from error

    def named(*choices: str) -> npt.NDArray[Any] | None:
        return next((arrays[name] for name in choices if name in arrays), None)

    images = named("images", "x", "X")
    if images is None:
        raise DataError(f"{path.name} has no array images or x; it has: {', '.join(arrays) or 'none'}.")
    index = array_index(
        path.name,
        images,
        labels=named("labels", "y"),
        class_names=named("class_names", "classes"),
        splits=named("split", "splits"),
        groups=named("group", "groups"),
    )
    return index, images


def _check_headers(where: str, archive: zipfile.ZipFile) -> None:
    """Every array's header must claim exactly the bytes that follow it, so that loading allocates no more."""
    for member in archive.infolist():
        if not member.filename.endswith(".npy"):
            continue
        with archive.open(member) as stream:
            major, _ = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
            shape, _, kind = read(stream)
            claimed = stream.tell() + int(np.prod([int(side) for side in shape], dtype=object)) * kind.itemsize
        if claimed != member.file_size and not kind.hasobject:
            raise DataError(
                f"{where}: array {member.filename.removesuffix('.npy')!r} claims {claimed:,} bytes but has "
                f"{member.file_size:,}. The file was cut or changed."
            )


def array_index(
    where: str,
    images: npt.NDArray[Any],
    *,
    labels: npt.NDArray[Any] | None = None,
    class_names: npt.NDArray[Any] | Sequence[str] | None = None,
    splits: npt.NDArray[Any] | None = None,
    groups: npt.NDArray[Any] | None = None,
) -> SampleIndex:
    """The table of an array of pictures: rows `row 0`, `row 1`, ...; its content is the array's SHA-256."""
    if images.ndim < 3 or not len(images):
        raise DataError(
            f"{where}: the pictures have shape {images.shape}; expected [S, H, W], [S, H, W, 3] or [S, 3, H, W]."
        )
    values: dict[str, list[Any] | None] = {"label": None, "split": None, "group": None}
    for role, array in (("label", labels), ("split", splits), ("group", groups)):
        if array is None:
            continue
        if array.shape != (len(images),) or array.dtype.kind not in "iuUSb":
            raise DataError(
                f"{where}: {role}s have shape {array.shape} and type {array.dtype}; expected "
                f"{len(images)} whole numbers or texts."
            )
        values[role] = [item.decode("utf-8", "replace") if isinstance(item, bytes) else item for item in array.tolist()]
    names = None if class_names is None else [str(name) for name in class_names]
    label_values, label_names = column_labels(where, values["label"], names)
    digest = sha256(f"{images.dtype.str} {images.shape} ".encode())
    digest.update(np.ascontiguousarray(images).view(np.uint8).data if images.size else b"")
    return make_index(
        [f"row {row}" for row in range(len(images))],
        labels=label_values,
        class_names=label_names,
        groups=column_texts(values["group"]),
        splits=column_texts(values["split"]),
        content=f"sha256 {digest.hexdigest()}",
    )


def picture_reader(where: str, images: npt.NDArray[Any]) -> Callable[[int], UInt8Array]:
    """Row -> RGB uint8 [H, W, 3], out of [S, H, W], [S, H, W, 1 or 3] or [S, 1 or 3, H, W].

    Whole numbers must lie in 0..255, floating-point ones in 0..1. Raises DataError otherwise.
    """
    shape = images.shape
    channels_last = images.ndim == 3 or (images.ndim == 4 and shape[3] in (1, 3))
    if not channels_last and not (images.ndim == 4 and shape[1] in (1, 3)):
        raise DataError(f"{where}: the pictures have shape {shape}; expected [S, H, W], [S, H, W, 3] or [S, 3, H, W].")
    if images.dtype.kind not in "uifb" or 0 in shape:
        raise DataError(
            f"{where}: the pictures have type {images.dtype} and shape {shape}; give uint8 or floats in 0..1."
        )
    low, high = float(images.min()), float(images.max())
    largest = 1 if images.dtype.kind in "fb" else 255
    if not (low >= 0 and high <= largest):  # NaN fails both
        raise DataError(
            f"{where}: {images.dtype} pictures must lie in 0..{largest}, these lie in {low:g}..{high:g}. "
            "Convert them first."
        )

    def read(row: int) -> UInt8Array:
        picture = images[row]
        if picture.dtype != np.uint8:
            picture = np.rint(picture.astype(np.float64) * (255 // largest)).astype(np.uint8)
        if not channels_last:
            picture = picture.transpose(1, 2, 0)
        if picture.ndim == 2:
            picture = picture[:, :, None]
        return np.ascontiguousarray(np.broadcast_to(picture, (*picture.shape[:2], 3)))

    return read

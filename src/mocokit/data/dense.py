"""Pictures with boxes or masks, as they are commonly laid out on a disk.

| what | layout |
|---|---|
| Pascal VOC boxes | `Annotations/*.xml`, `JPEGImages/`, `ImageSets/Main/{train,val,trainval,test}.txt` |
| COCO boxes | `annotations/*{train,val,test}*.json` with `{train,val,test}*/` or `images/` |
| the same | `{train,valid,test}/_annotations.coco.json` |
| masks, VOC | `SegmentationClass/*.png`, `JPEGImages/`, `ImageSets/Segmentation/*.txt` |
| masks, pairs | `images/` and `masks/` with the same names, below `train/`, `val/`, `test/` or at the top |

Where there is no test split, val is the test split; where there is neither, a fifth is taken by a hash of the names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt

from mocokit.data.decode import DecodeLimits, decode, decode_indices
from mocokit.data.index import SPLIT_WORDS
from mocokit.data.randomness import sample_id, uniform, word
from mocokit.data.scan import EXTENSIONS
from mocokit.errors import DataError

UInt8Array = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

IGNORED = 255
"""The value of a mask's pixels that belong to no class, unless 0 and 255 are the only values there are."""
TEST_SHARE = 0.2
_MAX_BYTES = 512 * 2**20
_NAMES = {"train": "train", "trainval": "train"} | SPLIT_WORDS


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """The boxes of one picture."""

    corners: Floats
    """[B, 4] left, top, right, bottom in pixels of the picture as it lies on the disk."""
    labels: Ints
    """[B] position in the class names."""
    difficult: npt.NDArray[np.bool_]
    """[B] VOC's `difficult` or COCO's `iscrowd`: not trained on, and neither right nor wrong when found."""


@dataclass(frozen=True, slots=True, eq=False)
class BoxSet:
    """Pictures with boxes, in two splits."""

    name: str
    class_names: tuple[str, ...]
    train: list[tuple[Path, Boxes]]
    test: list[tuple[Path, Boxes]]


@dataclass(frozen=True, slots=True)
class MaskSet:
    """Pairs of picture and mask, in two splits."""

    name: str
    train: list[tuple[Path, Path]]
    test: list[tuple[Path, Path]]


def read_picture(path: Path, limits: DecodeLimits | None = None) -> UInt8Array:
    """RGB uint8 [H, W, 3]. Raises DataError naming the file."""
    return _read(path, lambda data: decode(data, limits))


def read_mask(path: Path, limits: DecodeLimits | None = None) -> UInt8Array:
    """The numbers of a mask, uint8 [H, W]. Raises DataError naming the file."""
    return _read(path, lambda data: decode_indices(data, limits))


def _read(path: Path, decoded: Callable[[bytes], UInt8Array]) -> UInt8Array:
    try:
        return decoded(path.read_bytes())
    except OSError as error:
        raise DataError(f"Could not read {path}: {os.strerror(error.errno or 0)}. Check the data folder.") from error
    except DataError as error:
        raise DataError(f"{path} can't be used: {error}. Replace it or take it out of the split.") from error


# ------------------------------------------------------------------------------------------------------ boxes


def open_boxes(folder: Path) -> BoxSet:
    """A folder of pictures with boxes (table at the top). Raises DataError saying what was looked for."""
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder. Name the folder that holds the pictures and their boxes.")
    if (folder / "Annotations").is_dir() and (folder / "JPEGImages").is_dir():
        parts, names = _voc_boxes(folder)
    else:
        parts, names = _coco_boxes(folder)
    train, test = _two_splits(folder, parts)
    if not any(len(boxes.labels) for _, boxes in train) or not any(len(boxes.labels) for _, boxes in test):
        raise DataError(f"{folder} has no boxes in its train or its test split. Check the annotations.")
    return BoxSet(folder.name, names, train, test)


def _voc_boxes(folder: Path) -> tuple[dict[str, list[tuple[Path, Boxes]]], tuple[str, ...]]:
    listed = _image_sets(folder / "ImageSets" / "Main")
    if not listed:
        listed = {"": sorted(path.stem for path in (folder / "Annotations").glob("*.xml"))}
    read = {stem: _voc_file(folder / "Annotations" / f"{stem}.xml") for part in listed.values() for stem in part}
    names = tuple(sorted({name for objects in read.values() for name, _, _ in objects}))
    parts = {
        split: [(_picture_of(folder / "JPEGImages", stem), _boxes(read[stem], names)) for stem in stems]
        for split, stems in listed.items()
    }
    return parts, names


def _image_sets(folder: Path) -> dict[str, list[str]]:
    """Split -> names, from `train.txt` and so on; trainval only where there is no train."""
    found: dict[str, list[str]] = {}
    for word_, split in (("trainval", "train"), ("train", "train"), ("val", "val"), ("test", "test")):
        path = folder / f"{word_}.txt"
        if path.is_file():
            found[split] = [line.split()[0] for line in _text(path).splitlines() if line.strip()]
    for stems in found.values():
        for stem in stems:
            if "/" in stem or stem.startswith("."):
                raise DataError(f"{folder} lists {stem!r}, which is no file name. Correct the list.")
    return found


_Object = tuple[str, tuple[float, float, float, float], bool]


def _voc_file(path: Path) -> list[_Object]:
    text = _text(path)
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise DataError(f"{path} defines entities; it is no Pascal VOC annotation. Remove it.")
    try:
        root = ElementTree.fromstring(text)  # noqa: S314 entities were refused above
        found = []
        for one in root.iter("object"):
            box = one.find("bndbox")
            name = one.findtext("name", "").strip()
            if box is None or not name:
                raise ValueError("an object lacks its name or bndbox")
            left, top, right, bottom = (float(box.findtext(tag, "")) for tag in ("xmin", "ymin", "xmax", "ymax"))
            found.append((name, (left, top, right, bottom), one.findtext("difficult", "0").strip() == "1"))
    except (ElementTree.ParseError, ValueError) as error:
        raise DataError(f"{path} is no Pascal VOC annotation ({error}). Correct or remove it.") from error
    return found


def _coco_boxes(folder: Path) -> tuple[dict[str, list[tuple[Path, Boxes]]], tuple[str, ...]]:
    files = dict(_coco_files(folder))
    if not files:
        raise DataError(
            f"{folder} has no boxes: looked for Annotations/ with JPEGImages/ (Pascal VOC), annotations/*.json and "
            "{train,valid,test}/_annotations.coco.json (COCO)."
        )
    read = {split: (_coco_json(path), images) for split, (path, images) in files.items()}
    names = tuple(
        sorted({name for (_, objects, _), _ in read.values() for found in objects.values() for name, _, _ in found})
    )
    parts = {
        split: [
            (_inside(images, file, folder), _boxes(objects.get(number, []), names)) for number, file in pictures.items()
        ]
        for split, ((pictures, objects, _), images) in read.items()
    }
    return parts, names


def _coco_files(folder: Path) -> Iterator[tuple[str, tuple[Path, Path]]]:
    """Split -> (annotation file, folder of its pictures)."""
    for name in ("train", "val", "valid", "test"):
        path = folder / name / "_annotations.coco.json"
        if path.is_file():
            yield _NAMES[name], (path, path.parent)
    for path in sorted((folder / "annotations").glob("*.json")):
        for name in ("train", "val", "test"):
            if name in path.stem and "caption" not in path.stem and "keypoint" not in path.stem:
                near = sorted(one for one in folder.iterdir() if one.is_dir() and one.name.startswith(name))
                yield name, (path, near[0] if near else folder / "images")


def _coco_json(path: Path) -> tuple[dict[Any, str], dict[Any, list[_Object]], Path]:
    """Pictures by id, objects by picture id."""
    try:
        loaded = json.loads(_text(path))
        names = {one["id"]: str(one["name"]) for one in loaded["categories"]}
        pictures = {one["id"]: str(one["file_name"]) for one in loaded["images"]}
        objects: dict[Any, list[_Object]] = {}
        for one in loaded["annotations"]:
            left, top, width, height = (float(value) for value in one["bbox"])
            found = (names[one["category_id"]], (left, top, left + width, top + height), bool(one.get("iscrowd", 0)))
            objects.setdefault(one["image_id"], []).append(found)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is no COCO annotation file ({type(error).__name__}: {error}). Correct it.") from error
    return pictures, objects, path


def _inside(images: Path, file: str, folder: Path) -> Path:
    """A listed file, which must lie in the data folder."""
    path = images / file
    if not os.path.realpath(path).startswith(os.path.realpath(folder).rstrip("/") + "/"):
        raise DataError(f"The annotations list {file!r}, which leads out of {folder}. Correct the list.")
    return path


def _boxes(objects: Sequence[_Object], names: tuple[str, ...]) -> Boxes:
    """Boxes without area are left out: nothing can be learnt from them."""
    kept = [one for one in objects if one[1][2] > one[1][0] and one[1][3] > one[1][1]]
    return Boxes(
        corners=np.array([box for _, box, _ in kept], np.float32).reshape(-1, 4),
        labels=np.array([names.index(name) for name, _, _ in kept], np.int64),
        difficult=np.array([hard for _, _, hard in kept], np.bool_),
    )


# ------------------------------------------------------------------------------------------------------ masks


def open_masks(folder: Path) -> MaskSet:
    """A folder of pictures and masks (table at the top). Raises DataError saying what was looked for."""
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder. Name the folder that holds the pictures and their masks.")
    parts: dict[str, list[tuple[Path, Path]]] = {}
    if (folder / "SegmentationClass").is_dir():
        masks = folder / "SegmentationClass"
        listed = _image_sets(folder / "ImageSets" / "Segmentation")
        listed = listed or {"": sorted(path.stem for path in masks.glob("*.png"))}
        for split, stems in listed.items():
            parts[split] = [(_picture_of(folder / "JPEGImages", stem), masks / f"{stem}.png") for stem in stems]
    else:
        for name in ("", "train", "val", "valid", "validation", "test"):
            if pairs := _pairs(folder / name):
                parts[_NAMES.get(name, "")] = pairs
    if not parts:
        raise DataError(
            f"{folder} has no masks: looked for images/ and masks/ with the same file names, at the top or below "
            "train/ and test/, and for SegmentationClass/ with JPEGImages/ (Pascal VOC)."
        )
    train, test = _two_splits(folder, parts)
    return MaskSet(folder.name, train, test)


def _pairs(folder: Path) -> list[tuple[Path, Path]]:
    masks = {path.stem: path for path in sorted((folder / "masks").glob("*")) if _is_picture(path)}
    images = [path for path in sorted((folder / "images").glob("*")) if _is_picture(path)]
    return [(path, masks[path.stem]) for path in images if path.stem in masks]


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in EXTENSIONS and path.is_file()


def _picture_of(folder: Path, stem: str) -> Path:
    for extension in EXTENSIONS:
        for path in (folder / f"{stem}{extension}", folder / f"{stem}{extension.upper()}"):
            if path.is_file():
                return path
    raise DataError(f"{folder} has no picture called {stem!r}, which is listed. Add it or take it off the list.")


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise DataError(f"{path} is larger than {_MAX_BYTES:,} bytes. Check the file.")
        return path.read_text("utf-8", "replace")
    except OSError as error:
        raise DataError(f"Could not read {path}: {os.strerror(error.errno or 0)}. Check the data folder.") from error


def _two_splits(folder: Path, parts: Mapping[str, list[Any]]) -> tuple[list[Any], list[Any]]:
    """Train and test; val belongs to training's side only where there is a test split of its own, and is left out."""
    train = [*parts.get("train", []), *parts.get("", [])]
    test = parts.get("test") or parts.get("val") or []
    if not test:
        away = uniform(0, word("dense split"), np.array([sample_id(path.name) for path, _ in train], np.int64))
        test = [one for one, place in zip(train, away, strict=True) if place < TEST_SHARE]
        train = [one for one, place in zip(train, away, strict=True) if place >= TEST_SHARE]
    if len(train) < 2 or len(test) < 2:
        raise DataError(
            f"{folder} has {len(train)} pictures for training and {len(test)} for testing; at least 2 of each are "
            "needed. Add pictures or declare the splits."
        )
    return train, test

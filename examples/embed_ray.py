"""Embed a folder of pictures on a Ray cluster: one encoder in each worker, Parquet files out.

    python examples/embed_ray.py RUN PHOTOS/ --out vectors/ --workers 4 --gpus 1

RUN and PHOTOS must be readable on every node. The columns are those of `mocokit embed`: id, path, vector; names that
can't be read are in `reason`, with an empty vector. One machine needs none of this: use `mocokit embed`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

import mocokit
from mocokit.data.randomness import sample_id
from mocokit.errors import DataError


class Encode:
    """A worker: loads the encoder once, then turns batches of files into vectors."""

    def __init__(self, run: str, root: str) -> None:
        torch.set_num_threads(1)
        self.encoder = mocokit.load(run, device="cuda" if torch.cuda.is_available() else "cpu")
        self.root = root

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """{"bytes", "path"} to {"id", "path", "vector", "reason"}."""
        names = [Path(path).relative_to(self.root).as_posix() for path in batch["path"]]
        vectors = np.zeros((len(names), self.encoder.dim), np.float32)
        reasons, views, rows = [""] * len(names), [], []
        for row, data in enumerate(batch["bytes"]):
            try:
                views.append(self.encoder.transform(bytes(data)))
                rows.append(row)
            except DataError as error:
                reasons[row] = str(error)
        if rows:
            device = next(self.encoder.parameters()).device
            with torch.inference_mode():
                vectors[rows] = self.encoder(torch.stack(views).to(device)).cpu().numpy()
        return {"id": [sample_id(name) for name in names], "path": names, "vector": list(vectors), "reason": reasons}


def main() -> None:
    """Read, encode, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("photos")
    parser.add_argument("--out", required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of one worker")
    options = parser.parse_args()
    root = str(Path(options.photos).resolve())
    files = ray.data.read_binary_files(
        root, include_paths=True, file_extensions=["jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff"]
    )
    encoded = files.map_batches(
        Encode,
        fn_constructor_args=(str(Path(options.run).resolve()), root),
        batch_size=64,
        compute=ray.data.ActorPoolStrategy(size=options.workers),
        num_gpus=options.gpus or None,
    )
    encoded.write_parquet(str(Path(options.out).resolve()))


if __name__ == "__main__":
    main()

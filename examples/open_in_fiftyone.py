"""Look at embedded pictures in FiftyOne: a dataset with labels, vectors and the map.

    mocokit embed RUN PHOTOS/ --out photos.parquet
    python examples/open_in_fiftyone.py photos.parquet PHOTOS/          # in an environment that has fiftyone

It reads the file alone and needs pyarrow and fiftyone, not mocokit: FiftyOne asks for older versions of packages that
mocokit uses, so give it an environment of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq


def samples(parquet: Path, root: Path) -> list[dict[str, Any]]:
    """One dictionary a picture: filepath, label (or None), vector, and its place on the map."""
    rows = pq.read_table(parquet).to_pylist()
    return [
        {
            "filepath": str(root / row["path"]),
            "label": row.get("label"),
            "vector": row["vector"],
            "place": (row["projection_x"], row["projection_y"]),
        }
        for row in rows
    ]


def main(parquet: Path, root: Path) -> None:
    """Make the dataset and open the app."""
    import fiftyone as fo
    import fiftyone.brain as fob
    import numpy as np

    found = samples(parquet, root)
    dataset = fo.Dataset(f"mocokit {parquet.stem}", overwrite=True)
    dataset.add_samples(
        [
            fo.Sample(
                filepath=one["filepath"],
                vector=one["vector"],
                ground_truth=fo.Classification(label=one["label"]) if one["label"] is not None else None,
            )
            for one in found
        ]
    )
    points = np.array([one["place"] for one in found])
    fob.compute_visualization(dataset, points=points, brain_key="map")
    fob.compute_similarity(dataset, embeddings="vector", brain_key="similar", backend="sklearn")
    fo.launch_app(dataset).wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

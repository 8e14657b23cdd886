"""Look at embedded pictures in LightlyStudio: search by picture, the map and the selections, by mocokit's vectors.

    mocokit embed RUN PHOTOS/ --out photos.parquet
    python examples/open_in_lightly_studio.py photos.parquet PHOTOS/    # in an environment that has lightly-studio

It reads the file alone and needs pyarrow and lightly-studio, not mocokit: give it an environment of its own. With a
third argument `--no-app` it only makes the dataset. LightlyStudio's usage statistics are switched off unless the
environment variable LIGHTLY_STUDIO_ANALYTICS_ENABLED says otherwise.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq


def vectors_by_path(parquet: Path, root: Path) -> dict[str, list[float]]:
    """Each picture's vector by its absolute path."""
    rows = pq.read_table(parquet, columns=["path", "vector"]).to_pylist()
    return {str((root / row["path"]).resolve()): row["vector"] for row in rows}


def dataset_of(parquet: Path, root: Path) -> Any:
    """A dataset of the pictures that have a vector, tagged by their folder; its embeddings are these vectors."""
    os.environ.setdefault("LIGHTLY_STUDIO_ANALYTICS_ENABLED", "false")  # read when it is imported
    import lightly_studio as ls
    import numpy as np
    from lightly_studio_serve.embedder import ImagePathEmbedder

    stored = vectors_by_path(parquet, root)

    class Stored(ImagePathEmbedder):
        def embedding_space_spec(self) -> ls.EmbeddingSpaceSpec:
            return ls.EmbeddingSpaceSpec(f"mocokit {parquet.resolve()}", len(next(iter(stored.values()))))

        def embed_images(self, paths: list[str]) -> ls.EmbeddingResult:
            keys = [str(Path(path).resolve()) for path in paths]
            kept = [place for place, key in enumerate(keys) if key in stored]
            return ls.EmbeddingResult(np.array([stored[keys[place]] for place in kept], np.float32), kept)

    ls.register_default_embedder(Stored())
    dataset = ls.ImageDataset.load_or_create(f"mocokit {parquet.stem}")
    dataset.add_images_from_path(str(root), tag_depth=1)
    return dataset


def main(parquet: Path, root: Path, *, app: bool) -> None:
    """Make the dataset; open the app."""
    import lightly_studio as ls

    dataset = dataset_of(parquet, root)
    print(f"{sum(1 for _ in dataset)} pictures")
    if app:
        ls.start_gui()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), app="--no-app" not in sys.argv[3:])

"""`mocokit export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from mocokit import files
from mocokit.cli.app import OUTPUT, REQUIRED, Flag, app


@app.command
def export(
    run: Annotated[Path, Parameter(group=REQUIRED)],
    /,
    *,
    format: Annotated[Literal["safetensors", "timm", "torchvision", "onnx", "hf"], Parameter(group=REQUIRED)],
    out: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    encoder: Annotated[Literal["query", "key"], Parameter(group="Encoder")] = "query",
    head: Annotated[bool, Parameter(group="Encoder", negative=())] = False,
    license: Annotated[str, Parameter(group=OUTPUT)] = "unknown",
    overwrite: Annotated[bool, Flag] = False,
    json: Annotated[bool, Flag] = False,
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative=(), group=OUTPUT)] = False,
) -> None:
    """Write the encoder as a folder that loads without mocokit: weights, preprocessing, card.

    Before anything is written the exported encoder is loaded as its readers will and compared with the run's on 32
    images; above 1e-5 it fails.

    Examples:

        mocokit export runs/photos --format safetensors
        mocokit export runs/photos --format onnx --out encoder/ --license cc-by-4.0

    Parameters
    ----------
    run
        A run folder, or one made by `mocokit finetune`.
    format
        safetensors: weights and a model.py that needs torch alone; timm, torchvision: weights for that library's own
        model; onnx: a graph with a dynamic batch; hf: a folder as a model hub lays it out.
    out
        The new folder. Default: RUN/export/FORMAT.
    encoder
        The query encoder, or the key encoder that follows it.
    head
        Export the projection head too: z beside h.
    license
        Identifier that the card states, such as apache-2.0. The weights' licence is for you to decide.
    overwrite
        Replace an earlier export in --out.
    json
        Print the result as JSON.
    quiet
        No progress on stderr.
    """
    from mocokit import api

    done = api.export(run, format, out, which=encoder, head=head, licence=license, overwrite=overwrite, quiet=quiet)
    if json:
        print(files.to_json(done.to_dict()), end="")
    else:
        print(done.parity.line())
        print(f"Done: {done.path}: {', '.join(sorted(done.files))}. {done.path / 'README.md'} says how it loads.")

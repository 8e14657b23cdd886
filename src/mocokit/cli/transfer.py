"""`mocokit transfer detect` and `mocokit transfer segment`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from mocokit import files
from mocokit.cli.app import OUTPUT, REQUIRED, Flag, app
from mocokit.options import whole_number

transfer = App(name="transfer", help="Put a run's backbone into detection or segmentation models.")
app.command(transfer)

_Whole = Parameter(group="Budget", converter=whole_number)


@transfer.command
def detect(
    run: Annotated[Path, Parameter(group=REQUIRED)],
    /,
    *,
    data: Annotated[Path, Parameter(group=REQUIRED)],
    steps: Annotated[int, _Whole] = 300,
    side: Annotated[int, _Whole] = 192,
    batch_size: Annotated[int, _Whole] = 4,
    lr: Annotated[float, Parameter(group="Budget")] = 0.02,
    frozen: Annotated[bool, Parameter(group="Budget", negative=())] = False,
    seeds: Annotated[int, _Whole] = 1,
    channels: Annotated[int, _Whole] = 64,
    proposals: Annotated[int, _Whole] = 128,
    device: Annotated[str, Parameter(group="Hardware")] = "auto",
    threads: Annotated[int | None, Parameter(group="Hardware", converter=whole_number)] = None,
    json: Annotated[bool, Flag] = False,
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative=(), group=OUTPUT)] = False,
) -> None:
    """Train Faster R-CNN with a feature pyramid on the run's backbone and on random weights; compare their mAP.

    The defaults finish on two cores. The papers' size: --side 800 --channels 256 --proposals 1000 --batch-size 16.

    Examples:

        mocokit transfer detect runs/cells --data cells/
        mocokit transfer detect runs/cells --data cells/ --steps 2000 --frozen --seeds 3

    Parameters
    ----------
    run
        The run whose backbone is used.
    data
        A folder with Pascal VOC or COCO boxes.
    steps
        Optimiser steps of either arm.
    side
        Longer side of the images, in pixels.
    batch_size
        Images a step.
    lr
        Peak learning rate of SGD.
    frozen
        Train the heads alone; the backbone stays as it is, in both arms.
    seeds
        Repetitions with other heads and another order; scores are averaged.
    channels
        Width of the feature pyramid.
    proposals
        Regions looked at in an image.
    device
        cpu, cuda ...
    threads
        Threads of one operation on the CPU. Default: the run's.
    json
        Print the result as JSON.
    quiet
        No progress on stderr.
    """
    _run(
        "detect",
        run,
        data,
        json,
        steps=steps,
        side=side,
        batch_size=batch_size,
        lr=lr,
        frozen=frozen,
        seeds=seeds,
        channels=channels,
        proposals=proposals,
        device=device,
        threads=threads,
        quiet=quiet,
    )


@transfer.command
def segment(
    run: Annotated[Path, Parameter(group=REQUIRED)],
    /,
    *,
    data: Annotated[Path, Parameter(group=REQUIRED)],
    head: Annotated[Literal["fcn", "deeplab"], Parameter(group="Budget")] = "fcn",
    steps: Annotated[int, _Whole] = 300,
    side: Annotated[int, _Whole] = 192,
    batch_size: Annotated[int, _Whole] = 4,
    lr: Annotated[float, Parameter(group="Budget")] = 0.02,
    frozen: Annotated[bool, Parameter(group="Budget", negative=())] = False,
    seeds: Annotated[int, _Whole] = 1,
    device: Annotated[str, Parameter(group="Hardware")] = "auto",
    threads: Annotated[int | None, Parameter(group="Hardware", converter=whole_number)] = None,
    json: Annotated[bool, Flag] = False,
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative=(), group=OUTPUT)] = False,
) -> None:
    """Train a segmentation head on the run's backbone and on random weights; compare their mIoU.

    Examples:

        mocokit transfer segment runs/street --data street/
        mocokit transfer segment runs/street --data street/ --head deeplab --side 512 --steps 5000

    Parameters
    ----------
    run
        The run whose backbone is used.
    data
        A folder with images/ and masks/ of the same names (below train/ and test/), or Pascal VOC's layout.
    head
        fcn or deeplab, on the coarsest map that has at most an eighth of the image's resolution.
    steps
        Optimiser steps of either arm.
    side
        Longer side of the images, in pixels.
    batch_size
        Images a step.
    lr
        Peak learning rate of SGD.
    frozen
        Train the head alone; the backbone stays as it is, in both arms.
    seeds
        Repetitions with other heads and another order; scores are averaged.
    device
        cpu, cuda ...
    threads
        Threads of one operation on the CPU. Default: the run's.
    json
        Print the result as JSON.
    quiet
        No progress on stderr.
    """
    _run(
        "segment",
        run,
        data,
        json,
        head=head,
        steps=steps,
        side=side,
        batch_size=batch_size,
        lr=lr,
        frozen=frozen,
        seeds=seeds,
        device=device,
        threads=threads,
        quiet=quiet,
    )


def _run(task: Literal["detect", "segment"], run: Path, data: Path, as_json: bool, **settings: Any) -> None:
    from mocokit import api

    result = api.transfer(task, run, data, **settings)
    print(files.to_json(result.to_dict()) if as_json else result.text(), end="")

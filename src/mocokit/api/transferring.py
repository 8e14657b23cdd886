"""The verb `transfer`: a run's backbone in dense models, against random weights under the same budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from mocokit import files
from mocokit.contrast.backbones import Backbone
from mocokit.data.dense import BoxSet, MaskSet, open_boxes, open_masks
from mocokit.errors import UsageError
from mocokit.evaluation.dense_scores import need_pycocotools
from mocokit.evaluation.frozen import RANDOM_SEED
from mocokit.evaluation.protocol import Ledger, plan_hash
from mocokit.evaluation.transfer import (
    PRETRAINED,
    RANDOM,
    TransferPlan,
    TransferResult,
    transfer_detect,
    transfer_segment,
)
from mocokit.training import runlog
from mocokit.training.allocator import keep_freed_memory
from mocokit.training.precision import num_threads
from mocokit.training.run import Run, load_run
from mocokit.training.state import make_encoder, pick_device


def transfer(
    task: Literal["detect", "segment"],
    run: str | Path | Run,
    data: str | Path,
    *,
    threads: int | None = None,
    device: str = "auto",
    quiet: bool = False,
    **plan: Any,
) -> TransferResult:
    """Put a run's backbone into Faster R-CNN (`detect`) or a segmentation model (`segment`) and score it.

    data: a folder with Pascal VOC or COCO boxes, or with pairs of pictures and masks (`mocokit.data.dense`). plan: the
    fields of `TransferPlan` (steps, side, batch_size, lr, frozen, seeds, ...). The same model with random weights is
    trained under the same budget, and the difference is paired over test images. Writes eval/transfer-TASK.json into
    the run folder and a line into its ledger.

    Raises UsageError, DataError, MissingDependencyError (detection needs pycocotools), DivergedError.
    """
    if task not in ("detect", "segment"):
        raise UsageError(f"transfer knows detect and segment. Got {task!r}.")
    if task == "detect":
        need_pycocotools()
    try:
        budget = TransferPlan(**plan)
    except TypeError as error:
        raise UsageError(f"transfer has no such setting: {error}.") from error
    opened = run if isinstance(run, Run) else load_run(Path(run))
    if opened.config.encoder.clip:
        raise UsageError(
            f"transfer reads images, and {opened.path} was trained on clips of video. Use a run of `--video frames`."
        )
    keep_freed_memory()
    progress = runlog.Progress(quiet=quiet)
    for reason in opened.found.passed_over:
        progress.warn(f"passed over a damaged checkpoint: {reason}")
    images: BoxSet | MaskSet = open_boxes(Path(data)) if task == "detect" else open_masks(Path(data))
    views = opened.config.views
    progress.say(f"{len(images.train)} training and {len(images.test)} test images of {images.name}")
    record = {"task": task, "data": images.name, **budget.to_dict()}
    Ledger(opened.folder.evaluation / "ledger.jsonl").record(
        split="test", purpose=f"transfer {task}", plan=plan_hash(record), n=len(images.test), step=opened.step
    )

    def pretrained(seed: int) -> Backbone:
        return opened.encoder().backbone

    def random(seed: int) -> Backbone:
        return make_encoder(opened.config.encoder, views.size, RANDOM_SEED + seed).backbone

    arms: dict[str, Callable[[int], Backbone]] = {PRETRAINED: pretrained, RANDOM: random}
    shared: dict[str, Any] = {
        "mean": views.mean,
        "std": views.std,
        "device": pick_device(device),
        "show": lambda what, done, total: progress.show(f"{what}  {done}/{total}", final=done == total),
    }
    with num_threads(threads or opened.config.execution.threads or 1):
        if isinstance(images, BoxSet):
            result = transfer_detect(arms, images, budget, **shared)
        else:
            result = transfer_segment(arms, images, budget, **shared)
    files.write_json(opened.folder.evaluation / f"transfer-{task}.json", result.to_dict() | {"data": images.name})
    return result

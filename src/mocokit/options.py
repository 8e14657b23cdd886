"""The flags of the command line that overlay a recipe, as one dataclass. Imports nothing heavy: `--help` stays fast.

Every field is None when not given; then the recipe decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter, Token

_COMMON = Group("Common", sort_key=1)
_MOCO = Group("Momentum contrast", sort_key=2)
_DATA = Group("Data and views", sort_key=3)
_VIDEO = Group("Video", sort_key=3)
_OPTIM = Group("Optimiser", sort_key=4)
_HARDWARE = Group("Hardware", sort_key=5)
_OUTPUT = Group("Output", sort_key=6)


def _in(group: Group, *names: str) -> Parameter:
    return Parameter(group=group, name=names or None, negative=(), show_default=False)


def whole_number(_: Any, tokens: Sequence[Token]) -> int:
    """An integer as it is written; by itself cyclopts would round 1.5 to 2."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f"it must be a whole number, not {tokens[0].value!r}.") from None


def _int_in(group: Group, *names: str) -> Parameter:
    return Parameter(group=group, name=names or None, negative=(), show_default=False, converter=whole_number)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainOptions:
    """Everything a recipe decides and a flag may change."""

    recipe: Annotated[str | None, _in(_COMMON)] = None
    "Settings to start from: auto, small, digits, moving-shapes, moco-v1, moco-v2, moco-v3, moco-v3-vit, simclr, byol, and these methods with -cifar, -small or -medical (`mocokit recipes`). auto: small below 200,000 images, else moco-v2."  # noqa: E501
    epochs: Annotated[int | None, _int_in(_COMMON)] = None
    "Passes over the data."
    batch_size: Annotated[int | None, _int_in(_COMMON)] = None
    "Images per optimiser step. The learning rate stays the recipe's."
    accumulate: Annotated[int | None, _int_in(_COMMON)] = None
    "Parts that a batch goes through the network in, one after the other, to save memory. Default 1."
    seed: Annotated[int | None, _int_in(_COMMON)] = None
    "Decides the initial weights, the order and every view. Default 0."
    backbone: Annotated[str | None, _in(_COMMON)] = None
    "small-cnn, small-cnn-32-64-128, or any torchvision or timm model. Default: small-cnn up to 32 px, else resnet18."
    image_size: Annotated[int | None, _int_in(_COMMON)] = None
    "Side of the views in pixels. Default: the pictures' own longer side, at most 224."

    queue_size: Annotated[int | None, _int_in(_MOCO, "--queue-size", "-K")] = None
    "K, keys in the dictionary. Default: the power of two nearest to an eighth of the images, 4 batches to 65,536."
    temperature: Annotated[float | None, _in(_MOCO, "--temperature", "-T")] = None
    "T of InfoNCE, above 0."
    momentum: Annotated[float | None, _in(_MOCO, "--momentum", "-m")] = None
    "m of the key encoder's EMA, in [0, 1]."
    momentum_end: Annotated[float | None, _in(_MOCO)] = None
    "m at the end of the run, approached by a half cosine. Default: constant."
    order: Annotated[Literal["paper", "ema-first"] | None, _in(_MOCO)] = None
    "Order of a step: paper (Algorithm 1) or ema-first (the released code). The same losses and query weights."
    symmetric: Annotated[bool | None, Parameter(group=_MOCO, show_default=False)] = None
    "Let both views be queries and both keys (MoCo v1, v2; the other methods do so anyway). Default: no."
    bn_groups: Annotated[int | None, _int_in(_MOCO)] = None
    "Groups of a batch that batch norm treats apart, the keys shuffled over them (MoCo v1, v2). Default 1."
    shuffle_bn: Annotated[bool | None, Parameter(group=_MOCO, show_default=False)] = None
    "Shuffle the key batch over batch norm's groups and over ranks, where there are several (MoCo v1, v2). Default yes."
    mask_source: Annotated[bool | None, Parameter(group=_MOCO, show_default=False)] = None
    "Leave older keys of a query's own image out of its negatives. Default: yes."
    mask_group: Annotated[bool | None, Parameter(group=_MOCO, show_default=False)] = None
    "Leave keys of a query's own group out as well. Default: no."
    queue_init: Annotated[Literal["empty", "random"] | None, _in(_MOCO)] = None
    "empty: score real keys only. random: start with random unit vectors, as the released code does."
    stem: Annotated[Literal["auto", "small", "standard"] | None, _in(_MOCO)] = None
    "small: 3x3 stride-1 first convolution, no max-pool (ResNets). auto: small up to 64 px."
    head: Annotated[Literal["linear", "mlp", "mlp-bn", "mlp-bn-all"] | None, _in(_MOCO)] = None
    "Projection head: linear (v1), mlp (v2), mlp-bn: batch norm in hidden layers (BYOL), -all: after the last too (v3)."
    head_layers: Annotated[int | None, _int_in(_MOCO)] = None
    "Layers of an MLP head. Default 2."
    hidden: Annotated[int | None, _int_in(_MOCO)] = None
    "Width of the hidden layers of head and predictor. Default: the backbone's."
    dim: Annotated[int | None, _int_in(_MOCO)] = None
    "D, dimensions of z. Default 128."
    predictor: Annotated[Literal["none", "mlp-bn", "mlp-bn-all"] | None, _in(_MOCO)] = None
    "MLP on the query side alone (MoCo v3, BYOL)."
    freeze_patches: Annotated[bool | None, Parameter(group=_MOCO, show_default=False)] = None
    "Leave a ViT's patch projection at its random start (MoCo v3)."

    split: Annotated[str | None, _in(_DATA)] = None
    "Use only this split, where the data have splits. Default: train where there is one, else everything."
    label_column: Annotated[str | None, _in(_DATA)] = None
    "Column of a CSV or Parquet table that holds the label. Labels never enter training."
    group_column: Annotated[str | None, _in(_DATA)] = None
    "Column that holds the group (patient, product, video)."
    exclude: Annotated[str | None, _in(_DATA)] = None
    "A list of samples to leave out, as `mocokit check --write-exclude` makes it."
    views: Annotated[str | None, _in(_DATA)] = None
    "Augmentation recipe: moco-v1, moco-v2, simclr, byol or mnist-like (small gray images)."
    crop_min: Annotated[float | None, _in(_DATA)] = None
    "Smallest area of a random crop, as a share of the picture, in (0, 1]."
    blur: Annotated[bool | None, Parameter(group=_DATA, show_default=False)] = None
    "Gaussian blur among the views (v2's; adds little below 64 px)."
    max_bad: Annotated[float | None, _in(_DATA)] = None
    "Share of unreadable images above which the run stops. Default 0.01."

    init: Annotated[str | None, _in(_DATA)] = None
    "Weights that the backbone starts from: .safetensors, or .pt / .pth, read in a process of its own that can run nothing. Default: random."  # noqa: E501
    allow_partial: Annotated[bool | None, Parameter(group=_DATA, show_default=False)] = None
    "Take --init even when less than 90 % of the backbone's tensors are in it. Default: no."

    video: Annotated[Literal["off", "frames", "clips"] | None, _in(_VIDEO)] = None
    "DATA are videos. frames: frames of them are the pictures. clips: short clips are the samples, as the data move."
    frame_rate: Annotated[float | None, _in(_VIDEO)] = None
    "With --video frames: frames a second that are taken; near-duplicates are dropped. Default 1."
    clip_frames: Annotated[int | None, _int_in(_VIDEO)] = None
    "With --video clips: frames of a clip. Default 8."
    clip_stride: Annotated[int | None, _int_in(_VIDEO)] = None
    "With --video clips: take every so many-th frame. Default: what comes nearest to 15 frames a second."
    clip_speed: Annotated[int | None, _int_in(_VIDEO)] = None
    "With --video clips: each view plays at 1 to so many times the speed. Default 1."
    max_gap: Annotated[float | None, _in(_VIDEO)] = None
    "With --video clips: the second view is a clip of the same video up to so many seconds away; 0: the same clip. Default 1."  # noqa: E501

    optimizer: Annotated[Literal["sgd", "lars", "adamw"] | None, _in(_OPTIM)] = None
    "sgd with momentum, lars (large batches) or adamw (ViTs). Give --lr with it: their scales differ."
    lr: Annotated[float | None, _in(_OPTIM)] = None
    "Peak learning rate, for this batch size as it stands."
    sgd_momentum: Annotated[float | None, _in(_OPTIM)] = None
    "Momentum of SGD and LARS."
    weight_decay: Annotated[float | None, _in(_OPTIM)] = None
    "L2 penalty; with adamw decoupled."
    schedule: Annotated[Literal["cosine", "step", "constant"] | None, _in(_OPTIM)] = None
    "Course of the learning rate."
    warmup_epochs: Annotated[float | None, _in(_OPTIM)] = None
    "Epochs of linear growth at the start."

    device: Annotated[str | None, _in(_HARDWARE)] = None
    "cpu, cuda, cuda:1 ... Default: cuda where there is one."
    threads: Annotated[int | None, _int_in(_HARDWARE)] = None
    "Threads of one operation on the CPU. Default: all where timing shows that they pay, else 1. Settled at the start."
    workers: Annotated[int | None, _int_in(_HARDWARE)] = None
    "Threads that make views ahead of the step. Default 1, or 0 where --threads take all cores. Never changes a view."
    precision: Annotated[Literal["auto", "fp32", "bf16"] | None, _in(_HARDWARE)] = None
    "Arithmetic of the encoders; parameters, EMA, queue and loss stay fp32. auto times both at the start."
    layout: Annotated[Literal["auto", "contiguous", "channels-last"] | None, _in(_HARDWARE)] = None
    "Memory layout of the encoders. auto times both at the start."
    compile: Annotated[Literal["off", "on", "auto"] | None, _in(_HARDWARE)] = None
    "torch.compile for the encoders. auto tries it where the run takes 20 minutes or more. Default: off."

    checkpoint_every: Annotated[int | None, _int_in(_OUTPUT)] = None
    "Steps between checkpoints; the last step is always saved. Default: one epoch, at most 500 steps."
    eval_every: Annotated[int | None, _int_in(_OUTPUT)] = None
    "Epochs between kNN readings on the validation split of --monitor. Default: a tenth of the run."

    def given(self) -> dict[str, Any]:
        """The options that were given, by field name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

"""The model card of an exported encoder: what it is, how it loads, what it saw, how it was judged. No private paths."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, fields
from typing import Any

import yaml

from mocokit import files
from mocokit.data.blobs import public_name
from mocokit.errors import DamagedError
from mocokit.exporting.blueprint import Blueprint
from mocokit.exporting.parity import Parity
from mocokit.exporting.trained import Trained
from mocokit.training.run import Run

_REFERENCES = """\
```bibtex
@inproceedings{he2020moco, title={Momentum Contrast for Unsupervised Visual Representation Learning},
  author={He, Kaiming and Fan, Haoqi and Wu, Yuxin and Xie, Saining and Girshick, Ross}, booktitle={CVPR}, year={2020}}
@article{chen2020mocov2, title={Improved Baselines with Momentum Contrastive Learning},
  author={Chen, Xinlei and Fan, Haoqi and Girshick, Ross and He, Kaiming}, journal={arXiv:2003.04297}, year={2020}}
```"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sections:
    """What differs between formats."""

    library: str
    """`library_name` of the front matter."""
    load: str
    """The lines that load it, Python."""
    transform: str | None
    """Lines that define `transform`, where the loading lines don't bring it."""
    more: tuple[tuple[str, str], ...] = ()
    """Further titles and Python lines."""


def model_card(
    trained: Trained, blueprint: Blueprint, sections: Sections, parity: Parity, *, which: str, licence: str, format: str
) -> str:
    """README.md with YAML front matter."""
    front = {
        "license": licence,
        "library_name": sections.library,
        "pipeline_tag": "feature-extraction" if blueprint.clip else "image-feature-extraction",
        "tags": ["mocokit", "self-supervised-learning", "contrastive-learning", *_kind(trained)],
    }
    facts = blueprint.input
    body = [
        f"# {blueprint.backbone.name}, " + ("trained without labels" if trained.run else "fine-tuned"),
        f"{_origin(trained, which)} as `{format}`. "
        f"It turns a {'clip' if blueprint.clip else 'picture'} into h, {blueprint.feature_dim} numbers; compare them "
        "by cosine.",
        "## Load it",
        *([_code(sections.transform)] if sections.transform else []),
        _code(sections.load),
        _input(trained),
        *(part for title, lines in sections.more for part in (f"## {title}", _code(lines))),
        "## Preprocessing",
        f"Central square, resized to {facts.size} x {facts.size} ({facts.interpolation}, antialiased), RGB in 0..1, "
        f"then (x - mean) / std with mean {list(facts.mean)} and std {list(facts.std)}. {_canvas(blueprint, sections)}",
        parity.line(),
        "## Training",
        _training(trained.run) if trained.run else _tuning(trained),
        "## Evaluation",
        _evaluation(trained.run) if trained.run else _tuned_evaluation(trained),
        "## Not for",
        "Decisions about people, or pictures unlike those it was trained on, without an evaluation on such pictures. "
        "It repeats whatever shortcut separates the training pictures (camera, background, watermark).",
        "## Licence",
        f"`{licence}`, as stated by whoever exported it. mocokit's own code is under the Apache License 2.0; the terms "
        "of the training pictures may apply to weights made from them.",
        "## Made with",
        f"mocokit {importlib.metadata.version('mocokit')}, torch {importlib.metadata.version('torch')}.",
        _REFERENCES,
    ]
    return f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n" + "\n\n".join(body) + "\n"


def _input(trained: Trained) -> str:
    clips = trained.clips
    if clips is None:
        return "`image` is a Pillow image."
    every = "consecutive ones" if clips.stride == 1 else f"every {clips.stride}th one"
    return f"`frames` is a list of {clips.frames} Pillow images, frames of one video in order, {every} as in training."


def _code(lines: str) -> str:
    return f"```python\n{lines}\n```"


def _canvas(blueprint: Blueprint, sections: Sections) -> str:
    if sections.transform is None:
        return f"Pictures with a side above {blueprint.input.canvas} px are first shrunk to it (bicubic)."
    return (
        f"In mocokit, pictures with a side above {blueprint.input.canvas} px are first shrunk to it (bicubic); the "
        "lines above leave that out."
    )


def _kind(trained: Trained) -> list[str]:
    return [trained.run.config.contrast.method] if trained.run else ["fine-tuned"]


def _origin(trained: Trained, which: str) -> str:
    if trained.run is None:
        return f"The backbone of a classifier that was fine-tuned with mocokit for {trained.step} steps,"
    return f"The {which} encoder of a {trained.run.config.contrast.method} run of mocokit, step {trained.step},"


def _tuning(trained: Trained) -> str:
    facts = trained.tuned.config if trained.tuned else {}
    classes = ", ".join(f"`{name}`" for name in facts["class_names"][:50])
    return (
        f"- pretrained without labels, then fine-tuned on `{public_name(str(facts['labelled']))}` with the labels "
        f"`{facts['made_by'].get('budget')}`\n- classes: {classes}"
    )


def _tuned_evaluation(trained: Trained) -> str:
    facts = trained.tuned.config["made_by"] if trained.tuned else {}
    found = facts.get("test_accuracy")
    if not isinstance(found, float):
        return "None on record."
    return f"As a classifier: {100 * found:.1f} % of the test images right. Nothing else on record."


def _training(run: Run) -> str:
    config = run.config
    data = public_name(config.data.spec)
    what = {"off": "images", "frames": "frames", "clips": "clips"}[config.data.video]
    lines = [
        f"- data: {config.data.images} {what} of `{data}`"
        + (f", split {config.data.split}" if config.data.split else ""),
        f"- recipe `{config.recipe}`: {config.train.epochs} epochs, batch {config.train.batch_size}, queue "
        f"{config.contrast.K} keys, momentum {config.contrast.m}, temperature {config.contrast.T}, "
        f"seed {config.train.seed}",
    ]
    changed = [
        f"`{section}.{name} = {value}`"
        for section, part in (("encoder", config.encoder), ("contrast", config.contrast), ("optim", config.optim))
        for name, value in _not_default(part).items()
    ]
    if changed:
        lines.append(f"- other than default: {', '.join(changed)}")
    return "\n".join(lines)


def _not_default(part: Any) -> dict[str, Any]:
    return {one.name: getattr(part, one.name) for one in fields(part) if getattr(part, one.name) != one.default}


def _evaluation(run: Run) -> str:
    try:
        found = files.read_json(run.folder.evaluation / "verdict.json")
        low, high = (100 * value for value in found["ci95"])
        return (
            f"Verdict: **{found['verdict']}**. {found['metric']} {100 * found['score']:.1f} % against "
            f"{100 * found['baseline']['score']:.1f} % of {found['baseline']['name']}, the strongest that ran: "
            f"{100 * found['delta']:+.1f} points [95 % interval {low:+.1f}, {high:+.1f}], "
            f"{found['n_test']} test {found.get('judged', 'images')}, {found['seeds']} run(s), readout "
            f"{found['readout']} of the {found['encoder']} encoder at step {found['step']}."
        )
    except (DamagedError, KeyError, TypeError, ValueError):
        return "None on record: `mocokit evaluate RUN --labelled DATA` compares it with pixels and random weights."

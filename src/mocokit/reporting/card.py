"""The generated `README.md` of a run: a model card with Hugging Face front matter. No path of the machine is in it."""

from __future__ import annotations

from typing import Any

import yaml

from mocokit.reporting.page import spoken
from mocokit.reporting.report import Facts, load_lines, percent, readings

_CITE = """```
@inproceedings{he2020moco,
  title={Momentum Contrast for Unsupervised Visual Representation Learning},
  author={He, Kaiming and Fan, Haoqi and Wu, Yuxin and Xie, Saining and Girshick, Ross},
  booktitle={CVPR}, year={2020}
}
@article{chen2020mocov2,
  title={Improved Baselines with Momentum Contrastive Learning},
  author={Chen, Xinlei and Fan, Haoqi and Girshick, Ross and He, Kaiming},
  journal={arXiv:2003.04297}, year={2020}
}
```"""


def card(facts: Facts) -> str:
    """The card as Markdown. What is not known (the licence of the data, what the model is for) is left to its owner."""
    config = facts.config
    lines = ["---", yaml.safe_dump(_front(facts), sort_keys=False, allow_unicode=True).rstrip("\n"), "---", ""]
    lines += [f"# {_plain(facts.name)}", ""]
    lines += [
        f"An image encoder ({_code(config['encoder']['backbone'])}) trained without labels by {facts.method} on "
        f"{config['data']['images']:,} images, with mocokit.",
        "",
        "## Result",
        "",
        facts.verdict_line or "Not evaluated yet: `mocokit evaluate RUN --labelled DATA`.",
        "",
    ]
    if facts.verdict is not None:
        lines += ["| kNN | accuracy | 95 % interval |", "|---|---|---|"]
        lines += [
            f"| {_code(name)} | {percent(one['score'])} | {percent(one['ci95'][0])} to {percent(one['ci95'][1])} |"
            for name, one in facts.verdict.get("scores", {}).items()
        ]
        lines += ["", f"Pretraining saw the test images: {_plain(facts.verdict['pretraining_saw_test_images'])}."]
        lines += [f"The test split was read {readings(facts.ledger).get('test', 0)} time(s) for this run.", ""]
    lines += ["## Load it", "", "```python", *load_lines(facts), "```", ""]
    lines += [
        f"`x`: float32 [N, 3, {facts.size}, {facts.size}], RGB in 0..1, the central square resized to {facts.size} px, "
        f"minus the mean {_numbers(facts.mean)}, divided by {_numbers(facts.std)}. `h` is the backbone's output, "
        "which is what is kept; the head `z` served the training.",
        "",
        "## How it was trained",
        "",
        *(f"- {text}" for text in _training(facts)),
        "",
        "## What it is not",
        "",
        "A classifier: it says what is alike, not what it is. It knows what its training images show, and treats as "
        "alike whatever the views made alike (crops, colours, flips): if these distinctions matter to you, it may not "
        "see them. "
        "Nothing was checked for fairness or safety. The scores hold for the labelled data named above and no other.",
        "",
        "## Cite",
        "",
        _CITE,
        "",
    ]
    return str(spoken("\n".join(lines)))


def _front(facts: Facts) -> dict[str, Any]:
    front: dict[str, Any] = {
        "library_name": "mocokit",
        "pipeline_tag": "image-feature-extraction",
        "tags": ["self-supervised-learning", "contrastive-learning", facts.config["contrast"]["method"]],
    }
    if facts.verdict is not None:
        result = {
            "task": {"type": "image-classification", "name": "kNN on frozen features"},
            "dataset": {"type": "other", "name": "held-out labelled images"},
            "metrics": [{"type": "accuracy", "value": round(100 * facts.verdict["score"], 2)}],
        }
        front["metrics"] = ["accuracy"]
        front["model-index"] = [{"name": str(spoken(facts.name)), "results": [result]}]
    return front


def _training(facts: Facts) -> list[str]:
    config, contrast = facts.config, facts.config["contrast"]
    lines = [
        f"{config['data']['images']:,} images, {len(facts.skipped)} left out as unreadable; "
        f"{config['train']['epochs']} epochs of batches of {config['train']['batch_size']}."
    ]
    if contrast["method"] == "moco":
        lines.append(
            f"Dictionary of K = {contrast['K']:,} keys, temperature {contrast['T']}, momentum {contrast['m']}."
        )
    changed = [f"{s.name} {s.value}" for s in facts.settings if s.default is not None]
    if changed:
        lines.append(f"Other than the recipe {_code(config['recipe'])}: {', '.join(_code(text) for text in changed)}.")
    packages = facts.environment.get("packages", {})
    processor = _plain(facts.environment.get("processor"))
    lines.append(
        f"torch {packages.get('torch')}, mocokit {packages.get('mocokit')}, on {processor}"
        + (f" with {', '.join(map(_plain, facts.environment['gpus']))}" if facts.environment.get("gpus") else "")
        + "."
    )
    return lines


def _numbers(values: Any) -> str:
    return "(" + ", ".join(f"{value:g}" for value in values) + ")"


def _code(text: Any) -> str:
    """As inline code: nothing in it is Markdown or HTML."""
    return "`" + " ".join(str(text).replace("`", "'").split()) + "`"


def _plain(text: Any) -> str:
    """One line of text in which no sign is Markdown or HTML."""
    flat = " ".join(str(text).split())
    return "".join(f"\\{sign}" if sign in "\\`*_{}[]<>#|!&" else sign for sign in flat)

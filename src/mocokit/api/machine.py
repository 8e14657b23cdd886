"""The verb `doctor`: what this machine and installation can do."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from mocokit.training.environment import environment
from mocokit.training.precision import has_fast_bf16
from mocokit.training.state import pick_device

if TYPE_CHECKING:
    pass


def doctor() -> dict[str, Any]:
    """What this machine and installation can do: versions, cores, precision, optional parts."""
    facts = environment()
    bf16 = has_fast_bf16(pick_device("auto"))
    gpus = ", ".join(facts["gpus"]) or "none that torch sees"
    findings = [
        ("python", facts["python"]),
        *((name, version or "not installed") for name, version in facts["packages"].items()),
        ("processor", f"{facts['processor']}, {facts['cores']} cores, {facts['cpu_capability']}"),
        ("memory", f"{(facts['memory_bytes'] or 0) / 2**30:.0f} GiB"),
        ("gpu", gpus),
        ("bf16 in hardware", "yes: --precision auto will time it" if bf16 else "no: fp32 is used"),
        *((f"extra: {name}", _extra(modules)) for name, modules in EXTRAS.items()),
    ]
    return facts | {"bf16": bf16, "findings": findings}


EXTRAS: dict[str, tuple[str, ...]] = {
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "serve": ("starlette", "uvicorn"),
    "track": ("tensorboard", "wandb", "mlflow"),
}
"""Optional parts: extra -> modules that show it is there."""


def _extra(modules: tuple[str, ...]) -> str:
    there = [name for name in modules if importlib.util.find_spec(name)]
    return ", ".join(there) if there else "not installed"

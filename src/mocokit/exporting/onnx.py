"""An encoder as one ONNX file with a dynamic batch, and how onnxruntime runs it."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mocokit.errors import MissingDependencyError, MocokitError, first_line

PACKAGES = ("onnx", "onnxscript", "onnxruntime")


class _Outputs(nn.Module):
    """h, or h and z, as a tuple: what the graph returns."""

    def __init__(self, encoder: nn.Module, head: bool) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        if self.head:
            both: tuple[Tensor, Tensor] = self.encoder.h_and_z(images)  # type: ignore[operator]
            return both
        h: Tensor = self.encoder.features(images)  # type: ignore[operator]
        return (h,)


def require_onnx() -> Any:
    """onnxruntime. Raises MissingDependencyError when the extra is not installed."""
    for name in PACKAGES:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            raise MissingDependencyError(
                f"--format onnx needs {', '.join(PACKAGES)}; {name} is missing: pip install 'mocokit[onnx]'"
            ) from error
    return module


def to_onnx(encoder: nn.Module, size: int, *, head: bool, clip: int = 0) -> bytes:
    """The encoder as a serialised ONNX model: `images` float32 [batch, 3, size, size] -> `h` (and `z`).

    With clips of so many frames, `images` is [batch, 3, clip, size, size].

    Raises MissingDependencyError, and MocokitError for a network that can't be translated.
    """
    require_onnx()
    batch = torch.export.Dim("batch", min=1)
    names = ["h", "z"] if head else ["h"]
    level = logging.getLogger("torch.onnx").level
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the translator warns about its own internals
            program = torch.onnx.export(
                _Outputs(encoder, head).eval(),
                (torch.zeros(2, 3, *((clip,) if clip else ()), size, size),),
                dynamo=True,
                dynamic_shapes=({0: batch},),
                input_names=["images"],
                output_names=names,
                external_data=False,
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        raise MocokitError(
            f"torch can't translate this network to ONNX ({first_line(error, 160)}). Use --format safetensors."
        ) from error
    finally:
        logging.getLogger("torch.onnx").setLevel(level)
    assert program is not None
    return bytes(program.model_proto.SerializeToString())


def runner(model: bytes, *, head: bool) -> Callable[[Tensor], Sequence[Tensor]]:
    """The outputs of an ONNX model by onnxruntime on the CPU, one thread."""
    runtime = require_onnx()
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def run(x: Tensor) -> list[Tensor]:
        names = ["h", "z"] if head else ["h"]
        return [torch.from_numpy(out) for out in session.run(names, {"images": x.numpy()})]

    return run

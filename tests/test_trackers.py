import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mocokit.errors import UsageError
from mocokit.training.trackers import TRACKERS, flat, numbers, open_trackers

CONFIG: Mapping[str, Any] = {"contrast": {"K": 256, "m_end": None}, "views": {"mean": (0.1, 0.2)}}
ROWS: list[dict[str, Any]] = [
    {"step": step, "loss": 5.0 / step, "chance": None, "health": {"rank_z": 3.5, "positives": [1, 2]}, "note": "text"}
    for step in (1, 2, 3)
]


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def test_numbers_of_a_row() -> None:
    row = {"step": 3, "a": 1, "b": float("nan"), "c": True, "d": "x", "e": [1.0], "f": {"g": 2.5, "h": {"i": -1}}}
    assert numbers(row) == {"a": 1.0, "f/g": 2.5, "f/h/i": -1.0}
    assert flat(CONFIG) == {"contrast.K": "256", "contrast.m_end": "None", "views.mean": "(0.1, 0.2)"}


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"called 'tensorbord'\. Did you mean 'tensorboard'\?"):
        open_trackers(["tensorbord"], tmp_path / "t", run_name="r", config={})
    assert not (tmp_path / "t").exists()
    none = open_trackers([], tmp_path, run_name="r", config={})
    none.log(ROWS[0])
    none.close()


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_names_the_install_line(name: str, tmp_path: Path) -> None:
    code = (
        f"import sys; sys.modules[{name!r}] = None\n"  # as if it were not installed
        "from pathlib import Path\n"
        "from mocokit.errors import MissingDependencyError\n"
        "from mocokit.training.trackers import open_trackers\n"
        "try:\n"
        f"    open_trackers([{name!r}], Path({str(tmp_path)!r}), run_name='r', config={{}})\n"
        "except MissingDependencyError as error:\n"
        "    print(error.exit_code, error)\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"5 The {name} tracker needs a package that isn't installed")
    assert done.stdout.endswith("Install it: pip install 'mocokit[track]'\n")


def test_nothing_is_imported_until_it_is_asked_for() -> None:
    code = f"import mocokit.training.trackers, sys; print([name for name in {TRACKERS} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.skipif(not has("tensorboard"), reason="tensorboard is not installed (pip install 'mocokit[track]')")
def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = open_trackers(["tensorboard", "tensorboard"], tmp_path, run_name="run one", config=CONFIG)
    for row in ROWS:
        tracker.log(row)
    # Killed here: what was logged is there without close. Resumed from step 2:
    resumed = open_trackers(["tensorboard"], tmp_path, run_name="run one", config=CONFIG, step=2)
    resumed.log(ROWS[1] | {"loss": 7.0})
    resumed.close()
    resumed.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["health/rank_z", "loss"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 5.0), (2, 7.0)]
    (text,) = events.Tensors("config/text_summary")[:1]
    assert b"| contrast.K | 256 |" in text.tensor_proto.string_val[0]
    tracker.close()


@pytest.mark.skipif(not has("wandb"), reason="wandb is not installed (pip install 'mocokit[track]')")
def test_wandb_offline(tmp_path: Path) -> None:
    tracker = open_trackers(["wandb"], tmp_path, run_name="run", config=CONFIG)
    for row in ROWS:
        tracker.log(row)
    tracker.close()
    (stored,) = (tmp_path / "wandb").glob("wandb/offline-run-*/run-*.wandb")
    assert b"contrast.K" in stored.read_bytes()


@pytest.mark.skipif(not has("mlflow"), reason="mlflow is not installed (pip install 'mocokit[track]')")
def test_mlflow_files(tmp_path: Path) -> None:
    tracker = open_trackers(["mlflow"], tmp_path, run_name="run", config=CONFIG)
    for row in ROWS:
        tracker.log(row)
    tracker.close()
    (losses,) = (tmp_path / "mlflow").glob("*/*/metrics/loss")
    assert [(float(line.split()[1]), int(line.split()[2])) for line in losses.read_text().splitlines()] == [
        (5.0, 1),
        (2.5, 2),
        (5.0 / 3, 3),
    ]
    (setting,) = (tmp_path / "mlflow").glob("*/*/params/contrast.K")
    assert setting.read_text() == "256"

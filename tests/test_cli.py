"""The command line: what it costs to ask for help, what each mistake says, and with which code it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import mocokit
from mocokit import files
from mocokit.api import pretraining
from mocokit.cli import main
from mocokit.training.runfolder import claim_run, foreign_files
from tests.toy import (
    OPTIONS,
    STEPS,
    contents,
    flags,
    flip_bit,
    labelled_npz,
    npz,
    pictures,
    small_disk,
    verified_steps,
    without_privileges,
)

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Run a command in this process; returns its exit code, stdout and stderr."""

    def run(*words: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return npz(tmp_path / "toy.npz")


@pytest.fixture(scope="module")
def finished_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    data = npz(folder / "toy.npz")
    assert main(["pretrain", str(data), "--out", str(folder / "run"), "-q", *flags()]) == 0
    return folder / "run"


@pytest.fixture
def finished(finished_once: Path, tmp_path: Path) -> Path:
    """A copy of a run that is complete."""
    return shutil.copytree(finished_once, tmp_path / "finished")


def refused(result: tuple[int, str, str], code: int, *says: str) -> str:
    """A mistake's message: one, on stderr, saying `says`, without a traceback; returns it."""
    got, out, err = result
    assert got == code, err
    assert out == ""
    assert "Traceback" not in err
    assert err.count("error:") == 1
    message = err[err.index("error:") :]
    for text in says:
        assert text in message
    return message


# --------------------------------------------------------------------------------------------- help is cheap

HEAVY = "{'torch', 'torchvision', 'timm', 'numpy', 'numba', 'sklearn', 'matplotlib', 'yaml', 'PIL', 'pyarrow', 'faiss'}"


@pytest.mark.parametrize(
    "statement",
    [
        "import mocokit",
        "from mocokit.cli import main; main(['--help'])",
        "from mocokit.cli import main; main(['pretrain', '--help'])",
        "from mocokit.cli import main; main(['evaluate', '-h'])",
        "from mocokit.cli import main; main(['--version'])",
        "from mocokit.cli import main; main([])",
        "from mocokit.cli import main; main(['pretrain', 'x', '--out', 'y', '--epochs', 'z'])",
        "import mocokit.training.runfolder",
    ],
)
def test_nothing_heavy_is_imported_before_there_is_work(statement: str) -> None:
    script = f"{statement}\nimport sys\nprint('heavy:', sorted({HEAVY} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: []"


@pytest.mark.parametrize(
    ("before", "after"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_threads_of_libgomp_are_let_sleep_unless_the_user_has_decided(before: dict[str, str], after: str) -> None:
    inherited = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    script = "import os; from mocokit.cli import main; main(['--version']); print(os.environ.get('GOMP_SPINCOUNT'))"
    done = subprocess.run(
        [sys.executable, "-c", script], env=inherited | before, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == after


def test_every_public_name_is_there() -> None:
    assert all(getattr(mocokit, name) is not None for name in mocokit.__all__)
    assert dir(mocokit) == mocokit.__all__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        mocokit.nothing  # noqa: B018


def test_help_names_every_flag_the_examples_and_the_exit_codes(call: Call) -> None:
    code, out, err = call("--help")
    assert (code, err) == (0, "")
    assert "0 done, 1 failed, 2 usage" in " ".join(out.split())
    for command in ("pretrain", "evaluate", "finetune", "predict", "demo", "doctor"):
        assert command in out
    code, out, _ = call("pretrain", "--help")
    assert code == 0
    for name in OPTIONS:
        assert f"--{name.replace('_', '-')}" in out
    assert "mocokit pretrain photos/ --out runs/photos --resume" in out
    assert call("--version")[:2] == (0, f"{mocokit.__version__}\n")
    code, out, _ = call()
    assert code == 2
    assert "pretrain" in out


# ------------------------------------------------------------------------------------------------ usage errors


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["pretrian"], ["pretrian", "Did you mean", "pretrain"]),
        (["pretrain", "DATA", "--out", "OUT", "--epoch", "3"], ["--epoch", "Did you mean --epochs"]),
        (["pretrain", "DATA", "--out", "OUT", "--epochs", "abc"], ["--epochs", "a whole number, not 'abc'"]),
        (["pretrain", "DATA", "--out", "OUT", "--epochs", "1.5"], ["--epochs", "a whole number, not '1.5'"]),
        (["pretrain", "DATA", "--out", "OUT", "--epochs"], ["--epochs", "requires an argument"]),
        (["pretrain", "DATA", "--out", "OUT", "--lr", "fast"], ["--lr", "fast"]),
        (["pretrain", "DATA", "--out", "OUT", "--precision", "fp16"], ["--precision", "fp16", "bf16"]),
        (["pretrain", "DATA", "--out", "OUT", "more", "words"], ["Too many arguments: more words"]),
        (["pretrain", "DATA"], ["--out"]),
        (["pretrain", "--out", "OUT"], ["DATA"]),
        (["evaluate", "OUT"], ["--labelled"]),
        (["evaluate", "--labelled", "DATA"], ["RUNS"]),
        (["evaluate", "OUT", "--labelled", "DATA", "--readout", "x"], ["--readout", "x"]),
        (["evaluate", "OUT", "--labelled", "DATA", "--draws", "2.5"], ["--draws", "a whole number, not '2.5'"]),
    ],
)
def test_words_that_cannot_be_parsed(call: Call, data: Path, tmp_path: Path, words: list[str], says: list[str]) -> None:
    placed = {"DATA": str(data), "OUT": str(tmp_path / "run")}
    message = refused(call(*(placed.get(word, word) for word in words)), 2, *says)
    assert "--help`" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"backbone": "resnt18"}, ["'resnt18'", "Did you mean 'resnet18'"]),
        ({"backbone": "small-cnn-x"}, ["small-cnn-WIDTH"]),
        ({"backbone": "vgg11", "image_size": 16}, ["vgg11", "16 px", "--backbone or --image-size"]),
        ({"recipe": "moco-v9"}, ["moco-v9", "Choose one of"]),
        ({"views": "moco-v9"}, ["moco-v9", "Choose one of"]),
        ({"seed": -1}, ["`seed`", "-1"]),
        ({"lr": "nan"}, ["lr", "nan"]),
        ({"momentum": 1.5}, ["`m`", "[0, 1]", "1.5"]),
        ({"temperature": 0}, ["temperature", "above 0"]),
        ({"batch_size": 51}, ["50 images", "fewer than one batch of 51", "--batch-size 25"]),
        ({"device": "tpu"}, ["tpu", "cpu"]),
        ({"device": "mps"}, ["mps", "cpu"]),
        ({"split": "dev"}, ["no split 'dev'", "splits there are: none"]),
        ({"config": "nowhere.yaml"}, ["nowhere.yaml", "No such file"]),
        ({"monitor": "nowhere"}, ["nowhere", "does not exist"]),
        ({"monitor": "DATA"}, ["no labels", "ROOT/CLASS"]),
    ],
)
def test_a_value_that_cannot_be_used_leaves_a_folder_that_can(
    call: Call, data: Path, tmp_path: Path, changes: dict[str, Any], says: list[str]
) -> None:
    out = tmp_path / "run"
    changes = {name: str(data) if value == "DATA" else value for name, value in changes.items()}
    code = 3 if "split" in changes or "labels" in says[0] else 2
    refused(call("pretrain", data, "--out", out, "-q", *flags(**changes)), code, *says)
    status = json.loads((out / "status.json").read_text())
    assert (status["state"], status["step"]) == ("failed", 0)
    assert says[0] in status["message"]
    claim_run(out, "new")[1].release()  # the corrected command needs neither --resume nor --overwrite


def test_a_corrected_command_just_works(call: Call, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    refused(call("pretrain", data, "--out", out, "-q", *flags(backbone="resnt18")), 2)
    code, _, err = call("pretrain", data, "--out", out, "-q", *flags(epochs=1))
    assert (code, err) == (0, "")
    assert json.loads((out / "status.json").read_text())["message"] == ""


# --------------------------------------------------------------------------------------------------------- data


def save_pictures(folder: Path, count: int) -> Path:
    folder.mkdir(parents=True)
    for number, picture in enumerate(pictures(count)):
        Image.fromarray(picture).save(folder / f"{number:03d}.png")
    return folder


@pytest.mark.parametrize(
    ("make", "code", "says"),
    [
        (lambda p: p / "nothere", 2, ["nothere", "does not exist", "digits, moved-digits"]),
        (lambda p: p / "digit", 2, ["digit", "does not exist"]),
        (lambda p: npz(p / "x.npz").rename(p / "x.zip"), 2, ["x.zip", "no kind of data", ".npz"]),
        (lambda p: (p / "empty").mkdir() or p / "empty", 3, ["empty", "No pictures", ".jpg", "the folder is empty"]),
        (lambda p: save_pictures(p / "one", 1), 2, ["There are 1 images", "Add images"]),
        (lambda p: save_pictures(p / "five", 5), 2, ["There are 5 images", "--batch-size 2"]),
        (lambda p: npz(p / "none.npz", 0), 3, ["none.npz"]),
    ],
)
def test_data_that_cannot_be_used(call: Call, tmp_path: Path, make: Any, code: int, says: list[str]) -> None:
    refused(call("pretrain", make(tmp_path), "--out", tmp_path / "run", "-q", *flags()), code, *says)


def test_pictures_that_cannot_be_read_are_named_and_a_few_are_allowed(call: Call, tmp_path: Path) -> None:
    folder = save_pictures(tmp_path / "photos", 30)
    (folder / "007.png").write_bytes(b"<html>")
    (folder / "011.png").write_bytes((folder / "011.png").read_bytes()[:100])
    run = tmp_path / "run"
    message = refused(call("pretrain", folder, "--out", run, "-q", *flags()), 3, "photos", "'007.png'", "--max-bad")
    assert "HTML" in message
    code, _, err = call("pretrain", folder, "--out", run, "-q", *flags(max_bad=0.1, epochs=1))
    assert (code, err) == (0, "")
    rows = [json.loads(line) for line in (run / "skipped.jsonl").read_text().splitlines()]
    assert [row["name"] for row in rows] == ["007.png", "011.png"]


def test_what_may_not_be_read_is_said(call: Call) -> None:
    with without_privileges() as home:
        closed = home / "photos"
        closed.mkdir()
        closed.chmod(0)
        refused(call("pretrain", closed, "--out", home / "run", "-q", *flags()), 3, "photos", "unreadable")
        file = npz(home / "d.npz")
        file.chmod(0)
        refused(call("pretrain", file, "--out", home / "run", "-q", *flags()), 3, "d.npz", "Permission denied")
        (home / "c.yaml").touch(mode=0)
        config = ["--config", home / "c.yaml"]
        refused(call("pretrain", file, "--out", home / "run", "-q", *config), 2, "c.yaml", "Permission denied")
        (home / "shut").mkdir(mode=0o500)
        refused(call("pretrain", file, "--out", home / "shut" / "run", "-q"), 6, "shut/run", "Permission denied")
        closed.chmod(0o700)


def test_names_are_shown_as_they_are(call: Call, tmp_path: Path) -> None:
    name = "[bold red]a:smile:b[/]"
    refused(call("pretrain", tmp_path / name, "--out", tmp_path / "run", "-q"), 2, name)


def test_a_folder_whose_name_is_not_utf8(call: Call, tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    save_pictures(folder, 16)
    out = tmp_path / "run"
    assert call("pretrain", folder, "--out", out, "-q", *flags(epochs=1))[0] == 0
    assert mocokit.load_run(out).config.data.spec == str(folder)
    assert call("pretrain", folder, "--out", out, "-q", "--resume", *flags(epochs=1))[0] == 0


def test_a_queue_longer_than_the_data_works_and_is_remarked_on(call: Call, data: Path, tmp_path: Path) -> None:
    code, _, err = call("pretrain", data, "--out", tmp_path / "run", *flags(queue_size=500, epochs=1))
    assert code == 0
    assert "K 500 exceeds the 50 images" in err
    assert "left out of its negatives" in err
    code, _, err = call("pretrain", data, "--out", tmp_path / "b", "--no-mask-source", *flags(queue_size=51, epochs=1))
    assert code == 0
    assert "scored as negatives (--no-mask-source)!" in err


# -------------------------------------------------------------------------------------------------- the folder


def test_an_occupied_folder_names_both_ways_out(call: Call, data: Path, finished: Path) -> None:
    before = contents(finished)
    refused(call("pretrain", data, "--out", finished, "-q", *flags()), 2, str(finished), "--resume", "--overwrite")
    assert contents(finished) == before


def test_places_that_are_no_folder(call: Call, data: Path, tmp_path: Path) -> None:
    refused(call("pretrain", data, "--out", data, "-q"), 2, "toy.npz is a file", "--out")
    refused(call("pretrain", data, "--out", data / "run", "-q"), 6, "toy.npz/run", "A file stands where")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    for mode in ([], ["--overwrite"]):
        refused(call("pretrain", data, "--out", tmp_path / "mine", "-q", *mode), 2, "thesis.tex", "another --out")
    refused(call("pretrain", data, "--out", tmp_path / "mine", "-q", "--resume"), 2, "no run to resume")
    refused(call("pretrain", data, "--out", tmp_path / "no", "-q", "--resume"), 2, "no run to resume")
    refused(call("pretrain", data, "--out", tmp_path / "no", "--resume", "--overwrite"), 2, "give one of them")
    assert not (tmp_path / "no").exists()


def test_a_folder_in_use(call: Call, data: Path, finished: Path) -> None:
    _, lock = claim_run(finished, "resume")
    with lock:
        for mode in ("--resume", "--overwrite"):
            result = call("pretrain", data, "--out", finished, "-q", mode)
            refused(result, 1, str(finished), f"in use by process {os.getpid()} on")
    assert call("pretrain", data, "--out", finished, "-q", "--resume")[0] == 0


@pytest.mark.parametrize(
    "mistake",
    [
        ["nothere"],
        ["DATA", "--lr", "-1"],
        ["DATA", "--backbone", "resnt18"],
        ["DATA", "--config", "nothere"],
        ["DATA", "--monitor", "nothere"],
        ["DATA", "--batch-size", "51"],
        ["BROKEN"],
    ],
)
def test_a_mistake_with_overwrite_costs_no_run(
    call: Call, data: Path, finished: Path, tmp_path: Path, mistake: list[str]
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "x.png").write_text("x")
    before = contents(finished)
    places = {"DATA": str(data), "BROKEN": str(broken)}
    words = [places.get(word, word) for word in mistake]
    code, _, err = call("pretrain", *words, "--out", finished, "--overwrite", "-q", *flags(batch_size=None))
    assert code in (2, 3)
    assert "Traceback" not in err
    after = contents(finished)
    cached = {name for name in after if name.startswith(("cache/", ".lock"))}
    assert {n: d for n, d in after.items() if n not in cached} == {n: d for n, d in before.items() if n not in cached}


def test_overwrite_replaces_the_run(call: Call, data: Path, finished: Path) -> None:
    assert call("pretrain", data, "--out", finished, "--overwrite", "-q", *flags(epochs=1, seed=3))[0] == 0
    assert verified_steps(finished / "checkpoints") == [4, 6]
    assert mocokit.load_run(finished).config.train.seed == 3
    assert (finished / "loss.jsonl").read_bytes().count(b"\n") == 6
    (finished / "notes.txt").write_text("mine")
    refused(call("pretrain", data, "--out", finished, "--overwrite", "-q", *flags()), 2, "notes.txt", "Move it away")


def test_a_folder_without_its_configuration_is_not_resumed_from_nothing(call: Call, data: Path, finished: Path) -> None:
    (finished / "config.yaml").unlink()
    before = verified_steps(finished / "checkpoints")
    refused(call("pretrain", data, "--out", finished, "--resume", "-q"), 6, "config.yaml is missing", "--overwrite")
    assert verified_steps(finished / "checkpoints") == before
    assert call("pretrain", data, "--out", finished, "--overwrite", "-q", *flags(epochs=1))[0] == 0


# ------------------------------------------------------------------------------------------- damage and resume


def exact(name: str, checkpoint: str) -> bool:
    """Whether a repeated run must give this file the same bytes.

    Not the manifest: it records how long metrics.jsonl was, and that has speeds in it.
    """
    return (name.startswith(checkpoint) and not name.endswith("MANIFEST.json")) or name == "loss.jsonl"


def test_a_damaged_newest_checkpoint_is_passed_over_and_replaced(call: Call, data: Path, finished: Path) -> None:
    whole = contents(finished)
    flip_bit(finished / "checkpoints" / f"step-{STEPS}" / "model.safetensors", 4000)
    code, _, err = call("pretrain", data, "--out", finished, "--resume", "-q")
    assert code == 0
    assert f"WARNING: passed over a damaged checkpoint: {finished}/checkpoints/step-12/model.safetensors" in err
    assert err.count("\n") == 1  # quiet about everything else
    (noted,) = map(json.loads, (finished / "passed-over.jsonl").read_text().splitlines())
    assert noted["step"] == 8
    assert "step-12/model.safetensors does not match" in noted["passed_over"][0]
    assert foreign_files(finished) == []
    for name, before in whole.items():
        if exact(name, "checkpoints/step-12"):
            assert (finished / name).read_bytes() == before


def test_only_damaged_checkpoints(call: Call, data: Path, finished: Path) -> None:
    for path in finished.glob("checkpoints/step-*/state.json"):
        flip_bit(path, 9)
    losses = (finished / "loss.jsonl").read_bytes()
    says = ("No usable checkpoint", "step-12/state.json", "step-8/state.json", "--overwrite")
    refused(call("pretrain", data, "--out", finished, "--resume", "-q"), 6, *says)
    refused(call("evaluate", finished, "--labelled", labelled_npz(finished.parent / "l.npz"), "-q"), 6, *says)
    assert (finished / "loss.jsonl").read_bytes() == losses


def test_other_settings_on_resume(call: Call, data: Path, finished: Path) -> None:
    words = ("pretrain", data, "--out", finished, "--resume", "-q")
    message = refused(call(*words, *flags(epochs=5, queue_size=21)), 2, "other settings")
    assert "--epochs: the run has 2, the command 5" in message
    assert "--queue-size: the run has 20, the command 21" in message
    assert "--dim" not in message
    refused(call(*words, "--config", "x.yaml"), 2, "x.yaml")
    path = finished / "config.yaml"
    text = path.read_text()
    path.write_text(text.replace("sgd_momentum: 0.9", "sgd_momentum: 0.8"))
    refused(call(*words), 2, "another configuration", "config.yaml")
    path.write_text(text[:300])
    refused(call(*words), 6, "config.yaml", "it was changed")
    path.write_text(text)
    assert json.loads((finished / "status.json").read_text())["state"] == "completed"
    assert call(*words, *flags())[0] == 0


def test_a_log_that_was_cut(call: Call, data: Path, finished: Path) -> None:
    path = finished / "loss.jsonl"
    path.write_bytes(path.read_bytes()[:100])
    refused(call("pretrain", data, "--out", finished, "--resume", "-q"), 6, "loss.jsonl", "100 bytes", "--overwrite")


# ---------------------------------------------------------------------------------------------- other endings


def test_a_run_that_diverges(call: Call, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    changes = {"lr": 1e38, "checkpoint_every": 1, "warmup_epochs": 0, "schedule": "constant"}
    message = refused(call("pretrain", data, "--out", out, "-q", *flags(**changes)), 4, "not finite at step", "--lr")
    step = int(re.findall(r"not finite at step (\d+)", message)[0])
    assert json.loads((out / "status.json").read_text())["state"] == "failed"
    assert verified_steps(out / "checkpoints")[-1] == step
    assert (out / "loss.jsonl").read_bytes().count(b"\n") == step
    refused(call("pretrain", data, "--out", out, "-q", "--resume"), 4, "not finite at step")


def test_more_memory_than_there_is(call: Call, data: Path, tmp_path: Path) -> None:
    for number, changes in enumerate(({"queue_size": 10**13}, {"dim": 10**13})):
        out = tmp_path / str(number)
        refused(call("pretrain", data, "--out", out, "-q", *flags(**changes)), 1, "Not enough memory", "--queue-size")
        assert json.loads((out / "status.json").read_text())["state"] == "failed"


def test_a_disk_without_room_for_the_checkpoints(call: Call, data: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "2m") as disk:
        big = flags(backbone="small-cnn-64-96", epochs=1)
        message = refused(call("pretrain", data, "--out", disk / "run", "-q", *big), 6, "room for", "need", "--out")
        assert len(re.findall(r"\d,\d{3},\d{3}", message)) >= 2
        many = npz(tmp_path / "many.npz", 3000)
        refused(
            call("pretrain", many, "--out", disk / "run", "-q", *flags(epochs=1)), 6, "No space", "2,352,000 needed"
        )
        assert call("pretrain", data, "--out", disk / "run", "-q", *flags(epochs=1))[0] == 0


def test_a_disk_that_fills_up_on_the_way(
    call: Call, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "disk", "2m") as disk:
        run, filler = disk / "run", disk / "filler"
        assert call("pretrain", data, "--out", run, "-q", *flags(epochs=1))[0] == 0
        whole = contents(run)
        shutil.rmtree(run / "checkpoints" / "step-6")
        filler.write_bytes(bytes((files.free_bytes(disk) or 0) - 16_384))  # room for logs, not for a checkpoint
        refused(call("pretrain", data, "--out", run, "-q", "--resume"), 6, "room for", "need")
        monkeypatch.setattr(pretraining, "check_room", lambda *_: None)  # as if others had filled the disk since
        message = refused(call("pretrain", data, "--out", run, "-q", "--resume"), 6, "No space left on device")
        assert f"Could not write {run}/checkpoints/step-6" in message
        assert verified_steps(run / "checkpoints") == [4]
        assert json.loads((run / "status.json").read_text())["state"] == "failed"
        filler.unlink()
        assert call("pretrain", data, "--out", run, "-q", "--resume")[0] == 0
        assert not list(run.rglob(".tmp-*"))
        for name, before in whole.items():
            if exact(name, "checkpoints/step-6"):
                assert (run / name).read_bytes() == before


@pytest.mark.parametrize(
    ("error", "code", "state", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted", "KeyboardInterrupt"),
        (ZeroDivisionError("a bug"), None, "failed", "ZeroDivisionError: a bug"),
        (OSError(5, "Input/output error", "x.png"), None, "failed", "OSError: [Errno 5] Input/output error: 'x.png'"),
    ],
)
@pytest.mark.parametrize("where", ["build_store", "run_training"])
def test_a_bug_or_an_interrupt_is_written_down_and_the_folder_given_back(
    call: Call,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    error: BaseException,
    code: int | None,
    state: str,
    message: str,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(pretraining, where, fail)
    words = ("pretrain", data, "--out", tmp_path / "run", "-q", *flags())
    if code is None:
        with pytest.raises(type(error)):  # a bug keeps its traceback
            call(*words)
    else:
        assert call(*words)[0] == code
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["message"]) == (state, message)
    claim_run(tmp_path / "run", "resume")[1].release()


def test_debug_shows_the_traceback_of_a_mistake_too(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("pretrain", tmp_path / "nothere", "--out", tmp_path / "run")
    for code, _, err in (call(*words, "--debug"), call("--debug", *words)):
        assert code == 2
        assert "Traceback" in err
        assert "is no generated set" in err.splitlines()[-1]
    monkeypatch.setenv("MOCOKIT_DEBUG", "1")
    assert "Traceback" in call(*words)[2]


def test_a_reader_of_stdout_that_leaves_is_no_error() -> None:
    words = [sys.executable, "-m", "mocokit", "doctor"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


# ------------------------------------------------------------------------------------------------- evaluation


def test_runs_and_labels_that_cannot_be_used(call: Call, finished: Path, data: Path, tmp_path: Path) -> None:
    labelled = labelled_npz(tmp_path / "labelled.npz")

    def evaluate(*words: Any) -> tuple[int, str, str]:
        return call("evaluate", "-q", *words)

    refused(evaluate(tmp_path / "no", "--labelled", labelled), 2, "no does not exist", "mocokit pretrain")
    refused(evaluate(tmp_path, "--labelled", labelled), 2, "is not a run folder")
    refused(evaluate(data, "--labelled", labelled), 2, "is not a run folder")
    refused(evaluate(finished, "--labelled", tmp_path / "no"), 2, "does not exist")
    refused(evaluate(finished, "--labelled", data), 3, "toy.npz has no labels", "ROOT/CLASS", "--label-column")
    one = labelled_npz(tmp_path / "one.npz", classes=1)
    refused(evaluate(finished, "--labelled", one), 3, "one.npz has one class only")
    for flag, value, says in (
        ("--labels-per-class", "0", "--labels-per-class"),
        ("--labels-per-class", "few", "'few'"),
        ("--labels-per-class", "500", "fewer than the 500"),
        ("--draws", "0", "--draws"),
        ("--k", "0", "--k"),
        ("--knn-temperature", "0", "--knn-temperature"),
    ):
        code = 3 if value == "500" else 2
        refused(evaluate(finished, "--labelled", labelled, flag, value), code, says)
    (finished / "run.json").write_text('{"format": 99}')
    refused(evaluate(finished, "--labelled", labelled), 2, "another version")


def test_weights_and_fine_tunings_that_cannot_be_used(call: Call, finished: Path, tmp_path: Path) -> None:
    labelled = labelled_npz(tmp_path / "labelled.npz")
    (tmp_path / "w.pth").write_bytes(b"x")
    judge = ("evaluate", "-q", finished, "--labelled", labelled)
    refused(call(*judge, "--baseline", tmp_path / "w.pth"), 3, "w.pth could not be read safely", "save_file")
    refused(call(*judge, "--baseline", tmp_path / "no.safetensors"), 2, "no.safetensors are no file")
    refused(call(*judge, "--baseline", "timm:resnot"), 2, "timm has no model 'resnot'")
    refused(call(*judge, "--classifier", "svm"), 2, "--classifier")
    refused(call(*judge, "--random-seeds", "0"), 2, "--random-seeds")
    refused(call("evaluate", "-q", finished, finished, "--labelled", labelled), 2, "repeats", "one run and not two")
    tune = ("finetune", "-q", finished, "--labelled", labelled, "--out", tmp_path / "ft")
    for words, code, says in (
        (("--labels-per-class", "0"), 2, "--labels-per-class"),
        (("--labels-per-class", "5", "--label-fraction", "0.1"), 2, "either as"),
        (("--label-fraction", "7"), 2, "--label-fraction"),
        (("--labels-per-class", "900"), 3, "fewer than the 900"),
        (("--lr", "fast"), 2, "Got 'fast'"),
        (("--lr", "-1"), 2, "--lr"),
        (("--steps", "0"), 2, "--steps"),
        (("--layer-decay", "2"), 2, "--layer-decay"),
        (("--draws", "0"), 2, "--draws"),
        (("--threads", "0"), 2, "--threads"),
    ):
        refused(call(*tune, *words), code, says)
    assert not (tmp_path / "ft").exists()
    refused(call("predict", "-q", finished, labelled, "--out", tmp_path / "p.csv"), 2, "mocokit finetune")
    refused(call("predict", "-q", tmp_path / "no", labelled, "--out", tmp_path / "p.csv"), 2, "mocokit finetune")


def test_few_labels_from_the_command_line(call: Call, finished: Path, tmp_path: Path) -> None:
    labelled = labelled_npz(tmp_path / "labelled.npz")
    tune = ("finetune", finished, "--labelled", labelled, "--out", tmp_path / "ft", "--labels-per-class", "2,8")
    code, out, err = call(*tune, "--draws", "1", "--steps", "5", "--lr", "0.001")
    assert code == 0
    assert out.splitlines()[-1] == f"Next: mocokit predict {tmp_path}/ft IMAGES --out predictions.csv"
    assert "16  fine-tuned" in out
    assert "8/8  frozen random init" in err
    code, again, err = call(*tune, "--draws", "1", "--steps", "5", "--lr", "0.001", "--json", "-q")
    assert (code, err) == (0, "")
    assert json.loads(again)["table"] in out
    code, out, _ = call("predict", tmp_path / "ft", labelled, "--out", tmp_path / "p.csv", "-q")
    assert code == 0
    assert "Expected calibration error of the model: " in out
    assert out.splitlines()[-1] == f"Done: {tmp_path}/p.csv"


def test_a_run_without_a_checkpoint_yet(call: Call, data: Path, tmp_path: Path) -> None:
    refused(call("pretrain", data, "--out", tmp_path / "run", "-q", *flags(backbone="x")), 2)
    labelled = labelled_npz(tmp_path / "labelled.npz")
    refused(call("evaluate", "-q", tmp_path / "run", "--labelled", labelled), 6, "config.yaml")


# ------------------------------------------------------------------------------------------------------ output


def test_results_go_to_stdout_and_everything_else_to_stderr(call: Call, data: Path, tmp_path: Path) -> None:
    code, out, err = call("pretrain", data, "--out", tmp_path / "run", *flags(epochs=1))
    assert code == 0
    assert out.splitlines()[0] == f"Done: {tmp_path}/run/checkpoints/step-6"
    assert out.splitlines()[1].startswith(f"Next: mocokit evaluate {tmp_path}/run --labelled")
    assert "50 images of toy.npz" in err
    assert "step 6/6" in err
    code, out, err = call("pretrain", data, "--out", tmp_path / "b", "--json", "-q", *flags(epochs=1))
    assert (code, err) == (0, "")
    assert json.loads(out) == {"run": str(tmp_path / "b"), "step": 6, "checkpoint": "step-6"}


def test_doctor(call: Call) -> None:
    code, out, _ = call("doctor")
    assert code == 0
    assert "torch" in out
    code, out, _ = call("doctor", "--json")
    report = json.loads(out)
    assert code == 0
    assert {"python", "packages", "cores", "findings"} <= report.keys()
    assert str(Path.home()) not in out


def test_a_dry_run_says_what_would_happen_and_writes_nothing(call: Call, data: Path, tmp_path: Path) -> None:
    before = contents(tmp_path)
    out = tmp_path / "run"
    code, text, _ = call("pretrain", data, "--out", out, "--dry-run", *flags(queue_size=24))
    assert code == 0
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in text.splitlines() if re.match(r"[a-z ]+  +", line))
    assert lines["images"] == "50"
    assert lines["steps"] == "12 (6 an epoch)"
    assert lines["a key lives"] == "3 steps (K / keys of a step)"
    assert lines["chance loss"].startswith(f"{np.log(25):.3f}")
    code, text, _ = call("pretrain", data, "--out", out, "--dry-run", "--json", *flags(queue_size=24))
    plan = json.loads(text)
    assert (plan["images"], plan["total_steps"], plan["config"]["contrast"]["K"]) == (50, 12, 24)
    assert plan["chance_loss"] == pytest.approx(np.log(25))
    assert plan["pixel_bytes"] == 50 * 3 * 16 * 16
    refused(call("pretrain", tmp_path / "no", "--out", out, "--dry-run"), 2, "does not exist")
    assert contents(tmp_path) == before

"""No code from data: what our source may not contain, and what no file that we write contains."""

from __future__ import annotations

import ast
import pickletools
import zipfile
from pathlib import Path

import mocokit
from tests.toy import OPTIONS, contents, labelled_npz

SOURCE = Path(mocokit.__file__).parent
FORBIDDEN_CALLS = {
    "eval", "exec", "compile", "__import__", "torch.load", "torch.save", "torch.hub.load", "yaml.load",
    "yaml.unsafe_load", "yaml.full_load", "pickle.load", "pickle.loads", "pickle.dump", "pickle.dumps", "marshal.loads",
    "marshal.load", "shelve.open", "joblib.load", "joblib.dump", "dcp.load", "os.system", "os.popen",
    "subprocess.getoutput", "tarfile.extract", "tarfile.extractall", "shutil.unpack_archive", "runpy.run_path",
}  # fmt: skip
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
ALLOWED = {("training/foreign_child.py", "torch.load")}
"""The one place where a pickle is opened: a child process with `weights_only=True`."""


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def findings(path: Path, text: str) -> list[str]:
    """What a source file does that none of ours may."""
    found = []
    for node in ast.walk(ast.parse(text)):
        where = f"{path.as_posix()}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            modules = {name.split(".")[0] for name in names} | {(getattr(node, "module", "") or "").split(".")[0]}
            found += [f"{where} imports {name}" for name in modules & FORBIDDEN_MODULES]
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        if name in FORBIDDEN_CALLS:
            safe = any(k.arg == "weights_only" and getattr(k.value, "value", None) is True for k in node.keywords)
            if (path.as_posix(), name) not in ALLOWED or not safe:
                found.append(f"{where} calls {name}")
        for keyword in node.keywords:
            value = getattr(keyword.value, "value", None)
            if (keyword.arg, value) in {("shell", True), ("allow_pickle", True), ("weights_only", False)}:
                found.append(f"{where} passes {keyword.arg}={value}")
        if name in ("np.load", "numpy.load") and not any(k.arg == "allow_pickle" for k in node.keywords):
            found.append(f"{where} calls np.load without allow_pickle=False")
    return found


def test_our_source_does_nothing_of_the_kind() -> None:
    found, looked_at = [], 0
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text("utf-8")
        found += findings(path.relative_to(SOURCE), text)
        looked_at += 1
    assert found == []
    assert looked_at >= 80


def test_a_pickle_is_opened_in_one_place() -> None:
    calls = [
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and dotted(node.func) == "torch.load"
    ]
    assert calls == ["training/foreign_child.py"]


def test_the_search_finds_what_it_is_for() -> None:
    bad = """
import pickle, numpy as np
from dill import loads
torch.load(path)
torch.load(path, weights_only=False)
yaml.load(text, Loader=yaml.Loader)
np.load(path)
subprocess.run(words, shell=True)
eval(text)
"""
    assert len(findings(Path("training/foreign_child.py"), bad)) >= 9


def looks_like_a_pickle(data: bytes) -> bool:
    """Whether bytes parse as a pickle with at least one opcode that builds something."""
    if data[:1] not in (b"\x80", b"c", b"(", b"}", b"]") or data[-1:] != b".":
        return False
    try:
        return any(op.name in ("GLOBAL", "STACK_GLOBAL", "REDUCE", "PROTO") for op, _, _ in pickletools.genops(data))
    except (ValueError, IndexError):
        return False


def test_no_file_that_a_run_or_an_evaluation_writes_holds_a_pickle(tmp_path: Path) -> None:
    data = labelled_npz(tmp_path / "two.npz")
    run = mocokit.pretrain(data, tmp_path / "run", quiet=True, monitor=str(data), **OPTIONS)
    mocokit.evaluate(run, data, labels_per_class=3, draws=3, quiet=True)
    found = contents(run.path)
    assert len(found) >= 20
    for name, data_bytes in found.items():
        assert not looks_like_a_pickle(data_bytes), name
        assert not zipfile.is_zipfile(run.path / name), name
        assert b"\x80\x04\x95" not in data_bytes[:64], name

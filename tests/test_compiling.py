"""What numba keeps can be damaged, unwritable or nowhere: the same numbers come out and nothing ends."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mocokit.data.compiling import _Files

CODE = "from mocokit.data.randomness import hash_words; print(hash_words(7, 8, 9)[0])"


def hashed(cache: Path, *, limit: Callable[[], None] | None = None, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env=os.environ | {"NUMBA_CACHE_DIR": str(cache)} | environment,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limit,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.slow
def test_damaged_files_are_compiled_anew(tmp_path: Path) -> None:
    expected = hashed(tmp_path)
    kept = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert {path.suffix for path in kept} == {".nbc", ".nbi"}
    sizes = [path.stat().st_size for path in kept]
    for cut in (lambda size: 0, lambda size: size // 2, lambda size: size - 1):
        for path, size in zip(kept, sizes, strict=True):
            os.truncate(path, cut(size))
        assert hashed(tmp_path) == expected
        assert [path.stat().st_size for path in kept] == sizes, "what was damaged is not mended"


@pytest.mark.slow
def test_a_place_that_takes_no_bytes_is_done_without(tmp_path: Path) -> None:
    def no_bytes() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    assert hashed(tmp_path / "full", limit=no_bytes) == hashed(tmp_path / "fine")
    assert not [path for path in (tmp_path / "full").rglob("*") if path.is_file()]


@pytest.mark.slow
def test_no_place_at_all_is_done_without(tmp_path: Path) -> None:
    nowhere = hashed(tmp_path, NUMBA_CACHE_LOCATOR_CLASSES="_ZipCacheLocator")
    assert not list(tmp_path.iterdir())
    assert nowhere == hashed(tmp_path)


def test_another_source_never_finds_what_an_earlier_one_left(tmp_path: Path) -> None:
    earlier, later = (_Files(str(tmp_path), "loop", source) for source in ("earlier", "later"))
    earlier.save("types", "earlier code")
    later._save_index({"types": "loop.nowhere.nbc"})  # killed before the code was there
    assert later.load("types") is None
    later.save("types", "later code")
    assert (later.load("types"), earlier.load("types")) == ("later code", None)
    assert len(list(tmp_path.glob("*.nbc"))) == 2

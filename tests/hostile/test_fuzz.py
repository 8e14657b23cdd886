"""A fixed slice of `attacks.fuzz`: every reader bears files that were changed at random."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from attacks import fuzz


@pytest.mark.slow
@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_readers_return_or_refuse(tmp_path: Path, target: str) -> None:
    done = fuzz.fuzz(target, tmp_path, count=300)
    assert done.findings == ()
    assert done.inputs == 300
    assert done.refused > 0 or target == "config"
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_is_found_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def worse(data: bytes, place: Path) -> None:
        if data[:1] != b"{":
            raise KeyError("a bug")

    monkeypatch.setattr(fuzz, "TARGETS", {"json": worse})
    told = tmp_path / "told"
    fuzz._work("json", 0, 60, 200, None, tmp_path, told)
    assert '"input ' in told.read_text()
    kept = sorted(tmp_path.glob("json-0-*"))
    assert kept
    number = int(kept[0].name.rpartition("-")[2])
    again = fuzz.inputs_of("json", 0)
    assert [next(again) for _ in range(number + 1)][-1] == kept[0].read_bytes()


def test_a_mutation_is_another_file() -> None:
    rng, data = random.Random(0), bytes(range(256)) * 4
    made = [fuzz.mutate(rng, data, [data[::-1]]) for _ in range(200)]
    assert sum(one != data for one in made) > 190
    assert len(set(made)) > 190

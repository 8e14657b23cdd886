"""The compiled loops against the operations on tensors, bit by bit, and work spread over threads."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mocokit.data.rendering import render_by_tensors, render_compiled
from mocokit.data.threads import spread
from mocokit.data.views import ViewConfig, draw_parameters, view_recipe
from tests.test_views import EVERYTHING, RECIPES, pictures, same_bits

chances = st.sampled_from([0.0, 0.5, 1.0])


@st.composite
def configs(draw: Any) -> ViewConfig:
    """Any recipe's view at any size, with every chance off, on or even."""
    size = draw(st.integers(2, 40))
    config = draw(st.sampled_from([*(view_recipe(name, 32) for name in RECIPES), EVERYTHING]))
    return replace(
        config,
        size=size,
        blur_kernel=draw(st.integers(0, min(6, size - 1))) * 2 + 1,
        blur_sigma=draw(st.sampled_from([(0.1, 2.0), (0.01, 0.02), (3.0, 9.0)])),
        jitter=draw(chances),
        hue=draw(st.sampled_from([0.0, 0.1, 0.5])),
        brightness=draw(st.sampled_from([0.0, 0.4, 5.0])),
        contrast=draw(st.sampled_from([0.0, 0.4, 5.0])),
        saturation=draw(st.sampled_from([0.0, 0.4, 5.0])),
        **{name: draw(chances) for name in ("flip", "grayscale", "channel_swap", "blur", "solarize")},
        grayscale_first=draw(st.booleans()),
        mean=(0.1, 0.5, 0.9),
        std=(0.3, 1.0, 2.0),
    )


@settings(max_examples=60, deadline=None)
@given(config=configs(), side=st.sampled_from([1, 2, 7, 20, 33, 90]), threads=st.integers(1, 5))
def test_compiled_views_have_the_bits_of_tensor_operations(config: ViewConfig, side: int, threads: int) -> None:
    images, extents, ids = pictures(9, side)
    drawn = draw_parameters(config, extents.numpy(), ids, seed=side, epoch=1, views=(0, 1, 4))
    compiled = render_compiled(config, images, drawn, threads=threads)
    assert compiled.shape == (3, 9, 3, config.size, config.size)
    assert same_bits(compiled, render_by_tensors(config, images, drawn))


@pytest.mark.parametrize("recipe", RECIPES)
def test_large_views_on_threads_have_the_same_bits(recipe: str) -> None:
    config = view_recipe(recipe, 224)
    images, extents, ids = pictures(3, 250)
    drawn = draw_parameters(config, extents.numpy(), ids, seed=0, epoch=0, views=(0, 1))
    expected = render_by_tensors(config, images, drawn)
    for threads in (1, 2, 9):
        assert same_bits(render_compiled(config, images, drawn, threads=threads), expected)


def test_canvases_need_not_be_contiguous() -> None:
    images, extents, ids = pictures(4, 20)
    drawn = draw_parameters(EVERYTHING, extents.numpy(), ids, seed=0, epoch=0, views=(0,))
    other = images.contiguous(memory_format=torch.channels_last)
    assert same_bits(render_compiled(EVERYTHING, other, drawn), render_compiled(EVERYTHING, images, drawn))


@pytest.mark.slow
def test_a_processor_without_vectors_gives_the_same_bits(tmp_path: Path) -> None:
    """Compiled anew for the plainest processor of this kind: no AVX, no fused multiply-add."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from tests import test_views as t\n"
        "for recipe, digest in (('moco-v1', '90d7821398f6e816'), ('moco-v2', 'fa40cce11697e875')):\n"
        "    t.test_bits_are_those_of_earlier_versions(recipe, digest)\n"
        "import numba; print(numba.core.config.CPU_NAME)"
    )
    plain = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parents[1])],
        env=os.environ | plain,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "generic\n"), done.stderr
    assert list(tmp_path.rglob("*.nbc")), "nothing was compiled anew"


@given(count=st.integers(1, 30), threads=st.integers(1, 8))
def test_work_is_spread_over_everything_once(count: int, threads: int) -> None:
    done = np.zeros(count, np.int64)

    def work(rows: slice) -> None:
        done[rows] += 1

    spread(work, count, threads=threads)
    assert (done == 1).all()


@pytest.mark.parametrize("bad", range(3))
def test_the_error_of_any_share_is_raised_after_all_have_ended(bad: int) -> None:
    ended = []

    def work(rows: slice) -> None:
        if rows.start == bad:
            raise ValueError(f"share {rows.start}")
        ended.append(rows.start)

    with pytest.raises(ValueError, match=f"share {bad}"):
        spread(work, 3, threads=3)
    assert sorted(ended) == [share for share in range(3) if share != bad]

"""Freed memory is kept: the same large tensors, allocated again, touch no new pages."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mocokit.training.allocator import keep_freed_memory

COUNT = """
import resource, sys, torch
from mocokit.training.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def work():
    for _ in range(20):
        torch.ones(16 * 2**20)  # 64 MiB
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", COUNT, mode], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not keep_freed_memory(), reason="this C library's allocator can't be told to keep freed memory")
def test_large_tensors_allocated_again_touch_no_new_pages() -> None:
    default, kept = faults("default"), faults("keep")
    assert default > 20
    assert kept < 0.1 * default, (kept, default)


RELEASE = """
import torch
from pathlib import Path
from mocokit.training.allocator import keep_freed_memory, release_freed_memory
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 // 2**20
keep_freed_memory()
parts = [torch.ones(2**20) for _ in range(64)]  # 4 MiB each
last = torch.ones(2**20)  # on top of them: without it the heap would simply be cut off
del parts
before = resident()
release_freed_memory()
print(before - resident())
"""


@pytest.mark.skipif(not keep_freed_memory(), reason="this C library's allocator keeps nothing")
def test_kept_memory_can_be_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", RELEASE], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 200

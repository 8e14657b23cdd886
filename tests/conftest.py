"""One thread per test process: several processes with several OpenMP threads each would wait for one another."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and for the processes that tests start

from mocokit.data.rendering import compile_views


def pytest_configure() -> None:
    """Compile the view loops now (once on a machine): tests that kill a process expect it to be training by then."""
    compile_views()

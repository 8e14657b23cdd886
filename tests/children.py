"""Child processes forked from a server that has done the slow imports and computed nothing."""

from __future__ import annotations

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["mocokit.cli", "mocokit.api", "torch._dynamo", "tests.crash.harness"])

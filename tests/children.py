"""Child processes forked from a server that has done the slow imports and started no thread."""

from __future__ import annotations

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preloaded"])

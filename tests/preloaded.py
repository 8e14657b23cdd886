"""What the fork server imports once, so that its children begin with their work and not with seconds of imports.

It starts no thread: one view of a single pixel is all it computes, for the compiled loops to be in memory.
"""

from importlib import import_module

from mocokit import api
from mocokit.data.rendering import compile_views

for name in api.__all__:
    getattr(api, name)
for module in ("mocokit.cli", "tests.crash.harness"):
    import_module(module)
compile_views()

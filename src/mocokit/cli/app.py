"""The application that the commands are added to, and what their flags share."""

from __future__ import annotations

from cyclopts import App, Group, Parameter

from mocokit import __version__

_EXIT_CODES = (
    "Exit codes: 0 done, 1 failed, 2 usage or configuration, 3 data, 4 diverged, 5 optional dependency missing, "
    "6 storage, 130 / 143 stopped by SIGINT / SIGTERM after saving. `--debug` shows tracebacks."
)

app = App(
    name="mocokit",
    version=__version__,
    help="Learn image representations without labels by momentum contrast, and prove what was learned.\n\n"
    "Start with: `mocokit demo`",
    help_epilogue=_EXIT_CODES,
    help_format="markdown",
    suppress_keyboard_interrupt=False,  # `main` handles it
)

REQUIRED = Group("Required", sort_key=0)
OUTPUT = Group("Output", sort_key=6)
Flag = Parameter(negative=(), group=OUTPUT)

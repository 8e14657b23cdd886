"""The verbs `search serve` and `search page`: an index in a browser."""

from __future__ import annotations

import importlib
import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mocokit import files
from mocokit.api.searching import encoder_of, index_path, query_vector
from mocokit.errors import MissingDependencyError, StorageError, UsageError
from mocokit.retrieval.encode import Floats
from mocokit.retrieval.index import open_index
from mocokit.retrieval.pages import static_page
from mocokit.retrieval.pictures import Pictures
from mocokit.training import runlog

if TYPE_CHECKING:
    from starlette.applications import Starlette

ADDRESS = "127.0.0.1"


def search_app(index: str | Path, token: str, *, device: str = "auto", quiet: bool = False) -> Starlette:
    """The search page and its API as an ASGI application. Raises UsageError, MissingDependencyError, DamagedError."""
    _require("starlette")
    from mocokit.retrieval.serve import make_app

    opened = open_index(index_path(index))
    frozen = encoder_of(opened, device)
    progress = runlog.Progress(quiet=quiet)

    def encode(data: bytes) -> Floats:
        return query_vector(frozen, data, "The picture")

    return make_app(opened, Pictures(opened, progress.warn), encode, token)


def search_serve(
    index: str | Path, *, port: int = 8765, token: str | None = None, device: str = "auto", quiet: bool = False
) -> None:
    """Serve the search page on 127.0.0.1 until interrupted; prints its address. port 0: any free one.

    Raises UsageError (a port that is taken or out of range), MissingDependencyError, DamagedError.
    """
    if not 0 <= port <= 65_535:
        raise UsageError(f"--port must lie in [0, 65535]. Got {port}.")
    if token is not None and (len(token) < 8 or not token.isascii() or not token.isalnum()):
        raise UsageError("--token must be 8 letters and digits at least.")
    uvicorn = _require("uvicorn")
    secret = token or secrets.token_urlsafe(18).replace("-", "a").replace("_", "b")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((ADDRESS, port))
        except OSError as error:
            raise UsageError(
                f"Port {port} of this machine can't be used ({error.strerror}). Choose another --port."
            ) from error
        listener.listen(64)  # from here on a browser waits for the rest instead of being refused
        app = search_app(index, secret, device=device, quiet=quiet)
        print(f"http://{ADDRESS}:{listener.getsockname()[1]}/?token={secret}", flush=True)
        runlog.Progress(quiet=quiet).say("Open this address in a browser on this machine. Stop with Ctrl-C.")
        config = uvicorn.Config(app, log_level="error", access_log=False, timeout_keep_alive=5, limit_concurrency=64)
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        listener.close()


def search_page(index: str | Path, out: str | Path, *, quiet: bool = False) -> Path:
    """Write the search page with up to 5,000 images inside, for a browser without a server.

    Raises UsageError, DamagedError, StorageError.
    """
    path = Path(out)
    if path.suffix != ".html":
        raise UsageError(f"--out must end in .html. Got {str(out)!r}.")
    if path.is_dir():
        raise StorageError(f"{path} is a folder. Choose another --out.")
    opened = open_index(index_path(index))
    html = static_page(opened, Pictures(opened, runlog.Progress(quiet=quiet).warn))
    files.make_folder(path.parent)
    files.write_text(path, html)
    return path


def _require(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(f"search serve needs {name}: pip install 'mocokit[serve]'") from error

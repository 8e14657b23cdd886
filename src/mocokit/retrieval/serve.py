"""The local search page and its JSON API, for a browser on this machine.

It reads and never writes. Pictures are named by the ids of an index, never by paths. Every reply needs the token that
the start printed (once in the address, then in a cookie; or as `Authorization: Bearer`), and a Host that is this
machine, so neither another user nor a page from elsewhere can ask. An uploaded picture is decoded within the limits
of `data/decode.py` and forgotten.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from mocokit.data.decode import DecodeLimits
from mocokit.errors import DataError, UsageError
from mocokit.retrieval import pages, query
from mocokit.retrieval.encode import Floats
from mocokit.retrieval.index import SearchIndex
from mocokit.retrieval.openapi import openapi
from mocokit.retrieval.pictures import Pictures

THUMBNAIL = 192
MAX_PAGE = 200
MAX_SKIP = 100_000
COOKIE = "mocokit-search"
_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}
Encode = Callable[[bytes], Floats]
"""The bytes of a picture -> its unit vector [1, D]. Raises DataError."""


def make_app(index: SearchIndex, pictures: Pictures, encode: Encode, token: str) -> Starlette:
    """The application. encode is called by one request at a time."""
    html, policy = pages.server_page()
    one_at_a_time = anyio.CapacityLimiter(1)

    async def home(request: Request) -> Response:
        return HTMLResponse(html, headers={"Content-Security-Policy": policy + "; frame-ancestors 'none'"})

    async def describe(request: Request) -> Response:
        return JSONResponse(openapi())

    async def about(request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(pages.facts, index))

    async def images(request: Request) -> Response:
        k, skip, chosen = _paging(request)
        return JSONResponse(await run_in_threadpool(_browse, index, k, skip, chosen))

    async def similar(request: Request) -> Response:
        k, skip, chosen = _paging(request)
        sample = _sample(request.query_params.get("id", ""))
        return JSONResponse(await run_in_threadpool(_similar, index, sample, k, skip, chosen))

    async def upload(request: Request) -> Response:
        k, skip, chosen = _paging(request)
        data = await _body(request, DecodeLimits().max_bytes)
        vector = await anyio.to_thread.run_sync(encode, data, limiter=one_at_a_time)
        return JSONResponse(await run_in_threadpool(_answer, index, vector, k, skip, chosen, None))

    async def thumbnail(request: Request) -> Response:
        sample = _sample(request.path_params["sample"])
        return _picture(await run_in_threadpool(pictures.thumbnail, sample, THUMBNAIL))

    async def preview(request: Request) -> Response:
        sample = _sample(request.path_params["sample"])
        return _picture(await run_in_threadpool(pictures.preview, sample, THUMBNAIL))

    async def picture(request: Request) -> Response:
        sample = _sample(request.path_params["sample"])
        return _picture(await anyio.to_thread.run_sync(pictures.full, sample, limiter=one_at_a_time))

    async def refused(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": str(error)}, status_code=400)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"error": error.detail}, status_code=error.status_code, headers=error.headers)

    return Starlette(
        routes=[
            Route("/", home),
            Route("/openapi.json", describe),
            Route("/api/index", about),
            Route("/api/images", images),
            Route("/api/similar", similar, methods=["GET"]),
            Route("/api/similar", upload, methods=["POST"]),
            Route("/api/thumbnail/{sample}", thumbnail),
            Route("/api/preview/{sample}", preview),
            Route("/api/picture/{sample}", picture),
        ],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=_guard(token))],
        exception_handlers={UsageError: refused, DataError: refused, HTTPException: http_error},
    )


Next = Callable[[Request], Awaitable[Response]]


def _guard(token: str) -> Callable[[Request, Next], Awaitable[Response]]:
    """Who may ask: this machine's own name as Host, and the token."""

    async def guard(request: Request, call_next: Next) -> Response:
        host = request.headers.get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if name not in _HOSTS:
            reply: Response = JSONResponse({"error": "This page is for this machine alone."}, status_code=403)
        elif request.url.path == "/" and _same(request.query_params.get("token"), token):
            reply = RedirectResponse("/", status_code=303)
            reply.set_cookie(COOKIE, token, httponly=True, samesite="strict", path="/")
        elif _same(request.cookies.get(COOKIE), token) or _same(_bearer(request), token):
            reply = await call_next(request)
        else:
            told = "Open the address that `mocokit search serve` printed; it holds the token."
            reply = JSONResponse({"error": told}, status_code=401)
        for key, value in _HEADERS.items():
            reply.headers[key] = value
        reply.headers.setdefault("Cache-Control", "no-store")
        return reply

    return guard


def _same(given: str | None, token: str) -> bool:
    return given is not None and secrets.compare_digest(given.encode("utf-8", "replace"), token.encode())


def _bearer(request: Request) -> str | None:
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    return value if kind.lower() == "bearer" else None


def _paging(request: Request) -> tuple[int, int, query.Filter]:
    """k, skip and the filter of a request. Raises UsageError."""
    given = request.query_params
    k, skip = _whole(given.get("k", "24"), "k", 1, MAX_PAGE), _whole(given.get("skip", "0"), "skip", 0, MAX_SKIP)
    chosen = query.Filter(labels=tuple(given.getlist("label")[:100]), groups=tuple(given.getlist("group")[:100]))
    return k, skip, chosen


def _whole(text: str, name: str, low: int, high: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and low <= int(text) <= high):
        raise UsageError(f"{name} must be a whole number from {low} to {high}.")
    return int(text)


def _sample(text: str) -> int:
    """An id. Raises UsageError when the text is none."""
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        raise UsageError("id must be the number of an image, as the API gives it.")
    return int(text)


async def _body(request: Request, limit: int) -> bytes:
    """The bytes that were sent. Stops reading, with 413, as soon as they are too many."""
    too_large = HTTPException(413, f"The picture is larger than {limit:,} bytes.")
    declared = request.headers.get("content-length", "0")
    if not declared.isdigit() or len(declared) > 18 or int(declared) > limit:
        raise too_large
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise too_large
            parts.append(part)
    except ClientDisconnect as error:
        raise HTTPException(400, "The picture was not sent to its end.") from error
    return b"".join(parts)


def _browse(index: SearchIndex, k: int, skip: int, chosen: query.Filter) -> dict[str, Any]:
    may = query.allowed(index, chosen)
    rows = (index.rows.alive if may is None else may).nonzero()[0]
    hits = [query.hit(index, row, 0.0).to_dict() | {"score": None} for row in rows[skip : skip + k].tolist()]
    return {"asked": None, "hits": hits, "more": len(rows) > skip + k}


def _similar(index: SearchIndex, sample: int, k: int, skip: int, chosen: query.Filter) -> dict[str, Any]:
    row = index.rows.row_of(sample)
    if row is None:
        raise HTTPException(404, "There is no image with this id.")
    return _answer(index, query.stored_vector(index, sample), k, skip, chosen, row)


def _answer(
    index: SearchIndex, vector: Floats, k: int, skip: int, chosen: query.Filter, row: int | None
) -> dict[str, Any]:
    """The hits, and whether there are more: one more than asked for is looked up."""
    asked = None if row is None else query.hit(index, row, 1.0)
    hits = query.nearest(
        index, vector, k + 1, chosen=chosen, without=[asked.id] if asked is not None else [], skip=skip
    )[0]
    shown = None if asked is None else asked.to_dict() | {"score": None}
    return {"asked": shown, "hits": [one.to_dict() for one in hits[:k]], "more": len(hits) > k}


def _picture(made: tuple[str, bytes] | None) -> Response:
    if made is None:
        raise HTTPException(404, "There is no readable picture with this id.")
    kind, data = made
    return Response(data, media_type=kind, headers={"Cache-Control": "private, max-age=3600"})

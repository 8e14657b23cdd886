"""The API of the search page as an OpenAPI 3.1 document."""

from __future__ import annotations

import importlib.metadata
from typing import Any

_ID = {"type": "string", "pattern": "^[0-9]{1,19}$", "description": "An image's id: 63 bits, as text."}
_PAGING = [
    {"name": "k", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 200, "default": 24}},
    {"name": "skip", "in": "query", "schema": {"type": "integer", "minimum": 0, "maximum": 100_000, "default": 0}},
    {"name": "label", "in": "query", "schema": {"type": "array", "items": {"type": "string"}}},
    {"name": "group", "in": "query", "schema": {"type": "array", "items": {"type": "string"}}},
]


def _reply(name: str, what: str) -> dict[str, Any]:
    return {"description": what, "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}}


def _get(summary: str, ok: dict[str, Any], parameters: list[Any] | None = None) -> dict[str, Any]:
    errors = {code: _reply("Error", what) for code, what in _ERRORS.items()}
    return {"summary": summary, "parameters": parameters or [], "responses": {"200": ok, **errors}}


_ERRORS = {
    "400": "A value that can't be used, or a picture that can't be read",
    "401": "No token",
    "403": "Another host",
    "404": "No such image",
}
_IMAGE = {"description": "The picture, encoded anew", "content": {"image/png": {}, "image/jpeg": {}}}
_MOVING = {"description": "An animation", "content": {"image/webp": {}, "image/png": {}, "image/jpeg": {}}}


def openapi() -> dict[str, Any]:
    """The document, as JSON values."""
    hits, index = _reply("Hits", "Images"), _reply("Index", "The index")
    one = {"name": "id", "in": "path", "required": True, "schema": _ID}
    upload = _get("The images most like the picture that is sent", hits, _PAGING)
    upload["requestBody"] = {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
    upload["responses"]["413"] = _reply("Error", "The picture is too large")
    text = {"type": "string"}
    importlib.metadata.version("mocokit")
    nullable = {"type": ["string", "null"]}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mocokit search",
            "version": importlib.metadata.version("mocokit"),
            "license": {"name": "Apache-2.0"},
        },
        "security": [{"cookie": []}, {"bearer": []}],
        "paths": {
            "/api/index": {"get": _get("What is searched", index)},
            "/api/images": {"get": _get("All images, in the order they were added", hits, _PAGING)},
            "/api/similar": {
                "get": _get(
                    "The images most like a stored one",
                    hits,
                    [{"name": "id", "in": "query", "required": True, "schema": _ID}, *_PAGING],
                ),
                "post": upload,
            },
            "/api/thumbnail/{id}": {"get": _get("A small picture; of a clip four frames side by side", _IMAGE, [one])},
            "/api/preview/{id}": {"get": _get("A clip that plays; of a picture its thumbnail", _MOVING, [one])},
            "/api/picture/{id}": {"get": _get("A picture of up to 2,048 pixels", _IMAGE, [one])},
        },
        "components": {
            "securitySchemes": {
                "cookie": {"type": "apiKey", "in": "cookie", "name": "mocokit-search"},
                "bearer": {"type": "http", "scheme": "bearer"},
            },
            "schemas": {
                "Error": {"type": "object", "required": ["error"], "properties": {"error": text}},
                "Hit": {
                    "type": "object",
                    "required": ["id", "name", "label", "group", "score"],
                    "properties": {
                        "id": _ID,
                        "name": text,
                        "label": nullable,
                        "group": nullable,
                        "score": {"type": ["number", "null"], "description": "Cosine, -1 to 1"},
                    },
                },
                "Hits": {
                    "type": "object",
                    "required": ["asked", "hits", "more"],
                    "properties": {
                        "asked": {"oneOf": [{"$ref": "#/components/schemas/Hit"}, {"type": "null"}]},
                        "hits": {"type": "array", "items": {"$ref": "#/components/schemas/Hit"}},
                        "more": {"type": "boolean"},
                    },
                },
                "Index": {
                    "type": "object",
                    "required": ["images", "dim", "kind", "recall", "readout", "labels", "clips"],
                    "properties": {
                        "images": {"type": "integer"},
                        "dim": {"type": "integer"},
                        "kind": {"enum": ["exact", "hnsw", "ivf"]},
                        "recall": {"type": "number"},
                        "readout": text,
                        "clips": {"type": "boolean", "description": "Whether the rows are clips of videos"},
                        "labels": {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "properties": {"name": text, "count": {"type": "integer"}},
                            },
                        },
                    },
                },
            },
        },
    }

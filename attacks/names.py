"""File names that break what is careless with them: listed, and made as files by the tests."""

from __future__ import annotations

import os

NAMES: dict[str, bytes] = {
    "newline": b"two\nlines.png",
    "carriage return": b"over\rwritten.png",
    "quotes": b'it\'s "quoted".png',
    "script": b"<script>alert(1)<\xe2\x88\x95script>.png",
    "closing tag": b"--><img src=x onerror=alert(1)>.png",
    "emoji": "\U0001f436 \U0001f3f4\u200d\u2620\ufe0f.png".encode(),
    "right to left": "photo\u202egnp.exe.png".encode(),
    "line separator": "a\u2028b.png".encode(),
    "the longest": b"n" * 251 + b".png",
    "invalid utf-8": b"caf\xe9 \xff\xfe.png",
    "leading dash": b"-rf.png",
    "two dots": b"..png..png",
    "spaces": b"  leading and trailing  .png",
    "formula": b"=cmd|' calc'!A0.png",
    "terminal escape": b"\x1b[31mred\x1b]0;title\x07.png",
    "percent": b"%s %n {0} ${HOME} `id` $(id).png",
    "backslash": b"..\\..\\windows.png",
    "tab and bell": b"a\tb\x07.png",
}
"""What it tries -> the name, as bytes."""


def as_text(name: bytes) -> str:
    """The name as Python and the sample table write it: odd bytes as surrogate escapes."""
    return os.fsdecode(name)

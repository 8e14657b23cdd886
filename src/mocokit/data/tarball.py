"""The members of an uncompressed tar, found by their headers and offsets. Nothing is ever extracted.

Read from the format's description (POSIX.1-2024, pax; the GNU tar manual): old, ustar, GNU and pax headers. Every
step goes forward by at least one block and nothing larger than a megabyte is read, so a hostile file costs no more
than its own length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mocokit.errors import DataError

ReadAt = Callable[[int, int], bytes]
"""(offset, count) -> bytes; fewer at the end of the file."""
Member = tuple[str, int, int]
"""Name (`/` between parts, odd bytes as surrogate escapes), offset and size of a regular file's bytes."""

BLOCK = 512
_ZEROS = bytes(BLOCK)
_MAX_RECORD = 2**20  # bytes of one long name or pax header; real ones take a few hundred
_MAX_TAIL = 2**20  # how far behind the end mark something else is looked for; tar itself pads to 10 kB or so
_LINKS, _DEVICES, _FILES, _FOLDER = b"12", b"346", b"\x0007", b"5"


class NotATarError(DataError):
    """The file doesn't begin as a tar does."""


@dataclass(slots=True)
class TarNotes:
    """What was passed over in one tar, and whether it is whole."""

    links: int = 0
    devices: int = 0
    sparse: int = 0
    unsafe: int = 0
    """Members with an absolute name, a `..` in it, or none."""
    unknown: int = 0
    """Members of kinds that hold no file: volume labels, dumps of folders."""
    cut: str = ""
    """Where and why reading stopped early; empty when the tar is whole."""


def members(read_at: ReadAt, size: int, notes: TarNotes) -> Iterator[Member]:
    """The regular files of a tar of `size` bytes, in order; `notes` is filled in on the way.

    A tar that ends in the middle, or has a damaged header in it, gives the members before that place, and `notes.cut`
    says where. Raises NotATarError when already the first header is none.
    """
    position, long_name, pax = 0, "", dict[str, str]()
    while True:
        header = read_at(position, BLOCK)
        if len(header) < BLOCK:
            if position == 0:
                raise NotATarError(f"it is {size:,} bytes long, less than one header")
            notes.cut = f"it ends at byte {size:,} without an end mark"
            return
        if header == _ZEROS:
            if _something_behind(read_at, position, size):
                notes.cut = f"more data follow its end mark at byte {position:,}"
            return
        try:
            length, kind = _checked(header), header[156:157]
            if kind in b"xgLK":
                text, position = _record(read_at, position, length)
                if kind == b"L":
                    long_name = _decoded(text.partition(b"\0")[0])
                elif kind == b"x":
                    pax = _pax(text)
                continue
            length = int(pax.get("size", length))
            if length < 0:
                raise ValueError("a negative size")
        except ValueError as error:
            if position == 0:
                raise NotATarError(str(error)) from error
            notes.cut = f"the header at byte {position:,} is damaged ({error})"
            return
        name = _inside(pax.get("path") or long_name or _short_name(header))
        start = position + BLOCK
        sparse = any(key.startswith("GNU.sparse.") for key in pax)
        long_name, pax = "", {}
        if kind == b"S":
            sparse, start = True, _behind_sparse_map(read_at, start, header[482])
        has_data = kind not in _LINKS + _DEVICES + _FOLDER
        position = start + (-(-length // BLOCK) * BLOCK if has_data else 0)
        if has_data and start + length > size:
            notes.cut = f"it ends at byte {size:,}, inside {name!r}"
            return
        if kind in _LINKS:
            notes.links += 1
        elif kind in _DEVICES:
            notes.devices += 1
        elif sparse:
            notes.sparse += 1
        elif kind == _FOLDER or (kind == b"\0" and header[:100].rstrip(b"\0").endswith(b"/")):
            continue
        elif kind not in _FILES:
            notes.unknown += 1
        elif name is None:
            notes.unsafe += 1
        else:
            yield name, start, length


def windowed(read: ReadAt, window: int) -> ReadAt:
    """`read` with the last `window` bytes kept, for reading forward in small pieces. For one thread."""
    kept, begin = b"", 0

    def read_at(offset: int, count: int) -> bytes:
        nonlocal kept, begin
        if offset < begin or offset + count > begin + len(kept):
            kept, begin = read(offset, max(window, count)), offset
        return kept[offset - begin : offset - begin + count]

    return read_at


def _checked(header: bytes) -> int:
    """The size in a header whose checksum is right. Raises ValueError."""
    unsigned = sum(header) - sum(header[148:156]) + 8 * 32
    told = _number(header[148:156])
    if told != unsigned and told != unsigned - 256 * sum(byte > 127 for byte in header[:148] + header[156:]):
        raise ValueError("its checksum is wrong")
    return _number(header[124:136])


def _number(field: bytes) -> int:
    """An octal number, or a binary one where the first bit says so. Raises ValueError."""
    if field[0] & 0x80:
        value = int.from_bytes(field, "big") - (1 << (8 * len(field) - 1))
        if field[0] & 0x40:
            raise ValueError("a negative number")
        return value
    text = field.partition(b"\0")[0].strip()
    if text and not text.isdigit():
        raise ValueError("no octal number where one belongs")
    return int(text or b"0", 8)


def _record(read_at: ReadAt, position: int, length: int) -> tuple[bytes, int]:
    """The body of a long name or pax header at `position`, and where the next header is. Raises ValueError."""
    if length > _MAX_RECORD:
        raise ValueError(f"a name or attribute of {length:,} bytes")
    text = read_at(position + BLOCK, length)
    if len(text) < length:
        raise ValueError("cut in the middle")
    return text, position + BLOCK + -(-length // BLOCK) * BLOCK


def _pax(text: bytes) -> dict[str, str]:
    """Records `LENGTH KEY=VALUE\\n` of a pax header. Raises ValueError."""
    found: dict[str, str] = {}
    place = 0
    while place < len(text) and text[place] != 0:
        digits = text[place : place + 8].partition(b" ")[0]
        length = int(digits) if digits.isdigit() else 0
        record = text[place + len(digits) + 1 : place + length - 1]
        if length <= len(digits) + 2 or text[place + length - 1 : place + length] != b"\n" or b"=" not in record:
            raise ValueError("a broken pax record")
        key, _, value = record.partition(b"=")
        found[_decoded(key)] = _decoded(value)
        place += length
    if not found.get("size", "0").isdigit():
        raise ValueError("no number for a pax size")
    return found


def _short_name(header: bytes) -> str:
    name = header[:100].partition(b"\0")[0]
    if header[257:263] == b"ustar\0" and (prefix := header[345:500].partition(b"\0")[0]):
        name = prefix + b"/" + name
    return _decoded(name)


def _decoded(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _inside(name: str) -> str | None:
    """The name without `.` and empty parts; None when it leads outside, is absolute or empty."""
    if name[:1] not in ("", "/", ".") and "/." not in name and "//" not in name and "\0" not in name:
        return name
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if not parts or ".." in parts or name[0] == "/" or "\0" in name:
        return None
    return "/".join(parts)


def _behind_sparse_map(read_at: ReadAt, start: int, more: int) -> int:
    """Where the data of an old GNU sparse file begin: behind the blocks that list its further pieces."""
    while more:
        block = read_at(start, BLOCK)
        more = block[504] if len(block) == BLOCK else 0
        start += BLOCK
    return start


def _something_behind(read_at: ReadAt, position: int, size: int) -> bool:
    """Whether anything but zeros comes within a megabyte after the end mark (as in two tars joined by `cat`)."""
    end = min(size, position + _MAX_TAIL)
    while position < end:
        part = read_at(position, min(end - position, 2**16))
        if not part or part.count(0) < len(part):
            return bool(part)
        position += len(part)
    return False

"""One video file: which frames it has, and any of them as RGB, the same whichever was read before.

A frame's number is its place in the order in which it is shown. `frame_table` finds the frames without decoding them
where the container tells (packets with distinct time stamps), and by decoding everything once where it does not (AVI
has no time stamps). `VideoCursor` goes to a frame by seeking to a key frame before it; whatever comes out of the
decoder is known by its time stamp, and when what follows a seek is not what the table announces, the file is read
from its beginning. So a seek can cost time but never give another frame.

Only the containers in `FORMATS` are opened, and no file may point to another one. Decoding uses one thread.
"""

from __future__ import annotations

import stat
import time
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mocokit.data.decode import UnreadableImageError
from mocokit.errors import DataError, MissingDependencyError

UInt8Array = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegvideo,mpegts,asf,flv,ogg,gif"
"""The demuxers of FFmpeg that a file may be given to. Play lists are not among them: they name other files."""

_WITHOUT_STAMPS = ("avi",)


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoLimits:
    """What reading a video may cost."""

    max_bytes: int = 64 * 2**30
    """Largest file, bytes."""
    max_pixels: int = 50_000_000
    """Largest frame, pixels; looked up in the header, before anything is decoded."""
    max_frames: int = 2_000_000
    """Most frames of a file (18 hours at 30 a second)."""
    stall: float = 20.0
    """Seconds without a further packet or frame after which the file is given up."""


class UnreadableVideoError(DataError):
    """A file that is no video that can be read; `reason` says why, without its name."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"The video can't be read: {reason}.")
        self.reason = reason


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FrameTable:
    """The frames of a video in the order they are shown."""

    times: FloatArray
    """[n] seconds from the first frame, never falling."""
    stamps: Int64Array | None
    """[n] time stamps, rising; None where the container has none to be trusted: frames are then counted."""
    keys: Int64Array
    """Numbers of the frames at which decoding may begin, rising; the first is 0."""
    height: int
    """Of a frame as it is shown, pixels."""
    width: int

    def __len__(self) -> int:
        return len(self.times)

    @property
    def rate(self) -> float:
        """Frames per second on average; 1 for a single frame."""
        return float((len(self) - 1) / self.times[-1]) if len(self) > 1 and self.times[-1] > 0 else 1.0

    @property
    def steady(self) -> bool:
        """Whether no frame is more than 0.6 of the mean distance from where a steady rate would put it."""
        if len(self) < 3:
            return True
        due = np.arange(len(self)) / self.rate
        return bool(np.abs(self.times - due).max() <= 0.6 / self.rate)

    def at(self, seconds: FloatArray) -> Int64Array:
        """The frames on show at these times from the first frame; the first or last outside."""
        found = np.searchsorted(self.times, seconds + 1e-9, side="right") - 1
        return np.clip(found, 0, len(self) - 1).astype(np.int64)

    def steady_frames(self) -> Int64Array:
        """Frame numbers in even steps of time: all frames, or at a variable rate those on show at the mean rate."""
        if self.steady:
            return np.arange(len(self), dtype=np.int64)
        return self.at(np.arange(round(float(self.times[-1]) * self.rate) + 1) / self.rate)


def require_av() -> Any:
    """The module `av` (PyAV). Raises MissingDependencyError."""
    try:
        import av
    except ImportError as error:
        raise MissingDependencyError(
            "Reading videos needs PyAV, which is not installed: pip install 'mocokit[video]'."
        ) from error
    return av


def frame_table(path: Path, limits: VideoLimits | None = None) -> FrameTable:
    """Which frames the file has. Its first frame is decoded, to see that it can be. Raises UnreadableVideoError."""
    av, limits = require_av(), limits or VideoLimits()
    _check_file(path, limits)
    try:
        with _open(av, path) as container:
            first, found = _from_packets(av, container, _video_stream(container, limits), limits)
        height, width = _shown_size(first)
        if found is None or first.pts != found[0][0]:
            return _by_decoding(av, path, limits, height, width)
        stamps, keys, base = found
        times = (stamps - stamps[0]) * base
        return FrameTable(times=times, stamps=stamps, keys=keys, height=height, width=width)
    except (av.error.FFmpegError, OSError, ValueError, MemoryError) as error:
        raise UnreadableVideoError(_words(error)) from error


def _check_file(path: Path, limits: VideoLimits) -> None:
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise UnreadableVideoError(_words(error)) from error
    if not stat.S_ISREG(status.st_mode):
        raise UnreadableVideoError("not a regular file")
    if status.st_size > limits.max_bytes:
        raise UnreadableVideoError(f"{status.st_size:,} bytes, more than the limit of {limits.max_bytes:,}")


def _words(error: BaseException) -> str:
    """What went wrong, without FFmpeg's number and without the path."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())[:200].rstrip(".")


def _open(av: Any, path: Path) -> Any:
    options = {"format_whitelist": FORMATS, "protocol_whitelist": "file"}
    # `file:` keeps a name such as `concat:a|b` from being taken for a protocol.
    return av.open(f"file:{path}", container_options=options, metadata_errors="replace", timeout=(10.0, 10.0))


def _video_stream(container: Any, limits: VideoLimits) -> Any:
    """The first video stream that is no cover picture, set to decode on one thread."""
    streams = [stream for stream in container.streams.video if not _is_cover(stream)]
    if not streams:
        raise UnreadableVideoError("no video stream in it" + (", only sound" if container.streams.audio else ""))
    stream = streams[0]
    if stream.codec_context is None:
        raise UnreadableVideoError("no decoder for its codec")
    stream.codec_context.thread_count = 1
    _check_size(stream.codec_context.width, stream.codec_context.height, limits)
    return stream


def _is_cover(stream: Any) -> bool:
    """Whether the stream is a still that goes with sound (an album's cover)."""
    kinds = type(stream.disposition)
    return bool(stream.disposition & kinds.attached_pic)


def _check_size(width: int, height: int, limits: VideoLimits) -> None:
    if width * height > limits.max_pixels:
        raise UnreadableVideoError(f"frames of {width} x {height}, more than the limit of {limits.max_pixels:,} pixels")


def _from_packets(
    av: Any, container: Any, stream: Any, limits: VideoLimits
) -> tuple[Any, tuple[Int64Array, Int64Array, float] | None]:
    """The first frame; and time stamps, key frames and seconds of a unit, from the packets alone.

    None for the latter where they can't be trusted: in AVI, and wherever a packet lacks its stamp or two share one,
    the stamps don't tell the order.
    """
    stamps: list[int] = []
    keys: list[int] = []
    trusted = container.format.name not in _WITHOUT_STAMPS and stream.time_base is not None
    first: Any = None
    clock = _Clock(limits)
    for packet in _packets(container, stream):
        clock.tick()
        if first is None:
            first = next(iter(_decoded(av, packet)), None)
        if not packet.size or packet.is_discard or packet.is_corrupt:
            continue
        if packet.pts is None:
            trusted = False
            continue
        stamps.append(packet.pts)
        if packet.is_keyframe:
            keys.append(packet.pts)
        if len(stamps) > limits.max_frames:
            raise UnreadableVideoError(f"more than {limits.max_frames:,} frames")
    if first is None:
        raise UnreadableVideoError("no frame in it can be decoded")
    _check_size(first.width, first.height, limits)
    if not trusted or not stamps or len(set(stamps)) < len(stamps):
        return first, None
    ordered = np.array(sorted(stamps), np.int64)
    numbers = np.searchsorted(ordered, np.array(sorted(keys), np.int64)).astype(np.int64)
    return first, (ordered, np.union1d(numbers, [0]).astype(np.int64), float(stream.time_base))


def _by_decoding(av: Any, path: Path, limits: VideoLimits, height: int, width: int) -> FrameTable:
    """The table of a file whose packets don't tell: its frames are counted as they come out of the decoder."""
    with _open(av, path) as container:
        stream = _video_stream(container, limits)
        rate = float(stream.average_rate or stream.guessed_rate or 25)
        count = 0
        for _ in _frames(av, container, stream, limits):
            count += 1
            if count > limits.max_frames:
                raise UnreadableVideoError(f"more than {limits.max_frames:,} frames")
    return FrameTable(
        times=np.arange(count) / rate, stamps=None, keys=np.zeros(1, np.int64), height=height, width=width
    )


class _Clock:
    """Gives a file up when nothing comes of it any more."""

    def __init__(self, limits: VideoLimits) -> None:
        self.limit, self.last = limits.stall, time.monotonic()

    def tick(self) -> None:
        now = time.monotonic()
        if now - self.last > self.limit:
            raise UnreadableVideoError(f"nothing came of it for {self.limit:g} seconds")
        self.last = now

    def wait(self) -> None:
        """A packet that gave no frame: the clock goes on."""
        if time.monotonic() - self.last > self.limit:
            raise UnreadableVideoError(f"no frame came of it for {self.limit:g} seconds")


def _packets(container: Any, stream: Any) -> Iterator[Any]:
    """The stream's packets up to the end or to where the file is damaged beyond finding the next one."""
    av = require_av()
    packets = container.demux(stream)
    while True:
        try:
            packet = next(packets, None)
        except (av.error.FFmpegError, OSError):
            return
        if packet is None:
            return
        yield packet


def _decoded(av: Any, packet: Any) -> list[Any]:
    """The frames that come of a packet; none of a damaged one."""
    try:
        return list(packet.decode())
    except (av.error.FFmpegError, OSError):
        return []


def _frames(av: Any, container: Any, stream: Any, limits: VideoLimits) -> Iterator[Any]:
    """Decoded frames in the order they are shown; a packet that can't be decoded gives none, as in FFmpeg itself."""
    clock = _Clock(limits)
    for packet in _packets(container, stream):  # the last one is empty and drains the decoder
        for frame in _decoded(av, packet):
            clock.tick()
            _check_size(frame.width, frame.height, limits)
            yield frame
        clock.wait()


def _shown_size(frame: Any) -> tuple[int, int]:
    """Height and width after the rotation that the file asks for."""
    return (frame.width, frame.height) if frame.rotation // 90 % 2 else (frame.height, frame.width)


def fitted_size(height: int, width: int, side: int | None) -> tuple[int, int]:
    """Height and width with the longer one at most `side`; never enlarged."""
    longer = max(height, width)
    if side is None or longer <= side:
        return height, width
    return max(1, round(height * side / longer)), max(1, round(width * side / longer))


class VideoCursor:
    """An open video with a place in it. Frames in rising order cost one decoding; any other order works too.

    Not for several threads at once. Raises UnreadableImageError (a frame that does not decode) and
    UnreadableVideoError (a file that does not open any more).
    """

    def __init__(self, path: Path, table: FrameTable, limits: VideoLimits | None = None) -> None:
        self.path, self.table, self.limits = path, table, limits or VideoLimits()
        self._av = require_av()
        stamps = () if table.stamps is None else table.stamps.tolist()
        self._numbers = {stamp: number for number, stamp in enumerate(stamps)}
        self._keys: list[int] = table.keys.tolist()
        self._fitted: dict[int | None, tuple[int, int]] = {}
        self._reformatter = self._av.video.reformatter.VideoReformatter()
        self._container: Any = None
        self._stream: Any = None
        self._coming: Iterator[tuple[int, Any]] = iter(())
        self._held: tuple[int, Any] | None = None  # the frame last decoded
        self._sought = False  # whether decoding began in the middle of the file
        self._open = False

    def frame(self, number: int, side: int | None = None) -> UInt8Array:
        """Frame `number` as RGB uint8 [height, width, 3], turned upright, shrunk until no side exceeds `side`."""
        if not 0 <= number < len(self.table):
            raise ValueError(f"frame {number} of a video with {len(self.table)}")
        try:
            return self._picture(self._find(number), side)
        except (self._av.error.FFmpegError, OSError, MemoryError) as error:
            self.close()
            raise UnreadableImageError(f"frame {number}: {_words(error)}") from error
        except UnreadableVideoError as error:
            self.close()
            raise UnreadableImageError(f"frame {number}: {error.reason}") from error

    def close(self) -> None:
        """Let the file go; the next frame opens it again."""
        self._coming, self._held = iter(()), None
        self._open = False
        if self._container is not None:
            self._container.close()
            self._container = None

    def _find(self, number: int) -> Any:
        if not self._can_go_on(number):
            self._start(number)
        frame = self._advance(number)
        if frame is None and self._sought:
            self._start(0)
            frame = self._advance(number)
        if frame is None:
            raise UnreadableImageError(f"frame {number} of {len(self.table)} does not decode")
        return frame

    def _can_go_on(self, number: int) -> bool:
        """Whether the frame lies ahead, and no later start is nearer to it."""
        here = self._held[0] if self._held is not None else -1
        if not self._open or number < here:
            return False
        return number <= here + 1 or self.table.stamps is None or self._key_before(number) <= here + 1

    def _key_before(self, number: int) -> int:
        return self._keys[bisect_right(self._keys, number) - 1]

    def _start(self, number: int) -> None:
        """Begin decoding at the last key frame up to `number`, or at the file's beginning."""
        self.close()
        self._container = _open(self._av, self.path)
        self._stream = _video_stream(self._container, self.limits)
        key = self._key_before(number) if self.table.stamps is not None else 0
        self._sought = key > 0
        if self.table.stamps is not None and key > 0:
            self._container.seek(int(self.table.stamps[key]), stream=self._stream, backward=True)
        self._coming = self._numbered(key)
        self._open = True

    def _numbered(self, key: int) -> Iterator[tuple[int, Any]]:
        """(number, frame) of what the decoder gives, from the key frame on.

        After a seek this ends at the first sign that the decoder lacks something: a frame after the key frame that
        comes without the key frame itself, that is missing, or that is marked as damaged.
        """
        expected = key
        frames = _frames(self._av, self._container, self._stream, self.limits)
        if self.table.stamps is None:
            yield from enumerate(frames)
            return
        for frame in frames:
            number = self._numbers.get(frame.pts, -1)
            if number < 0:
                if self._sought and expected > key:
                    return
                continue
            if number < key:  # leading frames of a key frame that refer to the group before it
                continue
            if self._sought and (number != expected or frame.is_corrupt):
                return
            expected = number + 1
            yield number, frame

    def _advance(self, number: int) -> Any:
        """The frame, or None when it does not come. A frame beyond it stays held for the next request."""
        if self._held is not None and self._held[0] >= number:
            return self._held[1] if self._held[0] == number else None
        for got, frame in self._coming:
            self._held = (got, frame)
            if got >= number:
                return frame if got == number else None
        return None

    def _picture(self, frame: Any, side: int | None) -> UInt8Array:
        turns = frame.rotation // 90 % 4
        if side not in self._fitted:
            self._fitted[side] = fitted_size(self.table.height, self.table.width, side)
        height, width = self._fitted[side]
        if turns % 2:
            height, width = width, height
        method = "AREA" if height < frame.height or width < frame.width else "BICUBIC"
        # One reformatter for all frames: a frame's own would set up its scaler anew each time.
        rgb = self._reformatter.reformat(frame, width, height, "rgb24", interpolation=method).to_ndarray()
        return np.ascontiguousarray(np.rot90(rgb, turns) if turns else rgb)

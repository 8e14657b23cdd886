"""The rows that vectors are made of: pictures, frames of videos as pictures, or clips; opened anew to be shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mocokit.data.clips import ClipConfig, open_clips
from mocokit.data.exclusion import refuse_for_videos
from mocokit.data.sources import open_source
from mocokit.data.videos import holds_videos, open_videos, spaced_frames
from mocokit.errors import UsageError
from mocokit.exporting.trained import Trained
from mocokit.retrieval.encode import Source

Reading = dict[str, Any]
"""How videos become rows: {"clips": T, "stride": ...} or {"rate": frames a second}."""


def reading_of(trained: Trained, spec: str) -> Reading | None:
    """How the encoder reads `spec`; None for pictures. Raises UsageError where an encoder of clips has no videos."""
    clips = trained.clips
    if clips is not None:
        if not holds_videos(spec):
            raise UsageError(
                f"{trained.path} was trained on clips of video, and {spec} holds none. Name a folder of videos."
            )
        return {"clips": clips.frames, "stride": clips.stride}
    if trained.run is not None:
        kind, rate = trained.run.config.data.video, trained.run.config.data.frame_rate
    else:
        video = {} if trained.tuned is None else trained.tuned.config.get("video", {})
        kind, rate = video.get("video", "off"), video.get("frame_rate", 1.0)
    return {"rate": rate} if kind == "frames" and holds_videos(spec) else None


def clips_of(reading: Reading) -> ClipConfig | None:
    """The clips that a reading is of; None for frames."""
    return ClipConfig(frames=reading["clips"], stride=reading["stride"]) if "clips" in reading else None


def open_rows(
    spec: str,
    reading: Reading | None,
    *,
    split: str | None = None,
    label_column: str | None = None,
    group_column: str | None = None,
    exclude: str | Path | None = None,
) -> Source:
    """The rows of `spec`. Raises UsageError, DataError, MissingDependencyError."""
    if reading is None:
        return open_source(spec, split=split, label_column=label_column, group_column=group_column, exclude=exclude)
    refuse_for_videos(exclude, spec)
    videos = open_videos(spec, split=split, label_column=label_column, group_column=group_column, workers=2)
    clips = clips_of(reading)
    return spaced_frames(videos, reading["rate"], workers=2) if clips is None else open_clips(videos, clips)

import io
import struct
import threading
import warnings
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from mocokit.data.decode import DecodeLimits, UnreadableImageError, decode, picture_size, to_rgb
from mocokit.errors import DataError, UsageError

RNG = np.random.default_rng(7)
COLOUR = RNG.integers(0, 256, (6, 9, 3), dtype=np.uint8)
WHITE, BLUE = (255, 255, 255), (10, 20, 200)


def encoded(image: Image.Image | NDArray[np.generic], kind: str, **options: object) -> bytes:
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def with_exif(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


def tiff(data: bytes, width: int, height: int, bits: int, photometric: int, sample_format: int = 1) -> bytes:
    """A little-endian, uncompressed, one-strip grey TIFF, by the specification."""
    tags = {256: width, 257: height, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: height}
    tags |= {279: len(data), 339: sample_format}
    table = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(tags.items()))
    padded = data + b"\0" * (len(data) % 2)
    return struct.pack("<2sHI", b"II", 42, 8 + len(padded)) + padded + struct.pack("<H", len(tags)) + table + b"\0" * 4


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def levels(rgb: NDArray[np.uint8]) -> int:
    return len(np.unique(rgb))


# ------------------------------------------------------------------------------------------------- modes


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}),
        ("WEBP", {"lossless": True}),
        ("BMP", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("PPM", {}),
    ],
)
def test_lossless_rgb_comes_back_exactly(kind: str, options: dict[str, object]) -> None:
    rgb = decode(encoded(COLOUR, kind, **options))
    assert rgb.dtype == np.uint8
    assert rgb.flags.writeable
    np.testing.assert_array_equal(rgb, COLOUR)


def test_jpeg_is_close_and_grey_fills_three_channels() -> None:
    flat = np.broadcast_to(np.array([200, 30, 90], np.uint8), (16, 16, 3)).copy()
    assert np.abs(decode(encoded(flat, "JPEG", quality=95)).astype(int) - flat).max() <= 3
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8)
    np.testing.assert_array_equal(decode(encoded(grey, "PNG")), np.repeat(grey[:, :, None], 3, axis=2))
    bits = (grey % 2 * 255).astype(np.uint8)
    np.testing.assert_array_equal(decode(encoded(Image.fromarray(bits).convert("1"), "PNG"))[:, :, 1], bits)


def test_palette() -> None:
    picture = Image.fromarray(np.array([[0, 1, 2]], np.uint8), "L").convert("P")
    picture.putpalette([255, 0, 0, 0, 255, 0, 1, 2, 3])
    for kind in ("PNG", "GIF", "BMP", "TIFF"):
        assert decode(encoded(picture, kind)).tolist() == [[[255, 0, 0], [0, 255, 0], [1, 2, 3]]], kind


@pytest.mark.parametrize("background", [WHITE, BLUE])
def test_transparency_is_composited(background: tuple[int, int, int]) -> None:
    limits = DecodeLimits(background=background)
    alpha = np.array([[0, 51, 128, 255]], np.uint8)
    colour = np.broadcast_to(np.array([100, 150, 200], np.uint8), (1, 4, 3))
    share = alpha[:, :, None] / 255
    expected = colour * share + np.array(background) * (1 - share)
    rgba = np.concatenate([colour, alpha[:, :, None]], axis=2)
    got = decode(encoded(rgba, "PNG"), limits).astype(float)
    assert np.abs(got - expected).max() <= 1
    assert (
        np.abs(to_rgb(Image.fromarray(rgba).convert("RGBa"), background) - expected).max() <= 3
    )  # premultiplied rounds
    grey_alpha = np.stack([np.full((1, 4), 90, np.uint8), alpha], axis=2)
    expected_grey = 90 * share + np.array(background) * (1 - share)
    assert np.abs(decode(encoded(Image.fromarray(grey_alpha, "LA"), "PNG"), limits) - expected_grey).max() <= 1
    assert np.abs(to_rgb(Image.fromarray(grey_alpha, "LA").convert("La"), background) - expected_grey).max() <= 3


def test_transparent_colours_show_the_background() -> None:
    limits = DecodeLimits(background=BLUE)
    grey = Image.fromarray(np.array([[5, 6]], np.uint8))
    assert decode(encoded(grey, "PNG", transparency=6), limits).tolist() == [[[5, 5, 5], list(BLUE)]]
    colour = Image.fromarray(np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8))
    assert decode(encoded(colour, "PNG", transparency=(1, 2, 3)), limits).tolist() == [[list(BLUE), [4, 5, 6]]]
    palette = Image.fromarray(np.array([[0, 1]], np.uint8), "L").convert("P")
    palette.putpalette([255, 0, 0, 0, 255, 0])
    assert decode(encoded(palette, "GIF", transparency=1), limits).tolist() == [[[255, 0, 0], list(BLUE)]]
    assert decode(encoded(palette, "PNG", transparency=b"\x00\xff"), limits).tolist() == [[list(BLUE), [0, 255, 0]]]
    pa = palette.convert("PA")
    pa.putalpha(Image.fromarray(np.array([[0, 255]], np.uint8)))
    assert to_rgb(pa, BLUE).tolist() == [[list(BLUE), [0, 255, 0]]]


def test_other_colour_spaces() -> None:
    cmyk = Image.merge("CMYK", [Image.new("L", (4, 4), value) for value in (0, 255, 255, 0)])
    assert decode(encoded(cmyk, "TIFF"))[0, 0].tolist() == [255, 0, 0]
    black = Image.merge("CMYK", [Image.new("L", (4, 4), value) for value in (0, 0, 0, 255)])
    assert decode(encoded(black, "JPEG")).max() <= 2
    flat = Image.new("RGB", (8, 8), (200, 100, 50))
    assert np.abs(decode(encoded(flat.convert("YCbCr"), "TIFF")).astype(int) - (200, 100, 50)).max() <= 2
    assert np.abs(to_rgb(flat.convert("HSV"), WHITE).astype(int) - (200, 100, 50)).max() <= 3
    # CIE L* = 100 x 128/255 is a relative luminance of ((50.2 + 16) / 116)^3 = 0.186, in sRGB 0.469 x 255 = 119.6
    for lightness, expected in ((255, 255), (128, 119.6), (0, 0)):
        lab = Image.merge(
            "LAB", [Image.new("L", (4, 4), lightness), Image.new("L", (4, 4), 128), Image.new("L", (4, 4), 128)]
        )
        assert np.abs(decode(encoded(lab, "TIFF")).astype(float) - expected).max() <= 2, lightness


# ------------------------------------------------------------------------------------------ more than 8 bits

RAMP = np.linspace(0, 65535, 64 * 64).round().astype(np.uint16).reshape(64, 64)


@pytest.mark.parametrize(
    "data",
    [
        encoded(RAMP, "PNG"),
        encoded(RAMP, "TIFF"),
        encoded(Image.frombytes("I;16B", (64, 64), RAMP.astype(">u2").tobytes()), "TIFF"),
        encoded(Image.fromarray(RAMP.astype(np.int32)), "TIFF"),
        b"P5\n64 64\n65535\n" + RAMP.astype(">u2").tobytes(),
        b"P5\n64 64\n4095\n" + (RAMP // 16).astype(">u2").tobytes(),
        tiff(RAMP.astype("<u2").tobytes(), 64, 64, 16, photometric=1),
        tiff((RAMP.astype(np.int32) - 32768).astype("<i2").tobytes(), 64, 64, 16, photometric=1, sample_format=2),
        tiff((RAMP.astype(np.uint32) << 15).astype("<i4").tobytes(), 64, 64, 32, photometric=1, sample_format=2),
        encoded((RAMP / 65535).astype(np.float32), "TIFF"),
        encoded((RAMP / 257).astype(np.float32), "TIFF"),
        b"Pf\n64 64\n-1.0\n" + (RAMP / 65535).astype("<f4")[::-1].tobytes(),
    ],
    ids=[
        "png",
        "tiff",
        "tiff I;16B",
        "tiff I",
        "pgm",
        "pgm 12 bit",
        "raw tiff",
        "signed",
        "32 bit",
        "F 0..1",
        "F 0..255",
        "pfm",
    ],
)
def test_deep_grey_keeps_its_levels(data: bytes) -> None:
    rgb = decode(data)
    assert levels(rgb) >= 250
    assert np.abs(rgb[:, :, 0] - RAMP / 257).max() <= 1
    np.testing.assert_array_equal(rgb[:, :, 0], rgb[:, :, 2])


def test_twelve_bit_tiff_is_not_dark() -> None:
    values = (RAMP // 16).ravel().astype(np.uint32)
    pairs = (values[0::2] << 12) | values[1::2]
    packed = np.stack([pairs >> 16, pairs >> 8, pairs], axis=1).astype(np.uint8).tobytes()
    rgb = decode(tiff(packed, 64, 64, 12, photometric=1))
    assert levels(rgb) >= 250
    assert rgb.max() == 255


def test_white_is_zero_is_inverted_at_every_depth() -> None:
    assert decode(tiff(b"\x00\xff", 2, 1, 8, photometric=0))[0, :, 0].tolist() == [255, 0]
    assert decode(tiff(b"\x00\x00\xff\xff", 2, 1, 16, photometric=0))[0, :, 0].tolist() == [255, 0]
    data = tiff(np.array([0, 1], "<f4").tobytes(), 2, 1, 32, photometric=0, sample_format=3)
    assert decode(data)[0, :, 0].tolist() == [255, 0]


def test_sixteen_bit_colour_and_odd_floats() -> None:
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in np.repeat(RAMP[:, :, None], 3, axis=2))
    header = struct.pack(">IIBBBBB", 64, 64, 16, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    assert levels(decode(png)) >= 250
    ppm = b"P6\n64 64\n1000\n" + np.repeat(RAMP[:, :, None] // 66, 3, axis=2).astype(">u2").tobytes()
    assert levels(decode(ppm)) >= 250
    floats = np.array([[np.nan, np.inf, -np.inf, 0.5]], np.float32)
    assert decode(encoded(floats, "TIFF"))[0, :, 0].tolist() == [0, 255, 0, 0]  # 0.5 of 255, since infinity is above 1


def test_binary_pnm_matches_pillow() -> None:
    data = b"P6\n9 6\n200\n" + (COLOUR % 201).tobytes()
    np.testing.assert_array_equal(decode(data), np.asarray(Image.open(io.BytesIO(data))))
    with pytest.raises(UnreadableImageError):
        decode(data[:-1])
    with pytest.raises(UnreadableImageError, match="text PNM"):
        decode(b"P3\n2000 1001\n255\n1 2 3\n")


# -------------------------------------------------------------------------------------- orientation, frames

UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
    8: lambda a: np.rot90(a, 1),
}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    ("kind", "options"),
    [("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {}), ("TIFF", {"compression": "tiff_lzw"})],
)
def test_orientation(kind: str, options: dict[str, object], orientation: int) -> None:
    data = encoded(COLOUR, kind, exif=with_exif(orientation), **options)
    np.testing.assert_array_equal(decode(data), UPRIGHT[orientation](COLOUR))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_of_jpeg(orientation: int) -> None:
    big = np.kron(COLOUR, np.ones((16, 16, 1), np.uint8))
    data = encoded(big, "JPEG", quality=95, subsampling=0, exif=with_exif(orientation))
    expected = UPRIGHT[orientation](big)
    assert np.abs(decode(data).astype(int) - expected).mean() < 3
    reduced = decode(data, fit=36)
    assert reduced.shape[:2] == (expected.shape[0] // 2, expected.shape[1] // 2)


def test_first_frame_only() -> None:
    frames = [Image.new("RGB", (5, 4), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    for kind in ("GIF", "PNG", "WEBP", "TIFF"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert decode(data)[0, 0].tolist() == [255, 0, 0], kind


def test_fit_decodes_jpeg_smaller_but_no_less_than_twice() -> None:
    smooth = np.asarray(
        Image.fromarray(RNG.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((800, 600), Image.Resampling.BICUBIC)
    )
    data = encoded(smooth, "JPEG", quality=95)
    assert decode(data).shape == (600, 800, 3)
    for fit, expected in (
        (64, (150, 200)),
        (100, (150, 200)),
        (101, (300, 400)),
        (201, (600, 800)),
        (1000, (600, 800)),
    ):
        assert decode(data, fit=fit).shape[:2] == expected, fit
    reduced = np.asarray(Image.fromarray(decode(data)).resize((50, 38), Image.Resampling.BOX)).astype(int)
    draft = np.asarray(Image.fromarray(decode(data, fit=50)).resize((50, 38), Image.Resampling.BOX)).astype(int)
    assert np.abs(reduced - draft).mean() < 2
    assert decode(encoded(smooth, "PNG"), fit=8).shape == (600, 800, 3)
    assert picture_size(data) == (600, 800)


# --------------------------------------------------------------------------------------------------- limits


def png_claiming(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + chunk(b"IEND", b"")
    )


def jpeg_claiming(width: int, height: int) -> bytes:
    data = bytearray(encoded(COLOUR, "JPEG"))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    return bytes(data)


@pytest.mark.parametrize(
    "data",
    [
        png_claiming(13000, 13000),
        png_claiming(14000, 14000),
        png_claiming(2**31 - 1, 2**31 - 1),
        jpeg_claiming(65500, 65500),
        tiff(b"\0" * 100, 40000, 40000, 8, photometric=1),
        b"P6 100000 100000 255 xyz",
        b"GIF89a"
        + struct.pack("<HH", 60000, 60000)
        + b"\0\0\0,\0\0\0\0"
        + struct.pack("<HH", 60000, 60000)
        + b"\0\x08\0;",
        encoded(COLOUR, "BMP")[:18] + struct.pack("<ii", 50000, 50000) + encoded(COLOUR, "BMP")[26:],
    ],
    ids=["png", "png above Pillow's own limit", "png 4e18", "jpeg", "tiff", "ppm", "gif", "bmp"],
)
def test_bombs_are_refused_by_their_header(data: bytes) -> None:
    with pytest.raises(UnreadableImageError, match="limit"):
        decode(data)


def test_limits() -> None:
    data = encoded(COLOUR, "PNG")
    assert decode(data, DecodeLimits(max_pixels=54)).shape == (6, 9, 3)
    with pytest.raises(UnreadableImageError, match=r"9 x 6 pixels, more than the limit of 53; not decoded"):
        decode(data, DecodeLimits(max_pixels=53))
    with pytest.raises(UnreadableImageError, match="bytes, more than the limit of 20"):
        decode(data, DecodeLimits(max_bytes=20))
    for wrong in ({"max_pixels": 0}, {"max_pixels": 10**9}, {"max_bytes": 0}, {"background": (0, 0, 256)}):
        with pytest.raises(UsageError):
            DecodeLimits(**wrong)


def test_png_text_bomb() -> None:
    data = encoded(COLOUR, "PNG")
    text = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(b"x" * 100_000_000))
    with pytest.raises(UnreadableImageError, match="too large"):
        decode(data[:33] + text + data[33:])


# --------------------------------------------------------------------------------------- files that aren't


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty file"),
        (b"hello, I am a text\n", "looks like text"),
        (b"<!DOCTYPE html><html></html>", "looks like HTML"),
        (b"\x00\x00\x00\x20ftypheic\x00\x00\x00\x00", "looks like HEIC"),
        (b"\x00\x00\x00\x20ftypavif\x00\x00\x00\x00", "looks like AVIF"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (bytes(range(256)), "not a JPEG"),
    ],
)
def test_what_it_is_instead(data: bytes, reason: str) -> None:
    with pytest.raises(UnreadableImageError, match=reason) as caught:
        decode(data)
    assert isinstance(caught.value, DataError)
    assert "0x" not in caught.value.reason
    assert "\n" not in caught.value.reason


@pytest.mark.parametrize("kind", ["EPS", "PDF", "TGA", "SGI", "PCX", "ICO", "DDS", "ICNS"])
def test_formats_off_the_list_are_refused(kind: str) -> None:
    with pytest.raises(UnreadableImageError, match="not a JPEG"):
        decode(encoded(Image.new("RGB", (32, 32)), kind))


SEEDS = {
    "JPEG": encoded(COLOUR, "JPEG", exif=with_exif(6)),
    "progressive": encoded(np.kron(COLOUR, np.ones((4, 4, 1), np.uint8)), "JPEG", progressive=True),
    "PNG": encoded(COLOUR, "PNG", exif=with_exif(3)),
    "palette": encoded(Image.fromarray(COLOUR).quantize(8), "PNG", transparency=b"\0\x40"),
    "16-bit": encoded(RAMP[:4, :4], "PNG"),
    "WebP": encoded(COLOUR, "WEBP", exif=with_exif(5)),
    "GIF": encoded(Image.fromarray(COLOUR).quantize(8), "GIF", transparency=2),
    "BMP": encoded(COLOUR, "BMP"),
    "TIFF": encoded(COLOUR, "TIFF", exif=with_exif(7)),
    "PPM": encoded(COLOUR, "PPM"),
}


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    seed=st.sampled_from(sorted(SEEDS)),
    cut=st.floats(0, 1),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=6),
)
def test_damage_gives_a_picture_or_a_reason(seed: str, cut: float, flips: list[tuple[float, int]]) -> None:
    data = bytearray(SEEDS[seed])
    for place, value in flips:
        data[int(place * len(data))] = value
    if not flips:
        data = data[: int(cut * len(data))]
    reason, rgb = "", COLOUR
    try:
        rgb = decode(bytes(data))
    except UnreadableImageError as error:
        reason = error.reason or "none given"
    assert rgb.dtype == np.uint8
    assert rgb.shape[2:] == (3,)
    assert "0x" not in reason
    assert "none given" not in reason
    assert len(reason) < 400


@pytest.mark.parametrize("seed", ["JPEG", "PNG", "BMP", "PPM", "GIF"])
def test_truncated_files_are_unreadable(seed: str) -> None:
    data = SEEDS[seed]
    for share in (0.1, 0.5, 0.8):
        with pytest.raises(UnreadableImageError):
            decode(data[: int(len(data) * share)])


# ------------------------------------------------------------------------------------------------- warnings


def warning_jpeg() -> bytes:
    """A good JPEG with EXIF whose directory claims more entries than there are: Pillow warns when reading it."""
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x05" + struct.pack(">HHII", 0x0112, 3, 1, 6 << 16) + b"\0\x01"
    return encoded(COLOUR, "JPEG", exif=exif)


def test_warnings_stay_silent_even_as_errors() -> None:
    data = warning_jpeg()
    with pytest.warns(UserWarning, match=r"EXIF|Truncated"):
        Image.open(io.BytesIO(data)).getexif()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decode(data).shape[2] == 3
    bomb = png_claiming(10000, 10000)
    with pytest.raises(UnreadableImageError, match="limit"):
        decode(bomb)
    with pytest.warns(Image.DecompressionBombWarning):  # outside of decode nothing has changed
        Image.open(io.BytesIO(bomb))


def test_other_warnings_pass_and_threads_do_not_disturb_each_other() -> None:
    data, problems = warning_jpeg(), []

    def work() -> None:
        try:
            for _ in range(30):
                decode(data)
        except (Warning, UnreadableImageError) as error:
            problems.append(error)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for _ in range(50):
            with pytest.raises(UserWarning, match="ours"):
                warnings.warn("ours", stacklevel=1)
            with pytest.raises(UserWarning, match=r"EXIF|Truncated"):  # this thread isn't decoding
                Image.open(io.BytesIO(data)).getexif()
        for thread in threads:
            thread.join()
    assert problems == []


def test_global_settings_of_pillow_are_untouched() -> None:
    from PIL import ImageFile, PngImagePlugin

    decode(SEEDS["PNG"])
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False
    assert Image.MAX_IMAGE_PIXELS == 89_478_485
    assert PngImagePlugin.MAX_TEXT_CHUNK == 1024 * 1024

"""Builds the picture pack: one small file for every kind of picture that may come in, good and bad.

.venv/bin/python -m tests.pictures.build

writes `tests/pictures/pack/`, which is committed. What ingress must make of each file stands in
`tests/unit/trace/test_picture_pack.py`. The files hold the patterns below, so that the
pixels can be worked out by hand.
"""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

PACK = Path(__file__).with_name("pack")
WIDTH, HEIGHT = 40, 24

_Y, _X = np.mgrid[0:HEIGHT, 0:WIDTH]
#: [H, W, 3] uint8: red grows to the right, green downwards; smooth, so that JPEG keeps it.
COLORS = np.stack([_X * 6, _Y * 10, np.full_like(_X, 90)], axis=-1).astype(np.uint8)
#: [H, W] uint8: grows to the right.
GREY = (_X * 6).astype(np.uint8)
#: [H, W] uint8: 0 in the first columns, 255 in the last ones, all between.
ALPHA = np.clip(_X * 8 - 24, 0, 255).astype(np.uint8)
#: [H, W] uint16: from 200 to 64900, with low bytes of every size.
WIDE = (200 + _X * 1600 + _Y * 100).astype(np.uint16)
#: [H, W, 3] uint16.
WIDE_COLORS = np.stack([WIDE, WIDE[:, ::-1], WIDE // 2], axis=-1)
#: [H, W] float32 in [0, 1].
FLOATS = (_X / (WIDTH - 1)).astype(np.float32)
#: The colors of `lab.tif`, whose lightness is `GREY`.
LAB_A, LAB_B = 22, -28
#: [H, W] indices below 4, and their colors.
INDICES = ((_X // 10) % 4).astype(np.uint8)
PALETTE = np.asarray([[250, 10, 20], [30, 240, 40], [50, 60, 230], [200, 200, 90]], dtype=np.uint8)
#: Transparency of the four colors in files that have one for each.
PALETTE_ALPHA = (0, 85, 170, 255)

#: `pack/jpeg.jpg`, coded anew without loss: jpegtran -arithmetic (libjpeg-turbo 2.1.5); Pillow cannot write it.
ARITHMETIC_JPEG = (
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAIBAQEBAQIBAQECAgICAgQDAgICAgUEBAMEBgUGBgYFBgYGBwkIBgcJBwYGCAsICQoKCgoKBggLDAsK"
    "DAkKCgr/2wBDAQICAgICAgUDAwUKBwYHCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgoKCgr/yQARCAAYACgD"
    "AREAAhEBAxEB/8wACgAQEAUBEBEF/9oADAMBAAIRAxEAPwD/AO5Gt6JlnrGrnKNO+6S7NAswGI3WvzLdvPWTYuU7k4ZMLw30wUOd8nOwvAoFS3j2"
    "z4eR62dWHcq6Uyq8dkJmtB9c5KB1ABx1bDLE8VCVI6SFAId3Dpjh2fcopSDYzD+UU2g1aN2ue6O8l8eBGC7aPlpXQpKllu54vzk1+FIjgHMb7sTI"
    "rg6dQaZv9iN4Rx6fbnyvaoSlmnQ+J+2dYFvt/wBNdMaWIOGaT/v8nmfGiL2jUs/pna5uscr/2Q=="
)


def build_pack() -> dict[str, bytes]:
    """Return the files of the pack by name."""
    files: dict[str, bytes] = {}
    for part in (_png, _png_keys, _jpeg, _orientations, _webp_gif_bmp, _tiff, _netpbm, _sizes, _broken, _refused):
        added = part()
        assert not files.keys() & added.keys()
        files.update(added)
    return files


def png(
    width: int,
    height: int,
    depth: int,
    color: int,
    rows: Sequence[bytes],
    *,
    before: Sequence[tuple[bytes, bytes]] = (),
    after: Sequence[tuple[bytes, bytes]] = (),
    interlace: int = 0,
) -> bytes:
    """Write a PNG by hand.

    Args:
        width, height: pixels.
        depth: bits per sample.
        color: 0 grey, 2 RGB, 3 palette, 4 grey + alpha, 6 RGBA.
        rows: packed samples of each row.
        before, after: (kind, data) of the chunks on both sides of the pixels.
        interlace: 1 if the rows are those of Adam7.
    """
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlace)),
        *before,
        (b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows), 9)),
        *after,
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def tiff(width: int, height: int, *, bits: int, photometric: int, sample_format: int, strip: bytes) -> bytes:
    """Write a little-endian TIFF of one channel by hand: kinds that Pillow reads and does not write."""
    tags = [
        (256, 4, width),
        (257, 4, height),
        (258, 3, bits),
        (259, 3, 1),
        (262, 3, photometric),
        (273, 4, 8),
        (277, 3, 1),
        (278, 4, height),
        (279, 4, len(strip)),
        (339, 3, sample_format),
    ]
    directory = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", tag, kind, 1, v) for tag, kind, v in tags)
    strip += b"\0" * (len(strip) % 2)
    return b"II*\0" + struct.pack("<I", 8 + len(strip)) + strip + directory + b"\0" * 4


def _encode(picture: Image.Image, file_format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format=file_format, **options)
    return buffer.getvalue()


def _picture(pixels: np.ndarray[Any, Any], mode: str = "RGB") -> Image.Image:
    return Image.frombytes(mode, (pixels.shape[1], pixels.shape[0]), np.ascontiguousarray(pixels).tobytes())


def _packed(samples: np.ndarray[Any, Any], depth: int) -> list[bytes]:
    """Pack [H, W] samples of `depth` bits, most significant first."""
    bits = (samples[..., None] >> np.arange(depth - 1, -1, -1)) & 1
    return [np.packbits(row.reshape(-1)).tobytes() for row in bits.astype(np.uint8)]


def _wide_rows(*channels: np.ndarray[Any, Any]) -> list[bytes]:
    return [row.astype(">u2").tobytes() for row in np.dstack(channels)]


def _palette_picture() -> Image.Image:
    picture = _picture(INDICES, "P")
    picture.putpalette(PALETTE.tobytes())
    return picture


def _png() -> dict[str, bytes]:
    rgba = np.dstack([COLORS, ALPHA])
    palette = [(b"PLTE", PALETTE.tobytes())]
    files = {
        "rgb8.png": _encode(_picture(COLORS), "PNG"),
        "rgba8.png": _encode(_picture(rgba, "RGBA"), "PNG"),
        "la8.png": _encode(_picture(np.dstack([GREY, ALPHA]), "LA"), "PNG"),
        "grey8.png": _encode(_picture(GREY, "L"), "PNG"),
        "grey16.png": png(WIDTH, HEIGHT, 16, 0, _wide_rows(WIDE)),
        "rgb16.png": png(WIDTH, HEIGHT, 16, 2, _wide_rows(WIDE_COLORS)),
        "la16.png": png(WIDTH, HEIGHT, 16, 4, _wide_rows(WIDE, ALPHA.astype(np.uint16) * 257)),
        "rgba16.png": png(WIDTH, HEIGHT, 16, 6, _wide_rows(WIDE_COLORS, ALPHA.astype(np.uint16) * 257)),
        "palette8.png": png(WIDTH, HEIGHT, 8, 3, _packed(INDICES, 8), before=palette),
        "rgb8_interlaced.png": png(WIDTH, HEIGHT, 8, 2, _adam7(COLORS), interlace=1),
        "rgb8_icc.png": _encode(_picture(COLORS), "PNG", icc_profile=b"no real profile" * 20),
        "animated.png": _encode(
            _picture(COLORS), "PNG", save_all=True, append_images=[Image.new("RGB", (WIDTH, HEIGHT))] * 2
        ),
    }
    for depth in (1, 2, 4):
        files[f"grey{depth}.png"] = png(WIDTH, HEIGHT, depth, 0, _packed(INDICES & (2**depth - 1), depth))
        files[f"palette{depth}.png"] = png(
            WIDTH,
            HEIGHT,
            depth,
            3,
            _packed(INDICES & (2**depth - 1), depth),
            before=palette if depth > 1 else _first(2),
        )
    return files


def _first(num_colors: int) -> list[tuple[bytes, bytes]]:
    return [(b"PLTE", PALETTE[:num_colors].tobytes())]


def _adam7(pixels: np.ndarray[Any, Any]) -> list[bytes]:
    passes = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))
    return [row.tobytes() for y, x, down, right in passes for row in pixels[y::down, x::right]]


def _png_keys() -> dict[str, bytes]:
    """One transparent color, told in the bits of the file."""
    files = {
        f"grey{depth}_key.png": png(
            WIDTH, HEIGHT, depth, 0, _packed(INDICES & (2**depth - 1), depth), before=[(b"tRNS", struct.pack(">H", 1))]
        )
        for depth in (1, 2, 4, 8)
    }
    files["grey16_key.png"] = png(
        WIDTH, HEIGHT, 16, 0, _wide_rows(WIDE), before=[(b"tRNS", struct.pack(">H", WIDE[3, 5]))]
    )
    files["rgb8_key.png"] = png(
        WIDTH,
        HEIGHT,
        8,
        2,
        [row.tobytes() for row in COLORS],
        before=[(b"tRNS", struct.pack(">3H", *COLORS[3, 5]))],
    )
    files["rgb8_key_late.png"] = png(
        WIDTH, HEIGHT, 8, 2, [row.tobytes() for row in COLORS], after=[(b"tRNS", struct.pack(">3H", *COLORS[3, 5]))]
    )
    files["rgb16_key.png"] = png(
        WIDTH, HEIGHT, 16, 2, _wide_rows(WIDE_COLORS), before=[(b"tRNS", struct.pack(">3H", *WIDE_COLORS[3, 5]))]
    )
    palette = (b"PLTE", PALETTE.tobytes())
    files["palette8_key.png"] = png(
        WIDTH, HEIGHT, 8, 3, _packed(INDICES, 8), before=[palette, (b"tRNS", b"\xff\xff\0")]
    )
    files["palette2_alpha.png"] = png(
        WIDTH, HEIGHT, 2, 3, _packed(INDICES, 2), before=[palette, (b"tRNS", bytes(PALETTE_ALPHA))]
    )
    return files


def _jpeg() -> dict[str, bytes]:
    colors = _picture(COLORS)
    options = {"quality": 95, "subsampling": 0}
    ycc = np.asarray(_picture(255 - COLORS).convert("YCbCr"))
    ycck = bytearray(_encode(_picture(255 - np.dstack([ycc, np.full_like(GREY, 255)]), "CMYK"), "JPEG", quality=95))
    ycck[ycck.index(b"Adobe") + 11] = 2
    jpeg = _encode(colors, "JPEG", **options)
    return {
        "jpeg.jpg": jpeg,
        "jpeg_subsampled.jpg": _encode(colors, "JPEG", quality=95, subsampling=2),
        "jpeg_progressive.jpg": _encode(colors, "JPEG", progressive=True, **options),
        "jpeg_arithmetic.jpg": base64.b64decode(ARITHMETIC_JPEG),
        "jpeg_grey.jpg": _encode(_picture(GREY, "L"), "JPEG", quality=95),
        "jpeg_adobe_rgb.jpg": _encode(colors, "JPEG", keep_rgb=True, quality=95),
        "jpeg_cmyk.jpg": _encode(_picture(_cmyk(), "CMYK"), "JPEG", quality=95),
        "jpeg_ycck.jpg": bytes(ycck),
        "jpeg_icc.jpg": _encode(colors, "JPEG", icc_profile=b"no real profile" * 20, **options),
        "jpeg_two_pictures.jpg": _encode(
            colors, "MPO", save_all=True, append_images=[Image.new("RGB", (WIDTH, HEIGHT))], **options
        ),
        "jpeg_with_a_film.jpg": jpeg + b"\0\0\0\x18ftypmp42" + bytes(40),
    }


def _cmyk() -> np.ndarray[Any, Any]:
    return np.dstack([255 - COLORS, np.full_like(GREY, 51)])


def _orientations() -> dict[str, bytes]:
    files = {}
    for orientation in range(9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        files[f"orientation{orientation}.jpg"] = _encode(_picture(COLORS), "JPEG", exif=exif, quality=95, subsampling=0)
        if orientation == 6:
            files["orientation6.png"] = _encode(_picture(COLORS), "PNG", exif=exif)
            files["orientation6.webp"] = _encode(_picture(COLORS), "WEBP", exif=exif, lossless=True)
            chunk = (b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0"))
            rows = [row.tobytes() for row in COLORS]
            files["orientation6_late.png"] = png(WIDTH, HEIGHT, 8, 2, rows, after=[chunk])
            xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><a tiff:Orientation="6"/></x:xmpmeta>'
            text = (b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp)
            files["orientation6_xmp.png"] = png(WIDTH, HEIGHT, 8, 2, rows, before=[text])
            files["orientation6.tif"] = _encode(_picture(COLORS), "TIFF", tiffinfo={274: 6})
            files["orientation6_lzw.tif"] = _encode(_picture(COLORS), "TIFF", tiffinfo={274: 6}, compression="tiff_lzw")
    return files


def _webp_gif_bmp() -> dict[str, bytes]:
    rgba = _picture(np.dstack([COLORS, ALPHA]), "RGBA")
    black = Image.new("RGB", (WIDTH, HEIGHT))
    palette = _palette_picture()
    return {
        "lossless.webp": _encode(_picture(COLORS), "WEBP", lossless=True),
        "lossy.webp": _encode(_picture(COLORS), "WEBP", quality=95),
        "alpha.webp": _encode(rgba, "WEBP", lossless=True, exact=True),
        "animated.webp": _encode(_picture(COLORS), "WEBP", lossless=True, save_all=True, append_images=[black, rgba]),
        "palette.gif": _encode(palette, "GIF"),
        "transparent.gif": _encode(palette, "GIF", transparency=2),
        "animated.gif": _encode(palette, "GIF", save_all=True, append_images=[black, _picture(COLORS)]),
        "rgb.bmp": _encode(_picture(COLORS), "BMP"),
        "grey.bmp": _encode(_picture(GREY, "L"), "BMP"),
        "palette.bmp": _encode(palette, "BMP"),
        "bilevel.bmp": _encode(_picture(GREY, "L").convert("1", dither=Image.Dither.NONE), "BMP"),
        "rgb_32_bits.bmp": _encode(rgba, "BMP"),
    }


def _tiff() -> dict[str, bytes]:
    colors, grey = _picture(COLORS), _picture(GREY, "L")
    size = (WIDTH, HEIGHT)
    nan = FLOATS.copy()
    nan[3, 5] = np.nan
    lab = np.dstack([GREY, np.full_like(GREY, LAB_A % 256), np.full_like(GREY, LAB_B % 256)])
    pages = [Image.new("RGB", size), Image.new("RGB", (7, 5))]
    two = _palette_picture().convert("PA")
    return {
        "rgb.tif": _encode(colors, "TIFF"),
        "rgb_lzw.tif": _encode(colors, "TIFF", compression="tiff_lzw"),
        "rgb_big.tif": _encode(colors, "TIFF", big_tiff=True),
        "rgba.tif": _encode(_picture(np.dstack([COLORS, ALPHA]), "RGBA"), "TIFF"),
        "grey.tif": _encode(grey, "TIFF"),
        "la.tif": _encode(_picture(np.dstack([GREY, ALPHA]), "LA"), "TIFF"),
        "bilevel.tif": _encode(grey.convert("1", dither=Image.Dither.NONE), "TIFF", compression="group4"),
        "palette.tif": _encode(_palette_picture(), "TIFF"),
        "pa.tif": _encode(two, "TIFF"),
        "cmyk.tif": _encode(_picture(_cmyk(), "CMYK"), "TIFF"),
        "ycbcr.tif": _encode(colors.convert("YCbCr"), "TIFF"),
        "lab.tif": _encode(_picture(lab, "LAB"), "TIFF"),
        "grey16.tif": _encode(Image.fromarray(WIDE), "TIFF"),
        "grey16_big_endian.tif": _encode(_picture(WIDE.astype(">u2"), "I;16B"), "TIFF"),
        "grey16_lzw.tif": _encode(Image.fromarray(WIDE), "TIFF", compression="tiff_lzw"),
        "grey12.tif": tiff(*size, bits=12, photometric=1, sample_format=1, strip=b"".join(_packed(WIDE >> 4, 12))),
        "grey16_white_is_zero.tif": tiff(
            *size, bits=16, photometric=0, sample_format=1, strip=WIDE.astype("<u2").tobytes()
        ),
        "int32.tif": _encode(_picture(WIDE.astype("<i4") * 1000 - 7, "I"), "TIFF"),
        "int32_of_16_bits.tif": _encode(_picture(WIDE.astype("<i4"), "I"), "TIFF"),
        "int32_of_8_bits.tif": _encode(_picture(GREY.astype("<i4"), "I"), "TIFF"),
        "uint32.tif": tiff(*size, bits=32, photometric=1, sample_format=1, strip=(WIDE.astype("<u4") << 16).tobytes()),
        "float.tif": _encode(_picture(FLOATS, "F"), "TIFF"),
        "float_range.tif": _encode(_picture(FLOATS * 700 - 200, "F"), "TIFF"),
        "float_flat.tif": _encode(_picture(np.full_like(FLOATS, 77.4), "F"), "TIFF"),
        "float_nan.tif": _encode(_picture(nan, "F"), "TIFF"),
        "pages.tif": _encode(colors, "TIFF", save_all=True, append_images=pages),
    }


def _netpbm() -> dict[str, bytes]:
    size = b"%d %d" % (WIDTH, HEIGHT)
    bits = GREY >= 128
    plain_bits = "\n".join(" ".join("0" if bit else "1" for bit in row) for row in bits).encode()
    plain = "\n".join(" ".join(str(value) for value in row.reshape(-1)) for row in COLORS).encode()
    return {
        "plain.pbm": b"P1\n# a comment\n" + size + b"\n" + plain_bits + b"\n",
        "plain.ppm": b"P3\n" + size + b"\n255\n" + plain + b"\n",
        "bits.pbm": b"P4\n" + size + b"\n" + np.packbits(~bits, axis=1).tobytes(),
        "grey8.pgm": b"P5\n" + size + b"\n255\n" + GREY.tobytes(),
        "grey16.pgm": b"P5\n" + size + b"\n65535\n" + WIDE.astype(">u2").tobytes(),
        "grey16_dark.pgm": b"P5\n" + size + b"\n65535\n" + GREY.astype(">u2").tobytes(),
        "rgb8.ppm": b"P6\n" + size + b"\n255\n" + COLORS.tobytes(),
        "rgb16.ppm": b"P6\n" + size + b"\n65535\n" + WIDE_COLORS.astype(">u2").tobytes(),
        "float.pfm": b"Pf\n" + size + b"\n-1.0\n" + FLOATS[::-1].astype("<f4").tobytes(),
    }


def _flat(width: int, height: int) -> bytes:
    return _encode(Image.new("RGB", (width, height), (10, 200, 30)), "PNG")


def _sizes() -> dict[str, bytes]:
    files = {
        f"size_{w}x{h}.png": _flat(w, h)
        for w, h in ((1, 1), (31, 639), (200, 1), (201, 1), (5, 1000), (1, 3000), (4000, 20))
    }
    # White where the bit is set: a stripe on top of black.
    rows = [b"\xff" * 1000] * 100 + [b"\0" * 1000] * 7900
    files["size_8000x8000.png"] = png(8000, 8000, 1, 0, rows)
    return files


def _broken() -> dict[str, bytes]:
    noise = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    whole = {
        "png": _encode(_picture(noise), "PNG"),
        "jpg": _encode(_picture(noise), "JPEG"),
        "webp": _encode(_picture(noise), "WEBP"),
        "gif": _encode(_picture(noise).convert("P"), "GIF"),
        "bmp": _encode(_picture(noise), "BMP"),
        "tif": _encode(_picture(noise), "TIFF"),
    }
    files = {
        f"cut_{name}.{ending}": data[: int(len(data) * keep) if keep else -20]
        for ending, data in whole.items()
        for name, keep in (("at_0.3", 0.3), ("at_0.9", 0.9), ("by_20", 0))
    }
    data = whole["png"]
    idat = data.index(b"IDAT")
    damaged_exif = bytearray(files["cut_by_20.jpg"][:2] + b"\xff\xe1\0\x14Exif\0\0II*\0\xff\xff\xff\xff\x07\0\0\0")
    return {
        **files,
        "cut_in_header.png": data[:20],
        "cut_before_end.png": data[:-12],
        "crc_of_header.png": _flip(data, 30),
        "crc_of_pixels.png": _flip(data, idat + 300),
        "crc_of_text.png": _flip(
            png(WIDTH, HEIGHT, 8, 2, [row.tobytes() for row in COLORS], before=[(b"tEXt", b"Title\0some words")]), 48
        ),
        "damaged_exif.jpg": bytes(damaged_exif) + whole["jpg"][2:],
        "damaged_exif_gone.jpg": whole["jpg"],
        "huge_header.png": _huge_png(),
        "huge_header.gif": b"GIF89a\xff\xff\xff\xff" + whole["gif"][10:],
        "huge_header.webp": b"RIFF\x1e\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + b"\xff\xff\xff" * 2 + bytes(8),
        "huge_header.bmp": whole["bmp"][:18] + struct.pack("<ii", 60000, 60000) + whole["bmp"][26:],
        "no_width.png": png(0, 5, 8, 2, [b""] * 5),
        "jpeg_named.png": _encode(_picture(COLORS), "JPEG", quality=95, subsampling=0),
        "empty.png": b"",
        "html.png": b"<!DOCTYPE html>\n<html><body>404 Not Found</body></html>\n",
        "text.jpg": b"This is no picture.\n",
        "zip.png": b"PK\x03\x04" + bytes(60),
        "zeros.png": bytes(500),
    }


def _flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]


def _huge_png() -> bytes:
    return png(100_000, 100_000, 8, 2, [bytes(1000)] * 100)


def _refused() -> dict[str, bytes]:
    return {
        "drawing.eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 24\n%%EndComments\n0 0 40 24 rectfill\n%%EOF\n",
        "drawing_dos.eps": b"\xc5\xd0\xd3\xc6\x1e\0\0\0" + bytes(22) + b"%!PS-Adobe-3.0 EPSF-3.0\n%%EOF\n",
        "drawing.wmf": b"\xd7\xcd\xc6\x9a\0\0\0\0\0\0\x40\x02\x90\x01\x60\0\0\0\0\0\0\0\x01\0\x09\0\0\x03" + bytes(40),
        "drawing.emf": b"\x01\0\0\0\x6c\0\0\0" + bytes(32) + b" EMF" + bytes(64),
        "drawing.svg": b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg" width="40" height="24"/>\n',
        "document.pdf": b"%PDF-1.4\n1 0 obj\n<<>>\nendobj\n%%EOF\n",
        "icon.ico": _encode(_picture(COLORS).resize((16, 16)), "ICO", sizes=[(16, 16)]),
        "layers.psd": b"8BPS\0\x01" + bytes(60),
        "head.avif": b"\0\0\0\x1cftypavif\0\0\0\0avifmif1miaf" + bytes(40),
        "head.heic": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(40),
        "head.jp2": b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(40),
        "targa.tga": _encode(_picture(COLORS), "TGA"),
    }


def main() -> None:
    """Write the pack anew."""
    files = build_pack()
    PACK.mkdir(exist_ok=True)
    for path in PACK.iterdir():
        path.unlink()
    for name, data in files.items():
        (PACK / name).write_bytes(data)


if __name__ == "__main__":
    main()

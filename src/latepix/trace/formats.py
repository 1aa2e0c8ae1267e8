"""Which image formats are decoded, and what to say about the others."""

from __future__ import annotations

#: Formats decoded at the door. Everything else is refused by name.
ALLOWED_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
#: Formats whose decoder in Pillow starts other programs, or hands the file to a decoder that somebody plugged in.
RUNS_PROGRAMS = frozenset({"EPS", "WMF", "EMF", "BUFR", "GRIB", "HDF5", "MPEG"})

#: How files of the allowed formats start; those whose start is too short to tell (BMP, PPM) are left out.
_ALLOWED = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
#: (where, what, name): signatures of raster formats that are not decoded, and of some that start programs.
_REFUSED = (
    (0, b"%!PS", "EPS"),
    (0, b"\xc5\xd0\xd3\xc6", "EPS"),
    (0, b"\xd7\xcd\xc6\x9a", "WMF"),
    (0, b"\x01\0\x09\0\0\x03", "WMF"),
    (40, b" EMF", "EMF"),
    (0, b"BUFR", "BUFR"),
    (0, b"GRIB", "GRIB"),
    (0, b"\x89HDF\r\n\x1a\n", "HDF5"),
    (0, b"\0\0\x01\xb3", "MPEG"),
    (4, b"ftypavi", "AVIF"),
    (4, b"ftyphei", "HEIC"),
    (4, b"ftypmif1", "HEIF"),
    (0, b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (0, b"\xff\x4f\xff\x51", "JPEG 2000"),
    (0, b"\0\0\0\x0cJXL ", "JPEG XL"),
    (0, b"\xff\x0a", "JPEG XL"),
    (0, b"8BPS", "PSD"),
    (0, b"\0\0\x01\0", "ICO"),
    (0, b"icns", "ICNS"),
    (0, b"DDS ", "DDS"),
    (0, b"qoif", "QOI"),
    (0, b"SIMPLE  =", "FITS"),
)
#: What people send by mistake, by how it starts (lower case, without leading space).
_MISTAKES = (
    (b"<svg", "an SVG drawing; render it to PNG first"),
    (b"<!doctype html", "a web page, perhaps the error page of a server"),
    (b"<html", "a web page, perhaps the error page of a server"),
    (b"%pdf", "a PDF document; render its pages to PNG first"),
    (b"data:", "a data URL; pass it as text, not as bytes"),
    (b"ivborw0k", "base64; decode it first"),
    (b"/9j/", "base64; decode it first"),
    (b"{", "JSON, perhaps the error of a server"),
)


def is_allowed_format(data: bytes) -> bool:
    """Return whether a file starts like one of an allowed format."""
    return data.startswith(_ALLOWED) or (data.startswith(b"RIFF") and data[8:12] == b"WEBP")


def describe_unknown(data: bytes) -> tuple[str, str]:
    """Return reason code and words for bytes that no allowed decoder takes."""
    for at, signature, name in _REFUSED:
        if data.startswith(signature, at):
            why = "decoding it needs programs outside Pillow" if name in RUNS_PROGRAMS else "it is not on the list"
            return "unsupported_format", f"a picture in {name}, which is refused: {why}. Convert it to PNG"
    start = data[:512].lstrip().lower()
    if b"<svg" in start:
        return "not_an_image", _MISTAKES[0][1]
    words = next((words for text, words in _MISTAKES if start.startswith(text)), "not a picture in a known format")
    return "not_an_image", words if data else "no picture: there is not a single one"

"""Pictures in the messages of a row: how rows give them, in one form.

An image part of a message is any of
  {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}     as OpenAI's API takes it
  {"type": "image", "image": X}    X: a file, relative to the row's own; a data URL; base64; {"bytes": ..., "path": ...}
  {"type": "image"}                the next of the row's `images`, each like X, as in data sets of `datasets`
and becomes {"type": "image", "image": PATH, data URL or address}, which a row that is written holds too.
"""

import base64
import os
import re
from binascii import Error as NotBase64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from mimetypes import guess_type
from pathlib import Path
from typing import Any

from ...base.errors import BadInput, first_line

PART = "image"  # the type of a part that is a picture
SOURCES = ("image", "image_url", "path", "url", "base64", "bytes")  # keys of a part under which its picture stands
KEYS = ("images", "image")  # of a row
URL = re.compile(r"data:[^,]*;base64,(?P<data>.*)", re.DOTALL)
ADDRESS = re.compile(r"[\w+.-]+://")  # of a picture that is no file here; a server may know it
PLACE = re.compile(r"(:\d+|\[\d+\])$")  # behind the file, in where a row was read


class ImagePrompt(list[int]):
    """The token ids of a prompt, and the pictures at its image tokens, in order."""

    def __init__(self, ids: Iterable[int], pictures: Sequence[str]):
        super().__init__(ids)
        self.pictures = tuple(pictures)


def pictures_of(ids: Any) -> tuple[str, ...]:
    """The pictures of a prompt; none of one that is ids alone."""
    return getattr(ids, "pictures", ())


def with_pictures(ids: list[int], pictures: Sequence[str]) -> list[int]:
    """The ids as a prompt with these pictures; as they are without any."""
    return ImagePrompt(ids, pictures) if pictures else ids


def beside(row: Mapping[str, Any]) -> Sequence[Any]:
    """The pictures that stand beside a row's messages, in order."""
    given = next((row[key] for key in KEYS if row.get(key)), [])
    return given if isinstance(given, list) else [given]


def is_picture(part: Any) -> bool:
    """Whether a part of a message, in any of the forms above, is a picture."""
    return isinstance(part, Mapping) and part.get("type") in (PART, "image_url")


def as_part(part: Mapping[str, Any], own: Iterator[Any], origin: str) -> dict[str, str]:
    """A picture as all later code knows it. Args: own: the row's own pictures that no part before has taken.

    Raises: BadInput if it is in no known form.
    """
    given = next((part[key] for key in SOURCES if part.get(key) is not None), None)
    given = next(own, None) if given is None else given
    if isinstance(given, Mapping):  # {"url": ...} of OpenAI's API, or {"bytes": ..., "path": ...}
        given = next((given[key] for key in ("url", "bytes", "path") if given.get(key) is not None), None)
    if isinstance(given, bytes):
        given = f"data:image/unknown;base64,{base64.b64encode(given).decode()}"
    if not isinstance(given, str) or not given:
        raise BadInput(f"{origin}: a picture is given in no known form: {str(part)[:60]}")
    return {"type": PART, PART: source_of(given, Path(PLACE.sub("", origin)).parent)}


def source_of(given: str, folder: Path) -> str:
    """The path, data URL or address of a picture that a row names: a path, a URL, or base64."""
    if given.startswith("data:"):
        return given
    path = folder / given.removeprefix("file://")
    if ADDRESS.match(given) and not (given.startswith("file://") and os.path.isfile(path)):
        return given
    is_code = len(given) > 255 or not path.is_file() and re.fullmatch(r"[A-Za-z0-9+/\s]{64,}={0,2}", given)
    return f"data:image/unknown;base64,{given}" if is_code else str(path.absolute())


def sources_in(messages: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The pictures of normalised messages, in order."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return tuple(part[PART] for part in parts if is_picture(part))


def encoded(source: str) -> bytes:
    """The bytes of a picture's file. Raises OSError, or NotBase64."""
    found = URL.fullmatch(source)
    return Path(source).read_bytes() if found is None else base64.b64decode(found["data"])


def as_url(source: str) -> str:
    """The picture as a data URL, as servers take it. Raises UnreadablePicture."""
    if source.startswith("data:image/unknown") or not source.startswith("data:"):
        data = read_bytes(source)
        kind = kind_of(data) or guess_type(source)[0] or "image/png"
        return f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return source


def kind_of(data: bytes) -> str | None:
    """The media type that the first bytes of a picture tell."""
    known = {b"\x89PNG": "image/png", b"\xff\xd8": "image/jpeg", b"GIF8": "image/gif", b"RIFF": "image/webp"}
    return next((kind for begin, kind in known.items() if data.startswith(begin)), None)


class UnreadablePicture(BadInput):
    """A picture that is missing or broken."""


def read_bytes(source: str) -> bytes:
    """`encoded`, of which an error says which picture it is of."""
    if ADDRESS.match(source):
        raise UnreadablePicture(f"picture {source[:60]}: is not fetched from anywhere; give a file or its bytes")
    try:
        return encoded(source)
    except (OSError, NotBase64, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else first_line(error)
        raise UnreadablePicture(f"picture {source[:60]}: {why}") from error


def opened(source: str) -> Any:
    """The picture as PIL has it, in RGB. Raises UnreadablePicture; BadInput if PIL is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise BadInput("rows with pictures need pillow: pip install headstart[images]") from error
    data = read_bytes(source)
    try:
        with Image.open(BytesIO(data)) as image:
            return image.convert("RGB")
    except Exception as error:  # decoders of many formats raise errors of their own
        raise UnreadablePicture(f"picture {source[:60]}: {first_line(error)}") from error

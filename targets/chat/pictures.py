"""Pictures in the messages of a row: how rows give them, and what a target's processor makes of them.

An image part of a message is any of
  {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}     as OpenAI's API takes it
  {"type": "image", "image": X}    X: a file, relative to the row's own; a data URL; base64; {"bytes": ..., "path": ...}
  {"type": "image"}                the next of the row's `images`, each like X, as in data sets of `datasets`
and becomes {"type": "image", "image": PATH or data URL}, which a row that is written holds too.
"""

import base64
import re
from binascii import Error as NotBase64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from io import BytesIO
from mimetypes import guess_type
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ...base.errors import BadInput, first_line

PART = "image"  # the type of a part that is a picture
SOURCES = ("image", "image_url", "path", "url", "base64", "bytes")  # keys of a part under which its picture stands
KEYS = ("images", "image")  # of a row
URL = re.compile(r"data:[^,]*;base64,(?P<data>.*)", re.DOTALL)
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
    """The path or data URL of a picture that a row names: a path, a URL, or base64."""
    if given.startswith(("data:", "http:", "https:")):
        return given
    path = folder / given.removeprefix("file://")
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
    if source.startswith(("http:", "https:")):
        raise UnreadablePicture(f"picture {source[:60]}: is not fetched from the network; give a file or its bytes")
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


class ImageReader:
    """A target's processor, by which pictures become tokens and what its vision tower reads."""

    def __init__(self, processor: Any):
        self.processor = processor
        self.written = lru_cache(maxsize=4096)(self._written)

    def expanded(self, text: str, sources: Sequence[str]) -> str:
        """A rendered chat with as many image tokens for each picture as the target reads.

        Raises: UnreadablePicture; ValueError if the chat template shows other than these pictures.
        """
        shown = text.count(self.processor.image_token)
        if shown != len(sources):
            raise ValueError(f"it shows {shown} pictures of {len(sources)}")
        return self.processor.get_text_with_replacements([text], [self.written(source) for source in sources])[0][0]

    def tensors(self, sources: Sequence[str], ids: Sequence[int]) -> dict[str, Tensor]:
        """What the target's forward is told beside ids with these pictures: pixels, their grid, which tokens are of
        images."""
        given = dict(self._processed(sources))
        names = [name for name in ("mm_token_type_ids", "token_type_ids") if name in given]
        [kinds] = self.processor.create_mm_token_type_ids([list(ids)]) if names else [[]]
        for name in ("input_ids", "attention_mask", "text_replacement_offsets"):
            given.pop(name, None)
        return given | {name: Tensor(np.array([kinds])).long() for name in names}

    def within(self, ids: Sequence[int], sources: Sequence[str]) -> tuple[str, ...] | None:
        """The first of these pictures, whose tokens are those of the ids; None if the ids end inside one."""
        left = self.num_tokens(ids)
        for number, source in enumerate(sources):
            if left <= 0:
                return tuple(sources[:number]) if left == 0 else None
            tokens = self.processor.tokenizer(self.written(source), add_special_tokens=False)["input_ids"]
            left -= self.num_tokens(tokens)
        return tuple(sources) if left == 0 else None

    def num_tokens(self, ids: Sequence[int]) -> int:
        """How many of the ids are read as images."""
        return int(np.isin(np.asarray(ids), self.processor.image_token_ids).sum())

    def _written(self, source: str) -> str:
        """The text that a picture becomes."""
        return self._processed([source])["text_replacement_offsets"][0][0]["replacement"]

    def _processed(self, sources: Sequence[str]) -> Any:
        pictures = [opened(source) for source in sources]
        text = self.processor.image_token * len(pictures)
        try:
            return self.processor(
                images=pictures, text=[text], return_text_replacement_offsets=True, return_tensors="pt"
            )
        except Exception as error:  # of a picture that the processor does not take, such as one of a single pixel
            raise UnreadablePicture(f"picture {sources[0][:60]}: {first_line(error)}") from error


@lru_cache(maxsize=4)
def reader_of(tokenizer: Any) -> ImageReader | None:
    """The reader of the target whose tokenizer this is; None if it reads no pictures. Raises BadInput if its processor
    needs a package that is not installed."""
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(tokenizer.name_or_path)
    except ImportError as error:
        raise BadInput(f"rows with pictures: {first_line(error)}: pip install headstart[images]") from error
    except Exception:  # of a target with a tokenizer alone transformers raises errors of many kinds
        return None
    return ImageReader(processor) if getattr(processor, "image_token", None) else None

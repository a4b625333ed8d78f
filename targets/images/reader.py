"""A target's processor: how many tokens a picture becomes, and what the vision tower reads of it."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...base.errors import BadInput, first_line
from .pictures import UnreadablePicture, opened


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
        return given | {name: torch.tensor([kinds]) for name in names}

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

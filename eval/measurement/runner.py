"""Building the engine of a draft setting, and decoding batches of prompts with it, to time them or to prove texts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ...heads.drafter import Drafter
from ...heads.target import Target
from ..decoding.draft_setting import DraftSetting
from ..decoding.engine import Engine
from ..decoding.loop import Decoding, Generation, check_request
from ..decoding.sampling import Sampling
from ..decoding.stopping import Stop
from ..decoding.verify import AcceptRule
from .config import MeasureConfig
from .lossless import Unproved
from .proof.texts import first_unproved
from .result import RecordedTraining


def build_engine(
    target: Target,
    drafter: Drafter | None,
    setting: DraftSetting | None,
    *,
    batch_size: int,
    max_length: int,
    sampling: Sampling | None = None,
    accept: str | AcceptRule = "exact",
    steps: str = "eager",
    generator: torch.Generator | None = None,
) -> Engine:
    """The engine of a draft setting, or the baseline's if that is None. Args: as for `Engine`."""
    return Engine(
        target,
        drafter if setting else None,
        batch_size=batch_size,
        max_length=max_length,
        num_draft_tokens=setting.num_draft_tokens if setting and not setting.tree else None,
        tree=setting.tree if setting else None,
        sampling=sampling,
        accept=accept,
        steps=steps,
        generator=generator,
        verify_cost=setting.verify_cost if setting else None,
    )


class Runner:
    """Decodes batches of these prompts with a drafter in the config's setting, or without one, as the baseline.

    One engine per batch size serves all batches, so that steps are recorded only once. After an exception, the engine
    must be dropped.
    """

    def __init__(self, target: Target, drafter: Drafter | None, prompts: list[list[int]], config: MeasureConfig):
        """Raises BadInput on prompts that cannot be decoded, as `generate` does."""
        check_request(prompts, target=target, max_new_tokens=config.max_new_tokens)
        self.target, self.drafter, self.config = target, drafter, config
        self.max_length = max(map(len, prompts), default=0) + config.max_new_tokens
        self.stop = Stop.of(target, strings=config.stop_strings)
        self.generator = torch.Generator(device=target.device) if config.temperature > 0 else None
        self.engines: dict[int, Engine] = {}

    def engine(self, batch_size: int) -> Engine:
        """The engine for batches of that size."""
        if batch_size not in self.engines:
            config = self.config
            self.engines[batch_size] = build_engine(
                self.target,
                self.drafter,
                None if self.drafter is None else config.setting_for(self.drafter),
                batch_size=batch_size,
                max_length=self.max_length,
                sampling=config.sampling,
                accept=config.accept,
                steps=config.steps,
                generator=self.generator,
            )
        return self.engines[batch_size]

    def begin(self, batch: list[list[int]], seed: int) -> Decoding:
        """Start decoding a batch, without reading it yet. Args: seed: of the sampling at temperature > 0."""
        if self.generator is not None:
            self.generator.manual_seed(seed)
        return Decoding(self.engine(len(batch)), batch, max_new_tokens=self.config.max_new_tokens, stop=self.stop)

    def drop(self, batch_size: int) -> None:
        """Drop an engine, which frees its memory."""
        self.engines.pop(batch_size, None)

    def __call__(self, batch: list[list[int]], seed: int) -> Generation:
        """Decode a batch in one go."""
        try:
            decoding = self.begin(batch, seed)
            while not decoding.is_done:
                decoding.advance()
        except Exception:
            self.drop(len(batch))
            raise
        return decoding.generation

    def first_unproved(self, batch: list[list[int]], run: Generation, baseline: Sequence[Sequence[int]]) -> Unproved:
        """`proof.texts.first_unproved` of a run on this batch. Args: baseline: the texts without drafts."""
        limit = self.config.max_new_tokens
        return first_unproved(self.engine(len(batch)), batch, run, baseline, max_new_tokens=limit, stop=self.stop)


@dataclass(frozen=True)
class Contender:
    """A drafter in a setting, to be measured together with others against one baseline."""

    name: str  # what the report calls the drafter
    drafter: Drafter
    setting: DraftSetting
    training: RecordedTraining | None = None  # a head's record of its training

    def runner(self, target: Target, prompts: list[list[int]], config: MeasureConfig) -> Runner:
        """Decodes as the config says, in this setting."""
        return Runner(target, self.drafter, prompts, replace(config, setting=self.setting))

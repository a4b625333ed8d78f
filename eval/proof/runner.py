"""Building the engine of a draft setting, and decoding batches of prompts with it, to time them or to prove texts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ...heads.drafting.drafter import Drafter
from ...targets.target import Target
from ..decoding.draft_setting import DraftSetting
from ..decoding.engine import Engine
from ..decoding.loop import Decoding, Generation, check_request
from ..decoding.stopping import Stop
from ..figures.recorded_training import RecordedTraining
from .config import MeasureConfig
from .lossless import Unproved
from .texts import first_unproved


def build_engine(
    target: Target,
    drafter: Drafter | None,
    setting: DraftSetting | None,
    config: MeasureConfig,
    *,
    batch_size: int,
    max_length: int,
) -> Engine:
    """The engine of a draft setting, or the baseline's if that is None. Args: config: its own setting is ignored."""
    drafts = setting or DraftSetting("baseline", 0)
    return Engine(
        target,
        drafter if setting else None,
        batch_size=batch_size,
        max_length=max_length,
        num_draft_tokens=drafts.num_draft_tokens,
        tree=drafts.tree,
        sampling=config.sampling,
        accept=config.accept,
        steps=config.steps,
        generator=torch.Generator(target.device).manual_seed(0) if config.temperature > 0 else None,
        verify_cost=drafts.verify_cost,
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
        self.engines: dict[int, Engine] = {}

    def engine(self, batch_size: int) -> Engine:
        """The engine for batches of that size."""
        if batch_size not in self.engines:
            setting = None if self.drafter is None else self.config.setting_for(self.drafter)
            self.engines[batch_size] = build_engine(
                self.target, self.drafter, setting, self.config, batch_size=batch_size, max_length=self.max_length
            )
        return self.engines[batch_size]

    def begin(self, batch: list[list[int]], seed: int) -> Decoding:
        """Start decoding a batch, without reading it yet. Args: seed: of the sampling at temperature > 0."""
        engine = self.engine(len(batch))
        if engine.generator is not None:
            engine.generator.manual_seed(seed)
        return Decoding(engine, batch, max_new_tokens=self.config.max_new_tokens, stop=self.stop)

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

    def first_unproved(
        self, batch: list[list[int]], run: Generation, baseline: Sequence[Sequence[int]], seed: int
    ) -> Unproved:
        """`proof.texts.first_unproved` of a run on this batch.

        Args: baseline: the texts without drafts. seed: of both.
        """
        limit, engine = self.config.max_new_tokens, self.engine(len(batch))
        if engine.generator is not None:
            engine.generator.manual_seed(seed)
        return first_unproved(engine, batch, run, baseline, max_new_tokens=limit, stop=self.stop)


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

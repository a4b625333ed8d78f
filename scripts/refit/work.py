"""The rows of a run, and the target that reads them with a head."""

from dataclasses import dataclass
from functools import cached_property

from ...configs.errors import BadInput
from ...heads.decoders.cpu.products import pack_linears
from ...heads.loading import release_memory
from ...heads.registry import load_head
from ...heads.target import Target
from .data import OLD, Keyed, Parts, validation_of
from .foreign import is_foreign
from .reading import Reader, Reading, keep, readings_in
from .session import Session


@dataclass
class Work:
    """The rows of a run, and the target that reads them."""

    run: Session
    new: Parts
    old: Parts

    @cached_property
    def target(self) -> Target:
        settings = self.run.settings
        target = Target.load(settings.target, dtype=settings.dtype, device=settings.device)
        pack_linears(target.base)
        return target

    def reader(self, head: str, *, judges: bool = False) -> Reader:
        """What reads rows with a head. Args: judges: as in Reader. Raises BadInput if the head adapts the target."""
        loaded = load_head(head, self.target)
        if loaded.adapts_target:
            raise BadInput(f"--head {head}: it computes with adapters on the target, whose answers would be others")
        return Reader(self.target, loaded, self.run.settings.max_length, judges)

    @cached_property
    def validation(self) -> Keyed:
        """The rows for validation, of both sides."""
        return {**validation_of(self.own(self.new.rest)), **validation_of(self.old.rest)}

    def release(self) -> None:
        """Frees the target's memory, since training loads its own."""
        self.__dict__.pop("target", None)
        release_memory()

    def read(self, reader: Reader, rows: Keyed, name: str, *, until: float | None = None) -> dict[str, Reading]:
        """The readings of rows, by key. Each is appended to data/NAME, and those that are there are not read again.

        Args: until: second of the budget after which reading stops; None: all rows are read.
        """
        path = self.run.folder / "data" / name
        known = readings_in(path)
        left = [(key, row) for key, row in rows.items() if key not in known]
        for readings in reader.read(left):
            self.run.check_stop()
            keep(path, readings)
            if until is not None and self.run.clock.used > until:
                break
        return {key: reading for key, reading in readings_in(path).items() if key in rows}

    @property
    def readings(self) -> dict[str, Reading]:
        """The readings with the old head, without rows that could not be read."""
        found = readings_in(self.run.folder / "data" / "readings.jsonl")
        return {key: reading for key, reading in found.items() if not reading.problem}

    def own(self, rows: Keyed) -> Keyed:
        """The rows that were read and whose answers the target wrote; old rows are not tested."""
        found, foreign = self.readings, self.run.journal.foreign
        assert foreign is not None
        own = self.run.journal.own
        return {
            key: row
            for key, row in rows.items()
            if key in found and (key.startswith(OLD) or not is_foreign(found[key].typicality, foreign.served, own))
        }

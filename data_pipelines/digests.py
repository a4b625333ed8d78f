"""A set of digests for hundreds of millions of rows."""

SIZE = 16  # bytes of a digest
EMPTY = bytes(SIZE)


class Digests:
    """Digests of 16 bytes in one block of memory, hashed to their slots: 21 to 43 bytes a digest, while it grows half
    as much again. (A Python set of them takes 100 and more.) All-zero is no digest."""

    def __init__(self) -> None:
        self._num_slots = 1024
        self._table = bytearray(self._num_slots * SIZE)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, digest: bytes) -> bool:
        """Whether it is new; if so, it is kept."""
        assert len(digest) == SIZE and digest != EMPTY
        start = self._slot(digest)
        if self._table[start : start + SIZE] == digest:
            return False
        self._table[start : start + SIZE] = digest
        self._count += 1
        if self._count * 4 > self._num_slots * 3:
            self._grow()
        return True

    def _slot(self, digest: bytes) -> int:
        """Where the digest is, or would be put."""
        slot = int.from_bytes(digest[:8], "little") % self._num_slots
        while (there := self._table[slot * SIZE : slot * SIZE + SIZE]) != EMPTY and there != digest:
            slot = (slot + 1) % self._num_slots
        return slot * SIZE

    def _grow(self) -> None:
        old, self._num_slots = self._table, self._num_slots * 2
        self._table = bytearray(self._num_slots * SIZE)
        for start in range(0, len(old), SIZE):
            digest = old[start : start + SIZE]
            if digest != EMPTY:
                at = self._slot(bytes(digest))
                self._table[at : at + SIZE] = digest

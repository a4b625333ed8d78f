"""A compact set of digests, for hundreds of millions of rows."""

SIZE = 16  # bytes of a digest
EMPTY = bytes(SIZE)


class Digests:
    """Open-addressing hash set of 16-byte digests: 21 to 43 bytes of memory per digest, and 1.5 times that while the
    table grows. (A Python set takes over 100.) All-zero bytes mark an empty slot and are not a valid digest."""

    def __init__(self) -> None:
        self._num_slots = 1024
        self._table = bytearray(self._num_slots * SIZE)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, digest: bytes) -> bool:
        """Add the digest. Returns whether it was new."""
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
        """The byte offset of the digest in the table, or of the slot where it would be inserted."""
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

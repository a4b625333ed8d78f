"""A set of digests for hundreds of millions of rows."""

SIZE = 16  # bytes of a digest
EMPTY = bytes(SIZE)


class Digests:
    """Digests of 16 bytes in one block of memory, hashed to their places: 21 to 43 bytes a digest, while it grows half
    as much again. (A Python set of them takes 100 and more.) All-zero is no digest."""

    def __init__(self) -> None:
        self._num_places = 1024
        self._table = bytearray(self._num_places * SIZE)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, digest: bytes) -> bool:
        """Whether it is new; if so, it is kept."""
        assert len(digest) == SIZE and digest != EMPTY
        start = self._place(digest)
        if self._table[start : start + SIZE] == digest:
            return False
        self._table[start : start + SIZE] = digest
        self._count += 1
        if self._count * 4 > self._num_places * 3:
            self._grow()
        return True

    def _place(self, digest: bytes) -> int:
        """Where the digest is, or would be put."""
        place = int.from_bytes(digest[:8], "little") % self._num_places
        while (found := self._table[place * SIZE : place * SIZE + SIZE]) != EMPTY and found != digest:
            place = (place + 1) % self._num_places
        return place * SIZE

    def _grow(self) -> None:
        old, self._num_places = self._table, self._num_places * 2
        self._table = bytearray(self._num_places * SIZE)
        for start in range(0, len(old), SIZE):
            digest = old[start : start + SIZE]
            if digest != EMPTY:
                at = self._place(bytes(digest))
                self._table[at : at + SIZE] = digest

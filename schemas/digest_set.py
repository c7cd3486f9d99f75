"""A set of digests in little memory, for datasets of many millions of rows."""

_BITS = 14


class DigestSet:
    """Digests of one length; about 20 bytes of memory for one of 16, where a ``set`` of ``bytes`` takes about 90."""

    def __init__(self, size: int) -> None:
        """
        Args:
            size: bytes of a digest, two at least. They must be spread evenly, as those of a cryptographic hash are.
        """
        self._size, self._num = size, 0
        self._buckets = [bytearray() for _ in range(1 << _BITS)]

    def __len__(self) -> int:
        return self._num

    def add(self, digest: bytes) -> bool:
        """Add a digest; returns whether it is new."""
        bucket = self._buckets[int.from_bytes(digest[:2], "big") >> (16 - _BITS)]
        place = bucket.find(digest)
        while place > 0 and place % self._size:  # the end of one digest and the beginning of the next
            place = bucket.find(digest, place + 1)
        if place >= 0:
            return False
        bucket += digest
        self._num += 1
        return True

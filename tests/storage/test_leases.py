"""Leases on object storage survive damage to their records; tested on a storage in memory, without a server."""

import obstore
import pytest
from obstore.store import MemoryStore

from vantage.storage.leases import RemoteLeases

HOUR = 3600.0
PLACE = "locks/key"


@pytest.mark.parametrize(
    "content", [b"\xff", b"", b"{}", b"null", b"[" * 100_000, None], ids=lambda given: repr(given)[:9]
)
def test_a_lease_whose_record_was_damaged_or_removed_is_lost(content: bytes | None) -> None:
    """The next to wait takes the lease over. Its holder must notice, and neither crash nor overwrite the new lease."""
    remote = MemoryStore()
    with RemoteLeases(remote, seconds=HOUR).hold(PLACE, holder="run 1") as held:
        assert held.is_still_ours()
        if content is None:
            obstore.delete(remote, PLACE)
        else:
            obstore.put(remote, PLACE, content)
        assert not held.is_still_ours()
        with RemoteLeases(remote, seconds=HOUR).hold(PLACE, holder="run 2", timeout=5.0) as next_one:
            assert not held.is_still_ours()
            assert next_one.is_still_ours()

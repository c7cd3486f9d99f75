"""Push an exported folder to a prefix of a bucket: all files, then the same bytes read back, then the card."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError

from vantage.review.exports.exporting import CARD
from vantage.review.exports.pushing import PushRefused, card_last, sha256_of
from vantage.storage.bucket import open_bucket


class BucketPrefix:
    """A prefix of a bucket that holds one exported model, and nothing else."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._remote = open_bucket(address)

    def send(self, folder: Path, files: Mapping[str, str]) -> str:
        """Send the files, read them back, and put the card last; see ``vantage.review.exports.pushing.Pushed``.

        A prefix without a card was left by an interrupted push, which is completed. A prefix with a card is a published
        model, which is never changed.
        """
        try:
            self._send(folder, files)
        except BaseError as error:
            reason = str(error).splitlines()[0][:300]
            raise PushRefused(
                f"{self._address} did not take the model ({reason}); check the address and the login in the environment, and "
                "run the command again, which completes it"
            ) from error
        return self._address

    def _send(self, folder: Path, files: Mapping[str, str]) -> None:
        there = {str(each["path"]) for batch in obstore.list(self._remote) for each in batch}
        if others := sorted(there - set(files)):
            raise PushRefused(
                f"{self._address} has {others[0]}, which is no file of this model; name a prefix of its own"
            )
        if CARD in there:
            self._require_same(files)
            return
        for path in card_last(files)[:-1]:
            obstore.put(self._remote, path, folder / path)
        self._require_same({path: digest for path, digest in files.items() if path != CARD})
        with suppress(AlreadyExistsError):  # another push of the same files was faster: they are compared
            obstore.put(self._remote, CARD, folder / CARD, mode="create")
        self._require_same(files)

    def _require_same(self, files: Mapping[str, str]) -> None:
        """Read every file back and compare it."""
        for path, expected in files.items():
            try:
                found = sha256_of(memoryview(chunk) for chunk in obstore.get(self._remote, path).stream())
            except NotFoundError:
                found = "missing"
            if found != expected:
                raise PushRefused(
                    f"{self._address}/{path} is {found[:12]}, and the audited file {expected[:12]}; a published model is never "
                    "changed: name another prefix, or remove this one"
                )

"""Let a listener receive responses in a thread of its own, while one thread samples them and another trains."""

import queue
import threading
from collections.abc import Sequence

from vantage.tasks.rollout.engine import Listener

KEEP_UP_SECONDS = 0.05
"""Seconds after which a listener that receives nothing is called to keep up."""


class ListeningBeside:
    """A `Listener` that never waits: it passes everything on to another listener, which may have to wait for its
    turn."""

    def __init__(self, listener: Listener) -> None:
        """Begin to listen; ``stop`` ends it."""
        self._listener = listener
        self._waiting: queue.SimpleQueue[tuple[Sequence[int], Sequence[list[int]]]] = queue.SimpleQueue()
        self._received: set[int] = set()
        self._is_stopped = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._listen, name="listening beside", daemon=True)
        self._thread.start()

    def sampled(self, rows: Sequence[int], responses: Sequence[list[int]]) -> None:
        """See `Listener`."""
        self._received.update(rows)
        self._waiting.put((rows, responses))

    def keep_up(self) -> None:
        """Do nothing: this object's thread calls ``keep_up`` of the other listener."""

    def ended(self, rows: Sequence[int], responses: Sequence[list[int]]) -> None:
        """Receive the responses of a rank once all are sampled; those that were not received before are passed on."""
        places = [place for place, row in enumerate(rows) if row not in self._received]
        if places:
            self.sampled([rows[place] for place in places], [responses[place] for place in places])

    def stop(self) -> None:
        """Pass nothing more on. Responses that were not passed on are left to the code that wants their scores.

        Raises:
            Exception: the other listener has failed.
        """
        self._is_stopped.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def give_up(self) -> None:
        """Stop, and let the other listener forget the responses; its errors no longer matter."""
        self._is_stopped.set()
        self._thread.join()
        self._listener.give_up()

    def _listen(self) -> None:
        try:
            while not self._is_stopped.is_set():
                try:
                    rows, responses = self._waiting.get(timeout=KEEP_UP_SECONDS)
                except queue.Empty:
                    self._listener.keep_up()
                else:
                    self._listener.sampled(rows, responses)
        except BaseException as error:  # raised again when the responses are asked for
            self._error = error

"""A watch over a rank: one thread looks at what the rank's loop does not see.

heartbeat       ranks that hang
failure_watch   ranks that are dead
watchdog        a wait that takes long
"""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType

LOOK_S = 1.0


def aside(say: Callable[..., object], *told: object) -> None:
    """Say in a thread: a full pipe, or a stopped terminal, must not hold up other looks."""
    threading.Thread(target=say, args=told, name="said aside", daemon=True).start()


class Look(ABC):
    """A look of the watch.

    Attributes:
        every_s: seconds from one look to the next.
        over: set when the look ends; a look that waits must wake then.
    """

    every_s = LOOK_S

    def __init__(self) -> None:
        self.over = threading.Event()

    def begin(self) -> bool:
        """Make ready; return whether there is anything to look at."""
        return True

    @abstractmethod
    def look(self) -> None: ...


class Watch:
    """A thread while open, from the first look on."""

    def __init__(self) -> None:
        self._due_s: dict[Look, float] = {}
        self._lock = threading.Lock()
        """Held during a look."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def begin(self, look: Look) -> None:
        if not look.begin():
            return
        with self._lock:
            self._due_s[look] = 0.0
        if self._thread.ident is None:
            self._thread.start()

    def end(self, look: Look) -> None:
        """End a look, also one under way."""
        look.over.set()
        with self._lock:
            self._due_s.pop(look, None)

    def close(self) -> None:
        for look in list(self._due_s):
            self.end(look)
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _serve(self) -> None:
        while not self._over.wait(min((look.every_s for look in list(self._due_s)), default=LOOK_S)):
            for look in list(self._due_s):
                with self._lock:
                    if time.monotonic() >= self._due_s.get(look, float("inf")):
                        self._look(look)

    def _look(self, look: Look) -> None:
        """Look; a look that fails is the last of its kind."""
        try:
            look.look()
            self._due_s[look] = time.monotonic() + look.every_s
        except Exception:
            del self._due_s[look]
            aside(sys.excepthook, *sys.exc_info())

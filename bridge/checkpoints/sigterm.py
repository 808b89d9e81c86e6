"""SIGTERM as a request that a loop asks for, instead of the end of the process."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any


class Sigterm:
    """What this process was told by SIGTERM since `catch`, which the main thread calls; elsewhere nothing is caught."""

    def __init__(self) -> None:
        self.is_told = False
        self._earlier: Any = None
        self._pid: int | None = None

    def catch(self) -> None:
        """Catch the signal from now on, if this is the main thread."""
        if self._pid is None and threading.current_thread() is threading.main_thread():
            # None is a handler that Python did not set, and cannot set again
            self._earlier = signal.signal(signal.SIGTERM, self._hear) or signal.SIG_DFL
            self._pid = os.getpid()

    def give_back(self) -> None:
        """Let the signal do what it did before, unless somebody else has caught it since."""
        if self._pid is not None and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) == self._hear:
                signal.signal(signal.SIGTERM, self._earlier)
            self._pid = None

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self.is_told = True
            return
        # a process that was forked ends as it would have without us
        signal.signal(signal.SIGTERM, self._earlier)
        os.kill(os.getpid(), signal.SIGTERM)

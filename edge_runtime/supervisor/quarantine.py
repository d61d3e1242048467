"""Remember which requests were running when workers died, and refuse the ones that did so twice. No clock."""

from __future__ import annotations

from collections import OrderedDict

DEATHS_LIMIT = 2
REMEMBERED = 1024


class Quarantine:
    """Deaths per request content. A suspect (one death) should run alone, so that it can't take others with it."""

    def __init__(self) -> None:
        self._deaths: OrderedDict[bytes, int] = OrderedDict()

    def note_death(self, fingerprint: bytes) -> None:
        """Count one worker death while this request was running."""
        self._deaths[fingerprint] = self._deaths.pop(fingerprint, 0) + 1
        if len(self._deaths) > REMEMBERED:
            self._deaths.popitem(last=False)

    def is_suspect(self, fingerprint: bytes) -> bool:
        """Whether a worker has died with it."""
        return fingerprint in self._deaths

    def is_refused(self, fingerprint: bytes) -> bool:
        """Whether it has had its chances."""
        return self._deaths.get(fingerprint, 0) >= DEATHS_LIMIT

    def clear(self, fingerprint: bytes) -> None:
        """Acquit a suspect that was answered."""
        if not self.is_refused(fingerprint):
            self._deaths.pop(fingerprint, None)

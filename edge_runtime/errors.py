"""Say what can go wrong, with the facts and the remedy as attributes.

    EdgeError                 everything a user or client can be told
    ├── UsageError            a wrong argument on the command line or in a call        exit 2
    ├── CheckpointError       the model files are broken, incomplete or unsupported    exit 2
    ├── BuildError            an engine can't be built from a good checkpoint          exit 2
    ├── NoDeviceError         the accelerator or its driver is missing                 exit 69
    ├── BackendError          the inference backend failed                             exit 70
    ├── ClientIdTakenError    another connection uses our MQTT client id               exit 75
    ├── ConfigError           a configuration file, key or value is refused            exit 78
    ├── EngineRefusedError    an engine folder fails its manifest                      exit 78
    └── RequestError          one request is refused or failed; others go on           on the wire

Errors of our own code are ordinary exceptions (AssertionError, TypeError ...), never an EdgeError.
"""

from __future__ import annotations

from dataclasses import dataclass


class EdgeError(Exception):
    """Something a user or client can be told: `str(error)` is one complete line, remedy included."""

    exit_status = 70

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(f"{message}; {remedy}" if remedy else message)
        self.message = message
        self.remedy = remedy


class UsageError(EdgeError):
    """A wrong argument on the command line or in a call."""

    exit_status = 2


class CheckpointError(EdgeError):
    """Model files are broken, incomplete or of a kind that is not supported."""

    exit_status = 2


class BuildError(EdgeError):
    """An engine can't be built although the checkpoint is good."""

    exit_status = 2


class NoDeviceError(EdgeError):
    """The accelerator, its driver or its Python module is missing."""

    exit_status = 69


class BackendError(EdgeError):
    """The inference backend failed while loading or stepping."""

    exit_status = 70


class ClientIdTakenError(EdgeError):
    """Another connection uses our MQTT client id."""

    exit_status = 75


class ConfigError(EdgeError):
    """A configuration file, key or value is refused."""

    exit_status = 78


class EngineRefusedError(EdgeError):
    """An engine folder fails its manifest: nothing of it was loaded."""

    exit_status = 78


@dataclass(frozen=True, slots=True)
class PartialAnswer:
    """What had been generated when a request failed."""

    text: str
    completion_tokens: int


class RequestError(EdgeError):
    """One request is refused or failed.

    `code` is a key of `messages.ERROR_TABLE`, `param` the field at fault in msgspec's path form ("$.max_tokens"),
    `partial` what a device had generated before it failed, when it says so.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_ms: int | None = None,
        partial: PartialAnswer | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.retry_after_ms = retry_after_ms
        self.partial = partial

"""The base class of KVStow's errors, and the errors that several modules raise. Some modules define errors of their
own. The `code` of an error is stable, because the HTTP layer, counters and logs use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


class KvstowError(Exception):
    """Base of all errors raised by KVStow. They can be pickled, whatever their constructors take."""

    code: ClassVar[str] = "internal"

    def __init_subclass__(cls, code: str | None = None) -> None:
        if code is not None:
            cls.code = code

    def __reduce__(self) -> tuple[Callable[..., KvstowError], tuple[Any, ...]]:
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[KvstowError], args: tuple[Any, ...], fields: dict[str, Any]) -> KvstowError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class _ReasonError(KvstowError):
    """An error with a reason. `reason` is a word in snake case, and the message is a sentence."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ConfigError(KvstowError, code="invalid_config"):
    """A setting has a value that is not allowed."""

    def __init__(self, key: str, value: object, allowed: str) -> None:
        super().__init__(self._message(key, value, allowed))
        self.key, self.value, self.allowed = key, value, allowed

    @staticmethod
    def _message(key: str, value: object, allowed: str) -> str:
        return f"{key} is {value!r}; allowed: {allowed}"

    def renamed(self, key: str) -> ConfigError:
        """The same error under the name by which its user knows the setting."""
        return type(self)(key, self.value, self.allowed)


class SettingError(ConfigError):
    """A setting is unknown, contradicts another one, or needs one that is missing.

    `allowed` completes the sentence that begins with the key and the value, if that is neither None nor a bool.
    """

    @staticmethod
    def _message(key: str, value: object, allowed: str) -> str:
        return f"{key} {allowed}" if value is None or isinstance(value, bool) else f"{key} {value} {allowed}"


class InsufficientMemoryError(KvstowError, code="insufficient_memory"):
    """The machine or the cgroup has less memory than the pool needs."""


class MissingPackageError(KvstowError, code="missing_package"):
    """A package is not installed that only some uses of KVStow need, such as torch."""

    def __init__(self, use: str, package: str, extra: str) -> None:
        super().__init__(
            f"{use} needs {package}, which is not installed: pip install '.[{extra}]' in KVStow's checkout"
        )


class PinError(_ReasonError, code="pin_failed"):
    """Memory could not be populated or registered; `reason` is one of `PIN_FAILURES`."""

    PIN_FAILURES: ClassVar[tuple[str, ...]] = ("memlock", "cgroup_limit", "driver", "out_of_memory", "hugepages")


class ForeignMemoryError(KvstowError, code="foreign_memory"):
    """A file descriptor that was handed over is not the memory that it should be."""


class JournalError(KvstowError, code="journal_invalid"):
    """A journal or a node's roster cannot be read or written: it is damaged, void, too long, or of another format."""


class KeeperError(KvstowError, code="keeper"):
    """The keeper, which holds memory across restarts of the service, refused a request or cannot be reached."""


class KeeperBusyError(KeeperError):
    """The process of another service, which the keeper serves, still lives."""


class CopyError(KvstowError, code="copy_failed"):
    """A copy between the device and the pool failed."""


class LoadRefusedError(CopyError, code="load_refused"):
    """A load that a computation waits for was not started, because its slots are not this rank's any more."""


class QueueFullError(KvstowError, code="queue_full"):
    """A bound for ops in the data plane, event streams or running operations is reached; nothing was begun."""


class DataPlaneFailedError(KvstowError, code="data_plane_failed"):
    """The copy thread has failed or was closed; it takes no more ops."""


class InvalidRequestError(KvstowError, code="invalid_request"):
    """The arguments of a call are invalid or contradict each other."""


class NotFoundError(KvstowError, code="not_found"):
    """The block, rank, pool or operation does not exist."""


class ConflictError(KvstowError, code="conflict"):
    """The call is valid, but not in the current state."""


class LeaseError(KvstowError, code="lease_invalid"):
    """The lease was released, used by a load, or broken by a rank that lost its memory."""


class ProcessEndedError(KvstowError, code="process_ended"):
    """A process that this one started has ended before its work was done."""


class AttachError(KvstowError, code="attach_failed"):
    """An engine and the node service cannot talk to each other."""


class AttachRefusedError(_ReasonError, AttachError, code="attach_refused"):
    """The node service does not let a process attach."""


class ProtocolError(_ReasonError, AttachError, code="attach_protocol"):
    """The other end of an attach connection sent what the protocol does not allow."""


class DisconnectedError(AttachError, code="attach_disconnected"):
    """The other end of an attach connection has closed it, or its process has ended."""


class CallFailedError(AttachError, code="attach_call_failed"):
    """The node service refused one call, and the connection goes on. `service_code`: the code of its error."""

    def __init__(self, service_code: str, message: str) -> None:
        super().__init__(message)
        self.service_code = service_code


class TierUnavailableError(KvstowError, code="tier_unavailable"):
    """The store of the fleet tier gave no answer that can be used."""


class TierTimeoutError(TierUnavailableError, code="tier_timeout"):
    """The store of the fleet tier did not answer in time; nothing touches the slots of the call any more."""


class IntegrityError(KvstowError, code="integrity"):
    """The control plane's records are inconsistent: a defect of KVStow, not of its user."""

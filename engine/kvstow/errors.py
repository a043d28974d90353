"""Every error that KVStow raises, in one tree.

Each class has a stable `code` in snake case, which the HTTP layer, counters and logs use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


class KvstowError(Exception):
    """Base of all errors raised by KVStow. They can be pickled, whatever their constructors take."""

    code: ClassVar[str] = "internal"

    def __reduce__(self) -> tuple[Callable[..., KvstowError], tuple[Any, ...]]:
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[KvstowError], args: tuple[Any, ...], fields: dict[str, Any]) -> KvstowError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class _ReasonError(KvstowError):
    """`reason` is a word in snake case, the message a sentence."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ConfigError(KvstowError):
    """A setting has a value that is not allowed."""

    code = "invalid_config"

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


class InsufficientMemoryError(KvstowError):
    """The machine or the cgroup has less memory than the pool needs."""

    code = "insufficient_memory"


class MissingPackageError(KvstowError):
    """A package is not installed that only some uses of KVStow need, such as torch."""

    code = "missing_package"

    def __init__(self, use: str, package: str, extra: str) -> None:
        super().__init__(
            f"{use} needs {package}, which is not installed: pip install '.[{extra}]' in KVStow's checkout"
        )


class PinError(_ReasonError):
    """Memory could not be populated or registered; `reason` is one of `PIN_FAILURES`."""

    code = "pin_failed"
    PIN_FAILURES: ClassVar[tuple[str, ...]] = ("memlock", "cgroup_limit", "driver", "out_of_memory", "hugepages")


class ForeignMemoryError(KvstowError):
    """A file descriptor that was handed over is not the memory that it should be."""

    code = "foreign_memory"


class JournalError(KvstowError):
    """The journal of an index cannot be used: it belongs to another pool, another layout or another version."""

    code = "journal_invalid"


class KeeperError(KvstowError):
    """The keeper, which holds memory across restarts of the service, refused a request or cannot be reached."""

    code = "keeper"


class CopyError(KvstowError):
    """A copy between the device and the pool failed."""

    code = "copy_failed"


class QueueFullError(KvstowError):
    """The data plane's queue is full; the op was not taken."""

    code = "queue_full"


class DataPlaneFailedError(KvstowError):
    """The copy thread has failed or was closed; it takes no more ops."""

    code = "data_plane_failed"


class InvalidRequestError(KvstowError):
    """The arguments of a call are invalid or contradict each other."""

    code = "invalid_request"


class NotFoundError(KvstowError):
    """The block, rank, pool or operation does not exist."""

    code = "not_found"


class ConflictError(KvstowError):
    """The call is valid, but not in the current state."""

    code = "conflict"


class LeaseError(KvstowError):
    """The lease was released, used by a load, or broken by a rank that lost its memory."""

    code = "lease_invalid"


class ProcessEndedError(KvstowError):
    """A process that this one started has ended before its work was done."""

    code = "process_ended"


class AttachError(KvstowError):
    """An engine and the node service cannot talk to each other."""

    code = "attach_failed"


class AttachRefusedError(_ReasonError, AttachError):
    """The node service does not let a process attach."""

    code = "attach_refused"


class ProtocolError(_ReasonError, AttachError):
    """The other end of an attach connection sent what the protocol does not allow."""

    code = "attach_protocol"


class DisconnectedError(AttachError):
    """The other end of an attach connection has closed it, or its process has ended."""

    code = "attach_disconnected"


class CallFailedError(AttachError):
    """The node service refused one call, and the connection goes on. `service_code`: the code of its error."""

    code = "attach_call_failed"

    def __init__(self, service_code: str, message: str) -> None:
        super().__init__(message)
        self.service_code = service_code


class TierUnavailableError(KvstowError):
    """The store of the fleet tier gave no answer that can be used."""

    code = "tier_unavailable"


class TierTimeoutError(TierUnavailableError):
    """The store of the fleet tier did not answer in time; nothing touches the slots of the call any more."""

    code = "tier_timeout"


class IntegrityError(KvstowError):
    """The control plane's records are inconsistent: a defect of KVStow, not of its user."""

    code = "integrity"

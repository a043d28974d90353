"""Watches an engine's weights in this process: which files its rank has loaded, and whether anything may have changed
the weights since.

vLLM's remote procedure calls (RPCs) to its ranks name a method of the worker, or carry a function. The calls that vLLM
makes itself change no weights. Any other call may, so it is noticed before it runs, both in the engine's executor,
which sends it, and in the rank, which looks the method up.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, Final

from kvstow_service.connectors.engine_core.metadata import LoadedFiles

logger = logging.getLogger("kvstow.vllm")

HARMLESS: Final = frozenset(
    {
        "add_lora",
        "adjust_rank",
        "annotate_profile",
        "check_health",
        "checkpoint_prepare",
        "checkpoint_restore",
        "compile_or_warm_up_model",
        "compute_weight_checksums",
        "determine_available_memory",
        "discard",
        "execute_dummy_batch",
        "execute_method",
        "execute_model",
        "get_cache_block_size_bytes",
        "get_compilation_match_table",
        "get_encoder_timing_stats",
        "get_kv_cache_spec",
        "get_kv_connector_handshake_metadata",
        "get_model_inspection",
        "get_simple_cpu_offload_num_cpu_blocks",
        "get_supported_kv_cache_layouts",
        "get_supported_tasks",
        "handle_ft_command",
        "init_device",
        "init_worker",
        "initialize_cache",
        "initialize_from_config",
        "list_loras",
        "pin_lora",
        "profile",
        "release_late_interaction_query_cache",
        "remove_lora",
        "reset_encoder_cache",
        "reset_mm_cache",
        "sample_tokens",
        "save_sharded_state",
        "save_tensorized_model",
        "set_kv_cache_layout",
        "shutdown",
        "sleep",
        "supports_draft_weight_updates",
        "synchronize_device",
        "take_draft_token_ids",
        "update_environment_variables",
        "update_max_model_len",
        "wake_up",
    }
)
"""The methods that vLLM's own code calls on ranks, and that change no weights. Changes of adapters are noticed by their
files instead."""
_OWN_FUNCTIONS = {("vllm.distributed.ec_transfer.ec_connector.encoder_output_width", "_measure_on_worker")}


def ignore(reason: str) -> None:
    """The listener of an engine whose scheduler's half is not in this process. It does nothing."""


class WeightWatch:
    """The weights of one engine, as seen from one of its processes."""

    def __init__(self) -> None:
        self.loaded: LoadedFiles | None = None
        """The files that this process has loaded; None if it has loaded none, or does not know of it."""
        self.asked = 0
        """How many calls by name that may have changed weights this process has sent to ranks."""
        self.noticed = 0
        """How many such calls the rank in this process has received."""
        self.last = ""
        """The last such call, as a sentence."""
        self.listener: Callable[[str], None] = ignore
        """Called before the weights change, on the thread that changes them."""

    def asks(self, method: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that the engine's executor is about to send a call."""
        if not isinstance(method, str):
            if (getattr(method, "__module__", ""), getattr(method, "__qualname__", "")) not in _OWN_FUNCTIONS:
                self._change(f"the function {getattr(method, '__qualname__', method)!s}")
        elif method == "sleep":
            level = args[0] if args else kwargs.get("level", 1)
            if level not in (0, 1):
                self._change("sleep with a level above 1")
        elif method == "discard":
            tags = args[0] if args else kwargs.get("tags", ())
            if tags is None or "weights" in tags:
                self._change("discard of the weights")
        elif method not in HARMLESS:
            self.asked += 1
            self._change(method)

    def notices(self, method: str) -> None:
        """Note that the rank of this process is about to run a method that is not harmless."""
        self.noticed += 1
        if self.noticed > self.asked:  # this process has not sent the call
            self._change(method)

    def begin_serving(self) -> None:
        """Count from now on, because the rank has its weights. Calls before this were part of loading them."""
        self.noticed = 0

    def _change(self, what: str) -> None:
        self.last = f"weights_changed: {what} may have changed the weights of the running engine"
        self.listener(self.last)


_watches: dict[str, WeightWatch] = {}


def watch_of(config: Any) -> WeightWatch:
    """The watch of the engine with this `VllmConfig`."""
    return _watches.setdefault(str(config.instance_id), WeightWatch())


def watch_ranks() -> None:
    """Notice the calls that ranks of this process run from now on. Idempotent. Call it before vLLM loads weights."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    find = WorkerWrapperBase.__getattr__
    if getattr(find, "is_watched", False):
        return

    @functools.wraps(find)
    def find_and_watch(wrapper: Any, name: str) -> Any:
        found = find(wrapper, name)
        if name in HARMLESS or name.startswith("__") or not callable(found):
            return found
        return _noticed(wrapper, name, found)

    find_and_watch.is_watched = True  # type: ignore[attr-defined]
    WorkerWrapperBase.__getattr__ = find_and_watch


def watch_executors() -> None:
    """Notice the calls that executors of this process send to ranks from now on. Idempotent. Call it after the engine's
    executor was made, because vLLM imports only the class that it uses."""
    from vllm.v1.executor.abstract import Executor

    for kind in _subclasses(Executor):
        send = vars(kind).get("collective_rpc")
        if send is not None and not getattr(send, "is_watched", False):
            kind.collective_rpc = _watched(send)


def _subclasses(kind: Any) -> Iterator[Any]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def _watched(send: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(send)
    def watch_and_send(
        executor: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, *more: Any, **others: Any
    ) -> Any:
        if not isinstance(method, str) or method not in HARMLESS or method in ("sleep", "discard"):
            try:
                watch_of(executor.vllm_config).asks(method, tuple(args), dict(kwargs or {}))
            except Exception:
                logger.exception("KVStow cannot see whether %s changes weights", method)
        return send(executor, method, timeout, args, kwargs, *more, **others)

    watch_and_send.is_watched = True  # type: ignore[attr-defined]
    return watch_and_send


def _noticed(wrapper: Any, name: str, found: Callable[..., Any]) -> Callable[..., Any]:
    config = wrapper.__dict__.get("vllm_config")
    if config is None or config.kv_transfer_config is None:
        return found
    try:
        watch = watch_of(config)
        if name == "load_model" and watch.loaded is None:
            return functools.partial(_load, config, watch, found)
        watch.notices(name)
    except Exception:
        logger.exception("KVStow cannot see whether %s changes weights", name)
    return found


def _load(config: Any, watch: WeightWatch, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Load the weights, and compare the places to which the paths of the model lead before and after that."""
    from kvstow_service.connectors.vllm.modelpaths import ModelTrails

    before = ModelTrails.of(config)
    result = load(*args, **kwargs)
    watch.loaded = before.compare(ModelTrails.of(config))
    return result

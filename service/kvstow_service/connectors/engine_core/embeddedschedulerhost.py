"""The scheduler's half with its own engine and admin server in vLLM's process."""

from __future__ import annotations

import logging
from importlib.metadata import version

import vllm
from vllm.utils.network_utils import get_ip

import kvstow
from kvstow.bytesize import format_size
from kvstow.control.engine import OffloadEngine
from kvstow.errors import ConfigError
from kvstow_service.admin.adminhost import AdminOptions
from kvstow_service.admin.agent import AdminAddress
from kvstow_service.admin.embedded import EmbeddedAdmin
from kvstow_service.admin.tls import TlsFiles
from kvstow_service.connectors.engine_core.controlplane import EmbeddedControl
from kvstow_service.connectors.engine_core.gpublocks import BlockPool
from kvstow_service.connectors.engine_core.kvevents import EmbeddedBlocks
from kvstow_service.connectors.engine_core.metadata import RankHello
from kvstow_service.connectors.engine_core.metricsexport import StatsFeed
from kvstow_service.connectors.engine_core.offloadmetrics import read_family
from kvstow_service.connectors.engine_core.options import ConnectorOptions, misuse
from kvstow_service.connectors.engine_core.schedulerhost import EngineSetup, SchedulerHost
from kvstow_service.connectors.engine_core.schedulerside import SchedulerSide
from kvstow_service.connectors.engine_core.vllmprocess import VLLMProcess, this_node

logger = logging.getLogger("kvstow.vllm")

_HEAD_START_SECONDS = 1.0
"""The admin server's start waits for this long, because vLLM's own start ends soon after. Ranks of this host do not
wait for it."""


class EmbeddedSchedulerHost(SchedulerHost):
    """Runs an engine and an admin server in vLLM's process."""

    def __init__(self, setup: EngineSetup) -> None:
        """Raises `ConfigError` if the options do not allow an admin server to start."""
        super().__init__(setup)
        self.engine: OffloadEngine | None = None
        self.admin: EmbeddedAdmin | None = None
        self._admin_options = _admin_options(setup.options, setup.process)
        self._spans_nodes = False

    @property
    def address_for_ranks(self) -> AdminAddress | None:
        if self.admin is None or not (self._spans_nodes or self.admin.ranks_failure):
            return None
        return self.admin.address_for_ranks

    def close(self) -> None:
        if self.admin is not None:
            self.admin.stop()
        if self.engine is not None:
            self.engine.close()

    def _make_side(self, pool: BlockPool, hellos: list[RankHello]) -> SchedulerSide:
        options, process, groups = self._setup.options, self._setup.process, self._setup.groups
        sizes = [hello.slot_bytes for hello in hellos]
        self._spans_nodes = {hello.node for hello in hellos} != {this_node()}
        engine = OffloadEngine(options.engine_config(sizes, groups.alignment))
        self.stats = StatsFeed(
            lambda: read_family(engine.stats(), sum(sizes), self._slot_tokens, lost_blocks=self.lost_blocks),
            lambda: engine.open_transfers > 0,
        )
        side = self._new_side(EmbeddedControl(engine), pool, self._event_feed(EmbeddedBlocks(engine)))
        self.engine = engine
        admin = EmbeddedAdmin(
            engine,
            self._admin_options,
            identity=process.engine_id,
            mode="vllm",
            max_capacity_slots=self._max_slots(hellos),
            settings={**options.public(), "model": process.model, "engine_id": process.engine_id},
            build={"vllm": vllm.__version__, **{name: version(name) for name in self._setup.packages}},
            node_host=get_ip() if self._spans_nodes else "",
            head_start=_HEAD_START_SECONDS,
            freezes_heap=True,
        )
        self.admin = admin
        admin.start()
        slots = engine.config.capacity_slots
        logger.info(
            "KVStow %s keeps %d blocks of %d tokens in %s of host memory, over %d ranks; stores are %s",
            kvstow.__version__,
            slots,
            groups.alignment,
            format_size(slots * sum(sizes)),
            len(sizes),
            "lazy" if options.lazy_offload else "eager",
        )
        return side

    def _max_slots(self, hellos: list[RankHello]) -> int:
        """The largest capacity that a resize may set, in slots. The slots of a node's ranks share its available
        memory."""
        fitting = [
            min(hello.node_bytes for hello in ranks) // sum(hello.slot_bytes for hello in ranks)
            for node in {hello.node for hello in hellos}
            if (ranks := [hello for hello in hellos if hello.node == node])
        ]
        wanted = self._setup.options.max_slots([hello.slot_bytes for hello in hellos], min(fitting))
        return min(wanted, *(hello.max_slots for hello in hellos))


def _admin_options(options: ConnectorOptions, process: VLLMProcess) -> AdminOptions:
    """The options of the admin server. Each data-parallel engine has its own port."""
    tls = None
    if options.tls_cert is not None:
        tls = TlsFiles(options.tls_cert, options.tls_key, options.tls_client_ca)
    elif options.tls_key is not None or options.tls_client_ca is not None:
        raise misuse("tls_cert", None, "is needed by tls_key and tls_client_ca")
    try:
        return AdminOptions(
            host=options.admin_host,
            port=options.admin_port + process.data_parallel_index if options.admin_port else 0,
            token_file=options.token_file,
            viewer_token_file=options.viewer_token_file,
            readiness_require=options.readiness_require,
            allowed_hosts=options.allowed_hosts,
            tls=tls,
        )
    except ConfigError as error:
        key = f"admin_{error.key}" if error.key in ("host", "port") else error.key
        raise error.renamed(f"kv_connector_extra_config: {key}") from None

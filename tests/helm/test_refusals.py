"""Wrong values are refused before anything is installed, in words that name the value and what is allowed."""

from __future__ import annotations

import pytest
from tests.helm.conftest import ATTACHED, ENGINE, NODE, REGISTRY, SIDECAR, TryTemplate

pytestmark = pytest.mark.deploy

MOONCAKE = "tier.url=mooncake://mooncake-master.mooncake.svc:50051"


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["mode=daemonset"], "mode: daemonset is unknown; allowed: addon, engine or node"),
        (["mode=service"], "mode: service was replaced: use mode=node for one service on each node"),
        (["mode=service", "service.memory=8Gi"], "or mode=engine with sidecar=true for a service in vLLM's pod"),
        (["cpu_bytes_to_use=5"], "additional properties 'cpu_bytes_to_use' not allowed"),
        (["pool.sizeGiB=64"], "at '/pool': additional properties 'sizeGiB' not allowed"),
        (["pool.size=0Gi"], "at '/pool/size': '0Gi' does not match pattern"),
        (["pool.size=64G"], "at '/pool/size': '64G' does not match pattern '^([1-9][0-9]*(Mi|Gi|Ti))?$'"),
        (["pool.size=64"], "at '/pool/size': got number, want string"),
        (["pool.policy=fifo"], "at '/pool/policy': value must be one of 'auto', 'lru'"),
        (["pool.size=64Gi", "pool.maxSize=32Gi"], "pool.maxSize: 32Gi is less than pool.size, 64Gi"),
        (["pool.pinning.latencyTarget=soon"], "at '/pool/pinning/latencyTarget': 'soon' does not match pattern"),
        (["pool.pinning.latencyTarget=1ms", "pool.pinning.pause=1ms"], "pinning.latencyTarget: cannot be combined"),
        (["memory.hugePages=2Mi"], "at '/memory/hugePages': value must be one of 'advised', 'reserved'"),
        (["admin.port=80"], "at '/admin/port': minimum: got 80, want 1,024"),
        (["admin.port=65535", "parallel.data=2"], "admin.port: with parallel.data, the last admin server's port"),
        (["admin.token=short"], "at '/admin/token': 'short' does not match pattern"),
        (["admin.host=127.0.0.1"], "at '/admin/host': value must be one of '0.0.0.0', '::'"),
        (["admin.tokenSecret.name=mine", "admin.token=0123456789abcdef"], "tokenSecret.name: the Secret mine cannot"),
        (["admin.viewerToken=0123456789abcdef"], "admin.viewerToken: needs admin.guardReading"),
        (
            ["admin.guardReading=true", "admin.viewerToken=0123456789abcdef", "admin.token=0123456789abcdef"],
            "admin.viewerToken: must differ from admin.token",
        ),
        (["admin.guardReading=true", "admin.tokenSecret.viewerKey=token"], "admin.tokenSecret.viewerKey: must differ"),
        (["admin.tls.secretName=Not_One"], "at '/admin/tls/secretName': 'Not_One' does not match pattern"),
        (["admin.tls.cert=tls.pem"], "at '/admin/tls': additional properties 'cert' not allowed"),
        (["admin.tls.clientCa.secretName=ca"], "admin.tls.clientCa.secretName: needs admin.tls.secretName"),
        (["image.vllm.digest=latest"], "at '/image/vllm/digest': 'latest' does not match pattern"),
        (["monitoring.podMonitor.enabled=maybe"], "value must be one of 'auto', true, false"),
        (["engine.resources.memory=1Gi"], "at '/engine': additional properties 'resources' not allowed"),
        (["engine.cpu=0.5"], "at '/engine/cpu'"),
        (["pod.user=0"], "at '/pod/user': minimum: got 0, want 1"),
        (["mode=engine", "engine.model=m"], "image.registry: mode engine needs the registry"),
        (["mode=node"], "image.registry: mode node needs the registry"),
        (["sidecar=true"], "image.registry: the sidecar needs the registry"),
        (["mode=engine", REGISTRY], "engine.model: mode engine needs a model"),
        (
            [*ENGINE, "engine.port=9596", "parallel.data=2"],
            "engine.port: 9596 is used by an admin server",
        ),
        ([*NODE, "service.ranks=2"], "at '/service': additional properties 'ranks' not allowed"),
        ([*NODE, "service.memory=64"], "at '/service/memory': got number, want string"),
        ([*NODE, "pool.pinning.latencyTarget=1ms"], "pool.pinning.latencyTarget: mode node has none"),
        ([*NODE, "pool.maxSize=128Gi"], "pool.maxSize: has no effect with a node service"),
        ([*ATTACHED, "pool.maxSize=128Gi"], "pool.maxSize: has no effect with a node service"),
        ([*ATTACHED, "pool.size=64Gi"], "pool.size: has no effect with a node service, whose memory is service.memory"),
        ([*NODE, "pool.size=64Gi"], "pool.size: has no effect with a node service"),
        ([*SIDECAR, "pool.size=64Gi"], "pool.size: has no effect with a node service"),
        *(
            ([*NODE, "service.keeper.place=node", f"service.keeper.folder={folder}"], "at '/service/keeper/folder'")
            for folder in ("/etc", "/var/lib/kubelet", "/", "/run/../etc/kvstow")
        ),
        *(
            (
                [*NODE, "service.keeper.place=node", f"service.keeper.folder={folder}"],
                f"service.keeper.folder: {folder} and socket.folder, /run/kvstow, must lie apart",
            )
            for folder in ("/run/kvstow", "/run/kvstow/kvstow-keeper")
        ),
        ([*NODE, "sidecar=true"], "sidecar: belongs to engines, which other releases install"),
        ([*NODE, "attach.node=true"], "attach.node: belongs to engines, which other releases install"),
        ([*NODE, "attach.memory=1Gi"], "attach.memory: belongs to engines, which other releases install"),
        ([*NODE, "pod.user=null"], "pod.user: null leaves nobody to own the socket's folder"),
        ([*NODE, "socket.folder=/run"], "at '/socket/folder': '/run' does not match pattern"),
        ([*NODE, "socket.group=kvstow"], "at '/socket/group': got string, want integer"),
        ([*NODE, "service.updateStrategy=Recreate"], "value must be one of 'OnDelete', 'RollingUpdate'"),
        ([*NODE, "service.keeper.timeout=1h"], "at '/service/keeper': additional properties 'timeout' not allowed"),
        (
            [*NODE, "service.args={--attach-socket=/run/x/attach.sock}"],
            "service.args: --attach-socket=/run/x/attach.sock would contradict a flag that the chart sets; use the "
            "value socket.folder",
        ),
        ([*NODE, "socket.folder=/var/lib"], "at '/socket/folder': '/var/lib' does not match pattern"),
        ([*NODE, "socket.folder=/run/../etc/kvstow"], "at '/socket/folder': '/run/../etc/kvstow' does not match"),
        ([*NODE, "service.args={--admin-group,users}"], "service.args: --admin-group would let others in"),
        ([*NODE, "service.args={--config=/x}"], "service.args: --config=/x would let others in"),
        ([*SIDECAR, "service.args={--attach-group=9}"], "use the value socket.group"),
        ([*NODE, "service.args={--token-file=/x}"], "use the value admin.tokenSecret"),
        ([*NODE, "service.args={--pin-pause=0}"], "use the value pool.pinning.pause"),
        ([*NODE, "service.args={--no-keep-on-stop}"], "use the value service.keeper.keepOnStop"),
        (["service.keeper.place=node"], "service.keeper.place: node has no effect in mode addon"),
        (
            [*NODE, "service.args={--log-level debug}"],
            'service.args: "--log-level debug" is one argument, which names no flag: write --flag=value, or make the '
            "value an item of its own",
        ),
        (
            [*ENGINE, "engine.args={--max-model-len\t4096}"],
            'engine.args: "--max-model-len\\t4096" is',
        ),
        ([*ATTACHED, "sidecar=true"], "sidecar: true contradicts attach.node=true"),
        ([*ATTACHED, "networkPolicy.enabled=true"], "networkPolicy.enabled: with attach.node the admin port is"),
        ([*ATTACHED, "engine.probes.readinessPath=/readyz"], "engine.probes.readinessPath: with attach.node"),
        (["attach.weightsId=v1"], "attach.weightsId: needs attach.node=true or sidecar=true"),
        (["disk.size=1Ti"], "disk.size: needs disk.volume"),
        ([*NODE, "disk.volume=nfs"], "at '/disk/volume': value must be one of '', 'hostPath', 'ephemeral'"),
        ([*NODE, "disk.volume=hostPath"], "disk.paths: disk.volume=hostPath needs the folders"),
        ([*NODE, "disk.volume=hostPath", "disk.paths={nvme}"], "at '/disk/paths/0': 'nvme' does not match pattern"),
        ([*NODE, "disk.volume=ephemeral"], "disk.size: an ephemeral disk needs a size"),
        (
            [*NODE, "disk.volume=ephemeral", "disk.size=1Gi", "disk.paths={/mnt}"],
            "disk.paths: an ephemeral disk has no path on the node",
        ),
        (
            [*SIDECAR, "disk.volume=hostPath", "disk.paths={/mnt}"],
            "disk.volume: hostPath needs mode=node",
        ),
        ([*ENGINE, "disk.volume=ephemeral"], "disk.volume: needs mode=node or sidecar=true"),
        ([*ATTACHED, "disk.volume=ephemeral"], "disk.volume: with attach.node the cache is the node service's"),
        (
            [*NODE, MOONCAKE, "disk.volume=ephemeral", "disk.size=1Gi"],
            "disk.volume: cannot be combined with tier.url",
        ),
        ([*NODE, "service.args={--disk=/mnt}"], "use the value disk.paths"),
        (["tier.url=memory:"], "at '/tier/url': 'memory:' does not match pattern"),
        ([MOONCAKE], "tier.url: needs mode=node or sidecar=true"),
        ([*ENGINE, MOONCAKE], "tier.url: needs mode=node or sidecar=true"),
        (["tier.rdma.resources.rdma/hca=1"], "tier.rdma.resources: needs tier.url"),
        (["tier.tenants.ml[0]=1"], "tier.tenants: needs tier.url"),
        (
            [*NODE, MOONCAKE, "tier.tenants.ml[0]=1", "tier.tenants.web[0]=1"],
            "tier.tenants: uid 1 is in ml and in web, and nobody is of two tenants",
        ),
        ([*NODE, MOONCAKE, "service.args={--tenant=ml=1}"], "use the value tier.tenants"),
        (
            [*ATTACHED, MOONCAKE],
            "tier.url: with attach.node the cache is the node service's: set the tier in the release",
        ),
        ([*NODE, "tier.url=mooncake://kv:secret@r:1"], "tier.url: Mooncake knows no user names and no passwords"),
        ([*NODE, "tier.url=redis://r:6379"], "at '/tier/url': 'redis://r:6379' does not match pattern"),
        (
            [*NODE, MOONCAKE, "tier.rdma.resources.rdma/hca=1"],
            "tier.rdma.resources: needs the option protocol=rdma in tier.url",
        ),
        (
            [*NODE, f"{MOONCAKE}?protocol=rdma", "tier.rdma.resources.memory=1Gi"],
            "tier.rdma.resources: memory is no resource of a device plug-in",
        ),
        (
            [*SIDECAR, MOONCAKE, "tier.allowTo[0].ipBlock.cidr=10.0.0.0/8"],
            "tier.allowTo: only mode node",
        ),
        ([*NODE, MOONCAKE, "service.args={--tier=mooncake://r:1}"], "use the value tier.url"),
        (["attach.requireSharing=true"], "attach.requireSharing: needs attach.node=true or sidecar=true"),
        (["admin.readinessRequire={engine}"], "at '/admin/readinessRequire/0': value must be one of 'pool', 'pinned'"),
    ],
)
def test_wrong_values_are_refused_by_name(try_template: TryTemplate, sets: list[str], words: str) -> None:
    result = try_template(*sets)
    assert result.returncode != 0
    assert words in result.stderr

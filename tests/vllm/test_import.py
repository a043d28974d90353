"""Every process of vLLM imports the connector's module, GPU or not: it must be cheap, and do nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.vllm

# vLLM's own imports come first: what they do is not ours. Then nothing may be started, opened for writing, or asked
# of a GPU, and what only the admin server needs is not there.
CODE = """
import json, sys, threading
import torch
import vllm.distributed.kv_transfer.kv_connector.v1.base
from vllm.config import VllmConfig

absent = {"fastapi", "starlette", "uvicorn", "cuda"}
for name in list(sys.modules):
    if name.partition(".")[0] in absent:
        del sys.modules[name]

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"no module named {name}")

sys.meta_path.insert(0, Absent())

def no_cuda(*arguments):
    raise RuntimeError("there is no CUDA here")

torch.cuda._lazy_init = torch.cuda.is_available = torch.cuda.device_count = no_cuda

done = []

def audit(event, arguments):
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & 3:
        done.append(f"{event} {arguments[0]}")
    elif event.startswith(("socket.", "subprocess.", "os.fork", "os.mkdir", "os.spawn")):
        done.append(event)

def start(thread, start=threading.Thread.start):
    done.append("thread")
    start(thread)

threading.Thread.start = start  # Python 3.11 has no audit event for it
sys.dont_write_bytecode = True
sys.addaudithook(audit)
{statements}
print(json.dumps(done))
"""


def run(statements: str) -> list[str]:
    """What the statements did."""
    code = CODE.replace("{statements}", textwrap.dedent(statements))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    done: list[str] = json.loads(result.stdout.splitlines()[-1])
    return done


def test_it_imports_and_does_nothing() -> None:
    done = run(
        """
        from kvstow_service.connectors.vllm import KVStowConnector
        from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma
        assert supports_hma(KVStowConnector)
        assert KVStowConnector.requires_piecewise_for_cudagraph({}) is False
        KVStowConnector.build_kv_connector_stats()
        """
    )
    assert done == []


def test_the_check_sees_what_is_done_and_leaves_out_what_is_absent() -> None:
    done = run(
        """
        import os, socket, tempfile, threading
        threading.Thread(target=dict).start()
        socket.socket().close()
        os.close(tempfile.mkstemp()[0])
        for statement in ("import fastapi", "import uvicorn", "import cuda.bindings", "torch.zeros(1, device='cuda')"):
            try:
                exec(statement)
            except (ModuleNotFoundError, RuntimeError):
                continue
            raise SystemExit(f"{statement} works here")
        """
    )
    assert {event.partition(" ")[0] for event in done} == {"thread", "socket.__new__", "open"}

"""JAX on GPUs: real DMA and asynchronous dispatch, on one GPU, on two in one process, and in two processes.

This process holds torch and needs no JAX; each test starts one that has JAX and no torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PATIENCE = 150.0  # seconds
_SLACK = 4 << 20  # bytes; without KVStow it grew by 8.2 to 9.2 MB, with it by 7.2 to 8.8


def _environment(devices: int | None = None) -> dict[str, str]:
    """Of a process that sees this many of our GPUs, or all."""
    own = {
        "PYTHONPATH": f"{_ROOT}:{_ROOT / 'engine'}:{_ROOT / 'service'}",
        "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cuda"),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "NCCL_NVLS_ENABLE": "0",
        "PYTHONFAULTHANDLER": "1",
    }
    if devices is not None:
        ours = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(devices)))).split(",")
        own["CUDA_VISIBLE_DEVICES"] = ",".join(ours[:devices])
    return os.environ | own


@cache
def _num_devices() -> int:
    """How many GPUs JAX has; 0 also where it is not installed."""
    command = [sys.executable, "-c", "import jax; print(len(jax.devices()))"]
    process = subprocess.run(
        command, env=_environment(), capture_output=True, text=True, timeout=_PATIENCE, check=False
    )
    return int(process.stdout) if process.returncode == 0 else 0


@pytest.mark.parametrize(
    ("program", "devices"),
    [
        ("copies_go_through_pinned_memory", 1),
        ("copies_go_through_pinned_memory", 2),
        ("large_blocks_come_back", 1),
        ("large_blocks_come_back", 2),
        ("nothing_waits_for_a_step_that_runs", 1),
        ("nothing_waits_for_a_step_that_runs", 2),
        ("random_programs_leave_no_wrong_element", 1),
        ("random_programs_leave_no_wrong_element", 2),
        ("two_processes_agree", 2),
    ],
)
def test_jax_on_gpus(program: str, devices: int) -> None:
    _run(program, devices)


@pytest.mark.parametrize("devices", [1, 2])
def test_ten_thousand_ops_leave_nothing_behind(devices: int) -> None:
    """JAX itself grows on CUDA, so resident memory is compared with its growth without KVStow."""
    grown = int(_run("ten_thousand_ops_leave_nothing_behind", devices))
    assert grown < int(_run("jax_alone", devices)) + _SLACK


def _run(program: str, devices: int) -> str:
    """What the program prints."""
    if _num_devices() < devices:
        pytest.skip(f"needs JAX with {devices} CUDA devices; it has {_num_devices()}")
    command = [sys.executable, "-m", "tests.gpu.jaxprograms", program]
    return subprocess.run(
        command, cwd=_ROOT, env=_environment(devices), timeout=_PATIENCE, check=True, stdout=subprocess.PIPE, text=True
    ).stdout

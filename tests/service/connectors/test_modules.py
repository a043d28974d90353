"""Which modules of the connectors cannot be imported without vLLM or JAX: `make test` measures the
coverage of all others."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDER = "service/kvstow_service/connectors"

IMPORT_EACH = """
import sys
from importlib import import_module
sys.modules["vllm"] = sys.modules["jax"] = None
for name in sys.argv[1:]:
    try:
        import_module(f"kvstow_service.connectors.{name}")
    except ModuleNotFoundError as error:
        assert any(host in str(error) for host in ("vllm", "jax")), error
        print(name)
"""


def test_coverage_omits_exactly_the_modules_that_need_vllm_or_jax() -> None:
    names = [f"{path.parent.name}.{path.stem}" for path in (ROOT / FOLDER).glob("*/*.py")]
    found = subprocess.run(
        [sys.executable, "-c", IMPORT_EACH, *names],
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    left_out = [path for path in settings["tool"]["coverage"]["run"]["omit"] if path.startswith(f"{FOLDER}/")]
    assert sorted(left_out) == sorted(f"{FOLDER}/{name.replace('.', '/')}.py" for name in found.stdout.split())

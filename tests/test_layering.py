"""Imports point one way: service -> api -> engine; within the engine, the control plane knows no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WEB = {
    "fastapi",
    "starlette",
    "uvicorn",
    "pydantic",
    "pydantic_settings",
    "prometheus_client",
    "httpx",
    "click",
    "rich",
}

FORBIDDEN = {
    "engine/kvstow": {"kvstow_api", "kvstow_service", "vllm", *WEB},
    "engine/kvstow/control": {
        "torch",
        "cuda",
        *(f"kvstow.{part}" for part in ("attach", "memory", "devices", "dataplane")),
    },
    "engine/kvstow/tier": {
        "torch",
        "cuda",
        *(f"kvstow.{part}" for part in ("control", "attach", "memory", "devices", "dataplane")),
    },
    "engine/kvstow/attach": {
        "torch",
        "cuda",
        "zmq",
        *(f"kvstow.{part}" for part in ("control", "memory", "devices", "dataplane")),
    },
    "engine/kvstow/memory": {
        "torch",
        "cuda",
        *(f"kvstow.{part}" for part in ("attach", "control", "devices", "dataplane")),
    },
    "engine/kvstow/devices": {"kvstow.control", "kvstow.dataplane"},
    "service/kvstow_service/cli": {"torch", "cuda"},
    "service/kvstow_service/node": {"torch", "cuda", "kvstow.devices", "kvstow.dataplane"},
    "engine/kvstow/devices/jax": {"torch", "cuda"},
    "api/kvstow_api": {"kvstow_service", "vllm", "torch", "kvstow.memory", "kvstow.devices"},
    "service/kvstow_service/connectors/engine_core": {
        "torch",
        "cuda",
        "kvstow.devices.cuda",
        "kvstow.devices.jax",
        "kvstow_service.connectors.vllm",
        "kvstow_service.connectors.tpu",
    },
    "service/kvstow_service/connectors/vllm": {"kvstow.devices.jax", "kvstow_service.connectors.tpu"},
    "service/kvstow_service/connectors/tpu": {
        "torch",
        "cuda",
        "kvstow.devices.cpu",
        "kvstow.devices.cuda",
        "kvstow_service.connectors.vllm",
    },
    **{
        f"service/kvstow_service/{room}": {f"kvstow_service.{other}" for other in others.split()}
        for room, others in {
            "process": "admin node connectors replay cli demo",
            "admin": "node connectors replay cli demo",
            "connectors": "node replay cli demo",
            "node/attach": "node.node connectors replay cli demo",
            "node/survival": "node.node node.nodehost node.pools node.attach connectors replay cli demo",
            "node/pools": "node.node node.nodehost node.attach connectors replay cli demo",
            "node/tier": "node.node node.nodehost node.attach replay cli demo",
        }.items()
    },
}
ALLOWED = {
    "engine/kvstow/tier": {"kvstow.attach.identity"},
    "engine/kvstow/attach": {"kvstow.dataplane", "kvstow.devices.base", "kvstow.memory.mappedpool"},
}
"""Of what is forbidden: identities are plain values, and of what a rank's worker owns it names the types alone."""
ABOVE_DEVICES = {"copythread", "dataplane", "layeredloads"}


@cache
def imports_of(path: Path) -> tuple[str, ...]:
    return tuple(_imports_of(path))


def _imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def violations(folder: str, forbidden: set[str]) -> list[str]:
    allowed = ALLOWED.get(folder, set())
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in imports_of(path)
        if is_of(name, forbidden) and not is_of(name, allowed)
    ]


def is_of(name: str, modules: set[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_a_layer_imports_only_what_lies_below(folder: str) -> None:
    assert list((ROOT / folder).rglob("*.py"))
    assert violations(folder, FORBIDDEN[folder]) == []


@cache
def modules() -> dict[str, Path]:
    """All modules of the three layers, by name; a package is its `__init__`."""
    found = {}
    for layer in ("engine", "api", "service"):
        for path in (ROOT / layer).rglob("*.py"):
            parts = path.relative_to(ROOT / layer).with_suffix("").parts
            found[".".join(parts[:-1] if path.stem == "__init__" else parts)] = path
    return found


def imported_modules(name: str) -> set[str]:
    """Modules that this one imports. A package counts only where nothing of it is named."""
    known = modules()
    return {one for one in imports_of(known[name]) if one in known and known[one].stem != "__init__"}


def entries_of(package: str) -> dict[str, set[str]]:
    """The files and subpackages of a package, each with those of them that anything in it imports."""
    inside = [name for name in modules() if name.startswith(f"{package}.")]

    def entry(name: str) -> str:
        return name[len(package) + 1 :].partition(".")[0]

    found: dict[str, set[str]] = {entry(name): set() for name in inside}
    for name in inside:
        found[entry(name)] |= {entry(one) for one in imported_modules(name) & set(inside)} - {entry(name)}
    return found


def circle_of(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Nodes that lead back to the first of them; empty if there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


PACKAGES = sorted(name for name, path in modules().items() if path.stem == "__init__")


def test_files_import_each_other_without_a_circle() -> None:
    assert circle_of({name: imported_modules(name) for name in modules()}) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_the_files_and_folders_of_a_folder_import_each_other_without_a_circle(package: str) -> None:
    """So a reader can read each folder from the bottom up, and takes a subfolder for one thing."""
    assert circle_of(entries_of(package)) == []


def test_a_circle_is_seen() -> None:
    assert circle_of({"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"]}) != []
    assert {"kvstow.control", "kvstow_api.conditions", "kvstow_service.node"} <= set(PACKAGES)
    assert "pools" in entries_of("kvstow_service.node")["tier"]


def test_no_two_classes_have_one_name() -> None:
    found: dict[str, list[str]] = {}
    layers = ("engine/kvstow", "api/kvstow_api", "service/kvstow_service")
    for path in sorted(path for layer in layers for path in (ROOT / layer).rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_the_modules_at_the_bottom_of_the_engine_import_only_each_other() -> None:
    bottom = {path.stem: path for path in (ROOT / "engine/kvstow").glob("*.py") if path.stem not in ABOVE_DEVICES}
    allowed = {f"kvstow.{name}" for name in bottom}
    wrong = {
        name: [one for one in imports_of(path) if one.startswith("kvstow.") and not is_of(one, allowed)]
        for name, path in bottom.items()
    }
    assert {name: imports for name, imports in wrong.items() if imports} == {}


def test_jax_is_imported_by_its_device_and_its_hosts_alone() -> None:
    own = ROOT / "engine" / "kvstow" / "devices" / "jax"
    sources = [path for folder in ("engine", "api", "service") for path in (ROOT / folder).rglob("*.py")]
    users = {path for path in sources if {"jax", "jaxlib"} & {name.split(".")[0] for name in imports_of(path)}}
    assert {path.relative_to(ROOT).as_posix() for path in users if path.parent != own} == {
        "service/kvstow_service/connectors/tpu/connector.py",
        "service/kvstow_service/connectors/tpu/runnerhost.py",
    }


def test_msgspec_is_imported_for_messages_and_identities_alone() -> None:
    """A bare checkout runs the devices without it."""
    engine = ROOT / "engine/kvstow"
    users = [path for path in engine.rglob("*.py") if any(is_of(one, {"msgspec"}) for one in imports_of(path))]
    assert {path.relative_to(engine).parts[0] for path in users} == {"attach", "tier"}


def test_mooncake_is_imported_by_a_child_process_alone() -> None:
    sources = [path for folder in ("engine", "api", "service") for path in (ROOT / folder).rglob("*.py")]
    users = {path.name for path in sources if "mooncake" in {name.split(".")[0] for name in imports_of(path)}}
    assert users == {"storechild.py"}


def test_nothing_that_is_shipped_imports_a_test() -> None:
    for layer in ("engine", "api", "service"):
        assert violations(layer, {"tests", "bench"}) == []


def test_the_check_sees_a_violation() -> None:
    assert violations("service/kvstow_service", {"kvstow.control"}) != []


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("kvstow.control.engine", ["torch", "msgspec", "fastapi", "httpx", "prometheus_client"]),
        ("kvstow.attach.engine", ["torch", "fastapi", "httpx", "prometheus_client", "zmq"]),
        (
            "kvstow.attach.worker",
            ["torch", "kvstow.dataplane", "kvstow.memory", "fastapi", "httpx", "prometheus_client"],
        ),
        ("kvstow_api.app", ["torch"]),
        ("kvstow_service", ["torch", "fastapi"]),
        ("kvstow_service.admin.agent", ["torch", "fastapi", "httpx", "prometheus_client"]),  # in each vLLM process
        ("kvstow_service.connectors.engine_core.options", ["torch", "fastapi", "httpx", "prometheus_client"]),
        ("kvstow_service.connectors.engine_core.controlplane", ["kvstow.control.engine", "kvstow_service.admin"]),
        ("kvstow_service.connectors.engine_core.schedulerside", ["kvstow.control.engine", "kvstow_service.admin"]),
        ("kvstow_service.connectors.engine_core.offloadmetrics", ["kvstow.control.engine"]),
        ("kvstow_service.admin.embedded", ["torch", "fastapi", "uvicorn", "httpx", "prometheus_client"]),
        ("kvstow.memory.pinning", ["torch", "msgspec"]),
        ("kvstow.dataplane", ["msgspec"]),
        ("kvstow.devices.cuda", ["msgspec"]),
        ("kvstow_service.node.attach.attachserver", ["torch"]),
        ("kvstow_service.node.survival.keeper", ["torch", "numpy", "msgspec", "fastapi", "pydantic", "asyncio"]),
        ("kvstow_service.stores.mooncake.mooncakestore", ["torch", "numpy", "fastapi", "mooncake", "xxhash"]),
        ("kvstow_service.stores.mooncake.childmessages", ["torch", "numpy", "fastapi"]),
        ("kvstow_service.cli", ["torch", "msgspec", "fastapi", "uvicorn", "httpx", "prometheus_client"]),
    ],
)
def test_importing_a_module_leaves_out_what_it_does_not_need(module: str, absent: list[str]) -> None:
    code = f"import sys, {module}; print([name for name in {absent!r} if name in sys.modules])"
    env = {"PYTHONPATH": ":".join(str(ROOT / folder) for folder in ("engine", "api", "service"))}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_no_connector_imports_a_store() -> None:
    """The node service has the store below the pools; an engine only hears what came from it."""
    stores = {"kvstow.control.pooltier", "kvstow.tier.blockstore", "kvstow_service.stores", "kvstow_service.node"}
    assert stores == {one for one in stores if one in modules()}
    for path in (ROOT / "service/kvstow_service/connectors").rglob("*.py"):
        assert [one for one in imports_of(path) if is_of(one, stores)] == [], path


@pytest.mark.parametrize("name", ["vllm/connector", "vllm/attachedschedulerhost", "engine_core/schedulerhost"])
def test_an_attached_engine_imports_no_engine_and_no_admin_server(name: str) -> None:
    """vLLM's start would wait for it."""
    core = "kvstow_service.connectors.engine_core"
    embedded = {"kvstow.control", "kvstow_service.admin.embedded", f"{core}.embeddedschedulerhost"}
    code = ast.parse((ROOT / f"service/kvstow_service/connectors/{name}.py").read_text())
    modules = [node.module for node in code.body if isinstance(node, ast.ImportFrom) and node.module]
    assert [one for one in modules if is_of(one, embedded)] == []


def _assigned(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The pairs of target and value of all assignments, also of those of tuples."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                value = node.value
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    yield from zip(target.elts, value.elts, strict=True)
                else:
                    yield target, value


def forwards(files: Iterable[Path]) -> list[str]:
    """The assignments that forward a method, as in `self.use = engine.use` or, in a class, `take = peek`. A search for
    the method's definition or its callers does not find these."""
    trees = {path.name: ast.parse(path.read_text()) for path in files}
    classes = [
        (name, node) for name, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    ]
    members = [one for _, each in classes for one in each.body]
    functions = [one for one in members if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    data = {one.name for one in functions if any("property" in ast.unparse(how) for how in one.decorator_list)}
    data |= {ast.unparse(one.target) for one in members if isinstance(one, ast.AnnAssign)}
    methods = {one.name for one in functions} - data
    found = [
        f"{name}: {ast.unparse(one)}"
        for name, each in classes
        for one in each.body
        if isinstance(one, ast.Assign) and isinstance(one.value, ast.Name) and one.value.id in methods
    ]
    for name, tree in trees.items():
        for target, value in _assigned(tree):
            if not (isinstance(target, ast.Attribute) and isinstance(value, ast.Attribute)):
                continue
            if ast.unparse(target.value) == "self" and target.attr == value.attr and value.attr in methods:
                found.append(f"{name}: {ast.unparse(target)} = {ast.unparse(value)}")
    return found


def test_no_attribute_forwards_a_method() -> None:
    assert forwards(path for root in ("engine", "api", "service") for path in sorted((ROOT / root).rglob("*.py"))) == []


def test_a_forward_is_found(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    lines = ("class A:", " def use(self): ...", " again = use", "class B:", " def __init__(self, a): ")
    module.write_text("\n".join(lines) + "self.x, self.use = 1, a.use\n")
    assert forwards([module]) == ["module.py: again = use", "module.py: self.use = a.use"]

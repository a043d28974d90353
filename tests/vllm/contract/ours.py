"""What KVStow's connector takes from vLLM, read from its own sources, so that no list of it goes stale."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.vllm.contract.source import Call, Class, Function, Module, Source

PACKAGES = ("kvstow_service.connectors.engine_core", "kvstow_service.connectors.vllm")


class Import(NamedTuple):
    """`from module import name` in our module `where`."""

    module: str
    name: str
    where: str


class Use(NamedTuple):
    """A call of what was imported, or of its `attribute`; or that attribute alone, with no call."""

    imported: Import
    attribute: str | None
    call: Call | None


class Subclass(NamedTuple):
    """One of our classes that vLLM knows by a base class, maybe through a base class of ours. `reads`: what it takes
    from itself and does not define; `super_calls`: how it calls vLLM's methods."""

    ours: Class
    bases: tuple[Import, ...]
    reads: frozenset[str]
    super_calls: tuple[tuple[str, Call], ...]
    where: str


class Ours:
    """The connector's packages below `root`, the folder that holds `kvstow_service`."""

    def __init__(self, root: Path, packages: Sequence[str] = PACKAGES) -> None:
        self.source = Source(root)
        names = [
            f"{package}.{path.stem}"
            for package in packages
            for path in sorted(root.joinpath(*package.split(".")).glob("*.py"))
            if path.stem != "__init__"
        ]
        self.modules = [module for name in names if (module := self.source.module(name))]
        assert self.modules, f"no connector below {root}"

    def imports(self) -> list[Import]:
        return [known for module in self.modules for known in _vllm_imports(module).values()]

    def uses(self) -> list[Use]:
        """Every call of something imported, and every attribute taken from it."""
        return [use for module in self.modules for use in _uses(module)]

    def subclasses(self) -> list[Subclass]:
        return [found for module in self.modules for found in self._subclasses(module)]

    def protocol(self, module: str, name: str) -> dict[str, Function | None]:
        """Members of one of the shared package's protocols: functions, or None for attributes."""
        found = self.source.cls(f"{PACKAGES[0]}.{module}", name)
        assert found is not None, f"{module}.py has no {name}"
        properties = {name for name, function in found.functions.items() if function.is_property}
        plain: dict[str, Function | None] = dict.fromkeys({*found.attributes, *properties})
        return plain | {name: function for name, function in found.functions.items() if name not in properties}

    def _subclasses(self, module: Module) -> Iterator[Subclass]:
        for node in module.classes:
            lines = list(self._line(module, node))
            bases = tuple(
                known[name]
                for home, one in lines
                for known, name in ((_vllm_imports(home), name) for name in _base_names(one))
                if name in known
            )
            ours = self.source.cls(module.name, node.name)
            if bases and ours is not None and node.name not in self._base_names:
                reads = frozenset(read for _, one in lines for read in _self_reads(one)) - ours.functions.keys()
                reads -= ours.attributes
                calls = tuple(
                    call for home, one in lines if self._is_below_vllm(home, one) for call in _super_calls(one)
                )
                yield Subclass(ours, bases, reads, calls, module.path.name)

    def _line(self, module: Module, node: ast.ClassDef) -> Iterator[tuple[Module, ast.ClassDef]]:
        """The class, and those of ours that it inherits from."""
        yield module, node
        for name in _base_names(node):
            home = self.source.module(module.imports[name][0]) if name in module.imports else module
            if home is not None and home in self.modules:
                for base in (each for each in home.classes if each.name == name):
                    yield from self._line(home, base)

    def _is_below_vllm(self, module: Module, node: ast.ClassDef) -> bool:
        return any(name in _vllm_imports(module) for name in _base_names(node))

    @property
    def _base_names(self) -> set[str]:
        """Classes that others of ours inherit from: vLLM does not know them."""
        return {name for module in self.modules for node in module.classes for name in _base_names(node)}


def _base_names(node: ast.ClassDef) -> list[str]:
    return [base.id for base in node.bases if isinstance(base, ast.Name)]


def _vllm_imports(module: Module) -> dict[str, Import]:
    return {
        used: Import(home, name, module.path.name)
        for used, (home, name) in module.imports.items()
        if home.partition(".")[0] == "vllm"
    }


def _uses(module: Module) -> Iterator[Use]:
    known = _vllm_imports(module)
    called = {id(node.func): Call.of(node) for node in ast.walk(module.tree) if isinstance(node, ast.Call)}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Name) and node.id in known and id(node) in called:
            yield Use(known[node.id], None, called[id(node)])
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known:
            yield Use(known[node.value.id], node.attr, called.get(id(node)))


def _self_reads(node: ast.ClassDef) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Load):
            owner = inner.value
            if isinstance(owner, ast.Name) and owner.id == "self":
                yield inner.attr


def _super_calls(node: ast.ClassDef) -> Iterator[tuple[str, Call]]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
            owner = inner.func.value
            if isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "super":
                yield inner.func.attr, Call.of(inner)

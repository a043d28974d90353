"""Reads what Python sources offer, without importing them: vLLM of any version, and KVStow's own connector."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_CLASS = re.compile(r"^class (\w+)\(([\w.,\s]*)\):", re.MULTILINE)


class Call(NamedTuple):
    """How something is called: by so many positional arguments, and these keywords."""

    num_positional: int
    keywords: tuple[str, ...] = ()

    @classmethod
    def of(cls, node: ast.Call) -> Call:
        return cls(len(node.args), tuple(keyword.arg for keyword in node.keywords if keyword.arg))


class Signature(NamedTuple):
    """Parameters of a function; those of a method without `self`. The first `num_required` positional ones, and
    `required_keywords`, have no default."""

    positional: tuple[str, ...]
    num_required: int
    keywords: tuple[str, ...] = ()
    required_keywords: tuple[str, ...] = ()
    takes_any_positional: bool = False
    takes_any_keyword: bool = False

    @classmethod
    def of(cls, node: FunctionNode, *, bound: bool) -> Signature:
        args = node.args
        positional = [arg.arg for arg in (*args.posonlyargs, *args.args)]
        num_required = len(positional) - len(args.defaults)
        if bound and not _is_decorated(node, "staticmethod"):
            positional, num_required = positional[1:], num_required - 1
        defaults = zip(args.kwonlyargs, args.kw_defaults, strict=True)
        return cls(
            tuple(positional),
            num_required,
            tuple(arg.arg for arg in args.kwonlyargs),
            tuple(arg.arg for arg, default in defaults if default is None),
            args.vararg is not None,
            args.kwarg is not None,
        )

    def __str__(self) -> str:
        given = [f"{name}=..." if i >= self.num_required else name for i, name in enumerate(self.positional)]
        given += ["*args"] if self.takes_any_positional else ["*"] if self.keywords else []
        given += [name if name in self.required_keywords else f"{name}=..." for name in self.keywords]
        given += ["**kwargs"] if self.takes_any_keyword else []
        return f"({', '.join(given)})"

    def refuses(self, call: Call) -> str | None:
        """Why `call` fails; None if it does not."""
        if call.num_positional > len(self.positional) and not self.takes_any_positional:
            return f"it takes {len(self.positional)} positional arguments, not {call.num_positional}"
        allowed = {*self.positional[call.num_positional :], *self.keywords}
        for name in call.keywords:
            if name not in allowed and not self.takes_any_keyword:
                return f"it has no parameter {name}"
        for name in (*self.positional[call.num_positional : self.num_required], *self.required_keywords):
            if name not in call.keywords:
                return f"it wants the parameter {name}"
        return None

    def cannot_stand_for(self, other: Signature) -> Iterator[str]:
        """Why a function of this signature fails where `other` is called."""
        for index, name in enumerate(other.positional):
            mine = self.positional[index] if index < len(self.positional) else None
            if mine is None and not (self.takes_any_positional and self.takes_any_keyword):
                yield f"lacks the parameter {name}"
            elif mine is not None and mine != name:
                yield f"calls the parameter {name} {mine}"
        for name in other.keywords:
            if name not in self.keywords and name not in self.positional and not self.takes_any_keyword:
                yield f"lacks the keyword {name}"
        if other.takes_any_positional and not self.takes_any_positional:
            yield "lacks *args"
        if other.takes_any_keyword and not self.takes_any_keyword:
            yield "lacks **kwargs"
        for name in self.positional[len(other.positional) : self.num_required]:
            yield f"wants the parameter {name}, which is never passed"
        for name in self.required_keywords:
            if name not in other.keywords and name not in other.positional:
                yield f"wants the keyword {name}, which is never passed"


class Function(NamedTuple):
    """A function or method, as it is written. One that raises `NotImplementedError` counts as abstract."""

    name: str
    signature: Signature
    is_abstract: bool
    is_property: bool
    node: FunctionNode

    @classmethod
    def of(cls, node: FunctionNode, *, bound: bool) -> Function:
        abstract = _is_decorated(node, "abstractmethod") or _only_raises(node)
        return cls(node.name, Signature.of(node, bound=bound), abstract, _is_decorated(node, "property"), node)


class Class(NamedTuple):
    """A class with what it inherits from classes of the same sources. `attributes`: fields, class variables and what
    its methods assign to `self`. `own`: names that the class itself defines."""

    name: str
    functions: dict[str, Function]
    attributes: frozenset[str]
    own: frozenset[str]

    def has(self, name: str) -> bool:
        return name in self.functions or name in self.attributes


class Module:
    """One file. Everything in it counts as being at its top, also what stands in an `if` or `try` there."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self.tree = ast.parse(path.read_text(encoding="utf-8"), str(path))

    @cached_property
    def imports(self) -> dict[str, tuple[str, str]]:
        """By the name used here: (module, name there), of `from ... import`, wherever it stands."""
        return {
            alias.asname or alias.name: (node.module or "", alias.name)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    @cached_property
    def statements(self) -> dict[str, ast.stmt]:
        """What defines each name at the top."""
        found: dict[str, ast.stmt] = {}
        pending = list(self.tree.body)
        while pending:
            node = pending.pop(0)
            if isinstance(node, ast.If | ast.Try | ast.With):
                pending[:0] = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            for name in _defined_by(node):
                found.setdefault(name, node)
        return found

    @property
    def classes(self) -> list[ast.ClassDef]:
        return [node for node in self.statements.values() if isinstance(node, ast.ClassDef)]


@cache
def _parsed(name: str, path: Path) -> Module:
    """Each file once: vLLM's scheduler alone takes 0.2 s."""
    return Module(name, path)


@cache
def _inheritance(package: Path) -> list[tuple[str, set[str]]]:
    """The names of all classes that are at the top of a file, and of their base classes. Each package once: vLLM has
    3,000 files."""
    return [
        (found[1], {base.rpartition(".")[2].strip() for base in found[2].split(",")})
        for path in package.rglob("*.py")
        for found in _CLASS.finditer(path.read_text(encoding="utf-8"))
    ]


class Source:
    """The packages below `roots`; a module is taken from the first root that has it."""

    def __init__(self, *roots: Path) -> None:
        self._roots = roots
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        if name not in self._modules:
            bases = [root.joinpath(*name.split(".")) for root in self._roots]
            paths = [path for base in bases for path in (base.with_suffix(".py"), base / "__init__.py")]
            path = next((path for path in paths if path.is_file()), None)
            self._modules[name] = _parsed(name, path) if path else None
        return self._modules[name]

    def has(self, module: str, name: str) -> bool:
        """Whether `from module import name` works."""
        found = self.module(module)
        if found is None:
            return False
        return name in found.statements or name in found.imports or self.module(f"{module}.{name}") is not None

    def descendants(self, package: str, name: str) -> set[str]:
        """Names of all classes in the package that inherit from the class, also through others."""
        lines = [line for root in self._roots for line in _inheritance(root / package)]
        known = {name}
        while more := {child for child, parents in lines if parents & known} - known:
            known |= more
        return known - {name}

    def function(self, module: str, name: str) -> Function | None:
        """A function at the top of a module, or a method (`Class.method`, also an inherited one)."""
        owner, _, method = name.rpartition(".")
        if owner:
            found = self.cls(module, owner)
            return found.functions.get(method) if found else None
        defined = self._defined_in(module, name)
        node = defined[0].statements[defined[1]] if defined else None
        return Function.of(node, bound=False) if isinstance(node, FunctionNode) else None

    def cls(self, module: str, name: str) -> Class | None:
        """A class, wherever `module` has it from."""
        defined = self._defined_in(module, name)
        if defined is None:
            return None
        home, node = defined[0], defined[0].statements[defined[1]]
        if not isinstance(node, ast.ClassDef):
            return None
        functions = {
            child.name: Function.of(child, bound=True) for child in node.body if isinstance(child, FunctionNode)
        }
        attributes = set(_attributes(node))
        own = frozenset({*functions, *attributes})
        for base in node.bases:
            inherited = self.cls(home.name, _last_name(base))
            if inherited is not None and inherited.name != name:
                functions = inherited.functions | functions
                attributes |= inherited.attributes
        return Class(name, functions, frozenset(attributes), own)

    def _defined_in(self, module: str, name: str) -> tuple[Module, str] | None:
        found = self.module(module)
        if found is None:
            return None
        if name in found.statements:
            return found, name
        if name in found.imports and found.imports[name] != (module, name):
            return self._defined_in(*found.imports[name])
        return None


def sequence(node: ast.AST) -> list[str]:
    """Names of what a function, or a whole module, calls and yields, in the order of the text."""
    found: list[tuple[int, int, str]] = []
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            found.append((inner.func.end_lineno or 0, inner.func.end_col_offset or 0, _last_name(inner.func)))
        elif isinstance(inner, ast.Yield):
            found.append((inner.lineno, inner.col_offset, "yield"))
    return [name for _, _, name in sorted(found)]


def _defined_by(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.ClassDef | FunctionNode):
        yield node.name
    elif isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    for child in node.body:
        if not isinstance(child, FunctionNode):
            yield from _defined_by(child)
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and _is_self(inner.value):
            yield inner.attr


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _last_name(node: ast.expr) -> str:
    """`c` of `a.b.c`; the class of `Class[T]`."""
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _only_raises(node: FunctionNode) -> bool:
    last = node.body[-1]
    return isinstance(last, ast.Raise) and "NotImplementedError" in ast.dump(last)


def _is_decorated(node: FunctionNode, name: str) -> bool:
    return any(_last_name(decorator) == name for decorator in node.decorator_list)

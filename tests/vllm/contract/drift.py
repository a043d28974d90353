"""Compares what KVStow takes from vLLM with what a version of vLLM offers. Every difference is a sentence."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.vllm.contract.ours import Import, Ours, Subclass, Use
from tests.vllm.contract.reliance import (
    BASE,
    CACHE_SPECS,
    FIELDS,
    LEFT_ALONE,
    LEFT_OUT,
    MODULE,
    NEWER,
    ORDERS,
    PROTOCOLS,
    STATEMENTS,
)
from tests.vllm.contract.source import Call, Function, Source, sequence

from kvstow_service.connectors.engine_core import kvgroups


class Drift:
    """One comparison. `version` is what `theirs` is, for example "0.26.0"."""

    def __init__(self, ours: Ours, theirs: Source, version: str) -> None:
        self._ours, self._theirs = ours, theirs
        self._version = version
        self._vllm = f"vLLM {version}"

    def sentences(self) -> list[str]:
        """All differences that matter."""
        return sorted(
            {
                *self.imports(),
                *self.calls(),
                *self.hooks(),
                *self.fields(),
                *self.cache_specs(),
                *self.orders(),
                *self.statements(),
            }
        )

    # -- what is imported and called ------------------------------------------------------------------------

    def imports(self) -> Iterator[str]:
        for imported in self._ours.imports():
            yield from self._presence(imported, self._theirs.has(imported.module, imported.name))

    def calls(self) -> Iterator[str]:
        for use in self._ours.uses():
            module, name, where = use.imported
            if use.attribute is not None and self._theirs.module(f"{module}.{name}"):
                module, name = f"{module}.{name}", use.attribute
                yield from self._presence(Import(module, name, where), self._theirs.has(module, name))
            elif use.attribute is not None:
                yield from self._of_class(use, use.attribute)
                name = f"{name}.{use.attribute}"
            if use.call is not None and (refusal := self._refusal(module, name, use.call)):
                yield f"{self._vllm}: {refusal}; {where} calls it"

    def _of_class(self, use: Use, attribute: str) -> Iterator[str]:
        module, name, where = use.imported
        found = self._theirs.cls(module, name)
        if found is not None and not found.has(attribute):
            yield f"{self._vllm}: {name} has no {attribute}, which {where} takes"

    def _refusal(self, module: str, name: str, call: Call) -> str | None:
        """Why the call fails. What is not there is said elsewhere; a class without a constructor has fields."""
        function = self._theirs.function(module, name) or self._theirs.function(module, f"{name}.__init__")
        if function is not None:
            reason = function.signature.refuses(call)
            return f"{name}{function.signature}: {reason}" if reason else None
        made = self._theirs.cls(module, name)
        unknown = [keyword for keyword in call.keywords if made is not None and not made.has(keyword)]
        return f"{name} has no field {unknown[0]}" if unknown else None

    def _presence(self, imported: Import, is_there: bool) -> Iterator[str]:
        name = f"{imported.module}.{imported.name}"
        yield from self._dated(name, is_there, f"{name} is gone, and {imported.where} takes it")

    def _dated(self, key: str, is_there: bool, complaint: str) -> Iterator[str]:
        """Complain about what should be there and is not, or is there before the version that we have noted."""
        since = NEWER.get(key)
        expected = since is None or _number(self._version) >= _number(since)
        if expected and not is_there:
            yield f"{self._vllm}: {complaint}" + (f"; we expect it from {since} on" if since else "")
        elif is_there and not expected:
            yield f"{self._vllm} has {key} already; we thought that {since} introduced it"

    # -- hooks ----------------------------------------------------------------------------------------------

    def hooks(self) -> Iterator[str]:
        """Of every class of ours that vLLM calls by a base class of its own."""
        for subclass in self._ours.subclasses():
            yield from self._inherited(subclass)
        yield from self._undecided()

    def _inherited(self, subclass: Subclass) -> Iterator[str]:
        known: dict[str, Function] = {}
        attributes: set[str] = set()
        for imported in subclass.bases:
            base = self._theirs.cls(imported.module, imported.name)
            if base is None:
                continue  # `imports` complains
            attributes |= base.attributes
            known = base.functions | known
        label, dated = subclass.ours.name, subclass.bases[0].name
        for name, function in subclass.ours.functions.items():
            if name in known:
                yield from self._replaced(subclass, known[name], function)
            if not name.startswith("_"):
                complaint = f"the hook {name} of {dated} is gone, and {label} ({subclass.where}) defines it"
                yield from self._dated(f"{dated}.{name}", name in known, complaint)
        for name, function in known.items():
            if function.is_abstract and name not in subclass.ours.functions:
                yield f"{self._vllm}: {label} ({subclass.where}) lacks the abstract method {name}{function.signature}"
        for name in subclass.reads - known.keys() - attributes:
            yield f"{self._vllm}: {dated} has no {name}, which {label} ({subclass.where}) reads"
        for name, call in subclass.super_calls:
            if name in known and (refusal := known[name].signature.refuses(call)):
                yield f"{self._vllm}: {dated}.{name}{known[name].signature} refuses our super() call: {refusal}"

    def _replaced(self, subclass: Subclass, theirs: Function, ours: Function) -> Iterator[str]:
        label = f"{subclass.ours.name}.{ours.name} ({subclass.where})"
        if theirs.is_property != ours.is_property:
            yield f"{self._vllm}: {ours.name} is {'a property' if theirs.is_property else 'a method'}; {label} is not"
        for reason in ours.signature.cannot_stand_for(theirs.signature):
            yield f"{self._vllm} calls {theirs.name}{theirs.signature}: {label} {reason}"

    def _undecided(self) -> Iterator[str]:
        """Hooks that are neither defined by us nor left alone on purpose: they are new."""
        base = self._theirs.cls(*BASE)
        ours = next(found.ours for found in self._ours.subclasses() if BASE[1] in {base.name for base in found.bases})
        for name, function in base.functions.items() if base else ():
            if not name.startswith("_") and name not in ours.functions and name not in LEFT_ALONE:
                yield f"{self._vllm} has a hook that is neither ours nor left alone: {name}{function.signature}"

    # -- kinds of KV cache ----------------------------------------------------------------------------------

    def cache_specs(self) -> Iterator[str]:
        """Kinds of which nobody has decided what KVStow does with them: they are new."""
        decided = {*CACHE_SPECS, *kvgroups.SERVED, *LEFT_OUT, *kvgroups.REFUSED}
        for name in self._theirs.descendants("vllm", "KVCacheSpec") - decided:
            yield f"{self._vllm} has a kind of KV cache that is neither served nor left out nor refused: {name}"

    # -- fields, orders and statements ----------------------------------------------------------------------

    def fields(self) -> Iterator[str]:
        for (module, name), fields in FIELDS.items():
            for field in fields.split():
                yield from self._member(module, name, field, None)
        for (our_module, our_name), (module, name) in PROTOCOLS.items():
            for field, function in self._ours.protocol(our_module, our_name).items():
                yield from self._member(module, name, field, function)

    def _member(self, module: str, owner: str, field: str, ours: Function | None) -> Iterator[str]:
        found = self._theirs.cls(module, owner)
        is_there = found is not None and found.has(field)
        yield from self._dated(f"{owner}.{field}", is_there, f"{module}.{owner} has no {field}, which KVStow reads")
        if found is not None and is_there and ours is not None:
            theirs = found.functions.get(field)
            for reason in theirs.signature.cannot_stand_for(ours.signature) if theirs else ():
                yield f"{self._vllm}: {owner}.{field} {reason}, and we call {field}{ours.signature}"

    def orders(self) -> Iterator[str]:
        for (module, name), expected in ORDERS.items():
            function, whole = self._theirs.function(module, name), self._theirs.module(module)
            node = function.node if function else whole.tree if whole and name == MODULE else None
            if node is None:
                yield f"{self._vllm}: {module}.{name} is gone, which should call {', '.join(expected)}, in this order"
                continue
            calls = iter(sequence(node))
            for index, step in enumerate(expected):
                if not any(called in step.split("|") for called in calls):
                    before = f" after {expected[index - 1]}" if index else ""
                    yield f"{self._vllm}: {module}.{name} does not call {step}{before}"
                    break

    def statements(self) -> Iterator[str]:
        for (module, name), expected in STATEMENTS.items():
            function = self._theirs.function(module, name)
            if function is None or all(ast.unparse(node) != expected for node in ast.walk(function.node)):
                yield f"{self._vllm}: {module}.{name} does not say `{expected}`"


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])

"""The list of mutants is whole, and each still finds the code that it takes out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.mutants import MUTANTS, PATCHED, ROOT, path_of


@cache
def defined(path: str) -> dict[str, ast.stmt]:
    """What a file defines at its top."""
    found = ast.parse((ROOT / path).read_text()).body
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name: node for node in found if isinstance(node, kinds)}


def test_each_finds_its_code_once_and_leaves_valid_code() -> None:
    wrong = []
    for mutant in MUTANTS:
        text = (ROOT / mutant.path).read_text()
        if text.count(mutant.code) != 1:
            wrong.append(f"{mutant.name}: {mutant.path} has its code {text.count(mutant.code)} times")
        else:
            ast.parse(text.replace(mutant.code, mutant.instead))
    assert wrong == []


def test_the_tests_that_notice_exist() -> None:
    named = {mutant.test for mutant in MUTANTS} | {patched.test for patched in PATCHED}
    missing = [
        test
        for test in sorted(named)
        if not (ROOT / path_of(test)).exists() or ("::" in test and test.split("::")[1] not in defined(path_of(test)))
    ]
    assert missing == []


def test_names_are_unique() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names))
    assert not set(names) & {name for patched in PATCHED for name in patched.names}


def is_patching(node: ast.stmt) -> bool:
    """Whether this is a function that takes a `patch` alone: so are mutants written that patch."""
    if not isinstance(node, ast.FunctionDef) or node.decorator_list or len(node.args.args) != 1:
        return False
    (argument,) = node.args.args
    is_patch = argument.annotation is not None and ast.unparse(argument.annotation) == "pytest.MonkeyPatch"
    return argument.arg == "patch" and is_patch


def patching() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if "(patch: pytest.MonkeyPatch)" not in path.read_text():
            continue
        relative = str(Path(path).relative_to(ROOT))
        yield from ((relative, name) for name, node in defined(relative).items() if is_patching(node))


def test_those_that_patch_are_all_listed_in_mutants_py_and_exist() -> None:
    listed = [(patched.path, name) for patched in PATCHED for name in patched.names]
    assert len(listed) == len(set(listed))
    assert sorted(set(patching()) - set(listed)) == [], "not listed"
    assert [(path, name) for path, name in listed if not (ROOT / path).exists() or name not in defined(path)] == []


def test_those_that_patch_are_given_to_the_test_that_notices() -> None:
    """Named in its file, beside where they are defined."""
    unused = [
        name
        for patched in PATCHED
        for name in patched.names
        if (ROOT / path_of(patched.test)).read_text().count(name) < (1 if patched.path != path_of(patched.test) else 2)
        and not name.startswith("test_")
    ]
    assert unused == []

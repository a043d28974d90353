"""The files of a model, besides its weights and its configuration, that decide what is computed: those of its processor
for images, sound and video, and remote code."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kvstow_service.connectors.engine_core.hubcache import commit_of

_OF_NO_VALUE = {
    "added_tokens.json",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "vocab.json",
}
"""They decide which tokens there are, which every key covers, or how tokens are drawn. vLLM has read `config.json` into
its own configuration, which is part of the identity."""
_DEPTH = 3
_MOST_FILES, _MOST_BYTES = 512, 64 << 20
_OTHER_REPOSITORY = re.compile(rb'"[\w.-]+/[\w.-]+--[\w.]+"')
"""Code of another repository in an `auto_map`."""


class ModelFiles(NamedTuple):
    """`digest` covers names and contents, wherever the files lie. `others`: whether they name code of another
    repository. `changed`: a file that has changed after the moment that was asked about."""

    digest: str
    others: bool
    changed: Path | None


def read_model_files(places: Sequence[Path], *, processor: bool, code: bool, loaded_by: float) -> ModelFiles:
    """`places`: folders. `processor` and `code`: which files count. Raises `OSError`, also for files that are too many
    or too large to be read. The snapshot of a commit never changes, so `loaded_by`, in seconds since the epoch, does
    not count there."""
    digest, others, changed, size, count = hashlib.sha256(), False, None, 0, 0
    for place in places:
        is_commit = commit_of(place) is not None
        for name, file in _files(place, place, _DEPTH):
            if not _counts(file, processor=processor, code=code):
                continue
            stat = file.stat()
            size, count = size + stat.st_size, count + 1
            if size > _MOST_BYTES or count > _MOST_FILES:
                raise OSError(f"{place} has more than {_MOST_FILES} files or {_MOST_BYTES >> 20} MiB of them")
            content = file.read_bytes()
            digest.update(f"{name} {len(content)}\n".encode() + hashlib.sha256(content).digest())
            others |= code and _OTHER_REPOSITORY.search(content) is not None
            if stat.st_ctime > loaded_by and not is_commit:
                changed = file
    return ModelFiles(digest.hexdigest()[:16] if count else "", others, changed)


def _counts(file: Path, *, processor: bool, code: bool) -> bool:
    if file.suffix == ".py":
        return code
    is_setting = file.suffix == ".json" and not file.name.endswith(".index.json") and file.name not in _OF_NO_VALUE
    return processor and is_setting


def _files(folder: Path, root: Path, depth: int) -> Iterator[tuple[str, Path]]:
    """The files below `folder` with their names below `root`, in an order that does not depend on the place."""
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            if depth:
                yield from _files(entry, root, depth - 1)
        else:
            yield entry.relative_to(root).as_posix(), entry

"""The files of a model, besides its weights and its configuration, that decide what is computed: those of its
quantization, of its processor for images, sound and video, and remote code."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvstow_service.connectors.engine_core.hubcache import COMMIT, commit_of, find_snapshot

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
_QUANTIZATION = {"hf_quant_config.json", "quant_config.json", "quantize_config.json"}
_DEPTH = 3
_MOST_FILES, _MOST_BYTES = 512, 64 << 20
_OTHER_REPOSITORY = re.compile(rb'"[\w.-]+/[\w.-]+--[\w.]+"')
"""Code of another repository in an `auto_map`."""


class ModelFiles(NamedTuple):
    """`digest` covers names and contents, wherever the files lie; empty without files. `names_others`: whether code of
    another repository is named. `changed`: a file that has changed since vLLM started."""

    digest: str
    names_others: bool
    changed: Path | None

    def why_unshared(self, model: Any) -> str:
        """Why it is not certain which files vLLM has read, as a sentence; empty if it is."""
        if self.names_others and not COMMIT.fullmatch(str(model.code_revision)):
            return "files_unknown: the model's code comes from another repository; set code_revision to a commit"
        if self.changed is not None:
            return f"files_changed: {self.changed} has changed since vLLM started, which may have read it before"
        return ""


def model_files(config: Any, started: float) -> ModelFiles | None:
    """Those of a `VllmConfig`; None if they are nowhere on this node, and only those of quantization would count.
    `started`: a moment before vLLM has read any, in seconds since the epoch. Raises `OSError`."""
    model = config.model_config
    has_processor, has_code = getattr(model, "multimodal_config", None) is not None, bool(model.trust_remote_code)
    names = [(model.model, model.revision), (model.hf_config_path, None)]
    names += [(model.tokenizer, model.tokenizer_revision)] if has_processor else []
    places = []
    for name, revision in dict.fromkeys(names):
        if not name or Path(name).is_file():
            continue
        place = Path(name) if Path(name).is_dir() else find_snapshot(name, revision)
        if place is not None:
            places.append(place)
        elif has_processor or has_code:
            raise OSError(f"{name} is neither a folder nor in the cache of the Hugging Face Hub")
    if not places:
        return None
    found = read_model_files(places, processor=has_processor, code=has_code, loaded_by=started)
    own = model.model
    codes = dict(getattr(model.hf_config, "auto_map", None) or {}).values()  # of a repository, each names one
    others = has_code and any("--" in str(code) and str(code).partition("--")[0] != own for code in codes)
    return found._replace(names_others=found.names_others or others)


def read_model_files(places: Sequence[Path], *, processor: bool, code: bool, loaded_by: float) -> ModelFiles:
    """`places`: folders. `processor` and `code`: whether those of the processor, and remote code, count. Raises
    `OSError`, also for files that are too many or too large to be read. The snapshot of a commit never changes, so
    `loaded_by`, in seconds since the epoch, does not count there."""
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
    if file.name in _QUANTIZATION:
        return True
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

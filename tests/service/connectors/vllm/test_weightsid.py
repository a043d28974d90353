"""What identifies a model's weights."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kvstow_service.connectors.vllm.modelweights import Weights, identify_weights, weight_files

COMMIT = "0e9e39f249a16976918f6564b8830bc894c89659"


def not_cached(repository: str, revision: str | None) -> Path | None:
    return None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model that is no snapshot."""
    made = tmp_path / "model"
    made.mkdir()
    for name in ("config.json", "model.safetensors", "README.md"):
        (made / name).write_text(name)
        os.utime(made / name, ns=(10**18, 10**18))
    return made


def identify(folder: Path) -> Weights:
    return identify_weights(str(folder), None, None, not_cached)


def test_files_count_by_name_size_time_and_inode(folder: Path) -> None:
    before = identify(folder)
    assert (before.model, before.source) == (str(folder), "files")
    assert identify(folder) == before
    (folder / "README.md").write_text("something else")
    assert identify(folder) == before, "that is no weight"
    seen = {before.weights_id}
    os.utime(folder / "model.safetensors", ns=(10**18, 10**18 + 1))
    seen.add(identify(folder).weights_id)
    (folder / "config.json").write_text("{}")
    seen.add(identify(folder).weights_id)
    (folder / "more.safetensors").write_text("")
    seen.add(identify(folder).weights_id)
    times = (folder / "model.safetensors").stat().st_mtime_ns
    (folder / "copy").write_text("model.safetensors")
    (folder / "copy").rename(folder / "model.safetensors")
    os.utime(folder / "model.safetensors", ns=(times, times))
    seen.add(identify(folder).weights_id)
    assert len(seen) == 5


def test_parts_of_a_file_and_a_projector_beside_it_count(folder: Path) -> None:
    names = ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "mmproj-m.gguf")
    for name in (*names, "other.gguf"):
        (folder / name).write_text(name)
    assert [file.name for file in weight_files(folder / names[0]) or ()] == [*names]
    seen = {identify(folder / names[0]).weights_id}
    for name in names:
        (folder / name).write_text("changed")
        seen.add(identify(folder / names[0]).weights_id)
    assert len(seen) == 4


def test_a_snapshot_has_one_name_however_it_is_given(tmp_path: Path) -> None:
    place = tmp_path / "hub" / "models--meta-llama--Llama-3.1-8B" / "snapshots" / COMMIT
    place.mkdir(parents=True)
    (place / "model.safetensors").write_text("weights")
    found = identify(place)
    assert found == identify_weights("meta-llama/Llama-3.1-8B", "main", None, lambda *_: place)
    assert (found.model, found.source, found.commit) == ("meta-llama/Llama-3.1-8B", "snapshot", COMMIT)


def test_in_the_fleet_the_same_weights_have_the_same_id_where_files_differ(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "model"
    shutil.copytree(folder, copy)
    here, there = identify(folder), identify(copy)
    assert here.weights_id != there.weights_id
    assert here.fleet_id() == there.fleet_id()
    (copy / "model.safetensors").write_text("trained")
    assert here.fleet_id() != identify(copy).fleet_id()


def test_in_the_fleet_names_of_different_kinds_never_meet(folder: Path, tmp_path: Path) -> None:
    digest = identify(folder).fleet_id().removeprefix("files ")
    place = tmp_path / "models--org--model" / "snapshots" / COMMIT
    place.mkdir(parents=True)
    shutil.copy(folder / "model.safetensors", place)
    shutil.copy(folder / "config.json", place)
    assert identify(place).fleet_id().startswith("snapshot ")
    named = [identify_weights(str(folder), None, name, not_cached).fleet_id() for name in (digest, COMMIT)]
    assert named == [f"configured {digest} of model", f"configured {COMMIT} of model"]
    assert Weights("m", "", "unknown").fleet_id() == ""


def test_what_nothing_identifies_has_no_id(tmp_path: Path) -> None:
    assert identify_weights("s3://bucket/model", None, None, not_cached) == Weights("s3://bucket/model", "", "unknown")
    assert identify(tmp_path) == Weights(str(tmp_path), "", "unknown")

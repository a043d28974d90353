"""The paths of a vLLM model: where its weights and other files are, and where these paths lead while vLLM loads."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kvstow_service.connectors.engine_core.metadata import LoadedFiles
from kvstow_service.connectors.engine_core.pathtrail import Trail
from kvstow_service.connectors.engine_core.vllmprocess import find_snapshot, is_in_hub
from kvstow_service.connectors.vllm.modelweights import FindSnapshot, weight_files
from kvstow_service.connectors.vllm.valuesettings import counted_files, drafter_of


def snapshot_finder(config: Any) -> FindSnapshot:
    """Returns a function that finds snapshots in the folder to which vLLM downloads weights."""
    return partial(find_snapshot, cache=getattr(config.load_config, "download_dir", None))


class ModelTrails(NamedTuple):
    """The places to which the paths of the model lead at one time. `weights` includes the weights of a drafter. `files`
    are those of `model_files`. `problem`: why the paths cannot be followed, as a phrase; empty if they can."""

    weights: Trail
    files: Trail
    problem: str = ""

    @classmethod
    def of(cls, config: Any) -> ModelTrails:
        """Follow the paths. Never raises."""
        try:
            weights: list[Path] = []
            for model in (config.model_config, drafter_of(config)):
                if model is not None:
                    weights += _weight_paths(config, model)
            return cls(Trail.of(weights), Trail.of(counted_files(config)))
        except Exception as error:  # noqa: BLE001 - vLLM must go on
            return cls(Trail({}), Trail({}), f"{type(error).__name__}: {error}")

    def compare(self, later: ModelTrails) -> LoadedFiles:
        """The files that vLLM has loaded, if it loaded them between these trails and the `later` ones."""
        problem = self.problem or later.problem
        weights, files = _changed(self.weights, later.weights), _changed(self.files, later.files)
        return LoadedFiles(later.weights.digest, later.files.digest, weights, files, problem)


def _changed(before: Trail, after: Trail) -> str:
    """A place that has changed; empty if none has. vLLM may have added files to the cache of the Hub, and with them
    folders that were on no path before."""
    for place in before.differences(after):
        new = None if before.stamps.get(place) is not None else after.stamps.get(place)
        if new is None or not (new.is_folder or is_in_hub(place)):
            return place
    return ""


def _weight_paths(config: Any, model: Any) -> list[Path]:
    """The paths of a model's weights. Links in them are kept, because the trail follows them."""
    path = Path(model.model)
    place = path if path.exists() else snapshot_finder(config)(model.model, getattr(model, "revision", None))
    return [] if place is None else [place, *(weight_files(place) or ())]

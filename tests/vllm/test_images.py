"""Images in real engines: what the processor makes of an image is part of what its blocks mean."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.engineprocess import attached_engine
from tests.vllm.engines import A, Answer, assert_same, distance
from tests.vllm.models import write_image_model, write_image_settings
from tests.vllm.nodeservice import NodeService

pytestmark = pytest.mark.vllm

OTHER_MEAN = [0.1, 0.9, 0.1]
IMAGE = 1
WITH_IMAGES = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1}}


def test_an_image_that_is_processed_otherwise_is_another_one(service: NodeService, tmp_path: Path) -> None:
    """Either by a setting of vLLM or by a file of the model."""
    model, log = write_image_model(tmp_path / "model"), tmp_path / "engines"

    def ask(settings: Mapping[str, Any] | None = None) -> Answer:
        with attached_engine(model, service, log, {**WITH_IMAGES, **(settings or {})}) as engine:
            (answer,) = engine.ask(A, image=IMAGE)
            engine.forget_gpu()
            return answer

    first = ask()
    again = ask()
    other = ask({"mm_processor_kwargs": {"image_mean": OTHER_MEAN}})
    write_image_settings(model, OTHER_MEAN)
    edited = ask()
    assert [answer.cached > 0 for answer in (first, again, other, edited)] == [False, True, False, False]
    assert_same([again, edited], [first, other])
    assert distance(first, other) > 0.1

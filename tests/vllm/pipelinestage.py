"""Stages of a pipeline on the CPU: vLLM 0.32 makes the tensors between them in a warm-up that its CPU workers skip when
they run eagerly, and the last stage ends at its first step, with or without a connector."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_gather = GPUModelRunner.sync_and_gather_intermediate_tensors


class PipelineStage:
    """A worker extension (`worker_extension_cls`): each worker imports this module, which is all it is for."""


def _make_and_gather(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Make them as the warm-up does."""
    if self.intermediate_tensors is None:
        self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
            batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
        )
    return _gather(self, *args, **kwargs)


GPUModelRunner.sync_and_gather_intermediate_tensors = _make_and_gather

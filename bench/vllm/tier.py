"""Time to first token when a prefix lies in the fleet tier, against computing it and against a hit in the pool.

    python3 -m bench.vllm tier [--shapes 8b tp8] [--prompts 4] [--providers 4] [--invariant] [--out DIR]

Two engines with a pool each, on two GPUs if there are two, and a Mooncake Store of this machine, over TCP, with
`--providers` processes that lend it memory. Engine a computes prompts of 16,000 tokens and puts their blocks. Then
engine b asks

- prompts that nobody knows: they are computed; and again, from the GPU;
- prompts of a's, while every fetch is waited for; the same once more, from its pool; and again, from the GPU;
- others of a's, and the gate decides (`/v1/tier` says how);

and decodes another request while it puts and fetches. All answers of b to prompts of a's are compared with a's, and the
fetched blocks have checksums. Weights are random, so an answer depends on the whole prompt. Answers of computed and of
found prefixes differ by rounding: by how much, those show that were just computed and are asked again. With
`--invariant` vLLM runs in its batch-invariant mode: it is slower, and all answers must be equal, bit by bit.

Needs the packages `mooncake-transfer-engine-non-cuda` and `xxhash`. Mooncake listens on all addresses: run this without
a network, or as `unshare --user --map-root-user --net sh -c 'ip link set lo up && exec python3 -m bench.vllm tier'`.
Writes `tier.jsonl`, also while it runs, and `tier.md`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.service.tiers.mooncake.cluster import Cluster
from vllm.platforms import current_platform

from bench.vllm.engines import Setup, block_tokens
from bench.vllm.model import SHAPES, fill_weights, write_model
from bench.vllm.process import FORK, Measurement, MeasurementError
from bench.vllm.results import Results, make_parser, open_results
from bench.vllm.tierfigures import Stored, compare, element_bytes, tables
from bench.vllm.tierload import TIMEOUT, TINY, Prompts, ask, store

_ROOM = 1.6
"""Of the store: its allocator rounds sizes up, and it evicts from 0.85 on."""


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    results = open_results("tier", options)
    prompts = TINY if options.tiny else Prompts(options.prompts)
    with tempfile.TemporaryDirectory() as folder:
        done = [
            _measure_shape(name, Path(folder) / name, options, prompts, results)
            for name in (["tiny"] if options.tiny else options.shapes)
        ]
    return 0 if all(done) else 1


def _measure_shape(name: str, folder: Path, options: argparse.Namespace, prompts: Prompts, results: Results) -> bool:
    shape, is_cuda = SHAPES[name], current_platform.is_cuda()
    write_model(folder, shape, weights=not is_cuda)
    fill = partial(fill_weights, hidden=shape.hidden) if is_cuda else None
    gpus = _gpus()
    prompt_bytes = prompts.tokens * shape.token_bytes(element_bytes())
    gpu_blocks = (prompts.on_gpu * prompts.tokens + prompts.decoded + 1024) // block_tokens()
    with _store(folder / "store.log", int(_ROOM * prompts.stored * prompt_bytes), options.providers) as url:
        setup = Setup(
            folder,
            "kvstow",
            pool_bytes=(prompts.of_a + 3) * prompt_bytes,
            max_tokens=max(prompts.tokens, prompts.decoded) + 1024,
            gpu_blocks=gpu_blocks,
            graphs=options.graphs,
            graph_sizes=(1, 2),
            weights=not is_cuda,
            invariant=options.invariant,
            extra={"tier": url, "tier_write": "through", "weights_id": f"bench {name}"},
        )
        if len(gpus) == 1:
            kv_bytes = gpu_blocks * block_tokens() * shape.token_bytes(element_bytes())
            setup = replace(setup, gpu_share=0.4, kv_bytes=kv_bytes)
        is_stored = FORK.Event()
        known, _ = prompts.make(shape.vocabulary)
        engines = [
            Measurement(_on_gpu, gpus[:1], store, setup, fill, known, is_stored),
            Measurement(_on_gpu, gpus[-1:], ask, setup, fill, prompts, shape, results, is_stored),
        ]
        try:
            stored: Stored = engines[0].result(TIMEOUT)
            tiered, answers = engines[1].result(TIMEOUT)
        except MeasurementError as error:
            results.add("failed", of="tier", shape=name, error=str(error)[-3000:])
            return False
        finally:
            for engine in engines:
                engine.kill()
    tiered = replace(tiered, asked=[compare(way, found, stored.answers) for way, found in answers.items()])
    results.add("stored", shape=name, **{key: value for key, value in asdict(stored).items() if key != "answers"})
    results.add("tier", shape=name, **asdict(tiered))
    for table in tables(name, shape, prompts.tokens, stored, tiered):
        results.show(table)
    return not options.invariant or all(asked.is_exact for asked in tiered.asked)


@contextmanager
def _store(log: Path, num_bytes: int, providers: int) -> Iterator[str]:
    """The URL of a Mooncake of this machine."""
    cluster = Cluster(log, max(num_bytes // providers, 256 << 20))
    try:
        for _ in range(providers - 1):
            cluster.start_provider()
        yield cluster.url
    finally:
        cluster.close()


def _gpus() -> list[str]:
    """What `CUDA_VISIBLE_DEVICES` may be. Does not touch CUDA: processes are forked later."""
    if not current_platform.is_cuda():
        return [""]
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given:
        return given.split(",")
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True, timeout=60)
    return [str(number) for number in range(len(listed.stdout.splitlines()))]


def _on_gpu(gpus: Sequence[str], function: Callable[..., Any], *arguments: Any) -> Any:
    if gpus != [""]:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[0]
    return function(*arguments)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("tier", __doc__)
    shapes = [name for name in SHAPES if name != "tiny"]
    parser.add_argument("--shapes", nargs="+", default=["8b", "tp8"], choices=shapes)
    parser.add_argument("--prompts", type=int, default=4, metavar="N", help="of each kind; default: 4")
    parser.add_argument("--providers", type=int, default=4, metavar="N", help="processes of the store; default: 4")
    parser.add_argument("--graphs", choices=("none", "decode"), default="decode", help="CUDA graphs")
    parser.add_argument("--invariant", action="store_true", help="fail unless all answers are equal, bit by bit")
    return parser

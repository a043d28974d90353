"""Results as they are measured: each is a line of JSON, on the terminal and in a file of `--out`."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.report import Table
from bench.vllm.engines import CONNECTORS, GIB, GRAPHS, Graphs, Setup
from bench.vllm.model import SHAPES, Shape, write_model
from bench.vllm.node import Node, NodeService
from bench.vllm.process import MeasurementError, run

_ERROR = 3000  # how many characters of an error are kept, from its end


@dataclass(frozen=True, slots=True)
class Results:
    path: Path

    def add(self, kind: str, **values: Any) -> None:
        line = json.dumps({"kind": kind, **values})
        print(line, flush=True)
        with self.path.open("a") as file:
            file.write(line + "\n")

    def attempt(self, kind: str, measure: Callable[[], Any], **labels: Any) -> Any:
        """Record what `measure` returns, which is a dataclass, and return it. A failure is recorded, too, and returns
        None."""
        try:
            measured = measure()
        except MeasurementError as error:
            self.add("failed", of=kind, **labels, error=str(error)[-_ERROR:])
            return None
        self.add(kind, **labels, **asdict(measured))
        return measured

    def attempt_each(
        self,
        kind: str,
        options: argparse.Namespace,
        timeout: float,
        measure: Callable[..., Any],
        plain: Setup,
        *args: Any,
        **labels: Any,
    ) -> list[tuple[str, Any]]:
        """Return what `measure(setup, *args)` returns for each connector of `options`. They run in turn, each in its
        own process. Those that fail are left out."""
        runs = []
        with ExitStack() as stack:
            nodes = Nodes(stack, plain.pool_bytes)
            for turn, connector in enumerate(options.connectors):

                def once(connector: str = connector) -> Any:
                    return run(timeout, measure, replace(plain, connector=connector, node=nodes.of(connector)), *args)

                name = name_of(connector)
                measured = self.attempt(kind, once, **labels, connector=name, turn=turn, graphs=options.graphs)
                if measured is not None:
                    runs.append((name, measured))
        return runs

    def show(self, table: Table) -> None:
        text = table.to_markdown()
        print(f"{text}\n", flush=True)
        with self.path.with_suffix(".md").open("a") as file:
            file.write(text + "\n\n")


class Nodes:
    """The services to which the engines of a comparison attach: each engine gets an empty pool, or no service at
    all."""

    def __init__(self, stack: ExitStack, num_bytes: int) -> None:
        self._stack, self._num_bytes = stack, num_bytes
        self._service: NodeService | None = None

    def of(self, connector: str) -> Node | None:
        """Return the node for a connector. Raises `MeasurementError`."""
        if connector == "absent":
            return Node(Path("/nonexistent/attach.sock"), 0)
        if connector != "attached":
            return None
        if self._service is None:
            self._service = enter_node(self._stack, self._num_bytes)
        try:
            self._service.forget()
        except (OSError, RuntimeError) as error:  # `TimeoutError` is an `OSError`
            raise MeasurementError(str(error)) from error
        return self._service.node


def enter_node(stack: ExitStack, num_bytes: int, *, small_pages: bool = False) -> NodeService:
    """Start a service, which ends with `stack`. Raises `MeasurementError`."""
    try:
        return stack.enter_context(NodeService(num_bytes, small_pages=small_pages))
    except (OSError, RuntimeError) as error:  # `TimeoutError` is an `OSError`
        raise MeasurementError(str(error)) from error


@contextmanager
def plain_setup(
    options: argparse.Namespace,
    *,
    shape: str | None = None,
    tiny_pool: float = 0.05,
    config: Mapping[str, Any] | None = None,
    **given: Any,
) -> Iterator[Setup]:
    """Yield an engine's setup without a connector, for the model of the options, whose files exist inside the context.
    `tiny_pool` is host memory with `--tiny`, in GiB. `config` is that of the model. `given` are other fields."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = SHAPES[shape] if shape is not None else shape_of(options)
        write_model(Path(folder), chosen, weights=False, config=config)
        same = {name: getattr(options, name) for name in ("graphs", "extra", "attention") if hasattr(options, name)}
        num_bytes = int((tiny_pool if options.tiny else options.pool) * GIB)
        yield Setup(Path(folder), "none", pool_bytes=num_bytes, **same, **given)


def shape_of(options: argparse.Namespace) -> Shape:
    return SHAPES["tiny" if options.tiny else options.shape]


def name_of(connector: str) -> str:
    """Return the name of a connector, which is one of `CONNECTORS` or is given as JSON."""
    return str(json.loads(connector)["kv_connector"]) if connector.startswith("{") else connector


def connector(text: str) -> str:
    """Parse an option: one of `CONNECTORS`, or JSON."""
    if text not in CONNECTORS:
        try:
            name_of(text)
        except (ValueError, KeyError, TypeError):
            pass
        else:
            if text.startswith("{"):
                return text
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of {', '.join(CONNECTORS)}, nor JSON as --kv-transfer-config takes it"
        )
    return text


def open_results(name: str, options: argparse.Namespace) -> Results:
    options.out.mkdir(parents=True, exist_ok=True)
    results = Results(options.out / f"{name}.jsonl")
    results.add("options", **{key: str(value) for key, value in vars(options).items()})
    return results


def make_parser(name: str, doc: str | None, *, shape: bool = False) -> argparse.ArgumentParser:
    """Make the parser of the benchmark `name`, with the options that all have. With `shape`, it takes one model."""
    parser = argparse.ArgumentParser(
        prog=f"python3 -m bench.vllm {name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common(parser)
    if shape:
        parser.add_argument("--shape", default="8b", choices=[each for each in SHAPES if each != "tiny"])
    return parser


def add_resuming(parser: argparse.ArgumentParser, name: str) -> None:
    """Add options for the rows of earlier runs: see `read_rows`."""
    parser.add_argument("--resume", type=Path, metavar="DIR", help=f"with the rows of earlier runs, in {name}*.jsonl")
    parser.add_argument("--table", type=Path, metavar="DIR", help="measure nothing, and show the rows in this folder")


def read_rows(name: str, folder: Path | None) -> list[dict[str, Any]]:
    """Return the rows that runs of the benchmark `name` have measured, in the order of their files' names. Without a
    folder, there are none."""
    paths = [] if folder is None else sorted(folder.glob(f"**/{name}*.jsonl"))
    return [row for path in paths for row in rows_of(name, path)]


def rows_of(name: str, path: Path) -> list[dict[str, Any]]:
    """Return the rows that one run has measured."""
    return [row for row in map(json.loads, path.read_text().splitlines()) if row["kind"] == name]


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT", ".")), metavar="DIR", help="default: $OUT, or here"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a model and a load for two CPU cores: tries the program, measures nothing"
    )


def add_engines(parser: argparse.ArgumentParser, default: list[str], *, pool: float | None, graphs: Graphs) -> None:
    """Add options: which connectors are compared, and what is the same for all."""
    parser.add_argument(
        "--connectors",
        nargs="+",
        type=connector,
        metavar="NAME",
        default=default,
        help=f"in this order, each time in a new process: {', '.join(CONNECTORS)}, or JSON as "
        f"--kv-transfer-config takes it; attached starts a node service; default: {' '.join(default)}",
    )
    parser.add_argument("--pool", type=float, default=pool, metavar="GIB", help="host memory")
    add_engine(parser, graphs=graphs)


def add_engine(parser: argparse.ArgumentParser, *, graphs: Graphs) -> None:
    """Add the options of an engine with any connector."""
    parser.add_argument(
        "--extra", type=json.loads, default={}, metavar="JSON", help="more options of KVStow's connector"
    )
    parser.add_argument("--graphs", choices=GRAPHS, default=graphs, help="CUDA graphs; full is vLLM's default")

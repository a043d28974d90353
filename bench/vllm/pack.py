"""Packs vLLM for a GPU machine that has torch and no network, as one archive of about 50 MB.

    python3 bench/vllm/pack.py OUT            # here: downloads the wheels, writes OUT
    mkdir site && tar -xJf OUT -C site        # there
    PYTHONPATH=site python3 -m bench.vllm paths --attention FLASH_ATTN

vLLM's kernels use only torch's stable interface, so they run with an older torch than the wheel names (0.33.0 with 2.11
and transformers 5.17). The wheel has kernels for every GPU. The pack keeps the code for compute capability 9.0 (H100,
H200), and of FlashAttention 3 the kernels for bfloat16 and heads of 128 or 192 values. It overwrites the other code
with zeros, which take no room in the archive, so that sizes and addresses in the libraries stay. FlashAttention 2, the
kernels for mixtures of experts, DeepGEMM and FlashMLA are left out, so use TRITON_ATTN, FLASH_ATTN or TRITON_MLA, and
dense models.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

VLLM = "0.33.0"
ARCHITECTURE = 90
_PACKAGES = Path(__file__).with_name("pack.txt")
_PLATFORMS = (
    *("manylinux_2_39", "manylinux_2_34", "manylinux_2_31", "manylinux_2_28", "manylinux_2_27"),
    *("manylinux_2_17", "manylinux2014", "manylinux1"),
)
_LEFT_OUT = (
    *("vllm/_moe_C*.so", "vllm/vllm-rs", "vllm/_flashmla*", "vllm/_qutlass*", "vllm/_rust*", "vllm/_flashkda*"),
    *("vllm/_deepselect*", "vllm/vllm_flash_attn/_vllm_fa2*.so", "vllm/third_party/deep_gemm"),
    *("vllm/third_party/fmha_sm100", "mistral_common/data", "pycountry/locales"),
)
_CODE = b".nv_fatbin"
_MAGIC = 0xBA55ED50
_PTX, _MACHINE_CODE = 1, 2


class _Image(NamedTuple):
    """Code of one kind for one architecture, at the bytes from `start` to `end` of a library."""

    kind: int
    architecture: int
    start: int
    end: int


def prune(library: Path, wanted: Callable[[bytes], bool] = lambda code: True) -> None:
    """Overwrite the code in this library that this architecture does not run, or that is not `wanted`."""
    data = bytearray(library.read_bytes())
    for images in _kernels(data):
        runs = [each for each in images if each[:2] == (_MACHINE_CODE, ARCHITECTURE)]
        runs = runs or [each for each in images if each.kind == _PTX]  # PTX is compiled when it is loaded
        for each in images:
            if each not in runs or not wanted(bytes(data[each.start : each.end])):
                data[each.start : each.end] = bytes(each.end - each.start)
    library.write_bytes(data)


def _kernels(data: bytearray) -> Iterator[list[_Image]]:
    """Yield the images of each group of kernels in an ELF file. A group has the same kernels for different GPUs."""
    for start, end in _sections(data, _CODE):
        at = start
        while at < end:
            magic, _, header, length = struct.unpack_from("<IHHQ", data, at)
            if magic != _MAGIC:  # padding between two groups
                at += 8
                continue
            images, image, end_of_group = list[_Image](), at + header, at + header + length
            while image < end_of_group:
                kind, _, header, size = struct.unpack_from("<HHIQ", data, image)
                (architecture,) = struct.unpack_from("<I", data, image + 28)
                images.append(_Image(kind, architecture, image + header, image + header + size))
                image += header + size
            yield images
            at = end_of_group


def _sections(data: bytearray, name: bytes) -> Iterator[tuple[int, int]]:
    (table,) = struct.unpack_from("<Q", data, 40)
    size, number, index = struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQ", data, table + size * each) for each in range(number)]
    names = headers[index][4]
    for header in headers:
        start = names + header[0]
        if data[start : data.index(0, start)] == name:
            yield header[4], header[4] + header[5]


def is_for_bfloat16(code: bytes) -> bool:
    """Whether this code of FlashAttention 3 is for heads of 128 values, or of 192 (MLA). Code without a size is for all
    heads."""
    sizes = set(re.findall(rb"EEELi(\d+)ENS_", code))
    return not sizes or (sizes <= {b"128", b"192"} and b"6half_t" not in code and b"float_e4m3" not in code)


def fill(site: Path) -> None:
    """Put vLLM and the packages that it needs into an empty folder."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12", "--implementation", "cp"]
    command += [word for abi in ("cp312", "abi3", "none") for word in ("--abi", abi)]
    command += [word for name in _PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    with tempfile.TemporaryDirectory() as wheels:
        subprocess.run([*command, "-d", wheels, f"vllm=={VLLM}", "-r", str(_PACKAGES)], check=True)
        for wheel in Path(wheels).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)


def strip(site: Path) -> None:
    """Remove the files that the pack does not need."""
    for pattern in _LEFT_OUT:
        for path in site.glob(pattern):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
    for folder in [path for path in site.rglob("tests") if path.is_dir()]:
        shutil.rmtree(folder, ignore_errors=True)
    prune(site / "vllm" / "_C_stable_libtorch.abi3.so")
    prune(site / "vllm" / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so", is_for_bfloat16)


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    out = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        fill(site)
        strip(site)
        subprocess.run(["tar", "-cJf", str(out), "-C", str(site), "."], check=True)
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Compile the GPU kernels for real targets without a GPU, and hold their registers and spills against a budget.

nvcc for NVIDIA, clang to ISA for AMD; then the files that call the kernels, against ggml-cuda's headers. A compiler
that is not there is left out with a line that says so, or is an error with ``--require``. nvcc is looked for beside
this Python (``pip install`` puts it under ``nvidia/cu13``) and then in PATH.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "tests" / "gpu" / "kernels.cu"
INCLUDES = [ROOT / "native" / "cuda", ROOT / "native" / "kvq"]
NVIDIA = ["sm_80", "sm_90"]
AMD = ["gfx1100", "gfx1030", "gfx1201", "gfx942", "gfx90a"]
CLANG = "clang++-19"

# Of a thread in a block of 128: 168 registers leave three blocks on a multiprocessor of 65,536, 256 leave two waves
# on each SIMD of gfx942, six on those of gfx1100. ptxas spills a few words by its own choice of occupancy.
MAX_REGISTERS = {"sm": 168, "gfx": 256}
MAX_SPILL_BYTES = {"sm": 160, "gfx": 0}
MAX_SHARED_BYTES = 48 * 1024


@dataclass(frozen=True)
class Usage:
    """What a kernel takes on one target: registers a thread, spilled bytes a thread, shared memory a block in bytes."""

    kernel: str
    registers: int
    spill_bytes: int
    shared_bytes: int


def demangle(names: list[str]) -> list[str]:
    """Readable names; kernels without their namespaces and arguments."""
    text = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return [re.sub(r"\(.*|void |kvq::gpu::", "", line) for line in text.splitlines()]


def run(command: list[str]) -> str:
    """The compiler's messages; SystemExit with them if it fails."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"{' '.join(command)}\n{result.stdout}{result.stderr}")
    return result.stdout + result.stderr


def find_nvcc() -> str | None:
    """nvcc of the wheels in this environment, else of PATH."""
    wheel = Path(sysconfig.get_paths()["platlib"]) / "nvidia" / "cu13" / "bin" / "nvcc"
    return str(wheel) if wheel.is_file() else shutil.which("nvcc")


def cuda_includes() -> list[Path]:
    """Headers of CUDA and cuBLAS as wheels install them."""
    folder = Path(sysconfig.get_paths()["platlib"]) / "nvidia" / "cu13" / "include"
    return [folder] if folder.is_dir() else []


def compile_nvidia(nvcc: str, target: str, out: Path) -> list[Usage]:
    """Kernel usage as ptxas reports it."""
    flags = ["-std=c++17", "-O3", "-use_fast_math", f"-arch={target}", "-cubin", "-Xptxas", "-v"]
    text = run([nvcc, *flags, *(f"-I{path}" for path in INCLUDES), str(KERNELS), "-o", str(out / f"{target}.cubin")])
    found = re.findall(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
        r"(?:[^\n]*?(\d+) bytes smem)?",
        text,
        re.DOTALL,
    )
    names = demangle([name for name, *_ in found])
    return [
        Usage(name, int(registers), max(int(stores), int(loads)), int(shared or 0))
        for name, (_, stores, loads, registers, shared) in zip(names, found, strict=True)
    ]


def compile_amd(clang: str, target: str, out: Path) -> list[Usage]:
    """Kernel usage from the metadata of the ISA; needs no header or library of ROCm."""
    assembly = out / f"{target}.s"
    flags = ["-x", "hip", f"--offload-arch={target}", "-nogpulib", "-nogpuinc", "-std=c++17", "-O3"]
    command = [clang, *flags, *(f"-I{path}" for path in INCLUDES), str(KERNELS)]
    run([*command, "--cuda-device-only", "-S", "-o", str(assembly)])
    run([*command, "--cuda-host-only", "-fsyntax-only"])
    metadata = assembly.read_text(encoding="utf-8").partition("amdhsa.kernels:")[2]

    def values(field: str) -> list[str]:
        return re.findall(rf"^    \.{field}: +(\S+)$", metadata, re.MULTILINE)

    names = demangle([name for name in values("name") if name.startswith("_Z")])
    columns = [values(field) for field in ("vgpr_count", "private_segment_fixed_size", "group_segment_fixed_size")]
    return [
        Usage(name, int(registers), int(scratch), int(shared))
        for name, registers, scratch, shared in zip(names, *columns, strict=True)
    ]


def count_instructions(assembly: Path, kernel: str) -> str:
    """How often the instructions that matter occur in one kernel of an ISA file."""
    text = assembly.read_text(encoding="utf-8")
    body = text.partition(f"\n{kernel}:")[2].partition("\n.Lfunc_end")[0]
    wanted = ("global_load_b128", "global_load_dwordx4", "v_dot4", "v_perm_b32", "v_cvt_f32_ubyte", "scratch_store")
    return ", ".join(f"{word} {body.count(word)}" for word in wanted if word in body)


def over_budget(target: str, usage: list[Usage]) -> list[str]:
    """One line for each kernel that takes more than it may."""
    kind = re.match("[a-z]+", target)
    assert kind
    family = kind.group()
    return [
        f"{target}: {u} is over the budget of {MAX_REGISTERS[family]} registers,"
        f" {MAX_SPILL_BYTES[family]} bytes spilled, {MAX_SHARED_BYTES} bytes shared"
        for u in usage
        if u.registers > MAX_REGISTERS[family]
        or u.spill_bytes > MAX_SPILL_BYTES[family]
        or u.shared_bytes > MAX_SHARED_BYTES
    ]


def print_usage(target: str, usage: list[Usage], seconds: float) -> None:
    """A table of one target."""
    print(f"\n{target} ({seconds:.0f} s): registers, spilled bytes, shared bytes")
    for u in usage:
        print(f"  {u.kernel:28} {u.registers:4} {u.spill_bytes:4} {u.shared_bytes:6}")


def check_callers(nvcc: str, tree: Path, out: Path) -> None:
    """Our files of the backend, and the patched file that calls them, against ggml-cuda's headers."""
    folder = tree / "ggml" / "src" / "ggml-cuda"
    includes = [*INCLUDES, folder, folder.parent, tree / "ggml" / "include", *cuda_includes()]
    flags = ["-std=c++17", "-O3", "-use_fast_math", "-extended-lambda", "-arch=sm_80", "-c", "-DGGML_CUDA_NO_VMM"]
    ours = sorted((ROOT / "native" / "cuda").glob("*.cu"))
    for file in [*ours, folder / "ggml-cuda.cu"]:
        start = time.monotonic()
        run([nvcc, *flags, *(f"-I{path}" for path in includes), str(file), "-o", str(out / f"{file.stem}.o")])
        print(f"{file.name} compiles against ggml-cuda ({time.monotonic() - start:.0f} s)")


def has_cublas(tree: Path | None) -> str | None:
    """Why the callers cannot be compiled, or None."""
    if tree is None or not (tree / "ggml" / "src" / "ggml-cuda").is_dir():
        return "no patched llama.cpp tree: --tree"
    folders = [*cuda_includes(), *(Path(p) for p in os.environ.get("CPATH", "").split(":") if p)]
    return None if any((folder / "cublas_v2.h").is_file() for folder in folders) else "no cublas_v2.h"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tree", type=Path, help="a patched llama.cpp, for the files that call the kernels")
    parser.add_argument("--require", action="store_true", help="a compiler or header that is missing is an error")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where ISA and cubins go (default: deleted)")
    return parser.parse_args()


def main() -> int:
    """Compile everything that can be compiled here; 1 if something is over budget or missing."""
    args = parse()
    with tempfile.TemporaryDirectory() as scratch:
        out = args.keep or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        problems: list[str] = []
        missing: list[str] = []
        nvcc, clang = find_nvcc(), shutil.which(CLANG)
        for compiler, targets, build in ((nvcc, NVIDIA, compile_nvidia), (clang, AMD, compile_amd)):
            if not compiler:
                missing.append(f"{', '.join(targets)}: no {'nvcc' if targets is NVIDIA else CLANG}")
                continue
            for target in targets:
                start = time.monotonic()
                usage = build(compiler, target, out)
                if not usage:
                    problems.append(f"{target}: the compiler reported no kernel")
                print_usage(target, usage, time.monotonic() - start)
                if targets is AMD:
                    attention = "_ZN3kvq3gpu11attend_spanILi2ELi1ELi4EEEvNS0_14attention_argsE"
                    print(f"  attend_span<2, 1, 4>: {count_instructions(out / f'{target}.s', attention)}")
                problems += over_budget(target, usage)
        reason = has_cublas(args.tree) if nvcc else "no nvcc"
        if reason:
            missing.append(f"the files that call the kernels: {reason}")
        elif nvcc:
            check_callers(nvcc, args.tree, out)
    for line in missing:
        print(f"left out: {line}")
    for line in problems:
        print(f"error: {line}")
    return 1 if problems or (missing and args.require) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Converting Hugging Face models to GGUF with llama.cpp's own converter.

The converter comes from the same llama.cpp as the native library and is installed beside it. It runs in a process of
its own and needs what the ``tools`` extra installs (torch, transformers). It is never told to run a model's own code.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from pykvq import hub
from pykvq.errors import InvalidArgumentError, LibraryError, ModelFileError
from pykvq.files import require_space, temporary_beside, written_at_once
from pykvq.quantize import checked_type, quantize

# called with what is being done, and with 0 to 1
ConvertProgress = Callable[[str, float], None]

# what the converter writes by itself
_CONVERTER_TYPES = ("f32", "f16", "bf16", "q8_0")
_WEIGHTS = (".safetensors", ".bin")
# of a repository: weights in safetensors, configuration and tokenizer
_NEEDED = re.compile(r"[^/]+\.(safetensors|json|model|txt|jinja|tiktoken)")
_POLL_SECONDS = 0.2
_LOG_CHARACTERS = 1 << 16


def convert(
    source: str | os.PathLike[str],
    out_path: str | os.PathLike[str],
    type_name: str = "q4_k_m",
    *,
    imatrix: str | os.PathLike[str] | None = None,
    n_threads: int | None = None,
    force: bool = False,
    progress: ConvertProgress | None = None,
) -> None:
    """Writes a model as a GGUF file of a type; ``out_path`` is replaced at the end, in one step.

    Args:
        source: a folder with a Hugging Face model, ORG/REPO of the hub, or a GGUF file.
        out_path: where to write.
        type_name: one of ``quantize.quantize_types()``.
        imatrix: an importance matrix for the quantization.
        n_threads: of the quantization; None for the physical cores.
        force: begin even if memory or disk seem too small.
        progress: called with what is being done, and with 0 to 1.

    Raises:
        ModelFileError: the model is missing or damaged, its architecture is not known, or nothing can be written.
        LibraryError: the converter's requirements are not installed.
        DownloadError, InvalidArgumentError, OutOfMemoryError.
    """
    kind = checked_type(type_name, imatrix is not None)
    report = progress or (lambda _what, _done: None)
    target = Path(out_path)

    def report_quantizing(done: float) -> None:
        report("quantizing", done)

    folder = _model_folder(source, report)
    if folder.is_file():
        quantize(
            folder, target, kind.name, imatrix=imatrix, n_threads=n_threads, force=force, progress=report_quantizing
        )
        return
    weight_bytes = _weight_bytes(folder)
    in_one_go = kind.name in _CONVERTER_TYPES
    if not force:
        # F32 takes twice what 16-bit weights do
        require_space(target.parent, weight_bytes * (2 if kind.name == "f32" or not in_one_go else 1))
    if in_one_go:
        with written_at_once(target) as temporary:
            _run_converter(folder, temporary, kind.name, weight_bytes, report)
        return
    with temporary_beside(target, "16-bit") as full:
        _run_converter(folder, full, "auto", weight_bytes, report)
        quantize(full, target, kind.name, imatrix=imatrix, n_threads=n_threads, force=force, progress=report_quantizing)


def converter_path() -> Path:
    """Where llama.cpp's converter is installed.

    Raises:
        LibraryError: it is not.
    """
    from pykvq import _cffi

    path = Path(_cffi.__file__).parent / "llama_cpp" / "convert_hf_to_gguf.py"
    if not path.is_file():
        raise LibraryError(f"llama.cpp's converter is not at {path}: reinstall pykvq")
    return path


def _model_folder(source: str | os.PathLike[str], report: ConvertProgress) -> Path:
    """The folder of a model that is to be converted, or the GGUF file that is to be quantized."""
    path = Path(source)
    if path.is_symlink() and not path.exists():
        raise ModelFileError(f"'{path}' is a link to what does not exist: give a folder or a GGUF file")
    if path.is_file():
        return path
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelFileError(
                f"'{path}' has no config.json: give the folder of a Hugging Face model, or the path of a GGUF file"
            )
        return path
    try:
        reference = hub.parse_reference(os.fspath(source))
    except InvalidArgumentError as error:
        raise ModelFileError(
            f"'{path}' does not exist: give a folder, a GGUF file, or ORG/REPO of the Hugging Face hub"
        ) from error
    return _fetch_folder(reference.repo, report)


def _fetch_folder(repo: str, report: ConvertProgress) -> Path:
    repository = hub.list_files(repo)
    wanted = [file for file in repository.files if _NEEDED.fullmatch(file.name)]
    if not any(PurePosixPath(file.name).suffix == ".safetensors" for file in wanted):
        raise ModelFileError(f"{repo} has no weights in safetensors: only those are converted")
    folder = hub.models_dir() / "hf" / repo
    hub.fetch_files(repository, wanted, folder, lambda done, total: report("fetching", done / max(total, 1)))
    return folder


def _weight_bytes(folder: Path) -> int:
    try:
        weights = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHTS)
        sizes = {path: path.stat().st_size if path.exists() else None for path in weights}
    except OSError as error:
        raise ModelFileError(f"cannot read '{folder}' ({error.strerror or error}): check its permissions") from error
    if not sizes:
        raise ModelFileError(f"'{folder}' has no weights: no file ends in .safetensors or .bin")
    for path, size in sizes.items():
        if not size:
            fault = "is a link to a file that does not exist" if size is None else "is empty"
            raise ModelFileError(f"'{path}' {fault}: fetch the model again")
    return sum(filter(None, sizes.values()))


def _run_converter(folder: Path, out: Path, type_name: str, weight_bytes: int, report: ConvertProgress) -> None:
    command = [sys.executable, str(converter_path()), str(folder), "--outfile", str(out), "--outtype", type_name]
    log_path = out.with_name(f"{out.name}.log")
    try:
        with (
            log_path.open("wb") as log,
            # nothing is fetched: the model is here
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            ) as process,
        ):
            try:
                while process.poll() is None:
                    report("converting", min(out.stat().st_size / weight_bytes, 1.0))
                    time.sleep(_POLL_SECONDS)
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            said = log_path.read_text(encoding="utf-8", errors="replace")[-_LOG_CHARACTERS:]
            raise _converter_error(folder, said, process.returncode)
    finally:
        log_path.unlink(missing_ok=True)


def _converter_error(folder: Path, log: str, code: int) -> Exception:
    """One line out of what the converter printed."""
    missing = re.search(r"No module named '([\w.]+)'", log)
    if missing:
        return LibraryError(f"the converter needs {missing[1]}: pip install 'pykvq[tools]'")
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(ERROR:|[\w.]*(Error|Exception)\b)", line)] or lines[-1:]
    reason = re.sub(r"^ERROR:[\w-]+:", "", errors[-1]) if errors else f"it ended with exit code {code}"
    return ModelFileError(f"llama.cpp's converter cannot convert '{folder}': {reason}")

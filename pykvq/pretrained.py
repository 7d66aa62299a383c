"""``Llama.from_pretrained``: files of the Hugging Face hub, in the cache or folder that llama-cpp-python would use."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Sequence

from pykvq.errors import DownloadError, InvalidArgumentError


def download(
    repo_id: str,
    filename: str | None,
    additional_files: Sequence[str] = (),
    *,
    local_dir: str | os.PathLike[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> str:
    """The path of a file of a repository, which is downloaded first if it is not in the cache.

    Args:
        filename: its name, or a pattern that exactly one file matches; None for the only GGUF file.
        additional_files: names or patterns of files to download too.
    """
    import huggingface_hub

    try:
        wanted = [filename or "*.gguf", *additional_files]
        if any(set(pattern) & set("*?[") for pattern in wanted):  # plain names may be in the cache already
            names = huggingface_hub.HfApi().list_repo_files(repo_id)
            wanted = [_match(names, pattern, repo_id) for pattern in wanted]
        paths = [
            huggingface_hub.hf_hub_download(repo_id, name, local_dir=_text(local_dir), cache_dir=_text(cache_dir))
            for name in wanted
        ]
    except InvalidArgumentError:
        raise
    except Exception as error:  # of huggingface_hub and of the HTTP client below it, which differ by version
        reason = " ".join(str(error).split())
        raise DownloadError(f"cannot fetch {filename or 'a GGUF file'} of {repo_id}: {reason}") from error
    return paths[0]


def _text(folder: str | os.PathLike[str] | None) -> str | None:
    return None if folder is None else os.fspath(folder)


def _match(names: Sequence[str], pattern: str, repo_id: str) -> str:
    found = [name for name in names if fnmatch.fnmatch(name, pattern)]
    if len(found) != 1:
        ggufs = ", ".join(found or [name for name in names if name.endswith(".gguf")]) or "no GGUF file"
        problem = "matches several files" if found else "matches no file"
        raise InvalidArgumentError(f"{pattern!r} {problem} of {repo_id}: there is {ggufs}")
    return found[0]

"""``pykvq-run``: complete one prompt, or chat, with a GGUF model and a compressed KV cache."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pykvq.cli.console import answer_summary, interruptible, note, progress_bar, progress_bars, rate, write
from pykvq.cli.program import print_version, require, run_program
from pykvq.errors import InvalidArgumentError
from pykvq.kv_config import DEFAULT_PRESET, KV_TYPE_BITS, kv_presets, parse_kv_config

if TYPE_CHECKING:
    from pykvq.generation import Generation
    from pykvq.llama import Llama

PROGRAM = "pykvq-run"
MAX_CONTEXT = 2**30
MAX_THREADS = 512
MAX_TEMPERATURE = 1_000_000
DEFAULT_ANSWER_TOKENS = 256


@dataclass(frozen=True)
class Options:
    """The command line, checked."""

    model: str | None
    ctx: int
    kv: str
    prompt: str | None
    max_tokens: int | None
    temperature: float
    seed: int
    system: str | None
    threads: int | None
    n_gpu_layers: int
    device: str | None
    chat: bool
    json: bool
    verbose: bool
    force: bool
    calibrate: str | None

    def first_messages(self) -> list[dict[str, str]]:
        """The messages that a chat begins with."""
        return [] if self.system is None else [{"role": "system", "content": self.system}]


def _command(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A GGUF file, hf:ORG/REPO[:FILE] of the Hugging Face hub, or the name of a model that "
            "`pykvq-models list` shows. Without it: a small demo model, fetched once.",
        ),
    ] = None,
    ctx: Annotated[
        int, typer.Option("--ctx", metavar="N", help="Tokens of context; 0: as many as the model was trained on.")
    ] = 4096,
    kv: Annotated[
        str,
        typer.Option(
            "--kv",
            metavar="PRESET|TIERS",
            help=f"KV cache format: {', '.join(kv_presets())}, or tiers TYPE[/VTYPE][:TOKENS]+... from new tokens "
            f"to old ones, as in f16:128+q8_0:2048+q4_ve ({', '.join(KV_TYPE_BITS)}).",
        ),
    ] = DEFAULT_PRESET,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", metavar="PROMPT", help="Answer this and exit; without it: chat.")
    ] = None,
    n: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--n",
            metavar="N",
            help=f"Most tokens of an answer; -1: until the context is full. [default: {DEFAULT_ANSWER_TOKENS} with "
            "-p, -1 in a chat]",
        ),
    ] = None,
    temp: Annotated[float, typer.Option("--temp", metavar="T", help="Temperature; 0: the likeliest token.")] = 0.8,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the draw; -1: a random one.")] = -1,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message of the chat.")] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", help="Threads. [default: the physical cores]")
    ] = None,
    n_gpu_layers: Annotated[int, typer.Option("--n-gpu-layers", metavar="N", help="Layers on the GPU; -1: all.")] = 0,
    device: Annotated[
        str | None, typer.Option("--device", metavar="NAME,...", help="The GPUs to use, as CUDA0. [default: all]")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send PROMPT as a user message through the model's chat template.")
    ] = False,
    no_calibrate: Annotated[
        bool,
        typer.Option("--no-calibrate", help="Go without a calibration: worse answers, no wait at the first start."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With -p: print one JSON object instead of text.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Load even what does not seem to fit into memory.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print the native log to stderr.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> int:
    """Run a GGUF model with a KV cache that is a fraction of its usual size.

    The answer goes to stdout, everything else to stderr.
    """
    if version:
        return print_version(PROGRAM)
    require(0 <= ctx <= MAX_CONTEXT, "--ctx", ctx, f"0 (the model's training context) or 1 to {MAX_CONTEXT} tokens")
    require(n is None or n == -1 or n >= 1, "-n", n, "-1 (until the context is full) or at least 1 token")
    require(0 <= temp <= MAX_TEMPERATURE, "--temp", temp, f"0 (greedy) to {MAX_TEMPERATURE}")
    require(-1 <= seed < 2**32, "--seed", seed, f"-1 (random) or 0 to {2**32 - 1}")
    require(threads is None or 1 <= threads <= MAX_THREADS, "--threads", threads, f"1 to {MAX_THREADS}")
    require(-1 <= n_gpu_layers < 2**31, "--n-gpu-layers", n_gpu_layers, "-1 (all) or more")
    parse_kv_config(kv)
    if as_json and prompt is None:
        raise InvalidArgumentError("--json needs a prompt: add -p PROMPT")
    if system is not None and prompt is not None and not chat:
        raise InvalidArgumentError("--system needs the chat template: add --chat, or leave -p out")
    answer_tokens = DEFAULT_ANSWER_TOKENS if n is None and prompt is not None else n
    options = Options(
        model=model,
        ctx=ctx,
        kv=kv,
        prompt=prompt,
        max_tokens=None if answer_tokens == -1 else answer_tokens,
        temperature=temp,
        seed=seed,
        system=system,
        threads=threads,
        n_gpu_layers=n_gpu_layers,
        device=device,
        chat=chat,
        json=as_json,
        verbose=verbose,
        force=force,
        calibrate="never" if no_calibrate else None,
    )
    return _run(options)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, 1 for a failure, 2 for wrong usage, 130 after Ctrl-C.

    Any failure is one line on stderr.
    """
    return run_program(PROGRAM, _command, argv)


def _run(options: Options) -> int:
    started = time.perf_counter()
    with _load(options) as llm:
        load_s = time.perf_counter() - started
        if options.prompt is None:
            from pykvq.cli.chat import run_chat

            return run_chat(llm, options)
        return _complete(llm, options, options.prompt, load_s)


def _load(options: Options) -> Llama:
    path = _fetch_demo_model() if options.model is None else _find_model(options.model)
    from pykvq.llama import Llama

    with progress_bars("loading", "calibrating") as (show_load, show_calibration):
        return Llama(
            path,
            kv_quant=options.kv,
            n_ctx=options.ctx,
            n_threads=options.threads,
            n_gpu_layers=options.n_gpu_layers,
            device=options.device,
            seed=options.seed,
            verbose=options.verbose,
            progress=show_load,
            force=options.force,
            calibrate=options.calibrate,
            calibration_progress=show_calibration,
        )


def _find_model(name: str) -> str:
    from pykvq.models import resolve

    with progress_bar(name, is_bytes=True) as show:
        return str(resolve(name, progress=show))


def _fetch_demo_model() -> str:
    from pykvq import catalog

    model = catalog.default_model()
    if catalog.is_cached(model):
        return str(catalog.cached_path(model))
    note(f"fetching the demo model {model.title} ({model.download_bytes / 1e6:.0f} MB) into {catalog.cache_dir()}")
    with progress_bar(model.file, is_bytes=True) as show:
        return str(catalog.fetch(model, show))


def _complete(llm: Llama, options: Options, prompt: str, load_s: float) -> int:
    """Answers one prompt."""
    if options.chat:
        prompt = llm.chat_prompt([*options.first_messages(), {"role": "user", "content": prompt}])
    generation = llm.start_generation(
        prompt, max_tokens=options.max_tokens, sampling=llm.sampling_params(temperature=options.temperature)
    )
    texts: list[str] = []
    try:
        with contextlib.closing(interruptible(generation, llm.abort)) as pieces:
            for piece in pieces:
                texts.append(piece.text)
                if not options.json:
                    write(piece.text)
    finally:
        if texts and not options.json:
            write("\n")
    if options.json:
        write(json.dumps(_report_object(llm, generation, "".join(texts), load_s), ensure_ascii=False) + "\n")
    note(answer_summary(generation.result, llm.kv_info()))
    return 0


def _report_object(llm: Llama, generation: Generation, text: str, load_s: float) -> dict[str, Any]:
    result = generation.result
    return {
        "text": text,
        "tokens": result.tokens,
        "prompt_tokens": len(generation.request.prompt),
        "finish_reason": result.finish_reason,
        "timings": {
            "load_s": load_s,
            "prompt_n": result.prompt_n,
            "prompt_s": result.prompt_s,
            "prompt_tps": rate(result.prompt_n, result.prompt_s),
            "gen_n": result.gen_n,
            "gen_s": result.gen_s,
            "gen_tps": rate(result.gen_n, result.gen_s),
        },
        "kv_info": llm.kv_info(),
        "model": llm.model_path,
    }


if __name__ == "__main__":
    sys.exit(main())

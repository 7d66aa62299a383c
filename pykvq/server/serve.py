"""``pykvq-serve``: the command."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Sequence
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated

import typer

from pykvq.batching.scheduler import DEFAULT_MAX_QUEUE
from pykvq.cli.console import note, progress_bar
from pykvq.cli.program import print_version, require, run_program
from pykvq.errors import InvalidArgumentError, LibraryError
from pykvq.kv_config import DEFAULT_PRESET, kv_presets, parse_kv_config
from pykvq.server.settings import DEFAULT_HOST, DEFAULT_PORT, ServerSettings, parse_models

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

PROGRAM = "pykvq-serve"
_KEY_VARIABLE = "PYKVQ_API_KEY"
# seconds that answers may go on after Ctrl-C
_SHUTDOWN_SECONDS = 10


def _serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="GGUF files, names of models on this machine, or hf:ORG/REPO[:FILE]; NAME=MODEL serves it under "
            "another name. The first one is loaded at once, the others when they are asked for. Without any: a small "
            "demo model, fetched once.",
        ),
    ] = None,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.")] = DEFAULT_HOST,
    port: Annotated[
        int, typer.Option("--port", metavar="N", help="Port to listen on; 0: any free one.")
    ] = DEFAULT_PORT,
    slots: Annotated[int, typer.Option("--slots", metavar="N", help="Requests answered at once by a model.")] = 4,
    ctx: Annotated[
        int, typer.Option("--ctx", metavar="N", help="Tokens of each slot; 0: as many as the model was trained on.")
    ] = 4096,
    kv: Annotated[
        str, typer.Option("--kv", metavar="PRESET|TIERS", help=f"KV cache format: {', '.join(kv_presets())}, or tiers.")
    ] = DEFAULT_PRESET,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", help="Threads. [default: the physical cores]")
    ] = None,
    n_gpu_layers: Annotated[int, typer.Option("--n-gpu-layers", metavar="N", help="Layers on the GPU; -1: all.")] = 0,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            envvar=_KEY_VARIABLE,
            help="Ask for this key; may be given several times. Other users of this machine can read it on the command "
            "line: prefer the variable.",
        ),
    ] = None,
    max_queue: Annotated[
        int, typer.Option("--max-queue", metavar="N", help="Requests that may wait for a slot, before 429.")
    ] = DEFAULT_MAX_QUEUE,
    timeout: Annotated[
        float | None, typer.Option("--timeout", metavar="SECONDS", help="Most time for an answer. [default: none]")
    ] = None,
    load_wait: Annotated[
        float, typer.Option("--load-wait", metavar="SECONDS", help="Wait for a model to load, before 503.")
    ] = 60.0,
    idle_unload: Annotated[
        float | None,
        typer.Option("--idle-unload", metavar="SECONDS", help="Unload a model unused for so long. [default: never]"),
    ] = None,
    memory_budget: Annotated[
        float | None,
        typer.Option(
            "--memory-budget", metavar="GIB", help="Memory of all loaded models; idle ones make room. [default: none]"
        ),
    ] = None,
    max_body: Annotated[float, typer.Option("--max-body", metavar="MIB", help="Largest request.")] = 8.0,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option("--cors-origin", metavar="ORIGIN", help="Web origin whose scripts may use the server."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print requests and the native log to stderr.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> int:
    """Serve GGUF models over HTTP, in the way of OpenAI's API.

    Endpoints: /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/responses, /v1/models, /health, /metrics,
    /kv, /tokenize, /detokenize.
    """
    if version:
        return print_version(PROGRAM)
    parse_kv_config(kv)
    require(0 <= port < 2**16, "--port", port, "0 to 65535")
    require(1 <= slots <= 64, "--slots", slots, "1 to 64")
    require(0 <= ctx <= 2**30, "--ctx", ctx, "0 (the model's training context) or 1 to 1073741824 tokens")
    require(max_queue >= 0, "--max-queue", max_queue, "0 or more")
    for option, value in (("--timeout", timeout), ("--idle-unload", idle_unload), ("--memory-budget", memory_budget)):
        require(value is None or value > 0, option, value, "a number above 0")
    require(max_body > 0, "--max-body", max_body, "a number above 0")
    settings = ServerSettings(
        models=parse_models(models or [_demo_model()]),
        kv_quant=kv,
        n_slots=slots,
        n_ctx=ctx,
        n_threads=threads,
        n_gpu_layers=n_gpu_layers,
        api_keys=_api_keys(api_key or []),
        max_queue=max_queue,
        request_timeout=timeout,
        load_wait=load_wait,
        idle_unload=idle_unload,
        memory_budget=None if memory_budget is None else int(memory_budget * 2**30),
        max_body=int(max_body * 2**20),
        cors_origins=tuple(cors_origin or ()),
        verbose=verbose,
    )
    return run_server(settings, host, port)


def _api_keys(given: list[str]) -> tuple[str, ...]:
    if any(not key.strip() for key in given):
        raise InvalidArgumentError(f"an API key is empty: give --api-key KEY or set {_KEY_VARIABLE}")
    return tuple(key.strip() for key in given)


def _demo_model() -> str:
    from pykvq import catalog

    model = catalog.default_model()
    with progress_bar(model.file, is_bytes=True) as show:
        return str(catalog.fetch(model, show))


def run_server(settings: ServerSettings, host: str, port: int) -> int:
    """Serves until Ctrl-C or SIGTERM; running answers have a few seconds to end.

    Raises:
        LibraryError: the extra "server" is not installed.
    """
    try:
        from pykvq.server.app import create_app
    except ImportError as error:
        raise LibraryError(f"the server needs more packages ({error}): pip install 'pykvq[server]'") from error
    server, listener = listening_server(create_app(settings), host, port, verbose=settings.verbose)
    _announce(settings, host, listener.getsockname()[1])
    server.run([listener])
    return 0 if server.started else 1


def listening_server(app: ASGIApp, host: str, port: int, *, verbose: bool) -> tuple[uvicorn.Server, socket.socket]:
    """A server and its socket, to which clients may connect at once; ``server.run([socket])`` then answers them.

    Raises:
        InvalidArgumentError: the address cannot be listened on.
    """
    import uvicorn

    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("pykvq").setLevel(logging.INFO)  # the libraries' news is for nobody
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="info" if verbose else "warning",
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        # the address of the client is never used
        proxy_headers=False,
        server_header=False,
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=config.backlog)
    except OSError as error:
        raise InvalidArgumentError(
            f"cannot listen on {host}, port {port} ({error.strerror}): end what uses it, or give another --port"
        ) from error
    return uvicorn.Server(config), listener


def _announce(settings: ServerSettings, host: str, port: int) -> None:
    names = ", ".join(spec.name for spec in settings.models)
    note(f"listening on {base_url(host, port)}/v1 (models: {names}; {settings.n_slots} slots)")
    if not settings.api_keys and not is_loopback(host):
        note("warning: anyone who can reach this address can use the server: set an API key with --api-key")


def base_url(host: str, port: int) -> str:
    """The address of a server, without a path."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, 1 for a failure, 2 for wrong usage."""
    return run_program(PROGRAM, _serve, argv)


if __name__ == "__main__":
    sys.exit(main())

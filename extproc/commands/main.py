"""The command `extproc`. Every command says what went wrong in one line and exits non-zero."""

from __future__ import annotations

import asyncio
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import typer

app = typer.Typer(
    name="extproc",
    help="Route OpenAI-API requests to vLLM pods by LoRA adapter, as an Envoy external processor.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# Not `readable`: reading it says more of why it cannot be read.
ConfigOption = Annotated[
    Path,
    typer.Option(
        "--config", "-c", readable=False, help="Configuration file (docs/configuration.md)."
    ),
]

_Enum = TypeVar("_Enum", bound=StrEnum)


def main() -> None:
    """Run the command line."""
    app()


@app.command()
def serve(config: ConfigOption) -> None:
    """Serve Envoy until SIGTERM."""
    import uvloop

    from extproc.app.app import App
    from extproc.app.startup import refuse_start
    from extproc.config.file import ConfigError, parse_config, read_config
    from extproc.shell.logs import configure_logging

    async def run() -> None:
        await App(checked, path=config, text=text).run()

    try:
        text = read_config(config)
        checked = parse_config(text, source=str(config))
        refuse_start(checked)
        configure_logging(checked.log.level, is_json=checked.log.json_lines)
        uvloop.run(run())
    except (ConfigError, OSError) as error:
        _fail(str(error))


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)
def epp(context: typer.Context) -> None:
    """Serve a gateway as its endpoint picker, with the flags that charts pass (docs/epp.md)."""
    from extproc.commands.epp import run
    from extproc.commands.goflags import FlagError
    from extproc.config.file import ConfigError

    try:
        run(context.args or ["--help"])
    except (ConfigError, FlagError, OSError, ImportError) as error:
        _fail(str(error))


@app.command("check-config")
def check_config(config: ConfigOption) -> None:
    """Do the checks of the start on this machine, without serving.

    What `serve` refuses is refused here; an address that is in use is a warning, because it may be
    in use by the very service whose configuration this is.
    """
    from extproc.app.startup import check_start
    from extproc.config.file import ConfigError, load_config

    try:
        checked = load_config(config)
    except ConfigError as error:
        _fail(str(error))
    found = check_start(checked)
    for warning in (*found.in_use, *found.warnings):
        print(f"extproc: warning: {warning}", file=sys.stderr)
    if found.errors:
        _fail("\n".join(found.errors))
    typer.echo(f"{config}: ok (policy {checked.policy.name})")


@app.command()
def envoy(
    mode: Annotated[
        str, typer.Option(help="original-dst, override-host or full-duplex.")
    ] = "original-dst",
    preset: Annotated[
        str, typer.Option(help="`founding`: original-dst, bodies BUFFERED; excludes the others.")
    ] = "",
    body: Annotated[
        str,
        typer.Option(
            help="buffered, buffered-partial, streamed, streamed-strict, full-duplex, headers-only."
        ),
    ] = "",
    listen: Annotated[str, typer.Option(help="host:port for clients.")] = "127.0.0.1:8080",
    admin: Annotated[str, typer.Option(help="host:port of Envoy's admin.")] = "127.0.0.1:9901",
    picker: Annotated[
        list[str] | None, typer.Option(help="host:port or unix:PATH of a picker; may repeat.")
    ] = None,
    pod: Annotated[
        list[str] | None, typer.Option(help="ip:port of a pod (override-host); may repeat.")
    ] = None,
    path: Annotated[
        list[str] | None, typer.Option(help="Inference path to let through; may repeat.")
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(help="Largest request body.")] = 16 * 1024 * 1024,
    max_heap_bytes: Annotated[int, typer.Option(help="Envoy's memory.")] = 1024 * 1024 * 1024,
    max_connections: Annotated[int, typer.Option(help="Clients' connections.")] = 50_000,
    request_timeout_s: Annotated[
        float, typer.Option(help="For a whole request to arrive; not for its answer.")
    ] = 60.0,
    picker_ping_s: Annotated[
        float, typer.Option(help="Between pings to a picker, and for the answer to one.")
    ] = 5.0,
    message_timeout_s: Annotated[float, typer.Option(help="For one answer of the picker.")] = 10.0,
    max_message_timeout_s: Annotated[
        float, typer.Option(help="Longest hold that the picker may ask for, seconds.")
    ] = 120.0,
    flush_interval_s: Annotated[
        float, typer.Option(help="Longest delay of an access log entry, seconds.")
    ] = 0.05,
    response_phases: Annotated[
        bool | None, typer.Option(help="Send the response's phases to the picker, too.")
    ] = None,
    access_log: Annotated[bool, typer.Option(help="Tell the picker of finished requests.")] = True,
    shared_access_log: Annotated[
        bool, typer.Option(help="One log for several pickers: they have `peers` and pass it on.")
    ] = False,
    fail_open: Annotated[
        bool | None, typer.Option(help="Requests go on when the picker is gone.")
    ] = None,
    allow_mode_override: Annotated[
        bool, typer.Option(help="The picker may ask for the body.")
    ] = False,
    tls_ca: Annotated[str, typer.Option(help="CA file for TLS to the picker.")] = "",
    tls_cert: Annotated[str, typer.Option(help="Client certificate for mutual TLS.")] = "",
    tls_key: Annotated[str, typer.Option(help="Its private key.")] = "",
    tls_name: Annotated[str, typer.Option(help="Name in the picker's certificate.")] = "",
    pod_tls_ca: Annotated[str, typer.Option(help="CA file for TLS to the pods.")] = "",
    pod_tls_name: Annotated[str, typer.Option(help="Name in the pods' certificates.")] = "",
) -> None:
    """Print a complete Envoy bootstrap."""
    from extproc.envoyconfig import BootstrapOptions, Mode, RequestBody, TlsFiles, render

    if preset not in ("", "founding"):
        _fail(f"--preset {preset}: allowed: founding")
    if preset and (mode != "original-dst" or body not in ("", "buffered")):
        _fail("--preset founding is original-dst with buffered bodies")
    try:
        options = BootstrapOptions(
            mode=_one_of(Mode, "--mode", mode),
            request_body=_one_of(RequestBody, "--body", body) if body else None,
            response_phases=response_phases,
            listen=listen,
            admin=admin,
            pickers=tuple(picker or ("127.0.0.1:9002",)),
            picker_tls=TlsFiles(tls_ca, tls_cert, tls_key, tls_name) if tls_ca else None,
            pod_tls=TlsFiles(pod_tls_ca, server_name=pod_tls_name) if pod_tls_ca else None,
            static_pods=tuple(pod or ()),
            inference_paths=tuple(path) if path else None,
            max_body_bytes=max_body_bytes,
            max_heap_bytes=max_heap_bytes,
            max_connections=max_connections,
            request_timeout_s=request_timeout_s,
            picker_ping_s=picker_ping_s,
            message_timeout_s=message_timeout_s,
            max_message_timeout_s=max_message_timeout_s,
            access_log_flush_interval_s=flush_interval_s,
            access_log=access_log,
            shared_access_log=shared_access_log,
            failure_mode_allow=fail_open,
            allow_mode_override=allow_mode_override,
        )
        typer.echo(render(options), nl=False)
    except ValueError as error:
        _fail(str(error))


@app.command("check-pod")
def check_pod(
    url: Annotated[str, typer.Argument(help="Base URL of the model server.")],
    engine: Annotated[str, typer.Option(help="vllm or sglang.")] = "vllm",
    adapter: Annotated[str, typer.Option(help="An adapter to try; else the first listed.")] = "",
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the key that the server asks for.")
    ] = None,
    ca_file: Annotated[Path | None, typer.Option(help="CAs of the server's certificate.")] = None,
) -> None:
    """Check what a model server must offer, requirement by requirement (docs/model-server.md)."""
    from extproc.core.engines import PROFILES
    from extproc.shell import podcheck
    from extproc.shell.files import read_text
    from extproc.shell.tls import client_context

    if engine not in PROFILES:
        _fail(f"--engine {engine}: allowed: {', '.join(sorted(PROFILES))}")
    try:
        key = read_text(api_key_file).strip() if api_key_file else ""
        context = client_context(ca_file, verify=True) if url.startswith("https:") else None
    except OSError as error:
        _fail(str(error))
    checks = asyncio.run(
        podcheck.check_pod(
            url,
            profile=PROFILES[engine],
            headers={"authorization": f"Bearer {key}"} if key else None,
            ssl=context,
            adapter=adapter or None,
        )
    )
    for check in checks:
        typer.echo(podcheck.render(check))
    if any(check.passed is False and check.is_required for check in checks):
        raise typer.Exit(1)


@app.command()
def watch(
    target: Annotated[str, typer.Argument(help="host:port of the picker.")] = "127.0.0.1:9002",
    model: Annotated[list[str] | None, typer.Option(help="Only this model; may repeat.")] = None,
    endpoint: Annotated[str, typer.Option(help="Only decisions for this address.")] = "",
    only_rejections: Annotated[bool, typer.Option(help="Only errors.")] = False,
    last: Annotated[int, typer.Option(help="Begin with the last N decisions.")] = 0,
    tls: Annotated[bool, typer.Option(help="The picker speaks TLS.")] = False,
    tls_ca: Annotated[str | None, typer.Option(help="CA file; else the system's CAs.")] = None,
    tls_cert: Annotated[str | None, typer.Option(help="Client certificate for mutual TLS.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="Its private key.")] = None,
) -> None:
    """Follow decisions live."""
    from rich.console import Console

    from extproc.shell import watch as client

    console = Console(highlight=False, soft_wrap=True)

    async def run() -> None:
        context = None
        if tls or tls_ca or tls_cert:
            context = client.tls_context(ca_file=tls_ca, cert_file=tls_cert, key_file=tls_key)
        decisions = client.watch(
            target,
            tls=context,
            models=model or (),
            endpoint=endpoint,
            only_rejections=only_rejections,
            replay_last=last,
        )
        async for decision in decisions:
            console.print(client.render(decision))

    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        return
    except (client.WatchError, OSError) as error:
        _fail(str(error))


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)
def lab(context: typer.Context) -> None:
    """Judge routing rules in virtual time (docs/lab.md): `lab run SUITE`, `lab report`."""
    # Imported here: what serves has no need of the laboratory.
    from extproc.commands.lab import PAGES, lab_app
    from extproc.loadtest.report.page import page_of
    from extproc.loadtest.results import FORMAT

    PAGES[FORMAT] = page_of  # `lab report` takes a load test's result as well
    lab_app(context.args or ["--help"], prog_name="extproc lab")


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)
def loadtest(context: typer.Context) -> None:
    """Load tests with real requests (docs/loadtest.md): `loadtest compare`, `loadtest ramp`."""
    # Imported here: what serves has no need of load tests.
    from extproc.commands.loadtest import loadtest_app

    loadtest_app(context.args or ["--help"], prog_name="extproc loadtest")


@app.command()
def demo(
    keep: Annotated[bool, typer.Option(help="Stay up afterwards, with a curl to try.")] = False,
    seconds: Annotated[float, typer.Option(help="Length of each of the two runs.")] = 10.0,
    requests_per_s: Annotated[float, typer.Option("--rate", help="Requests a second.")] = 24.0,
    slots: Annotated[int, typer.Option(min=1, help="GPU slots for adapters on each pod.")] = 3,
) -> None:
    """Show it: a real Envoy, four fake pods, a dozen adapters, against round robin."""
    from extproc.commands.demo import run_demo

    raise typer.Exit(run_demo(keep=keep, seconds=seconds, rate=requests_per_s, slots=slots))


def _one_of(kind: type[_Enum], option: str, value: str) -> _Enum:
    if value not in list(kind):
        _fail(f"{option} {value}: allowed: {', '.join(kind)}")
    return kind(value)


def _fail(message: str) -> NoReturn:
    for line in message.splitlines() or [""]:
        print(f"extproc: {line}", file=sys.stderr)
    raise typer.Exit(2)

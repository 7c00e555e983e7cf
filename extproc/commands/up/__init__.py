"""`extproc up`: a real Envoy and the router before pods that run already, or fake ones.

It runs two configuration files, which `--print` prints.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from extproc.commands.failure import failure, listen_failure


def up(
    pod: Annotated[
        list[str] | None,
        typer.Option(
            help="Pod, as http://host:port or host:port; may be repeated. By default every vLLM "
            "on ports 8000 to 8007 of this host."
        ),
    ] = None,
    fake_pods: Annotated[
        int,
        typer.Option(
            min=0,
            max=64,
            help="Start so many fake pods, which need no GPU, and serve those. They take as long "
            "as vLLM on an H100, answer with made-up text, and end with the command.",
        ),
    ] = 0,
    adapters: Annotated[
        Path | None,
        typer.Option(
            help="Folder with an adapter in each subfolder, under the same path on the pods. "
            "Declares these adapters, and opens the API to declare more. Its store and token are "
            "in FOLDER/.extproc."
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            help="Policy (docs/least-harm.md), by name or as module:attribute; by default the "
            "router's default."
        ),
    ] = "",
    port: Annotated[int, typer.Option(min=1, max=65_535, help="Port of the gateway.")] = 8080,
    host: Annotated[
        str, typer.Option(help="IP address on which the gateway listens.")
    ] = "127.0.0.1",
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the API key that the pods require.")
    ] = None,
    ca_file: Annotated[
        Path | None,
        typer.Option(help="PEM file with the CAs of the certificates of https pods."),
    ] = None,
    routers: Annotated[
        int,
        typer.Option(
            min=1,
            max=16,
            help="Start so many routers, which tell each other their picks, behind the one Envoy.",
        ),
    ] = 1,
    max_cpu_loras: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1_000_000,
            help="The pods' --max-cpu-loras; by default as many as they have slots, as in vLLM.",
        ),
    ] = None,
    print_files: Annotated[
        bool,
        typer.Option("--print", help="Print the two files that it would use, and start nothing."),
    ] = False,
) -> None:
    """Start Envoy and the router before pods that run already, or fake ones; Ctrl-C stops all.

    Exit status: 0 after Ctrl-C or SIGTERM, 128 plus the signal's number before everything has
    started, 1 if something does not start or crashes.
    """
    from extproc.commands.up.files import UpFiles, check, start_alone, text_of
    from extproc.commands.up.folderadapters import AdapterFolder
    from extproc.commands.up.givenpods import find_pods, parse_pods
    from extproc.commands.up.run import run
    from extproc.config.configfile import ConfigError

    if fake_pods and (pod or print_files or max_cpu_loras):
        raise failure(
            "--fake-pods starts its own: it goes with none of --pod, --max-cpu-loras and --print"
        )
    if print_files and routers > 1:
        raise failure("--print prints the files of one router: it does not go with --routers")
    with ExitStack() as alone:
        try:
            given = parse_pods(pod or (), ca_file)
            if not print_files:
                alone.enter_context(start_alone())
            plan = UpFiles.make(
                *(host, port, policy, api_key_file, ca_file, max_cpu_loras),
                num_routers=routers,
                adapters=AdapterFolder.open(adapters) if adapters else None,
                is_printed=print_files,
            )
            pods = [] if fake_pods else find_pods(given, plan.access())
            check(plan, pods)
        except OSError as error:
            raise listen_failure(error, host, port) from error
        except (ConfigError, ValueError) as error:
            raise failure(error) from error
        if print_files:
            typer.echo(text_of(plan, pods), nl=False)
            return
        raise typer.Exit(run(plan, pods, fake_pods, on_started=alone.close))

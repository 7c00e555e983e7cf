"""`python -m tests.kubernetes.helm`: the commands of Helm that the pages name, by the real Helm.

It is a process of its own because Helm's threads stay in the network where they began.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.kubernetes.chart import CHART, installable


def main() -> int:
    """Run `install` or `uninstall` with the options that Helm's own command has."""
    import helm_python

    parser = argparse.ArgumentParser(prog="helm")
    parser.add_argument("command", choices=("install", "uninstall"))
    parser.add_argument("release")
    parser.add_argument("chart", nargs="?")
    parser.add_argument("-n", "--namespace", required=True)
    parser.add_argument("--create-namespace", action="store_true")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("-f", "--values", type=Path)
    typed = parser.parse_args()
    values: dict[str, Any] = helm_python.parse_set_string(",".join(typed.set))
    if typed.values is not None:
        values = {**yaml.safe_load(typed.values.read_text()), **values}
    kubeconfig = os.environ["KUBECONFIG"]
    with helm_python.Config(kubeconfig_path=kubeconfig, namespace=typed.namespace) as config:
        if typed.command == "uninstall":
            config.uninstall(typed.release)
        else:
            assert Path(typed.chart).samefile(CHART)
            config.install(
                str(installable()),
                typed.release,
                values,
                namespace=typed.namespace,
                create_namespace=typed.create_namespace,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())

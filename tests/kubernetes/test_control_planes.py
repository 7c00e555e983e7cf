"""Our chart under the control planes of Istio and of Envoy AI Gateway; pods are llm-d's simulator.

The scripts that start them are named by EXTPROC_ISTIO and EXTPROC_AIGATEWAY: folders with `up.sh`,
`down.py` and what these need. Each pod has a network namespace of its own, which takes root.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commandline import output_of

ROOT = Path(__file__).parents[2]
WITHIN_S = 300
ONCE = "The router is asked about each request, once."
HEALTH = "The routers' health names no reason and no warning."

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.kubernetes,
    pytest.mark.long,
    pytest.mark.timeout(900),
]


class ControlPlane:
    """One that runs, with our release, one router in its slice, and a gateway.

    Args:
        scripts: Folder with its scripts.
        work: A scratch folder.
        url: The gateway, in the network of the release.
        host: The host name of our route.
    """

    def __init__(self, scripts: Path, work: Path, url: str, host: str) -> None:
        self.scripts, self.work, self.url, self.host = scripts, work, url, host
        self._env = {**os.environ, "W": str(work), "E": str(work / "e"), "PROJECT": str(ROOT)}

    def start(self) -> None:
        """Start all of it: about a minute."""
        self.bash("bash $B/up.sh")

    def stop(self) -> None:
        """End all that was started."""
        self._run("python3", str(self.scripts / "down.py"))

    def bash(self, text: str) -> str:
        """Run commands after the folder's `env`; return what they print."""
        return self._run("bash", "-c", f". {self.scripts}/env; {text}")

    def check(self) -> dict[str, str]:
        """What `extproc check-gateway` finds wrong, from the network of the first router."""
        program = f"{sys.executable} -m extproc check-gateway {self.url}"
        options = f"--admin http://127.0.0.1:9901 --model adapter-0 --header 'Host: {self.host}'"
        said = self.bash(
            f"cd {ROOT}; nsenter -t $(cat $E/pid/net-router1) -n {program} {options} || true"
        )
        found = re.findall(r"^(FAIL|lack)  (.*)\n +(.*)$", said, re.MULTILINE)
        assert re.search(r"^pass  ", said, re.MULTILINE), said
        return {requirement: detail for _, requirement, detail in found}

    def counted(self, name: str) -> dict[str, int]:
        """A counter of the first router, by its labels."""
        page = self.bash("nsenter -t $(cat $E/pid/net-router1) -n curl -s 127.0.0.1:9090/metrics")
        lines = re.findall(rf"^{name}_total(?:\{{(.*)\}})? (\S+)$", page, re.MULTILINE)
        return {labels: int(float(value)) for labels, value in lines}

    def _run(self, *command: str) -> str:
        return output_of(*command, env=self._env, within_s=WITHIN_S)


def running(name: str, url: str, host: str) -> Callable[..., Iterator[ControlPlane]]:
    @pytest.fixture(scope="module")
    def fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
        folder = os.environ.get(name, "")
        if not folder or os.geteuid() != 0:
            pytest.skip(f"needs root, and in {name} a folder with the control plane's scripts")
        plane = ControlPlane(Path(folder), tmp_path_factory.mktemp("plane"), url, host)
        try:
            plane.start()
            yield plane
        finally:
            plane.stop()

    found: Any = fixture
    return found  # type: ignore[no-any-return]


istio = running("EXTPROC_ISTIO", "http://10.244.0.31", "any.local")
ai_gateway = running("EXTPROC_AIGATEWAY", "http://10.244.0.31:10080", "x.local")


def bodies(plane: ControlPlane) -> list[str]:
    """The statuses of requests of 100 bytes to 1 MB."""
    sizes = "for s in 100 20000 107000 1000000"
    ask = f"inc $PY $B/one.py {plane.url} {plane.host} adapter-0 $s 60 | cut -d' ' -f3"
    return plane.bash(f"{sizes}; do {ask}; done").split()


def test_ai_gateway_asks_once_about_each_request(ai_gateway: ControlPlane) -> None:
    before = sum(ai_gateway.counted("extproc_picks").values())
    assert bodies(ai_gateway) == ["200"] * 4
    assert sum(ai_gateway.counted("extproc_picks").values()) == before + 4
    assert sum(ai_gateway.counted("extproc_repeated_calls").values()) == 0
    assert ai_gateway.check() == {}


def test_ten_matches_of_a_route_make_one_decision_of_ai_gateway_s_ten_calls(
    ai_gateway: ControlPlane,
) -> None:
    ai_gateway.bash("python3 $B/nmatches.py 10 | k apply -f - >/dev/null 2>&1; sleep 5")
    before = sum(ai_gateway.counted("extproc_picks").values())
    assert bodies(ai_gateway) == ["200"] * 4
    assert sum(ai_gateway.counted("extproc_picks").values()) == before + 4
    assert ai_gateway.counted("extproc_repeated_calls")['result="answered"'] >= 4 * 9
    told = ai_gateway.check()
    assert "asks 10 times" in told.pop(ONCE)
    assert "times about one request" in told.pop(HEALTH)
    assert told == {}


def one_router(plane: ControlPlane) -> None:
    plane.bash(". $B/kubelet.sh; sl $R1; sleep 2")


def test_istio_s_gateway_passes_the_check(istio: ControlPlane) -> None:
    one_router(istio)
    assert istio.check() == {}


def test_without_its_destination_rule_istio_is_told_so(istio: ControlPlane) -> None:
    one_router(istio)
    said = istio.bash("bash $B/faults.sh tls")
    assert "speaks plaintext to this port" in said
    assert re.search(r"with it: .* 200 ", said)


def test_under_istio_a_response_that_breaks_off_is_not_completed(istio: ControlPlane) -> None:
    """12 streams whose pod is killed, and 40 clients that leave in their stream."""
    one_router(istio)
    said = istio.bash("bash $B/faults.sh outcomes")
    counts = [
        {name: int(value) for name, value in re.findall(r'outcome="(\w+)"} (\d+)', line)}
        for line in said.splitlines()
        if "completions_total" in line
    ]
    before, killed, left = (Counter(each) for each in counts)
    whole = sum(map(int, re.findall(r"'whole'\): (\d+)", said)))
    assert (killed - before)["completed"] == whole
    assert sum((killed - before).values()) == 12
    # Some answers were whole before their client left.
    gone = left - killed
    assert gone["unknown"] + gone["cancelled"] >= 25
    assert gone["failed"] == 0


def test_under_istio_a_strict_client_does_not_hang(istio: ControlPlane) -> None:
    one_router(istio)
    assert "15 s for the 100: 417" in istio.bash("bash $B/faults.sh expect")


def test_under_istio_one_of_two_routers_that_dies_costs_what_it_had_in_hand(
    istio: ControlPlane,
) -> None:
    """Of 30 requests a second: what it had in hand, and 1 % of those of ten seconds."""
    said = istio.bash("bash $B/faults.sh crash")
    statuses = re.search(r"sent (\d+) by status .*?200: (\d+)", said)
    assert statuses, said
    sent, well = map(int, statuses.groups())
    assert sent - well <= 6 + 3

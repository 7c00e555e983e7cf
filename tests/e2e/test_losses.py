"""A router's log at the default level when a pod's process is killed and started again."""

from __future__ import annotations

import pytest

from extproc.stack.stack import FakePod
from tests.e2e.harness import RouterProcess, eventually


@pytest.mark.slow
async def test_a_killed_pod_and_its_return_are_one_line_each() -> None:
    async with FakePod("pod-0", {"name": "pod-0"}) as lost, FakePod("pod-1", {}) as other:
        listed = [{"address": lost.address, "name": "pod-0"}, other.address]
        async with RouterProcess({"discovery": {"static": listed}}) as router:
            await lost.kill()
            await eventually(lambda: "no reports for" in router.log)
            health = await router.admin("/healthz")
            num_lost = await router.counter("extproc_endpoints_lost")
            await lost.start()
            await eventually(lambda: "reports again" in router.log)
            log = router.log
            await lost.kill()
            await other.kill()
            await eventually(lambda: "lost: 2 of 2" in router.log)
            status = await router.admin_status("/healthz")

    lines = [line for line in log.splitlines() if "pod-0" in line]
    assert len(lines) == 2, log
    assert f"WARNING extproc.service.scraping: pod-0 ({lost.address}): no reports for " in lines[0]
    assert lines[0].endswith(" s: connection refused; lost: 1 of 2")
    assert (
        f"INFO    extproc.service.scraping: pod-0 ({lost.address}): reports again after "
        in lines[1]
    )
    assert health["warnings"] == ["1 of 2 pods give no reports: connection refused: pod-0"]
    assert num_lost == 1
    assert status == 200

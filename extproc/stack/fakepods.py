"""Fake pods as processes."""

from __future__ import annotations

import sys

import msgspec

from extproc.stack.processes import ChildProcess, free_port, get_page


class FakePod(ChildProcess):
    """A fake vLLM pod on a port of 127.0.0.1 that stays the same over restarts.

    `config` is a `PodConfig` of the laboratory, or a mapping of its fields.
    """

    def __init__(self, name: str, config: object) -> None:
        super().__init__(name)
        self._port = free_port()
        self.address = f"127.0.0.1:{self._port}"
        self.url = f"http://{self.address}"
        self._config_path = self.dir / "pod.json"
        self._config_path.write_bytes(msgspec.json.encode(config))

    async def start(self) -> None:
        """Start, also again after the end; return once the pod listens.

        Raises:
            StackError: It ended or did not become ready.
        """
        command = [sys.executable, "-m", "extproc", "fake-pod"]
        self.spawn([*command, "--config", str(self._config_path), "--port", str(self._port)])
        await self.wait_until(self._is_up)

    async def _is_up(self) -> bool:
        return await get_page(f"{self.url}/health") is not None

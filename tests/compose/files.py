"""docker-compose.yml and what belongs to it, read as Docker reads them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker-compose.yml"
FILES = ROOT / "manifests" / "compose"
DASHBOARD = ROOT / "manifests" / "grafana" / "extproc.json"
PROFILES = ("locust", "vllm")


@cache
def services() -> dict[str, dict[str, Any]]:
    """Every service by name, variables at their defaults."""
    text = re.sub(r"(?<!\$)\$\{\w+:-([^}]*)\}", r"\1", COMPOSE.read_text(encoding="utf-8"))
    assert not re.search(r"(?<!\$)\$(?!\$)", text), "a variable without a default"
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
    return found


def unescape(text: str) -> str:
    """As it stands in the file to as the container gets it."""
    return text.replace("$$", "$")


def mounts(service: dict[str, Any]) -> dict[str, Path]:
    """Files and folders of the repository by their place in the container."""
    pairs = (volume.split(":") for volume in service.get("volumes", ()))
    return {inside: ROOT / outside for outside, inside, *_ in pairs if outside.startswith("./")}


def dockerfile() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile with their arguments, continued lines joined."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
    parts = (line.partition(" ") for line in joined.splitlines() if line.strip())
    return [(word.upper(), rest.strip()) for word, _, rest in parts]

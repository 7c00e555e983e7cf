"""docker-compose.yml and the files that it mounts."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.config import Config
from extproc.config.configfile import load_config
from tests.commandline import invoke, output_of
from tests.compose.files import COMPOSE, FILES, PROFILES, ROOT, mounts, services

pytestmark = pytest.mark.timeout(180)

OF_OURS = ("router", "pods")
ON_THE_HOST = {"gateway": 8080, "grafana": 3000, "locust": 8089}


def needs(program: str, package: str) -> str:
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"no {program}: apt-get install {package}")
    return found


@pytest.fixture(params=sorted(services()))
def service(request: pytest.FixtureRequest) -> dict[str, Any]:
    return services()[request.param]


def test_docker_compose_accepts_the_file() -> None:
    compose = needs("docker-compose", "docker-compose")
    profiles = [word for profile in PROFILES for word in ("--profile", profile)]

    taken = yaml.safe_load(output_of(compose, "-f", COMPOSE, *profiles, "config"))

    assert taken["services"].keys() == services().keys()
    assert taken["services"]["pods"]["deploy"]["replicas"] == 4


def test_every_service_has_a_health_check(service: dict[str, Any]) -> None:
    check = service["healthcheck"]

    assert check["test"][0] == "CMD"
    assert check.keys() >= {"interval", "timeout", "retries"}


def test_only_gateway_grafana_and_locust_have_a_port_on_the_host_on_loopback() -> None:
    published = {name: each["ports"] for name, each in services().items() if each.get("ports")}

    assert published == {name: [f"127.0.0.1:{port}:{port}"] for name, port in ON_THE_HOST.items()}


def test_each_port_on_the_host_has_a_variable() -> None:
    text = COMPOSE.read_text(encoding="utf-8")
    chosen = {name: int(port) for name, port in re.findall(r"\$\{(\w+_PORT):-(\d+)\}", text)}

    assert chosen == {f"{name.upper()}_PORT": port for name, port in ON_THE_HOST.items()}


def test_images_are_of_one_version(service: dict[str, Any]) -> None:
    image = service["image"]

    ours = ("extproc-compose:local", "extproc-loadtest:local")
    assert image in ours or re.search(r":v?\d+\.\d+\.\d+$", image), image


def test_no_service_can_gain_privileges(service: dict[str, Any]) -> None:
    if "vllm/" not in service["image"]:  # root in its image, and not tried without its rights
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service


@pytest.mark.parametrize("name", [*OF_OURS, "gateway", "prometheus"])
def test_root_file_systems_are_read_only_where_nothing_is_written(name: str) -> None:
    assert services()[name]["read_only"] is True


def test_every_mount_is_in_the_repository_and_read_only(service: dict[str, Any]) -> None:
    """The engine would create a missing one, as root."""
    for inside, outside in mounts(service).items():
        assert outside.exists()
        assert f":{inside}:ro" in " ".join(service["volumes"])


def test_every_dependency_has_no_profile(service: dict[str, Any]) -> None:
    for other, how in service.get("depends_on", {}).items():
        assert how == {"condition": "service_healthy"}
        assert "profiles" not in services()[other]


def test_real_pods_have_the_network_name_of_the_fake_ones() -> None:
    """So that DNS discovery and Prometheus find either."""
    name = router_config().discovery.dns

    assert name is not None
    assert name.name == "pods"
    assert services()["vllm"]["networks"] == {"default": {"aliases": ["pods"]}}


def router_config() -> Config:
    return load_config(FILES / "router.yaml")


def test_the_router_is_configured_for_its_pods_cpu_cache() -> None:
    for name in ("pods", "vllm"):
        words = shlex.split(services()[name]["command"][0].replace("$", ""))
        places = int(words[words.index("--max-cpu-loras") + 1])
        assert router_config().pods.max_cpu_loras == places


def test_pods_drain_for_longer_than_their_reports_last() -> None:
    pods = services()["pods"]
    words = shlex.split(pods["command"][0].replace("$", ""))
    drain_s = float(words[words.index("--drain-s") + 1])

    assert drain_s > router_config().scrape.expiry_s
    assert float(pods["stop_grace_period"].removesuffix("s")) > 2 * drain_s


def test_the_router_has_time_to_drain() -> None:
    server = router_config().server
    grace_s = float(services()["router"]["stop_grace_period"].removesuffix("s"))

    assert grace_s > server.drain_timeout_s + server.drain_delay_s


def test_debug_pages_stay_in_the_router_s_container() -> None:
    assert router_config().admin.address.startswith("127.0.0.1:")


def test_the_gateway_s_configuration_is_what_the_command_prints() -> None:
    page = (ROOT / "docs" / "docker-compose.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^extproc (envoy .*) > manifests/compose/envoy.yaml$", page, re.M)

    printed = invoke(*shlex.split(command)).stdout

    assert printed == (FILES / "envoy.yaml").read_text(encoding="utf-8")


def test_prometheus_accepts_its_configuration() -> None:
    output_of(needs("promtool", "prometheus"), "check", "config", FILES / "prometheus.yml")


def test_grafana_is_provisioned_with_what_is_mounted() -> None:
    folder = FILES / "grafana"
    (provider,) = yaml.safe_load((folder / "dashboards" / "extproc.yml").read_text())["providers"]
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())[
        "datasources"
    ]
    grafana = services()["grafana"]
    inside = mounts(grafana)
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])

    assert inside["/etc/grafana/provisioning/dashboards"] == folder / "dashboards"
    assert inside["/etc/grafana/provisioning/datasources"] == folder / "datasources"
    assert (inside[provider["options"]["path"]] / home.name).is_file()
    assert str(home.parent) == provider["options"]["path"]
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    assert source["url"] == "http://prometheus:9090"
    scraped = yaml.safe_load((FILES / "prometheus.yml").read_text())["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == scraped


def test_a_real_vllm_starts_without_adapters_by_default() -> None:
    service = services()["vllm"]

    assert not service["environment"]["LORA_MODULES"]
    assert (mounts(service)["/adapters"] / "README.md").is_file()


@pytest.mark.parametrize("page", ["README.md", "docs/docker-compose.md"])
def test_a_page_names_the_variables_of_the_file(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `([A-Z_]+)` \|", text, re.M))
    named |= set(re.findall(r"^([A-Z_]+)=\S+ (?:[A-Z_]+=\S+ )*docker compose", text, re.M))
    known = set(re.findall(r"\$\{(\w+):-", COMPOSE.read_text(encoding="utf-8")))

    assert named <= known
    if page.startswith("docs"):
        assert named == known

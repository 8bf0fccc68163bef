"""The unit, the images and the manifests: well formed, with flags and variables that `grapevine start` has."""

from __future__ import annotations

import configparser
import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from node.addresses import DEFAULT_PORT, GOSSIP_OFFSET, KV_OFFSET
from node.cli.options import kinds, split_arguments
from node.cli.start import OTHER_VARIABLES, start
from node.dirs import SERVICE_STATE_DIR
from node.settings import Settings

DEPLOY = Path(__file__).parents[1] / "deploy"
DEFAULTS = {item.name: item.default for item in dataclasses.fields(Settings)}
HTTP = DEFAULT_PORT
PORTS = {HTTP, HTTP + GOSSIP_OFFSET, HTTP + KV_OFFSET}


def starts(words: list[str]) -> dict[str, Any]:
    """The settings that `grapevine start` reads from its words; fails for a flag that it does not have."""
    assert words[0] == "start"
    own, _ = split_arguments([re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in words[1:]])
    given = [word for word in own if not word.startswith("/etc/") and word != "--config"]  # a file that is not here
    return start.make_context("start", given).params


def known(variable: str) -> bool:
    name = variable.removeprefix("GRAPEVINE_")
    return name != variable and (name.lower() in kinds() or name in OTHER_VARIABLES)


def manifests() -> dict[tuple[str, str], Any]:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes" / "grapevine.yaml").read_text())
    return {(one["kind"], one["metadata"]["name"]): one for one in documents}


def test_the_systemd_unit_starts_a_node_and_waits_for_it_to_end() -> None:
    unit = configparser.RawConfigParser(strict=False, delimiters=("=",), interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "systemd" / "grapevine.service")
    service = unit["Service"]
    words = shlex.split(service["ExecStart"])
    assert words[0].endswith("/bin/grapevine")
    params = starts(words[1:])
    assert (
        params["state_dir"] == SERVICE_STATE_DIR and str(SERVICE_STATE_DIR) == "/var/lib/" + service["StateDirectory"]
    )
    assert str(params["run_dir"]) == "/run/" + service["RuntimeDirectory"]
    assert float(service["TimeoutStopSec"]) > DEFAULTS["stop_grace_s"]
    assert service["RestartPreventExitStatus"] == "2"
    for variable in re.findall(r"GRAPEVINE_\w+", (DEPLOY / "systemd" / "grapevine.service").read_text()):
        assert known(variable), variable


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_itself_finds_no_fault_in_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / "grapevine.service").read_text()
    unit = tmp_path / "grapevine.service"
    unit.write_text(text.replace("/opt/grapevine/.venv/bin/grapevine", "/bin/true"))
    result = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    faults = [line for line in result.stderr.splitlines() if "grapevine.service" in line and "man page" not in line]
    assert faults == []


def test_the_image_installs_what_the_project_is_made_of_and_the_vllm_that_fits() -> None:
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())
    for package in project["tool"]["setuptools"]["packages"]["find"]["include"]:
        assert f"COPY {package.rstrip('*')} " in text
    (wanted,) = [need for need in project["project"]["optional-dependencies"]["vllm"] if need.startswith("vllm")]
    image = re.search(r"^FROM vllm/vllm-openai:v(\d+\.\d+)\.", text, re.MULTILINE)
    assert image is not None and f">={image[1]}," in wanted
    assert {
        int(port) for port in re.findall(r"\b(\d{4,5})\b(?!/udp)", re.search(r"^EXPOSE (.*)$", text, re.M)[1])
    } == PORTS  # type: ignore[index]
    assert re.findall(r"(\d+)/udp", text) == [str(HTTP + GOSSIP_OFFSET)]
    (command,) = re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE)
    assert starts(yaml.safe_load(command))["host"] == "0.0.0.0"
    for variable in re.findall(r"GRAPEVINE_\w+", text):
        assert known(variable), variable


def test_compose_gives_the_node_shared_memory_time_and_a_key() -> None:
    service = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())["services"]["grapevine"]
    assert starts(service["command"])["host"] == "0.0.0.0"
    assert all(known(variable) for variable in service["environment"])
    assert service["environment"]["GRAPEVINE_CLUSTER_KEY"].startswith("${CLUSTER_KEY:?")
    assert service["shm_size"] and service["stop_grace_period"] == "2m" and service["network_mode"] == "host"
    assert (DEPLOY / "docker" / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def test_the_schemas_of_kubernetes_accept_the_manifests() -> None:
    validator = pytest.importorskip(
        "kubernetes_validate", reason="no kubernetes-validate here: scripts/test installs it"
    )
    assert len(manifests()) == 5
    for document in manifests().values():
        validator.validate(document, validator.latest_version(), strict=True)


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="no hadolint here")
def test_hadolint_finds_no_fault_in_the_dockerfile() -> None:
    file = DEPLOY / "docker" / "Dockerfile"
    done = subprocess.run(["hadolint", "--no-color", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def composes() -> bool:
    """Whether Docker's command has its part for compose files."""
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not composes(), reason="no `docker compose` here")
def test_docker_itself_reads_the_compose_file() -> None:
    command = ["docker", "compose", "-f", str(DEPLOY / "docker" / "compose.yaml"), "config", "--quiet"]
    keyed = {**os.environ, "CLUSTER_KEY": "k"}
    assert subprocess.run(command, capture_output=True, env=keyed, check=False).returncode == 0
    bare = subprocess.run(command, capture_output=True, text=True, check=False)
    assert bare.returncode != 0 and "give the same key on every host" in bare.stderr


def test_the_manifests_find_each_other_by_a_headless_service() -> None:
    documents = manifests()
    stateful = documents["StatefulSet", "grapevine"]["spec"]
    nodes = documents["Service", "grapevine-nodes"]["spec"]
    assert nodes["clusterIP"] == "None" and nodes["publishNotReadyAddresses"] is True
    pod = stateful["template"]
    for selector in (
        nodes["selector"],
        documents["Service", "grapevine"]["spec"]["selector"],
        stateful["selector"]["matchLabels"],
    ):
        assert selector.items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    params = starts(container["args"])
    assert params["join"] == (f"{stateful['serviceName']}:{HTTP + GOSSIP_OFFSET}",) and params["mdns"] is False
    assert all(known(variable["name"]) for variable in container["env"])
    assert {port["containerPort"] for port in container["ports"]} == PORTS
    assert [p["containerPort"] for p in container["ports"] if p.get("protocol") == "UDP"] == [HTTP + GOSSIP_OFFSET]
    assert pod["spec"]["terminationGracePeriodSeconds"] > DEFAULTS["stop_grace_s"]
    names = {volume["name"] for volume in pod["spec"]["volumes"]}
    names |= {claim["metadata"]["name"] for claim in stateful["volumeClaimTemplates"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == names
    shm = next(volume for volume in pod["spec"]["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"]["medium"] == "Memory"


def test_probes_ask_paths_that_a_node_has() -> None:
    (container,) = manifests()["StatefulSet", "grapevine"]["spec"]["template"]["spec"]["containers"]
    source = (DEPLOY.parent / "node" / "http" / "server.py").read_text()
    for probe in ("livenessProbe", "readinessProbe"):
        assert f'"{container[probe]["httpGet"]["path"]}"' in source


def test_only_nodes_reach_gossip_and_kv() -> None:
    policy = manifests()["NetworkPolicy", "grapevine"]["spec"]
    open_ports = {port["port"] for rule in policy["ingress"] if "from" not in rule for port in rule["ports"]}
    inner = {port["port"] for rule in policy["ingress"] if "from" in rule for port in rule["ports"]}
    assert open_ports == {HTTP} and inner == PORTS - {HTTP}

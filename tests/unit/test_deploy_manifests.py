"""The manifests, rendered as ``kubectl apply --kustomize`` would send them: valid, restricted, and speaking of the
daemon as it is.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml

from sidecar.admin import build
from sidecar.config import load_config
from sidecar.config_shape import KEYS
from sidecar.health import BEAT_BOUND_SECONDS, TOLERANCES, Health
from sidecar.metrics import Metrics
from support.pages import ROOT

pytestmark = pytest.mark.anyio

KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("sidecar", "shared")
OLDEST = "1.33"
WITHOUT_SCHEMA = {"PodMonitor"}
ENDING_SECONDS = 5
"""What the daemon allows itself after ``drain.seconds``."""

Object = dict[str, Any]


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Object]]:
    """Objects of each overlay, and of both with the optional component."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: the manifests are not rendered")
    found = {name: render(KUBERNETES / "overlays" / name) for name in OVERLAYS}
    for name in OVERLAYS:
        folder = tmp_path_factory.mktemp("monitored")
        (folder / "kustomization.yaml").write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "kustomize.config.k8s.io/v1beta1",
                    "kind": "Kustomization",
                    "namespace": "watchkeeper",
                    "resources": [os.path.relpath(KUBERNETES / "overlays" / name, folder.resolve())],
                    "components": [
                        os.path.relpath(KUBERNETES / "components" / "pod-monitor", folder.resolve())
                    ],
                }
            )
        )
        found[f"{name}, monitored"] = render(folder)
    return found


def render(folder: Path) -> list[Object]:
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # A deprecated field is a warning there.
    assert done.stderr == ""
    return [item for item in yaml.safe_load_all(done.stdout) if item]


def every(rendered: dict[str, list[Object]], *kinds: str) -> Iterator[tuple[str, Object]]:
    for name, objects in rendered.items():
        for item in objects:
            if not kinds or item["kind"] in kinds:
                yield f"{name}: {item['kind']}/{item['metadata']['name']}", item


def workloads(rendered: dict[str, list[Object]]) -> list[tuple[str, Object]]:
    found = list(every(rendered, "Deployment", "StatefulSet", "Job"))
    assert found
    return found


def pod(workload: Object) -> Object:
    template: Object = workload["spec"]["template"]["spec"]
    return template


def containers(workload: Object) -> list[Object]:
    return [*pod(workload).get("initContainers", []), *pod(workload)["containers"]]


def daemon(workload: Object) -> Object:
    (found,) = (item for item in containers(workload) if item["name"] == "watchkeeper")
    return found


def configuration(objects: list[Object]) -> str:
    (found,) = (
        item["data"]["watchkeeper.toml"]
        for item in objects
        if item["kind"] == "ConfigMap" and "watchkeeper.toml" in item["data"]
    )
    return str(found)


# --- valid ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [OLDEST, "newest"])
def test_every_object_is_valid_to_the_letter(rendered: dict[str, list[Object]], version: str) -> None:
    known = kubernetes_validate.latest_version() if version == "newest" else version
    for _, item in every(rendered):
        if item["kind"] not in WITHOUT_SCHEMA:
            kubernetes_validate.validate(item, known, strict=True)


def test_a_field_that_does_not_exist_is_noticed(rendered: dict[str, list[Object]]) -> None:
    item = {**rendered["shared"][0], "specs": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(item, OLDEST, strict=True)


def test_no_two_objects_of_an_overlay_have_one_name(rendered: dict[str, list[Object]]) -> None:
    for objects in rendered.values():
        names = [
            (item["kind"], item["metadata"].get("namespace"), item["metadata"]["name"]) for item in objects
        ]
        assert len(names) == len(set(names))


def test_everything_is_in_the_namespace_that_enforces_the_restricted_profile(
    rendered: dict[str, list[Object]],
) -> None:
    for where, item in every(rendered):
        if item["kind"] == "Namespace":
            assert item["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
        else:
            assert item["metadata"]["namespace"] == "watchkeeper", where


# --- restricted -----------------------------------------------------------------------------------------------


def test_every_container_is_restricted(rendered: dict[str, list[Object]]) -> None:
    for where, workload in workloads(rendered):
        assert pod(workload)["securityContext"]["runAsNonRoot"] is True
        assert pod(workload)["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for field in ("hostNetwork", "hostPID", "hostIPC"):
            assert field not in pod(workload), where
        for container in containers(workload):
            context = container["securityContext"]
            assert context["runAsUser"] >= 10_000, where
            assert context["runAsGroup"] >= 10_000, where
            assert {key: context[key] for key in ("runAsNonRoot", "allowPrivilegeEscalation")} == {
                "runAsNonRoot": True,
                "allowPrivilegeEscalation": False,
            }
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}
            assert not [port for port in container.get("ports", []) if "hostPort" in port]
        kinds = {next(kind for kind in volume if kind != "name") for volume in pod(workload)["volumes"]}
        assert kinds <= {"configMap", "secret", "emptyDir"}, where


def test_no_pod_has_a_token_of_the_cluster(rendered: dict[str, list[Object]]) -> None:
    for where, workload in workloads(rendered):
        assert pod(workload)["automountServiceAccountToken"] is False, where
    for where, account in every(rendered, "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False, where


def test_every_container_says_what_it_needs(rendered: dict[str, list[Object]]) -> None:
    for where, workload in workloads(rendered):
        for container in containers(workload):
            assert set(container["resources"]["requests"]) == {"cpu", "memory"}, where
            # A throttled daemon falls behind; memory that is not bounded is the node's.
            assert set(container["resources"]["limits"]) == {"memory"}, where


def test_all_images_are_one(rendered: dict[str, list[Object]]) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for where, workload in workloads(rendered):
        assert {container["image"] for container in containers(workload)} == {f"watchkeeper:{version}"}, where


# --- as the daemon is -----------------------------------------------------------------------------------------


def test_in_an_agents_pod_it_is_a_sidecar_that_starts_first(rendered: dict[str, list[Object]]) -> None:
    kinds = set()
    for _, workload in every(rendered, "Deployment", "Job"):
        kinds.add(workload["kind"])
        (init,) = pod(workload)["initContainers"]
        assert init["restartPolicy"] == "Always"
        assert "startupProbe" in init
        assert daemon(workload) is init
    assert kinds == {"Deployment", "Job"}


def test_configuration_and_variables_are_what_the_daemon_reads(
    rendered: dict[str, list[Object]], tmp_path: Path
) -> None:
    names = {f"WATCHKEEPER_{key.upper().replace('.', '__')}" for key in KEYS} | {"WATCHKEEPER_CONFIG"}
    for name, objects in rendered.items():
        text = configuration(objects)
        for where, workload in workloads({name: objects}):
            values = {entry["name"]: value_of(entry, workload) for entry in daemon(workload)["env"]}
            ours = {key: value for key, value in values.items() if key.startswith("WATCHKEEPER_")}
            assert ours.keys() <= names, where
            for key, value in ours.items():
                ours[key] = re.sub(r"\$\((\w+)\)", lambda found, values=values: values[found[1]], value)
            path = tmp_path / "watchkeeper.toml"
            path.write_text(with_files(text, tmp_path))
            config = load_config(path, {**ours, "WATCHKEEPER_CONFIG": str(path)})
            assert config.nats.replicas == 3
            assert config.mode == "observe", "who takes it over turns it up"
            (lane,) = config.lane_names
            assert lane == expected_lane(workload)
            assert_paths(workload, text, ours)
            assert_fits(workload, config.drain.seconds, config.storage.max_mib)


def value_of(entry: Object, workload: Object) -> str:
    """The variable as the cluster would set it."""
    if "value" in entry:
        return str(entry["value"])
    path = entry["valueFrom"]["fieldRef"]["fieldPath"]
    if path == "metadata.name":
        return f"{workload['metadata']['name']}-0"
    label = re.fullmatch(r"metadata\.labels\['(.+)'\]", path)
    assert label is not None
    return str(workload["spec"]["template"]["metadata"]["labels"][label[1]])


def expected_lane(workload: Object) -> str:
    name = str(workload["metadata"]["name"])
    return f"{name}-0" if workload["kind"] == "StatefulSet" else name


def with_files(text: str, folder: Path) -> str:
    """The same configuration with files that exist here."""
    here = folder / "any"
    here.write_text("x")
    return re.sub(r'"/etc/watchkeeper/nats/[\w.]+"', f'"{here}"', text)


def assert_paths(workload: Object, text: str, ours: dict[str, str]) -> None:
    """What is read lies on a volume, and what is written on the one that may be."""
    mounts = {mount["mountPath"]: mount for mount in daemon(workload)["volumeMounts"]}
    read = [ours["WATCHKEEPER_CONFIG"], *re.findall(r'"(/etc/[\w./-]+)"', text)]
    for path in read:
        assert mounts[str(Path(path).parent)]["readOnly"] is True
    written = mounts[str(Path(ours["WATCHKEEPER_DATA_DIR"]).parent)]
    assert "readOnly" not in written
    assert written["name"] == "watchkeeper-data"


def assert_fits(workload: Object, drain: float, max_mib: int | None) -> None:
    """The drain fits into the grace period, the database into its volume."""
    others = 20 if workload["kind"] in ("Deployment", "Job") else 0
    assert pod(workload)["terminationGracePeriodSeconds"] >= drain + ENDING_SECONDS + others
    assert max_mib is not None
    if workload["kind"] == "StatefulSet":
        (claim,) = workload["spec"]["volumeClaimTemplates"]
        size = claim["spec"]["resources"]["requests"]["storage"]
    else:
        (volume,) = (item for item in pod(workload)["volumes"] if item["name"] == "watchkeeper-data")
        size = volume["emptyDir"]["sizeLimit"]
    gibibytes = re.fullmatch(r"(\d+)Gi", size)
    assert gibibytes is not None
    # A damaged database beside a new one, and the log of each.
    assert int(gibibytes[1]) * 1024 > 2 * max_mib + 2 * 64


async def test_every_probe_asks_what_the_daemon_serves_at_the_port_it_has(
    rendered: dict[str, list[Object]],
) -> None:
    app = build(Health(), Metrics(), list)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://pod") as client:
        for where, workload in workloads(rendered):
            container = daemon(workload)
            (port,) = container["ports"]
            listening = next(e["value"] for e in container["env"] if e["name"] == "WATCHKEEPER_ADMIN__LISTEN")
            assert listening == f"0.0.0.0:{port['containerPort']}", where
            paths = {}
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                asked = container[kind]["httpGet"]
                assert asked["port"] == port["name"], where
                assert (await client.get(asked["path"])).status_code in (200, 503)
                paths[kind] = asked["path"]
            assert paths == {
                "startupProbe": "/startupz",
                "readinessProbe": "/readyz",
                "livenessProbe": "/healthz",
            }
        for _, monitor in every(rendered, "PodMonitor"):
            (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
            assert endpoint["port"] == port["name"]
            assert (await client.get(endpoint["path"])).status_code == 200


def test_the_probes_have_the_daemons_own_patience(rendered: dict[str, list[Object]]) -> None:
    for _, workload in workloads(rendered):
        container = daemon(workload)
        live, ready, start = (container[f"{kind}Probe"] for kind in ("liveness", "readiness", "startup"))
        # No answer counts as late as an answer would.
        assert live["periodSeconds"] * live["failureThreshold"] >= BEAT_BOUND_SECONDS
        # The broker's trouble is tolerated by the daemon; the node adds little to it.
        assert ready["periodSeconds"] * ready["failureThreshold"] <= TOLERANCES["nats"]
        assert start["periodSeconds"] * start["failureThreshold"] >= 600


# --- what belongs together ------------------------------------------------------------------------------------


def test_mounts_and_volumes_agree(rendered: dict[str, list[Object]]) -> None:
    for where, workload in workloads(rendered):
        volumes = {volume["name"] for volume in pod(workload)["volumes"]}
        volumes |= {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])}
        mounts = [mount for container in containers(workload) for mount in container["volumeMounts"]]
        assert {mount["name"] for mount in mounts} == volumes, where
        # A file mounted by itself is never renewed.
        assert [mount for mount in mounts if "subPath" in mount] == [], where


def test_no_container_but_the_daemons_sees_its_credentials(rendered: dict[str, list[Object]]) -> None:
    for where, workload in workloads(rendered):
        for container in containers(workload):
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            if container["name"] != "watchkeeper":
                assert not mounted & {"watchkeeper-nats", "watchkeeper-data"}, where
        for volume in pod(workload)["volumes"]:
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o440, where


def test_each_sample_agent_has_the_credentials_of_its_own_lane(rendered: dict[str, list[Object]]) -> None:
    page = (ROOT / "deploy" / "README.md").read_text()
    for where, workload in every(rendered, "Deployment", "Job"):
        lane = workload["spec"]["template"]["metadata"]["labels"]["watchkeeper/lane"]
        secrets = {item["secret"]["secretName"] for item in pod(workload)["volumes"] if "secret" in item}
        assert secrets == {"watchkeeper-nats", f"{lane}-nats"}, where
        assert f"keys/agent-{lane}.creds" in page
        assert f"--lane {lane}" in page


def test_what_is_named_exists(rendered: dict[str, list[Object]]) -> None:
    secrets = set()
    for objects in rendered.values():
        names = {(item["kind"], item["metadata"]["name"]) for item in objects}
        for where, workload in workloads({"": objects}):
            assert ("ServiceAccount", pod(workload)["serviceAccountName"]) in names, where
            for volume in pod(workload)["volumes"]:
                if "configMap" in volume:
                    assert ("ConfigMap", volume["configMap"]["name"]) in names, where
                if "secret" in volume:
                    secrets.add(volume["secret"]["secretName"])
            if workload["kind"] == "StatefulSet":
                assert ("Service", workload["spec"]["serviceName"]) in names
    page = (ROOT / "deploy" / "README.md").read_text()
    for secret in secrets:
        assert f"create secret generic {secret}" in page


def selects(selector: Object, labels: dict[str, str]) -> bool:
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] == "Exists"
        wanted = wanted and expression["key"] in labels
    return bool(wanted)


def test_the_pod_that_restores_is_as_confined_as_the_daemon_and_holds_its_volume(
    rendered: dict[str, list[Object]],
) -> None:
    (restoring,) = render(KUBERNETES / "overlays" / "restore")
    kubernetes_validate.validate(restoring, OLDEST, strict=True)
    (owner,) = (item for item in rendered["shared"] if item["kind"] == "StatefulSet")
    assert restoring["metadata"]["namespace"] == owner["metadata"]["namespace"]
    assert restoring["spec"]["securityContext"] == pod(owner)["securityContext"]
    (container,) = restoring["spec"]["containers"]
    beside = daemon(owner)
    assert container["securityContext"] == beside["securityContext"]
    assert container["image"] == beside["image"]
    assert container["env"][0] in beside["env"]
    (mount,) = container["volumeMounts"]
    assert mount in beside["volumeMounts"]
    (volume,) = restoring["spec"]["volumes"]
    (template,) = owner["spec"]["volumeClaimTemplates"]
    claim = f"{template['metadata']['name']}-{owner['metadata']['name']}-0"
    assert volume["persistentVolumeClaim"]["claimName"] == claim


def test_selectors_find_their_pods(rendered: dict[str, list[Object]]) -> None:
    for name, objects in rendered.items():
        pods = [w["spec"]["template"]["metadata"]["labels"] for _, w in workloads({name: objects})]
        for where, item in every({name: objects}):
            spec = item.get("spec", {})
            if item["kind"] in ("Deployment", "StatefulSet"):
                assert selects(spec["selector"], spec["template"]["metadata"]["labels"]), where
            elif item["kind"] == "NetworkPolicy":
                assert all(selects(spec["podSelector"], labels) for labels in pods), where
            elif item["kind"] == "PodMonitor":
                assert all(selects(spec["selector"], labels) for labels in pods), where
            elif item["kind"] == "Service":
                assert any(spec["selector"].items() <= labels.items() for labels in pods), where


def test_the_shared_daemons_are_spread_and_taken_one_at_a_time(rendered: dict[str, list[Object]]) -> None:
    ((_, workload),) = every({"shared": rendered["shared"]}, "StatefulSet")
    ((_, budget),) = every({"shared": rendered["shared"]}, "PodDisruptionBudget")
    selector = workload["spec"]["selector"]
    assert budget["spec"] == {"maxUnavailable": 1, "selector": selector}
    (spread,) = pod(workload)["topologySpreadConstraints"]
    assert spread["labelSelector"] == selector
    affinity = pod(workload)["affinity"]["podAntiAffinity"]
    (term,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["podAffinityTerm"]["labelSelector"] == selector
    assert workload["spec"]["replicas"] > budget["spec"]["maxUnavailable"]


def test_the_network_policy_lets_through_what_the_configuration_needs(
    rendered: dict[str, list[Object]],
) -> None:
    for name, objects in rendered.items():
        ((_, policy),) = every({name: objects}, "NetworkPolicy")
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        ports = {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]}
        url = tomllib.loads(configuration(objects))["nats"]["url"]
        assert ports == {53, int(url.rpartition(":")[2])}
        (ingress,) = policy["spec"]["ingress"]
        (port,) = ingress["ports"]
        ((_, first), *_) = workloads({name: objects})
        assert port["port"] == daemon(first)["ports"][0]["name"]


def test_only_the_optional_component_needs_the_operator(rendered: dict[str, list[Object]]) -> None:
    for name in OVERLAYS:
        assert not list(every({name: rendered[name]}, *WITHOUT_SCHEMA))
        assert len(list(every({name: rendered[f"{name}, monitored"]}, *WITHOUT_SCHEMA))) == 1

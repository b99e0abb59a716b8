"""What routers, autoscalers and Kubernetes read of a server: gauges, health, and the manifests that name them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from threading import Event
from typing import Any, NoReturn

import pytest
import torch
import yaml

from server.conftest import Running, serving
from server.test_load import PROMPT, get, post, wait_for
from truedraft import Engine, load_model
from truedraft.cli.session import StackOptions
from truedraft.options import MachineOptions
from truedraft.server import ServerOptions

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
LONG = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0, "ignore_eos": True}


def gauges(running: Running) -> dict[str, tuple[float, str]]:
    """Value and labels of each of vLLM's names; the same number stands under our own where there is one."""
    line = r"^(truedraft|vllm):(\w+)\{(.*)\} (\S+)$"
    lines = re.findall(line, get(running.url, "/metrics")[1], re.MULTILINE)
    ours, found = (
        {name: (float(value), labels) for of, name, labels, value in lines if of == each}
        for each in ("truedraft", "vllm")
    )
    assert all(ours.get(name, each) == each for name, each in found.items())
    return found


@pytest.mark.parametrize("bound", ["places", "memory"])
def test_the_load_is_told_by_the_names_that_routers_read(bound: str) -> None:
    """Two of four requests run, for there are two places, or memory for two: the others wait, wherever they do."""
    target = load_model("embedded:target")
    assert target.tokenizer is not None
    prompt = len(target.tokenizer.encode(PROMPT))
    room, places, limit = 2 * target.context_length, 2, None
    if bound == "memory":  # each is granted its prompt and 300 tokens, so that 900 are enough for two and not for three
        room, places, limit = 900, 8, 900 * 2**30 // Engine(target, max_cache_bytes=2**30).cache_tokens
    engine = Engine(target, max_batch=places, max_cache_bytes=limit, prefix_cache_bytes=1 << 24)
    with serving(engine) as running, ThreadPoolExecutor(4) as pool:
        step, all_there, told = engine.step, Event(), Event()

        def held() -> bool:
            (told if len(engine._scheduler.running) == 2 else all_there).wait(60)
            return step()

        engine.step = held  # type: ignore[method-assign]
        asked = [pool.submit(post, running.url, LONG) for _ in range(4)]
        wait_for(lambda: running.service.running + running.service.waiting == 4)
        all_there.set()
        wait_for(lambda: len(engine._scheduler.running) == 2)
        busy = gauges(running)
        told.set()
        assert [reply.result(60)[0] for reply in asked] == [200] * 4
        wait_for(lambda: running.service.is_idle)
        idle = gauges(running)
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info")
    counted = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    assert {*names, *(f"spec_decode_{name}_total" for name in counted), "prefix_cache_hits_total"} <= set(busy)
    assert [busy[name][0] for name in names[:2]] == [2, 2] and [idle[name][0] for name in names[:3]] == [0, 0, 0]
    assert engine.cache_bytes > 0, "prefixes are kept"
    tokens = busy["kv_cache_usage_perc"][0] * room
    assert 500 < tokens < 700 if bound == "memory" else 2 * prompt <= tokens <= 2 * prompt + 4
    labels = f'model_name="tiny",block_size="64",num_gpu_blocks="{room // 64}"'
    value, told_labels = busy["cache_config_info"]
    assert value == 1 and sorted(told_labels.split(",")) == sorted(labels.split(","))


def test_a_step_that_hangs_is_told_until_it_ends(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(make_engine(), hung_after_s=0.5) as running, ThreadPoolExecutor(1) as pool:
        step, ends = running.engine.step, Event()
        monkeypatch.setattr(running.engine, "step", lambda: ends.wait(60) and step())
        asked = pool.submit(post, running.url, LONG)
        wait_for(lambda: get(running.url, "/health")[0] == 503)
        assert "a step has not ended after" in get(running.url, "/health")[1] and get(running.url, "/ready")[0] == 503
        ends.set()
        assert asked.result(60)[0] == 200 and get(running.url, "/health") == (200, '{"status":"ok"}')
        monkeypatch.setattr(type(running.engine.target), "failure", "rank 1 has ended")
        assert get(running.url, "/health") == (503, '{"status":"rank 1 has ended"}')


@pytest.mark.parametrize("fails", ["step", "forward"])
@pytest.mark.plants_failures
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_device_that_computes_no_more_is_told_and_other_failures_are_not(
    fails: str, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("planted")

    with serving(make_engine()) as running:
        with monkeypatch.context() as planted:
            planted.setattr(running.engine if fails == "step" else running.engine.target, fails, failing)
            assert post(running.url, LONG)[0] == 500
            assert get(running.url, "/health")[0] == get(running.url, "/ready")[0] == 200
            planted.setattr(running.engine.target, "device", torch.device("meta"))  # of which no number can be read
            assert post(running.url, LONG)[0] == 500
        for path in ("/health", "/ready"):
            status, told = get(running.url, path)
            assert status == 503 and "the device computes no more (" in told


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.name)
def test_manifests_are_those_of_the_published_schemas(file: Path) -> None:
    checker = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate, of the group dev")
    for manifest in yaml.safe_load_all(file.read_text()):
        for version in ("1.30", checker.latest_version()):
            checker.validate(manifest, version, strict=True)
        with pytest.raises(checker.ValidationError):
            checker.validate(manifest | {"spec": manifest["spec"] | {"misspelt": 1}}, version, strict=True)


def test_kuberay_is_asked_by_its_names_for_pods_of_the_published_schema() -> None:
    """The schema of RayService lies in no package: its names are those of its types (ray-operator/apis/ray/v1)."""
    checker = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate, of the group dev")
    service = yaml.safe_load((DEPLOY / "rayservice.yaml").read_text())
    cluster = service["spec"]["rayClusterConfig"]
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    assert service["spec"].keys() == {"serveConfigV2", "rayClusterConfig"}
    assert cluster.keys() == {"rayVersion", "enableInTreeAutoscaling", "headGroupSpec", "workerGroupSpecs"}
    assert head.keys() == {"rayStartParams", "template"}
    assert workers.keys() - head.keys() == {"groupName", "replicas", "minReplicas", "maxReplicas"}
    for group in (head, workers):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": group["template"]}
        checker.validate(pod, checker.latest_version(), strict=True)
        group["template"]["spec"]["containers"][0]["imag"] = "misspelt"
        with pytest.raises(checker.ValidationError):
            checker.validate(pod, checker.latest_version(), strict=True)


def test_manifests_and_the_board_name_what_there_is(make_engine: Callable[..., Engine]) -> None:
    found = {each["kind"]: each for file in MANIFESTS for each in yaml.safe_load_all(file.read_text())}
    pod = found["Deployment"]["spec"]["template"]
    server = pod["spec"]["containers"][0]
    options = dict(word.split("=") for word in server["args"])
    known = {each.name for kind in (StackOptions, ServerOptions, MachineOptions) for each in fields(kind)}
    assert {name.removeprefix("--").replace("-", "_") for name in options} <= known
    wait = server["lifecycle"]["preStop"]["sleep"]["seconds"] + float(options["--drain-s"]) + 5
    assert pod["spec"]["terminationGracePeriodSeconds"] > wait
    selected, aim = found["Service"]["spec"]["selector"], found["HorizontalPodAutoscaler"]["spec"]
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == selected
    assert selected.items() <= pod["metadata"]["labels"].items()
    assert aim["scaleTargetRef"]["name"] == found["Deployment"]["metadata"]["name"]
    board = json.loads((DEPLOY / "grafana.json").read_text())
    named = set(re.findall(r"truedraft:\w+", json.dumps([each["targets"] for each in board["panels"]])))
    named |= {each["pods"]["metric"]["name"].replace("_", ":", 1) for each in aim["metrics"]}
    with serving(make_engine(), price_per_hour=1.0) as running:
        probes = [server[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")]
        assert [get(running.url, path)[0] for path in probes] == [200] * 3
        assert post(running.url, LONG)[0] == 200
        there = set(re.findall(r"^[\w:]+", get(running.url, "/metrics")[1], re.MULTILINE))
    assert named <= there, named - there

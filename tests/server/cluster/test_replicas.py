"""Replicas and workers on a Ray of this machine, made for the tests: `make test-scale`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

pytest.importorskip("ray")

import ray
import yaml
from ray import serve
from ray.serve.schema import ServeDeploySchema

from ray_replicas import replicas_below
from truedraft import Engine, SamplingParams, load_model
from truedraft.cli.parameters import read_words
from truedraft.cli.serve import ServeOptions, loaded
from truedraft.deploy.ray import app
from truedraft.errors import ModelNotFoundError, OptionError
from truedraft.server.cluster import _CALLBACK
from truedraft.server.cluster.predictor import answers_on_ray
from truedraft.server.cluster.replicas import Replica, Size, running

DEPLOY = Path(__file__).parents[3] / "deploy"
WORDS = {"model": "embedded:target", "port": 0, "no_playground": True, "drain_s": 20}
SHORT = {"prompt": "import os\n", "max_tokens": 8, "temperature": 0}
LONG = SHORT | {"max_tokens": 1500, "ignore_eos": True, "speculation": {"enabled": False}}
TWO = Size(cpus=1, gpus=0, least=2, most=2)
PATIENCE_S = 300.0  # what is lost is waited for in vain; how fast a machine is must not matter


@pytest.fixture(scope="module", autouse=True)
def _one_ray() -> Iterator[None]:
    """Two processors, little memory; ended with all that runs on it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        environment: dict[str, Any] = {"runtime_env": {"env_vars": _CALLBACK}, "object_store_memory": 200_000_000}
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, **environment)
        try:
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def served(size: Size = TWO, make: Any = loaded, **words: Any) -> Iterator[str]:
    options = read_words(ServeOptions, WORDS | words)
    with running(partial(make, options), options.server, lambda: size) as url:
        yield url


def short_of_memory(options: ServeOptions, number: int) -> Any:
    """A replica that gets 64 MiB beside its model: three whole contexts or so."""
    made = loaded(options, number)
    data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (data + (64 << 20),) * 2)
    return made


def post(url: str, body: dict[str, Any]) -> httpx2.Response:
    return httpx2.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)


def post_stream(url: str, body: dict[str, Any], begun: threading.Semaphore) -> str:
    """What is streamed; tells once the first event is there."""
    with httpx2.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=PATIENCE_S) as reply:
        parts = []
        for part in reply.iter_text():
            if not parts:
                begun.release()
            parts.append(part)
    return "".join(parts)


def running_on_one(url: str) -> int:
    """Requests that run on the replica that answers, the less loaded one."""
    found = re.search(r"^vllm:num_requests_running\S* (\d+)", httpx2.get(f"{url}/metrics").text, re.MULTILINE)
    assert found is not None
    return int(found[1])


def until(holds: Any, seconds: float = PATIENCE_S) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)


def test_workers_write_the_answers_of_one_engine_in_order() -> None:
    wanted = [([5, 6, 7, n], SamplingParams(6, temperature=n % 2, seed=n)) for n in range(8)]
    engine = Engine(load_model("embedded:target"))
    alone = [engine.generate(ids, params) for ids, params in wanted]
    found = list(answers_on_ray("embedded:target", "cpu", wanted))
    assert found == [(each.token_ids, each.finish_reason == "stop") for each in alone]


def test_who_leaves_is_no_longer_answered_and_what_is_open_is_where_replicas_end() -> None:
    with ThreadPoolExecutor(1) as pool:
        with served(Size(1, 0, 1, 1)) as url:
            with httpx2.stream(
                "POST", f"{url}/v1/completions", json=LONG | {"stream": True}, timeout=PATIENCE_S
            ) as reply:
                lines = reply.iter_lines()  # kept: it closes the answer where it ends
                assert next(lines) and running_on_one(url) == 1
            until(lambda: not running_on_one(url), 1.0)
            open_one = pool.submit(post, url, LONG)
            until(lambda: running_on_one(url) == 1)
        found = open_one.result(PATIENCE_S)
    assert found.status_code == 200 and found.json()["usage"]["completion_tokens"] == LONG["max_tokens"]


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_is_told_by_its_own_error() -> None:
    told = "there is no folder '/no/such/folder'"
    with pytest.raises(ModelNotFoundError, match=told), served(model="/no/such/folder"):
        pass


@pytest.mark.slow
def test_a_worker_out_of_memory_says_so_and_the_service_is_back() -> None:
    """Torch's allocator fails, which the engine survives, or something else does, which ends the process."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # replicas cannot import it
    with served(Size(1, 0, 1, 1), short_of_memory) as url, ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(lambda _: post(url, LONG), range(12)))
        told = [each.json()["error"]["message"] for each in replies if each.status_code in (500, 503)]
        assert told and len(told) == sum(each.status_code != 200 for each in replies)
        assert all("can't allocate memory" in each or "ask again" in each for each in told)
        until(lambda: post(url, SHORT).status_code == 200)
        assert [post(url, SHORT).status_code for _ in range(4)] == [200] * 4


@pytest.fixture(scope="module")  # first used here: it holds both processors to the end
def url(_one_ray: None) -> Iterator[str]:
    with served() as found:
        yield found


def test_answers_and_streams_are_those_of_one_engine(url: str) -> None:
    alone = Engine(load_model("embedded:target")).generate(SHORT["prompt"], SamplingParams(8)).text
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: post(url, SHORT), range(16)))
    assert {reply.status_code for reply in replies} == {200}
    assert {reply.json()["choices"][0]["text"] for reply in replies} == {alone}
    lines = [line[6:] for line in post(url, SHORT | {"stream": True}).text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]) == alone
    assert httpx2.get(f"{url}/health").json() == {"status": "ok"}
    assert post(url, SHORT | {"temperature": -1}).status_code == 400


def test_ray_knows_the_numbers_of_each_replica(url: str) -> None:
    node = ray.nodes()[0]
    line = r'^ray_truedraft_num_requests_running\{.*replica="(\w+)".*\} (\S+)$'

    def both() -> bool:
        text = httpx2.get(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics").text
        return len(dict(re.findall(line, text, re.MULTILINE))) >= 2

    until(both)


def test_a_kill_ends_requests_with_an_error_that_says_so_and_the_service_comes_back(url: str) -> None:
    until(lambda: len(replicas_below(os.getpid())) == 2)  # those of an earlier test have ended
    with ThreadPoolExecutor(16) as pool:  # so many that none is as fast as to be done with all
        begun = threading.Semaphore(0)
        wholes = [pool.submit(post, url, LONG) for _ in range(8)]
        streams = [pool.submit(post_stream, url, LONG, begun) for _ in range(8)]
        assert all(begun.acquire(timeout=PATIENCE_S) for _ in streams)  # what no replica has begun is not lost with one
        killed = replicas_below(os.getpid())
        assert len(killed) == 2 and not all(each.done() for each in wholes) and not all(each.done() for each in streams)
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        replies, streamed = [each.result(PATIENCE_S) for each in wholes], [each.result(PATIENCE_S) for each in streams]
    lost = [each for each in replies if each.status_code != 200]
    assert {each.status_code for each in lost} == {503} and all(each.headers["retry-after"] for each in lost)
    assert all("ask again" in each.json()["error"]["message"] for each in lost)
    ends = [[line for line in each.split("\n") if line][-1].removeprefix("data: ") for each in streamed]
    broken = [end for end in ends if end != "[DONE]"]
    assert broken and all("ask again" in json.loads(end)["error"]["message"] for end in broken)
    assert post(url, SHORT).status_code == 200  # waits for a new replica
    until(lambda: len(set(replicas_below(os.getpid())) - set(killed)) == 2)


def test_health_is_the_engines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "get_replica_context", lambda: SimpleNamespace(rank=SimpleNamespace(rank=3)))
    monkeypatch.setattr("truedraft.server.cluster.replicas.warm_up", lambda engine: None)
    service = SimpleNamespace(engine=SimpleNamespace(learner=None), trouble=None)
    made: list[int] = []
    state = SimpleNamespace(metrics=SimpleNamespace(registry=SimpleNamespace(collect=list)))
    replica = Replica(lambda number: (made.append(number), (SimpleNamespace(state=state), service))[1])  # type: ignore[arg-type,return-value]
    replica.check_health()
    service.trouble = "a step has not ended after 300 s"
    with pytest.raises(RuntimeError, match="has not ended"):
        replica.check_health()
    assert made == [3]


def test_a_cluster_has_one_ray_serve(url: str) -> None:
    with pytest.raises(OptionError, match="runs on this cluster already"), served():
        pass
    assert post(url, SHORT).status_code == 200


def test_placement_that_cannot_be_met_and_a_port_that_is_taken() -> None:
    for size, message in (
        (Size(1, 0, 3, 3), "asks for 3 of 1 CPU each, and this cluster has room for 2"),
        (Size(1, 1, 1, 1), "1 CPU and 1 GPU each, and this cluster has room for 0"),
    ):
        with pytest.raises(OptionError, match=message), served(size):
            pass
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OptionError, match=f"{port} on 127.0.0.1 cannot be listened on"), served(port=port):
            pass
    with pytest.raises(OptionError, match="Ray decides which; got 'cuda:1'"):
        Size.of((1, 1), None, "cuda:1")
    assert Size.of((1, 2), None, "auto") == Size(1, 0, 1, 2) and Size.of((1, 1), 2, "cuda") == Size(2, 1, 1, 1)


def test_manifests_name_what_there_is_and_the_application_has_their_options() -> None:
    config = yaml.safe_load((DEPLOY / "serve.yaml").read_text())
    service = yaml.safe_load((DEPLOY / "rayservice.yaml").read_text())["spec"]
    inner = yaml.safe_load(service["serveConfigV2"])
    head = service["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert {each["name"]: each["value"] for each in head["env"]} == _CALLBACK
    for each in (config, inner):
        (application,) = ServeDeploySchema.model_validate(each).applications
        assert application.import_path == "truedraft.deploy.ray:app"
        deployment = app(application.args)._bound_deployment
        asked = deployment._deployment_config
        scaling = asked.autoscaling_config
        assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (2, 8, 24)
        assert deployment.ray_actor_options["num_cpus"] == 4 and asked.graceful_shutdown_timeout_s == 30
        assert read_words(ServeOptions, application.args).server.served_model_name == ("mine",)
    with pytest.raises(OptionError, match="unknown option '--max-bach'; did you mean '--max-batch'"):
        app({"model": "x", "max_bach": 3})

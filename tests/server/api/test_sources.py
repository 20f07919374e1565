"""Publishing from a source over HTTP: a hub on loopback, and directories that the operator allowed."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server.helpers.live_server import Artifacts, LiveServer, error_of, eventually, live_server
from tests.server.publishing.helpers.hub import FILE, Hub, commit, running_hub

MISMATCH = hashlib.sha256(b"another file").hexdigest()


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with running_hub() as running:
        yield running


@pytest.fixture(scope="module")
def allowed(artifacts: Artifacts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("allowed")
    shutil.copy(artifacts.third, directory / FILE)
    shutil.copy(artifacts.foreign, directory / "foreign.safetensors")
    (directory / "text.safetensors").write_text("no artifact, whatever its name says")
    (directory / "link.safetensors").symlink_to(artifacts.plain)
    return directory


@pytest.fixture(scope="module")
def sourced(
    artifacts: Artifacts, hub: Hub, allowed: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    """Run a server with both kinds of sources and two HTTP processes."""
    registry = tmp_path_factory.mktemp("sources") / "registry"
    options = ("--allow-hub", "--hub-url", hub.url, "--source-dir", allowed, "--source-dir", artifacts.base)
    more = ("--http-workers", 2, "--max-gpu-deltas", 2, "--shutdown-timeout", 1, "--max-restarts", 100)
    with live_server(artifacts.base, registry, *options, *more) as running:
        yield running


def start(server: LiveServer, name: str, source: str, **query: str) -> httpx.Response:
    return server.client.post("/variants", params={"name": name, **query}, json={"source": source})


def job_of(server: LiveServer, started: httpx.Response) -> dict[str, Any]:
    """Ask for a job over a new connection, so that any HTTP process answers."""
    reply = httpx.get(f"{server.url}{started.headers['Location']}", timeout=240)
    assert reply.status_code == 200, reply.text
    job: dict[str, Any] = reply.json()
    assert ("Retry-After" in reply.headers) == (job["status"] == "running")
    return job


def ended(server: LiveServer, started: httpx.Response) -> dict[str, Any]:
    assert started.status_code == 202, started.text
    assert eventually(lambda: job_of(server, started)["status"] != "running")
    return job_of(server, started)


def refusal(server: LiveServer, name: str, source: str) -> tuple[str, str]:
    """Publish from a source that fails; return the code and message of its error."""
    job = ended(server, start(server, name, source))
    assert (job["status"], job["result"]) == ("failed", None)
    assert list(job["error"]) == ["message", "type", "param", "code"]
    assert server.client.get(f"/variants/{name}").status_code == 404
    assert eventually(lambda: not partial_files(server))
    return job["error"]["code"], job["error"]["message"]


def partial_files(server: LiveServer) -> list[Path]:
    return list((server.registry / "uploads").iterdir())


def test_a_file_of_a_hub_is_published_as_an_upload_is(
    sourced: LiveServer, hub: Hub, artifacts: Artifacts
) -> None:
    content = artifacts.plain.read_bytes()
    hub.add("plain", content)
    started = start(sourced, "from-hub", f"hf://acme/plain@main/{FILE}")
    assert started.json()["status"] == "running"
    job = ended(sourced, started)
    assert (job["status"], job["error"], job["source"]) == ("done", None, f"hf://acme/plain@main/{FILE}")
    assert job["result"] == {
        "name": "from-hub",
        "version": 1,
        "digest": f"sha256:{hashlib.sha256(content).hexdigest()}",
        "size_bytes": len(content),
        "active": True,
    }
    assert (job["num_bytes"], job["size_bytes"]) == (len(content), len(content))
    assert job["revision"] == next(iter(commit(content)))
    assert sourced.generate("from-hub", max_new_tokens=1).json()["version"] == 1
    assert sourced.upload("from-hub", artifacts.plain).status_code == 200


def test_the_file_may_be_left_out_and_the_version_inactive(
    sourced: LiveServer, hub: Hub, artifacts: Artifacts
) -> None:
    hub.add("only", artifacts.third.read_bytes())
    sourced.upload("quiet", artifacts.plain)
    job = ended(sourced, start(sourced, "quiet", "hf://acme/only@main", activate="false"))
    assert (job["result"]["version"], job["result"]["active"]) == (2, False)


def test_a_redirect_of_the_hub_is_followed(sourced: LiveServer, hub: Hub, artifacts: Artifacts) -> None:
    hub.add("stored", artifacts.plain.read_bytes(), redirect=hub.url)
    assert ended(sourced, start(sourced, "stored", "hf://acme/stored@main"))["status"] == "done"
    assert any(path.startswith("/cdn/acme/stored") for _, path in hub.requests)


def test_a_redirect_to_another_host_is_not_followed(
    sourced: LiveServer, hub: Hub, artifacts: Artifacts
) -> None:
    with running_hub() as other:
        other.add("elsewhere", artifacts.plain.read_bytes())
        hub.add("elsewhere", artifacts.plain.read_bytes(), redirect=other.url)
        code, message = refusal(sourced, "elsewhere", "hf://acme/elsewhere@main")
        assert (code, "the hub redirects to" in message, other.requests) == ("source_unavailable", True, [])


def test_a_revision_that_moves_gives_the_commit_that_it_was(
    sourced: LiveServer, hub: Hub, artifacts: Artifacts
) -> None:
    first, second = artifacts.plain.read_bytes(), artifacts.third.read_bytes()
    moving = hub.add("moving", first)
    [pinned] = moving.commits
    begun = ended(sourced, start(sourced, "moving", "hf://acme/moving@main"))
    moving.commits.update(commit(second))
    again = ended(sourced, start(sourced, "moving", "hf://acme/moving@main"))
    back = ended(sourced, start(sourced, "moving", f"hf://acme/moving@{pinned}"))
    assert begun["revision"] == back["revision"] == pinned != again["revision"]
    assert [each["result"]["version"] for each in (begun, again, back)] == [1, 2, 1]
    resolved = [path for _, path in hub.requests if "/moving/resolve/" in path]
    assert resolved
    assert not [path for path in resolved if "/resolve/main/" in path]


def test_no_token_is_sent(sourced: LiveServer, hub: Hub) -> None:
    assert hub.headers
    assert not [headers for headers in hub.headers if "authorization" in map(str.lower, headers)]


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("hf://acme/absent@main", "invalid_request"),
        ("hf://acme/known@absent", "invalid_request"),
        ("hf://acme/known@main/absent.safetensors", "invalid_request"),
        ("hf://acme/two@main", "invalid_request"),
        ("hf://acme/broken@main", "source_unavailable"),
        ("hf://acme/cut@main", "source_unavailable"),
        ("hf://acme/changed@main", "source_unavailable"),
        ("hf://acme/huge@main", "too_large"),
        ("hf://acme/text@main", "invalid_artifact"),
        ("hf://acme/foreign@main", "base_mismatch"),
    ],
)
def test_a_hub_that_does_not_deliver_gives_the_error_of_an_upload(
    sourced: LiveServer, hub: Hub, artifacts: Artifacts, source: str, code: str
) -> None:
    content = artifacts.plain.read_bytes()
    hub.add("known", content)
    hub.add("two", content).commits[next(iter(commit(content)))]["second.safetensors"] = content
    hub.add("broken", content, status=500)
    hub.add("cut", content, sent_bytes=len(content) // 2, announced_bytes=len(content))
    hub.add("changed", content, etag=MISMATCH)
    hub.add("huge", content, announced_bytes=10**13)
    hub.add("text", b"no artifact, whatever its name says")
    hub.add("foreign", artifacts.foreign.read_bytes())
    found, message = refusal(sourced, "undelivered", source)
    assert found == code
    assert str(sourced.registry) not in message


def test_an_artifact_below_an_allowed_directory_is_published(
    sourced: LiveServer, allowed: Path, artifacts: Artifacts
) -> None:
    job = ended(sourced, start(sourced, "from-directory", str(allowed / FILE)))
    digest = hashlib.sha256(artifacts.third.read_bytes()).hexdigest()
    assert (job["status"], job["result"]["digest"], job["revision"]) == ("done", f"sha256:{digest}", None)


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("foreign.safetensors", "base_mismatch"),
        ("text.safetensors", "invalid_artifact"),
        ("link.safetensors", "invalid_request"),
        ("absent.safetensors", "invalid_request"),
        ("../secret.safetensors", "invalid_request"),
    ],
)
def test_a_path_that_cannot_be_published_gives_the_error_of_an_upload(
    sourced: LiveServer, allowed: Path, path: str, code: str
) -> None:
    assert refusal(sourced, "unpublished", f"{allowed}/{path}")[0] == code


@pytest.mark.parametrize(
    "body",
    [
        {}, {"source": ""}, {"source": 1}, {"source": "hf://acme"}, {"source": "hf://acme/x@main", "more": 1},
        {"source": "x" * 5000}, [],
    ],
    ids=str,
)  # fmt: skip
def test_a_body_that_names_no_source_is_refused_at_once(sourced: LiveServer, body: Any) -> None:
    reply = sourced.client.post("/variants?name=bodies", json=body)
    assert (reply.status_code, error_of(reply)["code"]) == (400, "invalid_request")


@pytest.mark.parametrize("source", ["hf://acme/plain@main", "/tmp"])
def test_sources_are_off_by_default(server: LiveServer, source: str) -> None:
    reply = start(server, "off", source)
    error = error_of(reply)
    assert (reply.status_code, error["code"], error["param"]) == (400, "invalid_request", "source")


def test_a_job_of_another_name_is_not_found(sourced: LiveServer, allowed: Path) -> None:
    started = start(sourced, "named", str(allowed / FILE))
    ended(sourced, started)
    for path in (started.headers["Location"].replace("named", "other"), "/variants/named/sources/absent"):
        reply = sourced.client.get(path)
        assert (reply.status_code, error_of(reply)["code"]) == (404, "model_not_found")


@pytest.fixture
def stalled(sourced: LiveServer, hub: Hub, artifacts: Artifacts) -> Iterator[Callable[[str], httpx.Response]]:
    """Return a function that starts a job whose hub stops sending after the first byte."""
    repository = hub.add("stalled", artifacts.plain.read_bytes(), stalls=True)

    def begin(name: str) -> httpx.Response:
        started = start(sourced, name, "hf://acme/stalled@main")
        if started.status_code == 202:
            asked = f"/{next(iter(repository.commits))}/"
            assert eventually(lambda: [path for way, path in hub.requests if way == "GET" and asked in path])
        return started

    yield begin
    repository.release.set()


def test_a_stalled_hub_holds_up_nothing_and_a_tenant_has_a_bounded_number_of_jobs(
    sourced: LiveServer, stalled: Callable[[str], httpx.Response], artifacts: Artifacts
) -> None:
    jobs = [stalled(f"stalled-{number}") for number in range(5)]
    assert [job.status_code for job in jobs] == [202] * 4 + [503]
    assert error_of(jobs[4])["code"] == "overloaded"
    assert sourced.upload("beside", artifacts.plain).status_code == 201
    assert sourced.generate("beside", max_new_tokens=1).status_code == 200
    assert job_of(sourced, jobs[0])["status"] == "running"
    http = [each for each in children(sourced) if "server.http_process" in " ".join(each.cmdline())]
    for process in http:
        process.kill()
    lost = [ended(sourced, job) for job in jobs[:4]]
    assert {(job["status"], job["error"]["code"]) for job in lost} == {("failed", "internal_error")}
    assert eventually(lambda: not partial_files(sourced))
    assert eventually(lambda: sourced.upload("after", artifacts.plain).status_code == 201)


def children(server: LiveServer) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def downloads(hub: Hub) -> list[str]:
    return [path for way, path in hub.requests if way == "GET" and "/resolve/" in path]


def end_while_it_downloads(server: LiveServer, hub: Hub, number: signal.Signals) -> int:
    """Send the server a signal while a download stands still; return its exit code when all its processes are gone."""
    begun = len(downloads(hub))
    start(server, "slow", "hf://acme/slow@main")
    assert eventually(lambda: partial_files(server) and len(downloads(hub)) > begun)
    running = children(server)
    code = server.stop(number)
    psutil.wait_procs(running, timeout=240)
    return code


def test_the_end_of_a_server_leaves_no_part_of_a_download(artifacts: Artifacts, tmp_path: Path) -> None:
    registry = tmp_path / "registry"
    with running_hub() as hub:
        hub.add("slow", artifacts.plain.read_bytes(), stalls=True)
        options = ("--allow-hub", "--hub-url", hub.url, "--max-gpu-deltas", 2, "--shutdown-timeout", 1)
        with live_server(artifacts.base, registry, *options) as killed:
            assert end_while_it_downloads(killed, hub, signal.SIGKILL) == -signal.SIGKILL
            assert partial_files(killed)
        with live_server(artifacts.base, registry, *options) as again:
            assert eventually(lambda: not partial_files(again))
            assert again.client.get("/variants").json()["variants"] == []
            assert end_while_it_downloads(again, hub, signal.SIGTERM) == 0
            assert not partial_files(again)


def test_a_source_that_is_refused_is_closed(sourced: LiveServer, allowed: Path) -> None:
    huge = allowed / "huge.safetensors"
    huge.touch()
    # Beyond --max-upload-gb, and without a block on the disk.
    os.truncate(huge, 17_000_000_000)
    for number in range(3):
        assert refusal(sourced, f"huge-{number}", str(huge))[0] == "too_large"
    opened = (file.path for process in children(sourced) for file in process.open_files())
    assert str(huge) not in opened

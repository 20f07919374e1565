"""Run the bench of hostile tenants, pages and clients against a real server at toy size."""

from __future__ import annotations

import json
import time
from pathlib import Path

import psutil
import pytest

from bench.attacker import attacking
from bench.attacks import KINDS, attacks
from bench.hostile import SMALL_SCOPE, Memory, main, make_world, serving_all

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(2400)]
RECOVERED_S = 120.0


def test_every_attack_is_answered_and_no_honest_call_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "hostile.json"
    main(["--small", "--dir", str(tmp_path), "--out", str(out)])
    text = out.read_text()
    found = {one["attack"]: one for one in json.loads(text)["results"]}
    assert tuple(found) == KINDS
    for one in found.values():
        assert one["same_text"], one
        assert one["replies"], one
        assert one["honest_refused"] == {}, one
        assert one["memory_bytes"]["engine"]["peak"] > 0
    assert set(found["cross-site-page"]["replies"]) == {"403 forbidden"}
    assert set(found["json-values"]["replies"]) == {"400 invalid_request"}
    assert set(found["unfit-prompts"]["replies"]) == {"400 invalid_request", "400 context_length_exceeded"}
    assert set(found["begun-queue"]["replies"]) <= {"200 ok", "503 overloaded"}
    printed = capsys.readouterr().out
    assert "| large-schemas " in printed
    assert str(tmp_path) not in text + printed


def test_memory_that_still_grows_in_the_last_third_is_not_level() -> None:
    def is_level(*rounds: int) -> bool:
        return Memory(start=0, peak=0, later=0, rounds=[mb << 20 for mb in rounds]).is_level

    assert is_level(100, 400, 900, 900, 910, 890)
    assert is_level(100, 100, 100, 100, 120, 100)
    assert not is_level(100, 200, 300, 400, 500, 600)
    # Too few to tell.
    assert is_level(100, 200, 400, 800, 1600)


def test_an_attack_goes_on_for_minutes_and_rows_of_an_older_list_of_sizes_are_kept(tmp_path: Path) -> None:
    out, kind = tmp_path / "hostile.json", "unfit-prompts"
    main(["--small", "--attacks", "long-lists", "--dir", str(tmp_path), "--out", str(out)])
    older = json.loads(out.read_text())
    del older["settings"]["sizes"]["num_ruled"]
    out.write_text(json.dumps({**older, "date": "2020-01-02"}))
    options = ["--small", "--attacks", kind, "--minutes", "0.2", "--dir", str(tmp_path)]
    main([*options, "--out", str(out)])
    kept, found = json.loads(out.read_text())["results"]
    assert (kept["attack"], kept["date"]) == ("long-lists", "2020-01-02")
    assert found["attack"] == kind
    assert len(found["memory_bytes"]["engine"]["rounds"]) > 1
    older["settings"]["num_new"] += 1
    out.write_text(json.dumps(older))
    main([*options, "--out", str(out)])
    assert [one["attack"] for one in json.loads(out.read_text())["results"]] == [kind]


def test_two_attacks_at_once_are_measured_beside_both_controls(tmp_path: Path) -> None:
    out = tmp_path / "hostile.json"
    main(["--small", "--attacks", "unfit-prompts+begun-queue", "--dir", str(tmp_path), "--out", str(out)])
    (found,) = json.loads(out.read_text())["results"]
    assert found["attack"] == "unfit-prompts+begun-queue"
    assert {"400 invalid_request", "200 ok"} <= set(found["replies"])
    assert "404 model_not_found" not in found["replies"]
    assert found["honest_refused"] == {}
    with pytest.raises(SystemExit):
        main(["--attacks", "unfit-prompts+nothing"])


def test_two_attackers_at_once_and_a_killed_engine_leave_the_honest_tenant_served(tmp_path: Path) -> None:
    """Each attack runs beside another one, while the engine is killed and started again."""
    # An engine dies more often than a server forgives.
    flags = ("--max-restarts", 100)
    with serving_all(make_world(tmp_path, SMALL_SCOPE, 2), SMALL_SCOPE, *flags, with_keys=True) as subject:
        sizes, url = SMALL_SCOPE.sizes, subject.server.url
        with_keys = [attack for attack in attacks(sizes).values() if attack.keys]
        for one, other in zip(with_keys[::2], with_keys[1::2], strict=False):
            keys, others = subject.keys_of(one), subject.keys_of(other, 1)
            with attacking(one, sizes, url, keys), attacking(other, sizes, url, others):
                engine = next(
                    pid for pid, (part, _) in subject.server.tree.of_each("VmRSS").items() if part == "engine"
                )
                psutil.Process(engine).kill()
                psutil.wait_procs([psutil.Process(engine)] if psutil.pid_exists(engine) else [], RECOVERED_S)
                deadline = time.monotonic() + RECOVERED_S
                while not subject.honest.is_served():
                    assert time.monotonic() < deadline, (one.kind, other.kind)
                    time.sleep(0.2)

"""Write `docs/reference.md`: every call, command, setting, error and metric, from the code that defines them.

Run it as `make reference`. A test compares the file with `reference()`.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from fastapi.routing import iter_route_contexts
from prometheus_client.parser import text_string_to_metric_families
from typer.main import get_group

from deltastore.registry import Registry
from peraxis.cli import COMMANDS
from server.api import lora_adapters
from server.api.access import ROLES
from server.api.errors import FAILURES, HTTP_FAILURES
from server.api.fields import NEUTRAL
from server.api.schemas import ChatBody, CompletionBody
from server.app import ADMIN_ROUTERS, PUBLIC_ROUTERS, SHARED_ROUTERS
from server.metrics.aggregator import Aggregator
from server.metrics.exposition import compose, read_registry
from server.metrics.metrics import EngineMetrics, FrontendMetrics
from server.settings import ENV_PREFIX, Settings, choices_of, flag_name, flags_of_settings

FILE = Path(__file__).with_suffix(".md")
INTRODUCTION = """# Reference

Every call, command, setting, error and metric. `make reference` writes this file from the code.

## Calls

The role is that of the key with `--auth keys`; `admin` includes the others, and `any` is each role but `metrics`. With
`--admin-port`, calls whose port is `admin` are served there alone, and those whose port is `both` there too. Those for
LoRA adapters need `--compat vllm-lora`. [`/openapi.json`](serving.md) describes bodies and parameters.
"""
ROUTERS = {"public": (*PUBLIC_ROUTERS, lora_adapters.router), "admin": ADMIN_ROUTERS}


def reference() -> str:
    """Return the text of `docs/reference.md`."""
    return "\n".join(
        [
            INTRODUCTION,
            _table(["call", "role", "port", "does"], _calls()),
            "\n## Fields of OpenAI's calls\n",
            "Of `POST /v1/chat/completions` and `POST /v1/completions`; the others are ignored.\n",
            _table(["field", "is"], _fields()),
            "\n## Commands\n\n`peraxis COMMAND --help` lists the options of each.\n",
            _table(["command", "does"], _commands()),
            "\n## Settings of `peraxis serve`\n",
            "A flag overrides the environment, which overrides the `--config` file.\n",
            _table(["flag", "environment", "meaning", "default"], _settings()),
            "\n## Errors\n\n[serving.md](serving.md#errors) says what each means and what to do.\n",
            _table(["status", "code"], _errors()),
            "\n## Metrics\n\nCounters end in `_total`.\n",
            _table(["metric", "type", "labels", "meaning"], _metrics()),
            "",
        ]
    )


def main() -> None:
    """Write the file."""
    FILE.write_text(reference())


def _calls() -> Iterator[list[str]]:
    for port, routers in ROUTERS.items():
        for router in routers:
            for context in iter_route_contexts(router.routes):
                for method in sorted(context.methods or ()):
                    role = ROLES[method, str(context.path)] or "none"
                    shown = "both" if router in SHARED_ROUTERS else port
                    yield [f"`{method} {context.path}`", role, shown, _first_line(context.endpoint)]


def _fields() -> Iterator[list[str]]:
    chat, completions = (set(kind.__struct_encode_fields__) for kind in (ChatBody, CompletionBody))
    for name in sorted(chat | completions | set(NEUTRAL)):
        calls = "" if {name} <= chat & completions else " in chats" if name in chat else " in completions"
        values = NEUTRAL.get(name, ())
        neutral = ", ".join(f"`{msgspec.json.encode(value).decode()}`" for value in values or ())
        refused = f"refused, but for {neutral}" if neutral else "refused"
        yield [
            f"`{name}`",
            f"served{calls}" if name in chat | completions else "of no effect" if values is None else refused,
        ]


def _commands() -> Iterator[list[str]]:
    for name, entry in COMMANDS.items():
        if not entry.is_group:
            yield [f"`peraxis {name}`", entry.help]
            continue
        group = get_group(importlib.import_module(entry.module).app)
        for command, content in sorted(group.commands.items()):
            yield [f"`peraxis {name} {command}`", content.get_short_help_str(200)]
    yield ["`peraxis version`", "Print the version."]


def _settings() -> Iterator[list[str]]:
    flags = flags_of_settings()
    for name, setting in Settings.model_fields.items():
        # A table of settings has no flag.
        flag = f"`{' '.join([flag_name(name), '|'.join(choices_of(name))]).strip()}`" if name in flags else ""
        meaning = _plain(setting.description or "")
        yield [_plain(flag), f"`{ENV_PREFIX}{name.upper()}`", meaning, _default(name)]


def _errors() -> Iterator[list[str]]:
    kinds = {*FAILURES.values(), *HTTP_FAILURES.values()}
    for status, code in sorted({(failure.status, failure.code) for failure in kinds}):
        yield [str(status), f"`{code}`"]


def _metrics() -> Iterator[list[str]]:
    aggregator, snapshots = (
        Aggregator(),
        (EngineMetrics().snapshot(), FrontendMetrics(process=True).snapshot()),
    )
    for source, snapshot in enumerate(snapshots):
        aggregator.started(source)
        aggregator.received(source, snapshot)
    with tempfile.TemporaryDirectory() as directory:
        state = read_registry(Registry(Path(directory)), ())
        text = compose(aggregator.merged(), state, is_ready=True).decode()
    labels = {family.name: family.label_names for each in snapshots for family in each.families}
    for family in sorted(text_string_to_metric_families(text), key=lambda family: family.name):
        suffix = "_total" if family.type == "counter" else ""
        names = labels.get(family.name) or _label_names(family)
        yield [
            f"`{family.name}{suffix}`", family.type, ", ".join(f"`{name}`" for name in names), family.documentation,
        ]  # fmt: skip


def _label_names(family: Any) -> list[str]:
    return sorted({name for sample in family.samples for name in sample.labels} - {"le"})


def _default(setting: str) -> str:
    field, flag = Settings.model_fields[setting], flags_of_settings().get(setting)
    if field.is_required():
        return "required"
    if flag is not None and flag.computed is not None:
        return flag.computed
    if isinstance(field.default, bool):
        return f"`{str(field.default).lower()}`"
    return f"`{field.default}`" if isinstance(field.default, str | int | float) else ""


def _first_line(function: Callable[..., Any] | None) -> str:
    return _plain((getattr(function, "__doc__", None) or "").strip().splitlines()[0])


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("``", "`")


def _table(head: Sequence[str], rows: Iterator[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()

"""Settings: the precedence of sources, and the messages for invalid values."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from deltastore.errors import SettingsError
from server.settings import Settings
from server.settings_sources import LoadedSettings, load_settings
from server.tenants.tenant import TenantLimits


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"PERAXIS_{name.upper()}", raising=False)


def loaded(tmp_path: Path, config: Path | None = None, **flags: Any) -> LoadedSettings:
    return load_settings({"base": tmp_path, "registry": tmp_path / "registry", **flags}, config)


def test_a_flag_wins_over_the_environment_over_the_file_over_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "peraxis.toml"
    config.write_text("port = 1\nmax_queue = 1\nload_threads = 1\n")
    monkeypatch.setenv("PERAXIS_PORT", "2")
    monkeypatch.setenv("PERAXIS_MAX_QUEUE", "2")
    settings = loaded(tmp_path, config, port=3).settings
    assert (settings.port, settings.max_queue, settings.load_threads) == (3, 2, 1)
    assert settings.max_num_seqs == 64
    assert settings.max_gpu_deltas is None


@pytest.mark.parametrize(
    ("variable", "meant"),
    [("PERAXIS_PROT", "PORT"), ("PERAXIS_ATUH", "AUTH"), ("PERAXIS_MAX_QUEU", "MAX_QUEUE")],
)
def test_a_variable_that_is_nearly_a_setting_is_refused(
    variable: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "")
    with pytest.raises(SettingsError, match=f"^{variable} is not a setting: PERAXIS_{meant} is; "):
        loaded(tmp_path)


@pytest.mark.parametrize(
    "variable",
    [
        "PERAXIS_URL", "PERAXIS_API_KEY",
        # Of a Service in Kubernetes that is called peraxis.
        "PERAXIS_SERVICE_HOST", "PERAXIS_SERVICE_PORT", "PERAXIS_SERVICE_PORT_HTTP", "PERAXIS_PORT_8000_TCP",
        "PERAXIS_PORT_8000_TCP_ADDR", "PERAXIS_PORT_8000_TCP_PORT", "PERAXIS_PORT_8000_TCP_PROTO",
        "PERAXIS_ADMIN_SERVICE_HOST", "PERAXIS_ADMIN_SERVICE_PORT", "PERAXIS_ADMIN_PORT_9090_TCP",
    ],
)  # fmt: skip
def test_a_variable_of_others_is_ignored(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "x")
    assert loaded(tmp_path).settings.port == 8000


def test_an_empty_variable_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERAXIS_ADMIN_PORT", "")
    assert loaded(tmp_path).settings.admin_port is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"port": 70000}, "port (from --port): input should be less than or equal to 65535, got 70000"),
        (
            {"max_gpu_deltas": 1},
            "max_gpu_deltas (from --max-gpu-deltas): input should be greater than or equal to 2",
        ),
        (
            {"slot_headroom": 0.5},
            "slot_headroom (from --slot-headroom): input should be greater than or equal to 1",
        ),
        ({"load_timeout": 0}, "load_timeout (from --load-timeout): input should be greater than 0"),
        (
            {"shutdown_timeout": float("nan")},
            "shutdown_timeout (from --shutdown-timeout): input should be a finite",
        ),
        (
            {"max_upload_gb": float("inf")},
            "max_upload_gb (from --max-upload-gb): input should be a finite number",
        ),
        ({"device": "tpu"}, "device (from --device): input should be 'auto', 'cpu' or 'cuda', got 'tpu'"),
        ({"dtype": "int8"}, "dtype (from --dtype): input should be 'auto', 'bfloat16'"),
        (
            {"base": Path("/no/such/base")},
            "base (from --base): there is no directory /no/such/base: give the directory of a Hugging Face checkpoint",
        ),
        ({"base": Path(__file__)}, f"base (from --base): {__file__} is a file: give the directory"),
        (
            {"source_dir": [Path("/no/such")]},
            "source_dir (from --source-dir): there is no directory /no/such: give an existing directory",
        ),
        ({"auth": "tokens"}, "auth (from --auth): input should be 'none' or 'keys', got 'tokens'"),
        ({"host": "0.0.0.0"}, "host 0.0.0.0 may be reached from other machines and auth is none"),
        ({"admin_host": "0.0.0.0", "admin_port": 1}, "admin_host 0.0.0.0 may be reached from other machines"),
        ({"admin_host": "::", "admin_port": 1}, "take --auth keys or --admin-host 127.0.0.1, or"),
        (
            {"admin_host": "127.0.0.1"},
            "admin_host is 127.0.0.1 and there is no admin port: give --admin-port",
        ),
        ({"host": "::"}, "take --auth keys or --host 127.0.0.1, or --allow-unauthenticated"),
        ({"host": "gpu-7"}, "host gpu-7 may be reached from other machines"),
        ({"port": 9, "admin_port": 9}, "port and admin_port are both 9: give each its own"),
        ({"prot": 9}, "prot (from --prot) is not a setting"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_invalid_value_is_named_in_one_line(tmp_path: Path, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        loaded(tmp_path, **flags)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_invalid_variable_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERAXIS_LOAD_THREADS", "many")
    with pytest.raises(SettingsError, match=r"load_threads .from PERAXIS_LOAD_THREADS.: .*got 'many'"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port = ", "not valid TOML"),
        ("prot = 9", r"prot .from the configuration file. is not a setting"),
        ("port = 70000", r"port .from the configuration file.: input should be less"),
        ("[server]\nport = 1", r"server .from the configuration file. is not a setting"),
    ],
)
def test_an_invalid_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    config = tmp_path / "peraxis.toml"
    config.write_text(text)
    with pytest.raises(SettingsError, match=message):
        loaded(tmp_path, config)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"absent\.toml: No such file or directory"):
        loaded(tmp_path, tmp_path / "absent.toml")


def test_the_printed_settings_are_a_configuration_file_of_the_same_settings(tmp_path: Path) -> None:
    first = loaded(tmp_path, max_upload_gb=0.5, host='odd "host"', allow_unauthenticated=True)
    config = tmp_path / "printed.toml"
    config.write_text(first.describe())
    assert tomllib.loads(config.read_text())["max_upload_gb"] == 0.5
    assert load_settings({}, config).settings == first.settings


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "::1"])
def test_an_address_of_this_machine_alone_needs_no_keys(tmp_path: Path, host: str) -> None:
    assert loaded(tmp_path, host=host).settings.auth == "none"


@pytest.mark.parametrize("flags", [{"auth": "keys"}, {"allow_unauthenticated": True}], ids=str)
def test_any_address_is_served_with_keys_or_when_the_operator_insists(
    tmp_path: Path, flags: dict[str, Any]
) -> None:
    assert loaded(tmp_path, host="0.0.0.0", **flags).settings.host == "0.0.0.0"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("https://chat.example.org/", "no origin: give scheme, host and port alone"),
        ("chat.example.org", "no origin"),
        ("https://*.example.org", "no origin"),
        ("null", "no origin"),
        ("https://chat.example.org:443", "leave it out"),
        ("http://chat.example.org:80", "leave it out"),
    ],
)
def test_an_origin_that_no_browser_would_send_is_refused(tmp_path: Path, given: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        loaded(tmp_path, auth="keys", allowed_origin=(given,))


def test_origins_come_with_commas_and_need_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PERAXIS_ALLOWED_ORIGIN", "https://Chat.example.org,http://localhost:3000,http://[::1]:3000,*"
    )
    expected = ("https://chat.example.org", "http://localhost:3000", "http://[::1]:3000", "*")
    assert loaded(tmp_path, auth="keys").settings.allowed_origin == expected
    with pytest.raises(SettingsError, match="--auth keys"):
        loaded(tmp_path)


def test_gigabytes_are_decimal(tmp_path: Path) -> None:
    assert loaded(tmp_path, max_upload_gb=1.5).settings.max_upload_bytes == 1_500_000_000


def test_limits_of_tenants_are_a_table_of_the_file_or_json_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "peraxis.toml"
    config.write_text("[default_limits]\nrequests_per_minute = 5\n")
    settings = loaded(tmp_path, config).settings
    assert settings.default_limits == TenantLimits(requests_per_minute=5)
    assert Settings.model_validate_json(settings.model_dump_json()) == settings
    config.write_text(loaded(tmp_path, config).describe())
    assert load_settings({}, config).settings == settings
    monkeypatch.setenv("PERAXIS_DEFAULT_LIMITS", '{"max_running": 3}')
    assert loaded(tmp_path, config).settings.default_limits == TenantLimits(max_running=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"max_runing": 3}', "unknown field `max_runing`"),
        ('{"max_running": 0}', r"expected `int` >= 1 - at `\$.max_running`"),
        ("3", "expected `object`"),
        ("many", "malformed"),
    ],
)
def test_a_limit_that_is_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.setenv("PERAXIS_DEFAULT_LIMITS", text)
    with pytest.raises(SettingsError, match=rf"default_limits .from PERAXIS_DEFAULT_LIMITS.: .*{message}"):
        loaded(tmp_path)


def test_directories_of_sources_come_from_flags_the_file_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    config = tmp_path / "peraxis.toml"
    config.write_text(f'source_dir = ["{one}", "{two}"]')
    assert loaded(tmp_path).settings.source_dir == ()
    assert loaded(tmp_path, config).settings.source_dir == (one, two)
    monkeypatch.setenv("PERAXIS_SOURCE_DIR", f"{two}:{one}/../one")
    assert loaded(tmp_path, config).settings.source_dir == (two, one)
    found = loaded(tmp_path, config, source_dir=[one])
    assert found.settings.source_dir == (one,)
    assert f'source_dir = ["{one}"]  # from --source-dir' in found.describe()


def test_a_setting_that_is_no_more_ends_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_more = "is no longer a setting: a server fetches from no hub; `peraxis push hf://"
    for name, flag in (("allow_hub", "--allow-hub"), ("hub_url", "--hub-url")):
        with pytest.raises(SettingsError, match=rf"{name} \(from {flag}\) {no_more}"):
            load_settings({"base": tmp_path, "registry": tmp_path, name: "https://hub.example"})
        config = tmp_path / "peraxis.toml"
        config.write_text(f"{name} = true\n")
        with pytest.raises(SettingsError, match=rf"{name} \(from the configuration file\) {no_more}"):
            load_settings({"base": tmp_path, "registry": tmp_path}, config)
        with monkeypatch.context() as patched:
            patched.setenv(f"PERAXIS_{name.upper()}", "true")
            with pytest.raises(SettingsError, match=rf"{name} \(from PERAXIS_{name.upper()}\) {no_more}"):
                loaded(tmp_path)


def test_a_bucket_is_taken_as_it_is_given_and_a_directory_as_its_path(tmp_path: Path) -> None:
    assert loaded(tmp_path, registry="s3://bucket/a/prefix").settings.registry == "s3://bucket/a/prefix"
    assert loaded(tmp_path).settings.registry == str(tmp_path / "registry")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"registry_cache_gb": 15}, "registry_cache_gb is 15 and max_upload_gb 16"),
    ],
)
def test_a_bucket_that_cannot_be_served_is_refused(
    tmp_path: Path, flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        loaded(tmp_path, registry="s3://bucket/a/prefix", **flags)
    assert loaded(tmp_path, **flags).settings.registry == str(tmp_path / "registry")


def test_a_bucket_without_its_client_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.settings.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"pip install 'peraxis\[s3\]'"):
        loaded(tmp_path, registry="s3://bucket/a/prefix")


def test_a_name_of_the_file_in_capitals_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "peraxis.toml"
    config.write_text("Port = 3\n")
    with pytest.raises(SettingsError, match=r"Port is not a setting: port is; write it in lower case"):
        loaded(tmp_path, config)


@pytest.mark.parametrize("variable", ["peraxis_prt", "PERAXIS_DEFAULT_LIMITS__MAX_VARIANTS", "Peraxis_Atuh"])
def test_a_misspelt_variable_is_refused_in_any_case(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(SettingsError, match=f"{variable} is not a setting: PERAXIS_"):
        loaded(tmp_path)


@pytest.mark.parametrize("name", ["base", "registry_cache", "lora_dir"])
def test_an_empty_path_is_not_the_working_directory(name: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=rf"{name} \(from --.*\): the path is empty: give a directory"):
        load_settings({"base": tmp_path, "registry": "r", "compat": "vllm-lora", name: ""})


def test_an_empty_source_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"source_dir .*: a path is empty: give a directory"):
        loaded(tmp_path, source_dir=[""])


@pytest.mark.parametrize("registry", ["file:///tmp/x", "gs://bucket/x", "https://bucket.example/x"])
def test_a_registry_in_another_store_is_refused(registry: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"registry .*: give a directory's path, or s3://BUCKET/PREFIX"):
        load_settings({"base": tmp_path, "registry": registry})

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
from pydantic import ValidationError

from bridge import config
from bridge.config import Settings, data_folder, load_settings, profiles, redact
from bridge.errors import ConfigError

REPOSITORY = Path(__file__).parents[2]
NAMES = [
    *("remote", "warehouse", "volume", "volume_root", "spark_jars"),
    *("max_bytes", "client_max_bytes", "cache_dir", "cache_max_bytes", "progress"),
]


@pytest.fixture(autouse=True)
def _own_working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BRIDGE_SPARK_JARS", raising=False)


def write_profile(text: str, *, name: str = "mine", folder: str = "conf") -> str:
    path = Path(folder, f"{name}.yaml")
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


def failure_of(**keywords: object) -> str:
    with pytest.raises(ConfigError) as failure:
        load_settings(**keywords)  # type: ignore[arg-type]
    return str(failure.value)


# Defaults


def test_the_names_are_those_of_the_contract() -> None:
    assert list(Settings.model_fields) == NAMES


def test_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = load_settings()
    assert settings.model_dump() == {
        **dict.fromkeys(NAMES),
        "warehouse": tmp_path / "data/bridge/warehouse",
        "cache_dir": tmp_path / "cache/bridge",
        "cache_max_bytes": 50 * 2**30,
    }
    assert settings.origins == dict.fromkeys(NAMES, "default")


@pytest.mark.parametrize("value", [None, "", "relative/folder"])
def test_folders_without_a_usable_xdg_variable_are_in_the_home(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    for variable in ("XDG_DATA_HOME", "XDG_CACHE_HOME"):
        if value is None:
            monkeypatch.delenv(variable, raising=False)
        else:
            monkeypatch.setenv(variable, value)
    assert data_folder() == Path.home() / ".local/share/bridge"
    assert load_settings().cache_dir == Path.home() / ".cache/bridge"


# Precedence


def test_keyword_then_environment_then_profile_then_default(monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_profile("max_bytes: 1MiB\nvolume: /Volumes/a/b/profile\nremote: sail\n")
    monkeypatch.setenv("BRIDGE_MAX_BYTES", "2MiB")
    monkeypatch.setenv("BRIDGE_VOLUME", "/Volumes/a/b/environment")
    settings = load_settings(profile="mine", max_bytes=3, volume=None)
    assert (settings.max_bytes, settings.volume, settings.remote) == (3, "/Volumes/a/b/environment", "sail")
    assert settings.origins == dict.fromkeys(NAMES, "default") | {
        "max_bytes": "keyword",
        "volume": "BRIDGE_VOLUME",
        "remote": path,
    }


def test_what_holds_nothing_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    write_profile("max_bytes: 1MiB\nvolume:\nspark_jars: ''\n")
    monkeypatch.setenv("BRIDGE_MAX_BYTES", "")
    settings = load_settings(profile="mine", max_bytes=None)
    assert (settings.max_bytes, settings.volume, settings.spark_jars) == (2**20, None, None)


def test_the_environment_names_the_profile_unless_a_keyword_does(monkeypatch: pytest.MonkeyPatch) -> None:
    write_profile("max_bytes: 1", name="one")
    write_profile("max_bytes: 2", name="two")
    monkeypatch.setenv("BRIDGE_PROFILE", "one")
    assert load_settings().max_bytes == 1
    assert load_settings(profile="two").max_bytes == 2


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load_settings().max_bytes = 1  # type: ignore[misc]


# Values


@pytest.mark.parametrize(
    "remote",
    [
        "sail",
        "databricks",
        "databricks://staging",
        "local",
        "local[2]",
        "local[*]",
        "local-cluster[2,1,1024]",
        "sc://localhost",
        "sc://[::1]:15002/;use_ssl=true;token=abc",
    ],
)
def test_each_form_of_remote(remote: str) -> None:
    assert load_settings(remote=remote).remote == remote


@pytest.mark.parametrize(
    "remote",
    [
        "Sail",
        "local[0]",
        "local[]",
        "local-cluster[2,1]",
        "spark://h:7077",
        "sc://",
        "sc:///;token=abc",
        "databricks://",
    ],
)
def test_any_other_remote_is_refused(remote: str) -> None:
    assert failure_of(remote=remote) == (
        "remote is not of a known form; give one of sail, databricks, databricks://<profile of ~/.databrickscfg>, "
        "local, local[N], local[*], local-cluster[N,cores,MB], sc://<host>:<port>."
    )


def test_paths_are_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("BRIDGE_VOLUME_ROOT", "roots/../volumes")
    write_profile("cache_dir: cache")
    settings = load_settings(profile="mine", warehouse=Path("~/tables"), volume="~/exports")
    assert settings.warehouse == Path("/home/someone/tables")
    assert settings.volume_root == tmp_path / "volumes"
    assert settings.cache_dir == tmp_path / "cache"
    assert settings.volume == "/home/someone/exports"


def test_jars_are_a_folder_or_a_list(tmp_path: Path) -> None:
    assert load_settings(spark_jars=Path("jars")).spark_jars == str(tmp_path / "jars")
    maven = "io.delta:delta-spark_4.2_2.13:4.4.0"
    assert load_settings(spark_jars=maven).spark_jars == maven
    listed = load_settings(spark_jars="a.jar, hdfs://host/b.jar,,/c.jar").spark_jars
    assert listed == f"{tmp_path}/a.jar,hdfs://host/b.jar,/c.jar"


@pytest.mark.parametrize(("value", "read"), [(True, True), ("true", True), ("0", False), ("False", False)])
def test_progress(value: object, read: bool) -> None:
    assert load_settings(progress=value).progress is read


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_bytes", "12 parsecs", 'max_bytes is "12 parsecs"; give an integer or a size such as "512MiB" or "1GB".'),
        ("cache_max_bytes", -1, 'cache_max_bytes is -1; give an integer or a size such as "512MiB" or "1GB".'),
        ("progress", "maybe", "progress is 'maybe'; give true or false."),
        ("progress", 2, "progress is 2; give true or false."),
        ("warehouse", 5, "warehouse is 5; give the path of a folder."),
        ("cache_dir", "s3://bucket/x", "cache_dir is 's3://bucket/x'; give the path of a folder."),
        ("spark_jars", ["a.jar"], "spark_jars is ['a.jar']; give a folder or a comma-separated list of jars."),
        ("volume", 5, "volume is 5; give /Volumes/<catalog>/<schema>/<volume> or the path of a folder."),
    ],
)
def test_a_wrong_value_is_refused(name: str, value: object, message: str) -> None:
    assert failure_of(**{name: value}) == message


def test_the_source_of_a_wrong_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_profile("max_bytes: 12 parsecs")
    assert failure_of(profile="mine").startswith(f'{path}: max_bytes is "12 parsecs"; give')
    monkeypatch.setenv("BRIDGE_MAX_BYTES", "12 leagues")
    assert failure_of(profile="mine").startswith('BRIDGE_MAX_BYTES: max_bytes is "12 leagues"; give')


# Names


def test_an_unknown_name_is_refused() -> None:
    listed = f"The settings are {', '.join(NAMES)}."
    path = write_profile("max_byte: 1")
    assert failure_of(max_byte=1) == f'"max_byte" is not a setting. Did you mean "max_bytes"? {listed}'
    assert failure_of(profile="mine") == f'{path}: "max_byte" is not a setting. Did you mean "max_bytes"? {listed}'
    write_profile("3: 1")
    assert failure_of(profile="mine") == f'{path}: "3" is not a setting. {listed}'


def test_an_unknown_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDGE_MAX_BYTE", "1")
    message = failure_of()
    assert message.startswith('BRIDGE_MAX_BYTE in the environment is not a setting. Did you mean "BRIDGE_MAX_BYTES"? ')
    assert message.endswith("BRIDGE_PROGRESS, BRIDGE_CONF, BRIDGE_PROFILE.")


def test_variables_that_are_read_elsewhere_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDGE_CONF", ".")
    monkeypatch.setenv("BRIDGE_REQUIRE", "fuse")
    monkeypatch.setenv("BRIDGE_TEST_DATA", "/data")
    load_settings()


# Profiles


@pytest.mark.parametrize(
    ("name", "remote"), [("local", "sail"), ("cluster", "sc://localhost:15002"), ("databricks", "databricks")]
)
def test_a_shipped_profile_is_valid_as_it_is_and_with_its_comments_taken_up(
    monkeypatch: pytest.MonkeyPatch, name: str, remote: str
) -> None:
    assert load_settings(profile=name).remote == remote
    monkeypatch.setenv("SPARK_TOKEN", "abc")
    text = (REPOSITORY / "conf" / f"{name}.yaml").read_text(encoding="utf-8")
    optional = [
        line.removeprefix("# ") for line in text.splitlines() if line.startswith(tuple(f"# {n}: " for n in NAMES))
    ]
    assert optional
    for line in optional:
        write_profile(line)
        settings = load_settings(profile="mine")
        assert "conf/mine.yaml" in settings.origins.values(), line


def test_the_first_folder_that_has_a_profile_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert profiles()["local"] == REPOSITORY / "conf/local.yaml"
    assert list(profiles()) == ["cluster", "databricks", "local"]
    write_profile("max_bytes: 1", name="local")
    assert load_settings(profile="local").origins["max_bytes"] == "conf/local.yaml"
    write_profile("max_bytes: 2", name="local", folder="elsewhere")
    monkeypatch.setenv("BRIDGE_CONF", "elsewhere")
    assert load_settings(profile="local").max_bytes == 2


def test_a_wheel_has_its_profiles_inside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inside = tmp_path / "site-packages/bridge/conf"
    inside.mkdir(parents=True)
    (inside / "local.yaml").write_text("max_bytes: 7")
    monkeypatch.setattr(config, "__file__", str(inside.parent / "config.py"))
    assert load_settings(profile="local").max_bytes == 7


@pytest.mark.parametrize("name", ["loca", "conf/local"])
def test_an_unknown_profile_is_refused(name: str) -> None:
    assert failure_of(profile=name) == (
        f'There is no profile "{name}". Did you mean "local"? The profiles are cluster, databricks, local; '
        f"looked in conf, {REPOSITORY}/conf."
    )


def test_an_unknown_profile_where_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(config, "__file__", str(tmp_path / "bridge/config.py"))
    assert failure_of(profile="local") == (
        f'There is no profile "local". The profiles are none; looked in conf, {tmp_path}/conf.'
    )


def test_a_folder_of_profiles_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDGE_CONF", "nowhere")
    assert failure_of(profile="local") == "BRIDGE_CONF is nowhere, which is not a folder."


def test_an_empty_profile_is_fine() -> None:
    write_profile("# nothing yet\n")
    assert load_settings(profile="mine").origins == dict.fromkeys(NAMES, "default")


def test_a_profile_that_is_no_mapping_is_refused() -> None:
    path = write_profile("- remote: sail")
    assert failure_of(profile="mine") == f'{path}: holds a list; a profile holds lines such as "max_bytes: 1GiB".'


def test_broken_yaml_is_refused() -> None:
    path = write_profile("remote: sail\nvolume: [")
    assert failure_of(profile="mine") == f"{path}: not valid YAML at line 2, column 10."
    Path(path).write_bytes(b"remote: \xff")
    assert failure_of(profile="mine") == f"{path}: not valid YAML."


def test_a_profile_may_refer_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_profile("remote: sc://${SPARK_HOST}:443/;token=${SPARK_TOKEN}\nmax_bytes: 1\n")
    monkeypatch.setenv("SPARK_HOST", "spark.example.com")
    assert (
        failure_of(profile="mine") == f"{path}: remote refers to ${{SPARK_TOKEN}}, which the environment does not hold."
    )
    monkeypatch.setenv("SPARK_TOKEN", "abc")
    assert load_settings(profile="mine").remote == "sc://spark.example.com:443/;token=abc"


# Secrets


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("sc://host:443/;token=abc;x=y", "sc://host:443/;token=***;x=y"),
        ("sc://host/;user_id=me@example.com;Token=a=b", "sc://host/;user_id=me@example.com;Token=***"),
        (
            "sc://host/;x-api-key=abc;db_password=abc;use_ssl=true",
            "sc://host/;x-api-key=***;db_password=***;use_ssl=true",
        ),
        ("sc://user:p@ss/w@host:443/;x=y", "sc://***@host:443/;x=y"),
        ("user:pw@host", "***@host"),
        ("sail", "sail"),
        ("local[*]", "local[*]"),
        ("/Volumes/main/ml/exports", "/Volumes/main/ml/exports"),
    ],
)
def test_redact(value: str, shown: str) -> None:
    assert redact(value) == shown


def test_settings_do_not_show_a_token() -> None:
    settings = load_settings(remote="sc://host/;token=hunter2")
    assert "hunter2" not in repr(settings) + str(settings)
    assert "sc://host/;token=***" in repr(settings)


@pytest.mark.parametrize(
    "line", ["remote: spark://h/;token=hunter2", "remote: 'sc://h/;token=hunter2", "remote: [hunter2]"]
)
def test_errors_do_not_show_a_token(line: str) -> None:
    write_profile(line)
    with pytest.raises(ConfigError) as failure:
        load_settings(profile="mine")
    assert "hunter2" not in "".join(traceback.format_exception(failure.value))

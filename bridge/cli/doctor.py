"""bridge doctor."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

import bridge
from bridge.cli import options
from bridge.cli.screen import print_table
from bridge.display import format_bytes, format_seconds, plain_table

if TYPE_CHECKING:
    from bridge.config import Settings

_DISTRIBUTION = "spark-training-bridge"
_BASE = ("pyarrow", "pandas", "datasets")
# all of these put their files into the one folder `pyspark`
_PYSPARKS = ("pyspark", "pyspark-client", "databricks-connect")
_ENGINES = ("embedded engine", "local[*]", "remote server", "Databricks")
_FOLDERS = ("volume root", "warehouse")


@dataclass(frozen=True)
class Check:
    """What was seen of one thing, and what to type where it does not work. "absent" is for what not everybody needs."""

    name: str
    state: Literal["ok", "absent", "problem"]
    seen: str
    remedy: str = ""


def doctor(profile: options.Profile = None) -> None:
    """Check that everything works, and say what to type if not."""
    options.choose_profile(profile)
    checks = list(_run_checks())
    rows = []
    for check in checks:
        rows.append([check.name, check.state, check.seen])
        rows += [["", "", f"> {line.strip()}"] for line in check.remedy.splitlines()]
    print_table(plain_table(["check", "state", "what was seen, and > what to type"], rows))
    broken = _broken(checks)
    problems = sum(check.state == "problem" for check in checks)
    print()
    if broken:
        print(f"Needed, and broken: {', '.join(broken)}.")
        raise typer.Exit(1)
    print("All that is needed works." + (f" Problems beside that: {problems}." if problems else ""))


def _broken(checks: Iterable[Check]) -> list[str]:
    states = {check.name: check.state for check in checks}
    broken = [name for name in (*_BASE, "settings", *_FOLDERS) if states.get(name) == "problem"]
    if states["settings"] == "problem" or any(states[name] == "ok" for name in _ENGINES):
        return broken
    return ["no engine works", *broken]


def _run_checks() -> Iterable[Check]:
    from bridge.config import data_folder

    yield Check("Python", "ok", f"{sys.version.split()[0]} at {sys.executable}")
    yield Check("bridge", "ok", bridge.__version__)
    for name in _BASE:
        yield _package(Check(name, "problem", "not installed", f"pip install {name}"))
    yield _package(Check("torch", "absent", "needed for tensors and loaders", _extra("torch")))
    yield _package(Check("pysail", "absent", "needed for the embedded engine", _extra("local")))
    yield _safely("pyspark", _pyspark)
    settings, check = _settings()
    yield check
    if settings is None:
        return  # every other call of `bridge` would fail for the same reason
    yield _safely("embedded engine", lambda: _embedded(settings.warehouse))
    yield _safely("local[*]", _local_spark)
    yield _safely("Delta for local[*]", lambda: _delta_jars(settings.spark_jars))
    yield _safely("remote server", lambda: _remote(settings))
    yield _safely("Databricks", _databricks)
    root = settings.volume_root or data_folder() / "volumes"
    yield _safely("/Volumes", lambda: _mount(root))
    yield _safely("volume root", lambda: _folder("volume root", root, "BRIDGE_VOLUME_ROOT"))
    yield _safely("warehouse", lambda: _folder("warehouse", settings.warehouse, "BRIDGE_WAREHOUSE"))
    yield _safely("memory", lambda: _memory(settings))


def _safely(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as exc:  # noqa: BLE001  # whatever is broken here, the other checks still help
        return _failed(name, exc)


def _failed(name: str, exc: Exception, state: Literal["absent", "problem"] = "problem") -> Check:
    first, _, rest = str(exc).partition("\n")
    return Check(name, state, first or type(exc).__name__, rest)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _extra(name: str) -> str:
    return f'pip install "{_DISTRIBUTION}[{name}]"'


def _package(absent: Check) -> Check:
    def look() -> Check:
        version = _version(absent.name)
        return Check(absent.name, "ok", version) if version else absent

    return _safely(absent.name, look)


def _pyspark() -> Check:
    found = {name: version for name in _PYSPARKS if (version := _version(name))}
    seen = ", ".join(f"{name} {version}" for name, version in found.items())
    if not found:
        return Check("pyspark", "absent", "needed for every engine", f"{_extra('local')}, or [spark], or [databricks]")
    if len(found) == 1:
        return Check("pyspark", "ok", seen)
    extra = "databricks" if "databricks-connect" in found else "spark" if "pyspark" in found else "local"
    return Check(
        "pyspark",
        "problem",
        f"{seen}: they own the same folder, {_pyspark_folder()}, and overwrite each other's files",
        f"pip uninstall -y {' '.join(found)}\n{_extra(extra)}",
    )


def _pyspark_folder() -> str:
    spec = importlib.util.find_spec("pyspark")
    return str(Path(spec.origin).parent) if spec is not None and spec.origin else "pyspark"


def _settings() -> tuple[Settings | None, Check]:
    from bridge.config import load_settings

    try:
        settings = load_settings()
    except (bridge.ConfigError, RuntimeError) as exc:  # RuntimeError: there is no home folder
        return None, _failed("settings", exc)
    given = sorted({origin for origin in settings.origins.values() if origin != "default"})
    return settings, Check("settings", "ok", f"from {', '.join(given)}" if given else "defaults")


def _embedded(warehouse: Path) -> Check:
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        try:
            rows = bridge.connect("sail").range(3).count()
        except bridge.MissingDependencyError as exc:
            return _failed("embedded engine", exc, "absent")
    took = format_seconds(time.perf_counter() - start)
    for warning in caught:
        if issubclass(warning.category, RuntimeWarning):  # a table of the warehouse that cannot be registered
            return Check("embedded engine", "problem", str(warning.message), "move that folder out of the warehouse")
    tables = sum(1 for _ in warehouse.glob("*/*/*/_delta_log"))
    return Check(
        "embedded engine", "ok", f"started and counted to {rows} in {took}; Delta tables in the warehouse: {tables}"
    )


def _local_spark() -> Check:
    from bridge.spark.engines.process import find_java, spark_home

    try:
        spark_home()
        java, version = find_java()
    except (bridge.MissingDependencyError, bridge.EngineUnavailableError) as exc:
        return _failed("local[*]", exc, "absent")
    return Check("local[*]", "ok", f"the full pyspark, and Java {version} at {java}")


def _delta_jars(spark_jars: str | None) -> Check:
    from bridge.spark.engines.apache import delta_conf

    if spark_jars is None:
        return Check(
            "Delta for local[*]", "absent", "the setting spark_jars is empty: local[*] reads no Delta tables",
            "export BRIDGE_SPARK_JARS=<a folder with delta-spark and what it needs>",
        )  # fmt: skip
    delta_conf(spark_jars)
    return Check("Delta for local[*]", "ok", spark_jars)


def _remote(settings: Settings) -> Check:
    from bridge.config import redact
    from bridge.spark.channel import open_session

    remote = settings.remote if (settings.remote or "").startswith("sc://") else os.environ.get("SPARK_REMOTE")
    if not remote or not remote.startswith("sc://"):
        return Check(
            "remote server", "absent", "no sc:// address in SPARK_REMOTE or the setting remote",
            "export SPARK_REMOTE=sc://<host>:15002",
        )  # fmt: skip
    spark = open_session(remote, timeout_s=10)
    version = spark.version
    spark.stop()
    return Check("remote server", "ok", f"{redact(remote)} answers: Spark {version}")


def _databricks() -> Check:
    set_ = [name for name in sorted(os.environ) if name.startswith("DATABRICKS_")]
    if Path("~/.databrickscfg").expanduser().is_file():
        set_.append("~/.databrickscfg")
    version = _version("databricks-connect")
    if version and set_:
        return Check(
            "Databricks", "ok", f"databricks-connect {version}; configured by {', '.join(set_)}; not contacted"
        )
    if version:
        return Check(
            "Databricks", "absent", f"databricks-connect {version}, but no workspace is named",
            "export DATABRICKS_HOST=https://<workspace>, or DATABRICKS_CONFIG_PROFILE",
        )  # fmt: skip
    seen = "databricks-connect is not installed" + (f", though {', '.join(set_)} is there" if set_ else "")
    return Check("Databricks", "absent", seen, f"{_extra('databricks')}  (in an environment without pyspark)")


def _mount(root: Path) -> Check:
    if os.path.ismount("/Volumes") or os.path.isdir("/Volumes"):
        return Check("/Volumes", "ok", "mounted")
    return Check("/Volumes", "absent", f"not mounted; the volume root, {root}, stands for it")


def _folder(name: str, folder: Path, variable: str) -> Check:
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    remedy = f"make {folder} a folder that you can write, or export {variable}=<another>"
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as exc:
        return Check(name, "problem", f"{folder} cannot be written: {exc.strerror} ({nearest})", remedy)

    made = "" if nearest == folder else "; it will be made"
    return Check(name, "ok", f"{folder} ({format_bytes(shutil.disk_usage(nearest).free)} free{made})")


def _memory(settings: Settings) -> Check:
    from bridge.config import available_memory, collect_ceiling

    free, ceiling = format_bytes(available_memory()), format_bytes(collect_ceiling(settings))
    return Check("memory", "ok", f"{free} available; a collect may hold {ceiling}")

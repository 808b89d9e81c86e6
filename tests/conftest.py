"""What tests need, and a bare environment for each.

A marked test whose needs are not met is skipped with the name of what is missing. BRIDGE_REQUIRE=apache,fuse turns the
skips of these markers into failures.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

# what of BRIDGE_* describes the machine rather than a person's preferences
_KEPT = {"BRIDGE_REQUIRE", "BRIDGE_SPARK_JARS", "BRIDGE_TEST_DATA"}


@functools.cache
def _java_version() -> int:
    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java")
    if not java or not os.path.exists(java):
        return 0
    shown = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    match = re.search(r'version "(\d+)', shown)
    return int(match[1]) if match else 0


def _lacks_apache() -> str | None:
    if _java_version() < 17:
        return "Java 17 or newer"
    spec = importlib.util.find_spec("pyspark")
    if not spec or not spec.origin or not Path(spec.origin).with_name("bin").joinpath("spark-submit").exists():
        return "the full pyspark, with bin/spark-submit"
    return None


def _lacks_delta_jvm() -> str | None:
    if lacking := _lacks_apache():
        return lacking
    jars = os.environ.get("BRIDGE_SPARK_JARS", "")
    names = os.listdir(jars) if os.path.isdir(jars) else [os.path.basename(jar.strip()) for jar in jars.split(",")]
    return None if any(name.startswith("delta-spark_") for name in names) else "delta-spark in BRIDGE_SPARK_JARS"


@functools.cache
def _lacks_fuse() -> str | None:
    if not os.path.exists("/dev/fuse"):
        return "/dev/fuse"
    if not shutil.which("gcc"):
        return "gcc"
    if not shutil.which("fusermount3"):
        return "fusermount3"
    probe = "#define FUSE_USE_VERSION 31\n#include <fuse3/fuse.h>\n"
    compiled = subprocess.run(
        ["gcc", "-D_FILE_OFFSET_BITS=64", "-xc", "-fsyntax-only", "-"],
        input=probe,
        text=True,
        capture_output=True,
        check=False,
    )
    return "libfuse3 with its headers" if compiled.returncode else None


def _lacks_golden() -> str | None:
    data = os.environ.get("BRIDGE_TEST_DATA", "")
    return None if os.path.isdir(data) else "the folder named by BRIDGE_TEST_DATA"


def _lacks_notebook() -> str | None:
    absent = [name for name in ("nbclient", "ipykernel") if not importlib.util.find_spec(name)]
    return " and ".join(absent) or None


_LACKS: dict[str, Callable[[], str | None]] = {
    "apache": _lacks_apache,
    "cluster": _lacks_apache,
    "delta_jvm": _lacks_delta_jvm,
    "fuse": _lacks_fuse,
    "golden": _lacks_golden,
    "notebook": _lacks_notebook,
}


def _required() -> set[str]:
    return {name.strip() for name in os.environ.get("BRIDGE_REQUIRE", "").split(",") if name.strip()}


def pytest_configure() -> None:
    if unknown := _required() - set(_LACKS):
        raise pytest.UsageError(f"BRIDGE_REQUIRE names {', '.join(sorted(unknown))}; it takes {', '.join(_LACKS)}")


@pytest.hookimpl(optionalhook=True)  # pytest-xdist may be absent
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Give a worker all tests that share a server or the fixtures of a module, in the order in which they stand."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _share(nodeid)

    # the tests of engines stand first and take longest; by number, a few of minutes would come last
    config.option.loadscopereorder = False
    return Scheduling(config, log)


def _share(nodeid: str) -> str:
    """Name what a test shares with others; xdist's own groups are lost under pytest 9.2."""
    module, _, name = nodeid.partition("::")
    if module == "tests/engines/test_cluster_server.py":
        return "cluster"
    words = name.partition("[")[2].removesuffix("]").split("-")
    engine = next((engine for engine in ("apache", "cluster") if engine in words), None)
    if engine is None or not module.startswith("tests/engines/"):
        return module
    return f"{module} {engine}" if module.endswith("/test_sessions.py") else engine  # which has servers of its own


@pytest.hookimpl(tryfirst=True)  # before the fixtures, which would fail for what is missing
def pytest_runtest_setup(item: pytest.Item) -> None:
    for name, lacks in _LACKS.items():
        if item.get_closest_marker(name) and (lacking := lacks()):
            if name in _required():
                pytest.fail(f"{name}: needs {lacking}, and BRIDGE_REQUIRE asks for it", pytrace=False)
            pytest.skip(f"{name}: needs {lacking}")


@pytest.fixture(scope="session", autouse=True)
def _bare_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide the person's settings, also from fixtures that live as long as the session."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("BRIDGE_", "DATABRICKS_", "SPARK_REMOTE")) and name not in _KEPT:
                patch.delenv(name)
        _give_folders(patch, tmp_path_factory)
        yield


@pytest.fixture(autouse=True)
def _own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Give each test a data folder and a cache folder of its own."""
    _give_folders(monkeypatch, tmp_path_factory)


def _give_folders(patch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    home = tmp_path_factory.mktemp("home")
    patch.setenv("XDG_DATA_HOME", str(home / "data"))
    patch.setenv("XDG_CACHE_HOME", str(home / "cache"))

"""The hook of tests/conftest.py that skips what cannot run here, or fails where it has to."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).parents[1] / "conftest.py"


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A suite with the hook and one test marked `golden`, which needs a folder that is not there."""
    monkeypatch.delenv("BRIDGE_REQUIRE", raising=False)
    monkeypatch.delenv("BRIDGE_TEST_DATA", raising=False)
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8"))
    pytester.makeini(
        "[pytest]\nmarkers =\n    apache\n    cluster\n    delta_jvm\n    fuse\n    golden\n    notebook\n"
    )
    pytester.makepyfile(
        """
        import pytest

        @pytest.fixture
        def data():
            raise AssertionError("a fixture ran for a test that cannot")

        @pytest.mark.golden
        def test_marked(data):
            pass

        def test_unmarked():
            pass
        """
    )
    return pytester


def run(inner: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return inner.runpytest_inprocess("-rs", "-p", "no:cacheprovider", *arguments)


def test_what_is_missing_is_named_by_the_skip(inner: pytest.Pytester) -> None:
    result = run(inner)
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["*golden: needs the folder named by BRIDGE_TEST_DATA"])


def test_a_required_marker_fails_instead(inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDGE_REQUIRE", "fuse, golden")
    result = run(inner)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*golden: needs the folder named by BRIDGE_TEST_DATA, and BRIDGE_REQUIRE asks for it"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_what_is_there_runs(inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDGE_REQUIRE", "golden")
    monkeypatch.setenv("BRIDGE_TEST_DATA", str(inner.path))
    result = run(inner)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*a fixture ran for a test that cannot*"])


def test_an_unknown_requirement_is_refused(inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDGE_REQUIRE", "golden,fuze")
    result = run(inner)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*BRIDGE_REQUIRE names fuze; it takes apache, cluster, *"])


@pytest.mark.parametrize(
    ("marker", "environment", "needs"),
    [
        ("apache", {"JAVA_HOME": "/nowhere"}, "Java 17 or newer"),
        ("cluster", {"JAVA_HOME": "/nowhere"}, "Java 17 or newer"),
        ("delta_jvm", {"JAVA_HOME": "/nowhere"}, "Java 17 or newer"),
        ("fuse", {"PATH": "/nowhere"}, None),
    ],
)
def test_each_need_is_named(
    inner: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    marker: str,
    environment: dict[str, str],
    needs: str | None,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    inner.makepyfile(f"import pytest\n\n@pytest.mark.{marker}\ndef test_marked():\n    pass\n")
    result = run(inner)
    result.assert_outcomes(skipped=1)
    needs = needs or ("gcc" if Path("/dev/fuse").exists() else "/dev/fuse")
    result.stdout.fnmatch_lines([f"*{marker}: needs {needs}"])


@pytest.mark.apache
def test_delta_is_looked_for_among_the_jars(
    inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    inner.makepyfile("import pytest\n\n@pytest.mark.delta_jvm\ndef test_marked():\n    pass\n")
    monkeypatch.setenv("BRIDGE_SPARK_JARS", str(tmp_path))
    result = run(inner)
    result.stdout.fnmatch_lines(["*delta_jvm: needs delta-spark in BRIDGE_SPARK_JARS"])
    jar = tmp_path / "delta-spark_4.2_2.13-4.4.0.jar"
    jar.touch()
    for value in (str(tmp_path), f"/other.jar, {jar}"):
        monkeypatch.setenv("BRIDGE_SPARK_JARS", value)
        run(inner).assert_outcomes(passed=1)


def test_the_environment_is_bare_and_each_test_has_its_own_folders(
    inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BRIDGE_VOLUME", "BRIDGE_PROFILE", "DATABRICKS_TOKEN", "SPARK_REMOTE", "BRIDGE_TEST_DATA"):
        monkeypatch.setenv(name, "given")
    monkeypatch.setenv("XDG_DATA_HOME", "/nowhere")
    inner.makepyfile(
        """
        import os

        import pytest

        seen = {"/nowhere"}

        @pytest.fixture(scope="session")
        def early():
            return dict(os.environ)

        @pytest.mark.parametrize("turn", [1, 2])
        def test_it(early, turn):
            for environment in (early, os.environ):
                assert not {"BRIDGE_VOLUME", "BRIDGE_PROFILE", "DATABRICKS_TOKEN", "SPARK_REMOTE"} & set(environment)
                assert environment["BRIDGE_TEST_DATA"] == "given"
                assert environment["XDG_DATA_HOME"] != "/nowhere"
            assert os.environ["XDG_DATA_HOME"] not in seen
            seen.add(os.environ["XDG_DATA_HOME"])
        """
    )
    run(inner).assert_outcomes(passed=2)

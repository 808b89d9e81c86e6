"""Settings: a keyword wins over a BRIDGE_* environment variable, that over a profile, that over the default.

A profile is a YAML file of settings. The profile "local" is `local.yaml` in the first of these folders that has it:
$BRIDGE_CONF, ./conf, and the folder that comes with the package.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, ValidationInfo, field_validator

from bridge.display import did_you_mean, parse_bytes
from bridge.errors import ConfigError

_PREFIX = "BRIDGE_"
_COLLECT_BYTES = 512 << 20
# read elsewhere than as settings: the folder and the name of a profile, and what the tests need
_OTHER_VARIABLES = re.compile(r"BRIDGE_(CONF|PROFILE|REQUIRE|TEST_.*)")
_REMOTE_FORMS = (
    "sail",
    "databricks",
    "databricks://<profile of ~/.databrickscfg>",
    "local",
    "local[N]",
    "local[*]",
    "local-cluster[N,cores,MB]",
    "sc://<host>:<port>",
)
_REMOTE = re.compile(
    r"sail|databricks|databricks://[^\s/]+"
    r"|local|local\[(\*|[1-9]\d*)\]|local-cluster\[[1-9]\d*,[1-9]\d*,[1-9]\d*\]"
    r"|sc://[^\s/;]\S*"
)
_SECRET_PARAMETER = re.compile(r"(?i)([\w.-]*(?:token|password|passwd|pwd|secret|key|credential|auth)[\w.-]*)=[^;]*")
_BARE_PARAMETER = re.compile(r";[^=;]+(?=;|$)")
_USER_INFO = re.compile(r"^(\w+://)?[^;]*@")
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def data_folder() -> Path:
    """Return where `bridge` keeps what it may not lose: $XDG_DATA_HOME/bridge, or ~/.local/share/bridge."""
    return _xdg_folder("XDG_DATA_HOME", ".local/share")


def _xdg_folder(variable: str, fallback: str) -> Path:
    value = os.environ.get(variable, "")
    # the XDG Base Directory Specification: a relative path in these variables is to be ignored
    return (Path(value) if os.path.isabs(value) else Path.home() / fallback) / "bridge"


class Settings(BaseModel):
    """What is in force. Made by `load_settings`; a bare `Settings()` holds the defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    remote: str | None = Field(None, description="The engine; see conf/. None: found as `connect` describes.")
    warehouse: Path = Field(
        default_factory=lambda: data_folder() / "warehouse", description="Tables of the embedded engine."
    )
    volume: str | None = Field(None, description="Where exports go when a call names no volume.")
    volume_root: Path | None = Field(
        None,
        description="What stands for /Volumes where nothing is mounted there. None: `volumes` in the data folder with "
        "engines on this machine, else nothing does.",
    )
    spark_jars: str | None = Field(
        None, description="Jars for a local Apache Spark: a folder of them, or a comma-separated list."
    )
    max_bytes: int | None = Field(
        None,
        description="The most that one collect may hold, in bytes of Arrow. None: the lesser of 512 MiB and a quarter "
        "of the free memory.",
    )
    client_max_bytes: int | None = Field(
        None, description="The most that a whole-table hand-off of an export may hold. None: decided from free memory."
    )
    cache_dir: Path = Field(
        default_factory=lambda: _xdg_folder("XDG_CACHE_HOME", ".cache"), description="Local copies of files on volumes."
    )
    cache_max_bytes: int = Field(50 * 1024**3, description="The most that cache_dir may hold.")
    progress: bool | None = Field(None, description="Whether long work is shown. None: where someone can see it.")

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def origins(self) -> dict[str, str]:
        """Where each value came from: "keyword", a variable such as "BRIDGE_VOLUME", a profile's path or "default"."""
        return {name: self._origins.get(name, "default") for name in type(self).model_fields}

    @field_validator("remote", mode="before")
    @classmethod
    def _check_remote(cls, value: object) -> object:
        if isinstance(value, str) and _REMOTE.fullmatch(value):
            return value
        # the value is left out: it may hold a token
        raise ValueError(f"remote is not of a known form; give one of {', '.join(_REMOTE_FORMS)}.")

    @field_validator("warehouse", "volume_root", "cache_dir", mode="before")
    @classmethod
    def _check_path(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, str | Path) and "://" not in str(value):
            return _absolute(value)
        raise ValueError(f"{info.field_name} is {value!r}; give the path of a folder.")

    @field_validator("spark_jars", mode="before")
    @classmethod
    def _check_jars(cls, value: object) -> object:
        if not isinstance(value, str | Path):
            raise ValueError(f"spark_jars is {value!r}; give a folder or a comma-separated list of jars.")
        jars = [jar.strip() for jar in str(value).split(",") if jar.strip()]
        # Maven coordinates and addresses stand; what is left are paths
        return ",".join(jar if ":" in jar else str(_absolute(jar)) for jar in jars)

    @field_validator("volume", mode="before")
    @classmethod
    def _check_volume(cls, value: object) -> object:
        if isinstance(value, str | Path):
            return os.path.expanduser(str(value))
        raise ValueError(f"volume is {value!r}; give /Volumes/<catalog>/<schema>/<volume> or the path of a folder.")

    @field_validator("max_bytes", "client_max_bytes", "cache_max_bytes", mode="before")
    @classmethod
    def _check_bytes(cls, value: object, info: ValidationInfo) -> object:
        return parse_bytes(value, name=str(info.field_name))

    @field_validator("progress", mode="before")
    @classmethod
    def _check_progress(cls, value: object) -> object:
        known = {"true": True, "1": True, "false": False, "0": False}
        if isinstance(value, bool) or (isinstance(value, str) and value.lower() in known):
            return known[str(value).lower()]
        raise ValueError(f"progress is {value!r}; give true or false.")

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, redact(value) if isinstance(value, str) else value


def load_settings(*, profile: str | None = None, **keywords: object) -> Settings:
    """Return the settings in force, each from the first of: keyword, environment variable, profile, default.

    A keyword, an environment variable or a line of a profile that holds nothing (None, "", null) counts as not given.
    Paths are relative to the working directory, also those in a profile; `~` is expanded.

    Args:
        profile: Name of a profile; else $BRIDGE_PROFILE, else no profile.
        keywords: Settings by name.

    Raises:
        ConfigError: There is no such profile, a name is no setting, or a value is not what the setting takes.
    """
    _refuse_unknown_variables()
    environment = {name: os.environ.get(_variable(name)) for name in Settings.model_fields}
    profile = profile or os.environ.get("BRIDGE_PROFILE")
    path = _find_profile(profile) if profile else None

    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    layers: list[tuple[Mapping[str, object], str | None]] = [(keywords, "keyword"), (environment, None)]
    if path:
        layers.append((_read_profile(path), str(path)))
    for layer, origin in layers:
        for name, value in layer.items():
            if name not in Settings.model_fields:
                raise ConfigError(
                    f'{_subject(origin)}"{name}" is not a setting.{did_you_mean(name, Settings.model_fields)} '
                    f"The settings are {', '.join(Settings.model_fields)}."
                )
            if value not in (None, "") and name not in values:
                values[name] = value
                origins[name] = origin or _variable(name)
    try:
        settings = Settings(**values)  # type: ignore[arg-type]  # what pydantic is here to check
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        raise ConfigError(f"{_subject(origins[str(first['loc'][0])])}{first['ctx']['error']}") from exc
    settings._origins.update(origins)
    return settings


def profiles() -> dict[str, Path]:
    """Return the profiles that can be named, in order of name, with the file that each would be read from."""
    found: dict[str, Path] = {}
    for folder in _conf_folders():
        for path in folder.glob("*.yaml"):
            found.setdefault(path.stem, path)
    return dict(sorted(found.items()))


def redact(value: str) -> str:
    """Return `value`, such as a `remote`, with *** for what may be secret: tokens, keys, passwords, user names."""
    hidden = _SECRET_PARAMETER.sub(r"\1=***", _USER_INFO.sub(r"\1***@", value))
    return _BARE_PARAMETER.sub(";***", hidden)  # the rest of a token that holds a semicolon


def _variable(name: str) -> str:
    return _PREFIX + name.upper()


def _subject(origin: str | None) -> str:
    return f"{origin}: " if origin and origin != "keyword" else ""


def _absolute(path: str | Path) -> Path:
    # os.path, since Path.expanduser raises for a user that is not known
    return Path(os.path.abspath(os.path.expanduser(path)))


def _refuse_unknown_variables() -> None:
    known = [_variable(name) for name in Settings.model_fields]
    for variable in os.environ:
        if variable.startswith(_PREFIX) and variable not in known and not _OTHER_VARIABLES.fullmatch(variable):
            known += ["BRIDGE_CONF", "BRIDGE_PROFILE"]
            raise ConfigError(
                f"{variable} in the environment is not a setting.{did_you_mean(variable, known)} "
                f"The variables are {', '.join(known)}."
            )


def _conf_folders() -> list[Path]:
    folders = [Path("conf"), _package_conf()]
    if named := os.environ.get("BRIDGE_CONF"):
        folders.insert(0, _absolute(named))
        if not folders[0].is_dir():
            raise ConfigError(f"BRIDGE_CONF is {named}, which is not a folder.")
    return folders


def _package_conf() -> Path:
    package = Path(__file__).parent
    shipped = package / "conf"
    # a checkout has the folder beside the package; a wheel has it inside
    return shipped if shipped.is_dir() else package.parent / "conf"


def _find_profile(name: str) -> Path:
    known = profiles()
    if name not in known:
        looked = ", ".join(map(str, _conf_folders()))
        raise ConfigError(
            f'There is no profile "{name}".{did_you_mean(name, known)} '
            f"The profiles are {', '.join(known) or 'none'}; looked in {looked}."
        )
    return known[name]


def _read_profile(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as stream:
            content = yaml.safe_load(stream)
    except yaml.YAMLError as exc:
        # not the error's own text: it may quote the line
        mark = getattr(exc, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}: not valid YAML{where}.") from exc
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f'{path}: holds a {type(content).__name__}; a profile holds lines such as "max_bytes: 1GiB".')
    return {str(key): _expand(value, path=path, key=str(key)) for key, value in content.items()}


def _expand(value: object, *, path: Path, key: str) -> object:
    """Return `value` with each ${NAME} replaced by that environment variable."""
    if not isinstance(value, str):
        return value

    def read(match: re.Match[str]) -> str:
        try:
            return os.environ[match[1]]
        except KeyError as exc:
            raise ConfigError(f"{path}: {key} refers to ${{{match[1]}}}, which the environment does not hold.") from exc

    return _REFERENCE.sub(read, value)


def collect_ceiling(settings: Settings, num_processes: int = 1) -> int:
    """Return the most bytes one collect may hold: as set, else the lesser of 512 MiB and a quarter of free memory.

    Args:
        num_processes: How many processes of this machine will hold it.
    """
    if settings.max_bytes is not None:
        return settings.max_bytes
    return min(_COLLECT_BYTES, available_memory() // (4 * num_processes))


def available_memory() -> int:
    """Return the bytes of memory that this process may still take: the machine's, or less in a container."""
    free_kib = _kernel_number("/proc/meminfo", "MemAvailable:")  # None: not Linux
    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    available = half if free_kib is None else free_kib * 1024
    limit, used = (_kernel_number(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit is None or used is None:
        return available
    # the kernel drops what a container's memory holds of files when the room is needed
    reclaimable = _kernel_number("/sys/fs/cgroup/memory.stat", "inactive_file ") or 0
    return max(0, min(available, limit - used + reclaimable))


def _kernel_number(path: str, name: str = "") -> int | None:
    """Return the number of the line that begins with `name`; None where there is no such file or number."""
    try:
        found = re.search(rf"^{name}\s*(\d+)", Path(path).read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None

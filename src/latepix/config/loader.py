"""TOML and command line -> one frozen config, or one `ConfigError` that lists everything that is wrong.

In: the arguments after the command, `[@ run.toml] [--section @ part.toml] [--a.b value]`; later files win over earlier
ones, the command line wins over files. Out: an instance of the config class. What holds:

* a problem is one line of the message: where it was written (file or command line), full key path, what was got, what
  was wanted; an unknown key also names the nearest known one;
* `write_config` writes `config.json` so that `load_config(cls, ["@", "config.json"])` gives an equal config back.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import tomllib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_config import ConfigFileError, cli

from latepix.config.explain import (
    COMMAND_LINE,
    KnownKeys,
    Source,
    describe,
    describe_wanted,
    join_path,
    known_keys,
    nearest,
)
from latepix.errors import ConfigError

ConfigT = TypeVar("ConfigT", bound=BaseModel)

_FILE_TYPES = (".toml", ".json")
_VERSIONED = ("torch", "transformers", "tokenizers", "renderers", "safetensors", "numpy", "pillow")
_GIT_TIMEOUT_S = 10
_BOOL_WORDS = ("true", "false", "1", "0")


def load_config(cls: type[ConfigT], args: Sequence[str], *, prog: str | None = None) -> ConfigT:
    """Read files and command line into a checked config.

    `--help` prints the keys with their types and defaults and exits with status 0.

    Args:
        cls: the config class, such as `RunConfig`.
        args: the arguments after the command, such as `["@", "run.toml", "--steps", "20"]`.
        prog: how the help names the command.

    Raises:
        ConfigError: a file or a key is wrong; the message has one line for each problem.
    """
    if "--help" in args or "-h" in args:
        return cli(cls, args=["--help"], prog=prog)  # ty: ignore[no-matching-overload]  its overloads leave out prog
    known = known_keys(cls)
    scan = _Scan(known, args)
    if scan.problems:
        raise ConfigError("\n".join(scan.problems))
    try:
        return cli(cls, args=scan.args)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{COMMAND_LINE}: a value in brackets is not valid JSON: {error}") from error
    except ConfigFileError as error:
        if not isinstance(error.__cause__, ValidationError):
            raise ConfigError(f"{COMMAND_LINE}: {error.message}") from error
        problems = error.__cause__.errors(include_url=False)
        raise ConfigError("\n".join(describe(problem, known, scan.sources) for problem in problems)) from error


def write_config(config: BaseModel, run_dir: Path) -> Path:
    """Write the resolved config to `run_dir`/config.json, and what it ran with to `run_dir`/versions.json.

    Both files appear whole or not at all.

    Returns:
        The path of config.json.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    path = run_dir / "config.json"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        _replace(path, config.model_dump_json(indent=2))
        _replace(run_dir / "versions.json", json.dumps(collect_versions(), indent=2))
    except OSError as error:
        raise ConfigError(
            f"Cannot write the config to run folder {run_dir}: {error.strerror or error}. "
            "Wanted a folder that can be made and written; choose another output_dir or free some space."
        ) from error
    return path


def collect_versions() -> dict[str, str | None]:
    """Return the versions a run depends on: latepix, its commit, Python and packages; None where not known."""
    packages = {name: _installed(name) for name in ("latepix", *_VERSIONED)}
    return {"commit": _commit(), "python": platform.python_version(), "platform": platform.platform(), **packages}


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of the checkout this file lies in, with `-dirty` if it was changed since."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None  # an installed wheel: a repository further up is somebody else's
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _replace(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text + "\n", encoding="utf-8")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


class _Scan:
    """Splits the arguments into files and keys before the library sees them.

    The library would take `--dry-run @ run.toml` as a file for `dry_run` and `--seed --steps 5` as seed "--steps", and
    does not say which file a key came from. So each flag is looked up, and each file read, here first.

    Attributes:
        args: arguments that mean the same and cannot be misread: files first, then keys.
        sources: files in order, then the command line; a later one wins.
        problems: one line for each thing that is already wrong.
    """

    def __init__(self, known: KnownKeys, args: Sequence[str]) -> None:
        self.problems: list[str] = []
        self._known = known
        self._rest = list(args)
        self._files: list[Source] = []
        self._file_args: list[str] = []
        self._keys: dict[str, Any] = {}
        self._key_args: list[str] = []
        while self._rest:
            self._take(self._rest.pop(0))
        self.args = self._file_args + self._key_args
        self.sources = [*self._files, Source(COMMAND_LINE, self._keys)]

    def _take(self, token: str) -> None:
        if token.startswith("@"):
            self._take_file("", token[1:])
        elif token.startswith("--") and len(token) > 2:
            key, equals, value = token[2:].partition("=")
            self._take_flag(key.replace("-", "_"), value if equals else None)
        else:
            self.problems.append(f"{COMMAND_LINE}: got {token!r}, wanted `@ FILE` or `--key value`")

    def _take_file(self, prefix: str, name: str) -> None:
        name = name or (self._rest.pop(0) if self._rest else "")
        if not name:
            self.problems.append(f"{COMMAND_LINE}: @: no file follows, wanted a TOML or JSON file, as in `@ run.toml`")
            return
        self._file_args += [*([f"--{prefix}"] if prefix else []), "@", name]
        try:
            self._files.append(Source(name, _nest(prefix, _read_table(name))))
        except ConfigError as error:
            self.problems.append(str(error))

    def _take_flag(self, path: str, value: str | None) -> None:
        field = self._known.leaves.get(path)
        negated = self._known.leaves.get(path.removeprefix("no_"))
        follower = self._rest[0] if self._rest else "--"
        if value is not None:
            self._set(path, value)
        elif field is None and negated is not None and negated.annotation is bool:
            self._set(path.removeprefix("no_"), "false")
        elif path in self._known.sections or (field is None and follower.startswith("@")):
            self._take_section(path, follower)
        elif field is not None and field.annotation is bool:
            self._set(path, self._rest.pop(0).lower() if follower.lower() in _BOOL_WORDS else "true")
        elif field is not None and get_origin(field.annotation) in (list, dict):
            self._set(path, *self._pop_values())
        elif not follower.startswith(("--", "@")):
            self._set(path, self._rest.pop(0))
        elif field is None:
            self._set(path, "true")  # pydantic refuses it by name
        else:
            wanted = describe_wanted(path, self._known)
            self.problems.append(f"{COMMAND_LINE}: {path}: no value follows, wanted {wanted}")

    def _take_section(self, path: str, follower: str) -> None:
        if follower.startswith("@"):
            self._take_file(path, self._rest.pop(0)[1:])
            return
        self._pop_values()
        keys = ", ".join(f"--{join_path(path, name)}" for name in self._known.sections[path].model_fields)
        self.problems.append(f"{COMMAND_LINE}: {path}: is a section, wanted one of its keys: {keys}")

    def _pop_values(self) -> list[str]:
        values: list[str] = []
        while self._rest and not self._rest[0].startswith(("--", "@")):
            values.append(self._rest.pop(0))
        return values

    def _set(self, path: str, *values: str) -> None:
        _put(self._keys, path, values)
        flag = f"--{path.replace('_', '-')}"
        field = self._known.leaves.get(path)
        is_flag = field is not None and field.annotation is bool
        if len(values) == 1 and (values[0].startswith(("--", "@")) or (is_flag and values[0] not in _BOOL_WORDS)):
            self._key_args.append(f"{flag}={values[0]}")
        else:
            self._key_args += [flag, *values]


def _read_table(name: str) -> dict[str, Any]:
    """Read a TOML or JSON file.

    Raises:
        ConfigError: it is missing, not readable, of another type, or does not parse.
    """
    path = Path(name)
    if path.suffix not in _FILE_TYPES:
        raise ConfigError(f"{name}: got a file of type {path.suffix or '(none)'!r}, wanted {' or '.join(_FILE_TYPES)}")
    try:
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except FileNotFoundError as error:
        names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        close = nearest(path.name, names)
        hint = f"; did you mean {path.parent / close}?" if close else f" (looked in {path.parent.absolute()})"
        raise ConfigError(f"{name}: no such file{hint}") from error
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: is not UTF-8 text (byte {error.start})") from error
    except ValueError as error:  # both parsers' errors: they name line and column
        raise ConfigError(f"{name}: is not valid {path.suffix[1:].upper()}: {error}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{name}: got a JSON {type(table).__name__}, wanted an object with the keys of a config")
    return table


def _nest(path: str, table: dict[str, Any]) -> dict[str, Any]:
    for name in reversed(path.split(".") if path else []):
        table = {name: table}
    return table


def _put(table: dict[str, Any], path: str, value: Any) -> None:
    *parents, leaf = path.split(".")
    for name in parents:
        inner = table.setdefault(name, {})
        if not isinstance(inner, dict):
            return  # `--a 1 --a.b 2`: the library keeps the first as well
        table = inner
    table[leaf] = value

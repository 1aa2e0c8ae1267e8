"""What a config class accepts, where keys were written and what pydantic refused go in; one line a problem comes out.

A line reads `where: key path: what was got, what was wanted`, such as
`run.toml: trainer.optim.lrr: unknown key, got 0.1; did you mean trainer.optim.lr?`
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

COMMAND_LINE = "command line"

# Share of characters two names must have in common (difflib's ratio). Paths share their sections, so they need more.
_SIMILAR_NAME = 0.6
_SIMILAR_PATH = 0.8
_MAX_SHOWN_CHARS = 80
_KINDS: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
}
_WANTED = {
    "int_type": _KINDS[int],
    "int_parsing": _KINDS[int],
    "int_from_float": _KINDS[int],
    "float_type": _KINDS[float],
    "float_parsing": _KINDS[float],
    "bool_type": _KINDS[bool],
    "bool_parsing": _KINDS[bool],
    "string_type": _KINDS[str],
    "path_type": _KINDS[Path],
    "tuple_type": "a list, which only a file can hold",
    "model_type": "a section of keys",
    "model_attributes_type": "a section of keys",
}


class Source(NamedTuple):
    """Where keys were written (a file's name or `COMMAND_LINE`), and the nested keys it holds."""

    name: str
    keys: Mapping[str, Any]


class KnownKeys(NamedTuple):
    """What a config class accepts, by dotted path. The root section is ""."""

    sections: Mapping[str, type[BaseModel]]
    leaves: Mapping[str, FieldInfo]

    @property
    def paths(self) -> list[str]:
        """Every path but the root's."""
        return [path for path in (*self.sections, *self.leaves) if path]


def known_keys(cls: type[BaseModel], prefix: str = "") -> KnownKeys:
    """List every section and every leaf of a config class."""
    sections: dict[str, type[BaseModel]] = {prefix: cls}
    leaves: dict[str, FieldInfo] = {}
    for name, field in cls.model_fields.items():
        path = join_path(prefix, name)
        section = _section_class(field.annotation)
        if section is None:
            leaves[path] = field
        else:
            inner = known_keys(section, path)
            sections.update(inner.sections)
            leaves.update(inner.leaves)
    return KnownKeys(sections, leaves)


def join_path(prefix: str, name: str) -> str:
    """Put a name under a dotted path, which may be the root's ""."""
    return f"{prefix}.{name}" if prefix else name


def nearest(name: str, known: Collection[str], *, similarity: float = _SIMILAR_NAME) -> str | None:
    """Return the known name closest to `name`, or None if none is close.

    Args:
        name: the name as the user wrote it.
        known: the names that exist.
        similarity: least share of characters in common, 0 to 1.
    """
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=similarity)), None)


def nearest_path(path: str, known: Collection[str]) -> str | None:
    """Return the known dotted path closest to `path`, or None if none is close.

    Looked for among the keys of the same section first (each part of the path in turn: `trainer.optm.lr` ->
    `trainer.optim.lr`), then among keys of the same name elsewhere (`lr` -> `trainer.optim.lr`), then among all paths.

    Args:
        path: the path as the user wrote it.
        known: every path that exists, sections as well as keys.
    """
    found = ""
    for name in path.split("."):
        start = join_path(found, "")
        inside = [other.removeprefix(start) for other in known if other.startswith(start)]
        siblings = {other for other in inside if "." not in other}
        close = name if name in siblings else nearest(name, siblings)
        if close is None:
            break
        found = join_path(found, close)
    else:
        return found
    leaf = path.rpartition(".")[2]
    same_name = [other for other in known if other.rpartition(".")[2] == leaf]
    return same_name[0] if len(same_name) == 1 else nearest(path, known, similarity=_SIMILAR_PATH)


def describe(problem: ErrorDetails, known: KnownKeys, sources: Sequence[Source]) -> str:
    """Say in one line what is wrong with one key.

    Args:
        problem: one entry of `ValidationError.errors()`.
        known: what the config class accepts.
        sources: where keys were written; a later one wins.
    """
    parts = problem["loc"]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")
    if problem["type"] == "extra_forbidden":
        return _describe_unknown([str(part) for part in parts], problem["input"], known, sources)
    if problem["type"] == "missing":
        files = [source.name for source in sources if source.name != COMMAND_LINE]
        return f"{', '.join(files) or COMMAND_LINE}: {path}: missing, wanted {describe_wanted(path, known)}"
    if problem["type"] in ("value_error", "assertion_error"):  # a rule of ours: it names its keys and values itself
        rule = problem["msg"].partition(", ")[2]
        written = [source.name for source in sources if source.keys]
        return f"{', '.join(written) or 'defaults'}: {f'{path}: ' if path else ''}{rule}"
    wanted = _WANTED.get(problem["type"]) or problem["msg"].removeprefix("Input should be ")
    return f"{_written_in(parts, sources)}: {path}: got {_brief(problem['input'])}, wanted {wanted}"


def describe_wanted(path: str, known: KnownKeys) -> str:
    """Say what a key holds: its kind, and its docstring in brackets."""
    if path in known.sections:
        required = [name for name, field in known.sections[path].model_fields.items() if field.is_required()]
        return f"a section with {', '.join(required)}" if required else "a section of keys"
    field = known.leaves.get(path)
    if field is None:
        return "a value"
    kind = _kind_name(field.annotation)
    return f"{kind} ({field.description.rstrip('.')})" if field.description else kind


def _describe_unknown(names: list[str], got: Any, known: KnownKeys, sources: Sequence[Source]) -> str:
    while isinstance(got, Mapping) and len(got) == 1:  # of an unknown section with one key, name the key
        name, got = next(iter(got.items()))
        names = [*names, str(name)]
    path = ".".join(names)
    close = nearest_path(path, known.paths)
    if close is None:
        section = next(parent for parent in _parents(names) if parent in known.sections)
        hint = f"known keys of {section or 'the config'}: {', '.join(known.sections[section].model_fields)}"
    else:
        hint = f"did you mean {close}?"
    return f"{_written_in(names, sources)}: {path}: unknown key, got {_brief(got)}; {hint}"


def _written_in(names: Sequence[str | int], sources: Sequence[Source]) -> str:
    """Return the name of the last source that holds a key, or else the deepest section of it."""
    for depth in range(len(names), 0, -1):
        for source in reversed(sources):
            if _holds(source.keys, names[:depth]):
                return source.name
    return "defaults"


def _holds(keys: Any, names: Sequence[str | int]) -> bool:
    for name in names:
        if not isinstance(keys, Mapping) or name not in keys:
            return False
        keys = keys[name]
    return True


def _parents(names: Sequence[str]) -> Iterator[str]:
    """Yield the dotted paths above a key, deepest first, down to the root's ""."""
    return (".".join(names[:depth]) for depth in range(len(names) - 1, -1, -1))


def _section_class(annotation: Any) -> type[BaseModel] | None:
    """Return the class of `Section` or `Section | None`."""
    choices = [choice for choice in get_args(annotation) if choice is not NoneType] or [annotation]
    only = choices[0] if len(choices) == 1 else None
    return only if isinstance(only, type) and issubclass(only, BaseModel) else None


def _kind_name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " or ".join(map(repr, get_args(annotation)))
    return "a list" if get_origin(annotation) in (list, tuple) else _KINDS.get(annotation, "a value")


def _brief(value: Any) -> str:
    """Show a value in one short line."""
    if isinstance(value, Mapping):
        return f"a section with {', '.join(map(str, value)) or 'no keys'}"
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[: _MAX_SHOWN_CHARS - 3]}..."

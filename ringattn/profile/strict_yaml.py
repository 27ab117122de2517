"""Reads and writes YAML as plain data: bounded, without aliases, anchors, tags or repeated keys.

``yaml.safe_load`` builds whatever its input names, an alias bomb too, and lets the last of two equal keys win.
Here the parser's events are checked one by one as the data is built, so bad input costs no more than reading it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import yaml
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

# A profile is about 6 deep and some 250 nodes a plan.
MAX_DEPTH = 16
MAX_NODES = 200_000
MAX_NUMBER_LENGTH = 64

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_BaseDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_resolver: Any = Resolver()
_constructor: Any = SafeConstructor()
_TAG = "tag:yaml.org,2002:"


class YamlError(Exception):
    """Fault of a text, in one line, with its line number."""

    def __init__(self, message: str, mark: Any) -> None:
        super().__init__(message if mark is None else f"line {mark.line + 1}: {message}")


def read_yaml(text: str, *, until: str = "") -> object:
    """Return the one document in ``text`` as dict, list, str, int, float, bool and None; raises YamlError.

    Plain scalars mean what they mean to ``yaml.safe_load``, except that dates are refused: they need quotes. With
    ``until`` nothing is read from that key of the outermost mapping on.
    """
    builder = _Builder()
    try:
        for event in yaml.parse(text, Loader=_Loader):
            builder.take(event)
            if until and builder.keys == [until]:
                break
    except yaml.MarkedYAMLError as error:
        problem = " ".join(str(error.problem or error.context).split())
        raise YamlError(f"not valid YAML: {problem}", error.problem_mark) from None
    except yaml.YAMLError as error:  # a character YAML does not allow
        raise YamlError(f"not valid YAML: {' '.join(str(error).split())}", None) from None
    if not builder.documents:
        raise YamlError("the file is empty", None)
    return builder.root


class _Builder:
    """Builder of data from parser events; every open collection is on ``stack``.

    A fault quotes the text only once that has said that it is a profile, with a ``schema`` above: any file can be named
    as one, and what is in others is nobody's business.
    """

    def __init__(self) -> None:
        self.root: object = None
        self.documents = 0
        self.nodes = 0
        self.stack: list[dict[str, object] | list[object]] = []
        self.keys: list[str | None] = []  # for each open mapping the key that waits for its value

    def take(self, event: Any) -> None:
        if isinstance(event, yaml.AliasEvent):  # a node, too
            raise YamlError("aliases (*name) are not allowed", event.start_mark)
        if isinstance(event, yaml.NodeEvent):
            self._node(event)
        elif isinstance(event, yaml.CollectionEndEvent):
            self.stack.pop()
            self.keys.pop()
        elif isinstance(event, yaml.DocumentStartEvent):
            self.documents += 1
            if self.documents > 1:
                raise YamlError("a second document starts here; a profile is one", event.start_mark)

    def _node(self, event: Any) -> None:
        mark = event.start_mark
        self.nodes += 1
        if event.anchor is not None:
            raise YamlError("anchors (&name) are not allowed", mark)
        if event.tag is not None:
            raise YamlError("tags (!name) are not allowed", mark)
        if self.nodes > MAX_NODES:
            raise YamlError(f"more than {MAX_NODES} values", mark)
        if isinstance(event, yaml.ScalarEvent):
            try:
                value = _scalar(event)
            except ValueError as error:
                raise YamlError(f"{self._quoted('a value', event.value)} {error}", mark) from None
            self._place(value, mark)
            return
        if len(self.stack) >= MAX_DEPTH:
            raise YamlError(f"nested more than {MAX_DEPTH} deep", mark)
        opened: dict[str, object] | list[object] = {} if isinstance(event, yaml.MappingStartEvent) else []
        self._place(opened, mark)
        self.stack.append(opened)
        self.keys.append(None)

    def _place(self, value: object, mark: Any) -> None:
        if not self.stack:
            self.root = value
            return
        parent = self.stack[-1]
        if isinstance(parent, list):
            parent.append(value)
        elif (key := self.keys[-1]) is not None:
            parent[key] = value
            self.keys[-1] = None
        elif not isinstance(value, str):
            raise YamlError("a key must be text", mark)
        elif value in parent:
            raise YamlError(f"{self._quoted('key', value)} appears twice", mark)
        else:
            self.keys[-1] = value

    def _quoted(self, what: str, text: str) -> str:
        is_profile = isinstance(self.root, dict) and type(self.root.get("schema")) is int
        return f"{what} {text[:60]!r}" if is_profile else what


def _scalar(event: Any) -> str | int | float | bool | None:
    """Return what a scalar means; ValueError, which says why, for one that means nothing here."""
    value: str = event.value
    if not event.implicit[0] or len(value) > MAX_NUMBER_LENGTH:  # quoted; or too long for anything but text
        return value
    return _plain_scalar(value)


@lru_cache(maxsize=4096)  # most are keys and names, the same in every row: a third of the time of reading
def _plain_scalar(value: str) -> str | int | float | bool | None:
    tag = str(_resolver.resolve(yaml.ScalarNode, value, (True, False))).removeprefix(_TAG)
    if tag == "str":
        return value
    if tag == "null":
        return None
    node = yaml.ScalarNode(_TAG + tag, value)
    try:
        if tag == "bool":
            return bool(_constructor.construct_yaml_bool(node))
        if tag == "int":
            return int(_constructor.construct_yaml_int(node))
        if tag == "float":
            return float(_constructor.construct_yaml_float(node))
    except (ValueError, IndexError, OverflowError):
        raise ValueError("is not a number") from None
    raise ValueError(f"has a meaning of its own in YAML ({tag}); put it in quotes")


class Quoted(str):
    """Text that is always written in quotes, such as a version, which would read as a number."""

    __slots__ = ()


LINE_WIDTH = 120


class _Dumper(_BaseDumper):  # type: ignore[misc]
    """Dumper of short collections of scalars on one line and everything else one entry a line; never an alias."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> Any:
        node = super().represent_mapping(tag, mapping, flow_style)
        node.flow_style = _fits_a_line([leaf for pair in node.value for leaf in pair])
        return node

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> Any:
        node = super().represent_sequence(tag, sequence, flow_style)
        node.flow_style = _fits_a_line(node.value)
        return node


def _fits_a_line(leaves: list[Any]) -> bool:
    scalars = all(isinstance(leaf, yaml.ScalarNode) for leaf in leaves)
    return scalars and sum(len(leaf.value) + 2 for leaf in leaves) <= LINE_WIDTH - 20


def _represent_quoted(dumper: Any, text: Quoted) -> Any:
    return dumper.represent_scalar(f"{_TAG}str", str(text), style='"')


_Dumper.add_representer(Quoted, _represent_quoted)


def write_yaml(content: object) -> str:
    """Return ``content`` (dict, list and scalars) as text that ``read_yaml`` reads back equal."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=LINE_WIDTH)

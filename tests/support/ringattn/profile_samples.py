"""A profile with something in every field, as it is, as text and as YAML data, and ways to spoil it."""

from __future__ import annotations

import copy
from typing import Any

import yaml
from hypothesis import strategies as st
from machine_samples import rich_profile

from ringattn.errors import ProfileError
from ringattn.profile import strict_yaml as yaml_strict
from ringattn.profile.schema import Policy
from ringattn.profile.yaml_io import checksum_of, dump_profile
from ringattn.workload import INPUT_DTYPES

RICH = rich_profile()
RICH_TEXT = dump_profile(RICH)
POLICY = Policy(tuple((name, name) for name in INPUT_DTYPES), ("flash", "math"), ("math",), 8)
PLAIN = yaml.safe_load(RICH_TEXT)

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def resealed(plain: dict[str, Any]) -> str:
    """As YAML with a checksum that fits, where one can be computed."""
    content = {key: value for key, value in plain.items() if key != "checksum"}
    try:
        seal = checksum_of(yaml_strict.read_yaml(yaml_strict.write_yaml(content)))  # type: ignore[arg-type]
    except ValueError:  # NaN has no canonical JSON
        seal = "sha256:0"
    return yaml_strict.write_yaml({**content, "checksum": seal})


def mutated(path: tuple[Any, ...], change: str, value: Any) -> dict[str, Any]:
    plain = copy.deepcopy(PLAIN)
    parent: Any = plain
    for step in path[:-1]:
        parent = parent[step]
    if change == "delete":
        del parent[path[-1]]
    elif change == "add" and isinstance(parent, dict):
        parent["surplus"] = value
    else:
        parent[path[-1]] = value
    return plain


def assert_one_line(error: ProfileError, source: str) -> None:
    message = str(error)
    assert message.startswith(source + ": ")
    assert message.isprintable(), message
    assert len(message) < 600

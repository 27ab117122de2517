"""Profile files: whatever is written is read back equal, and nothing else is read at all."""

from __future__ import annotations

import copy
import errno
import json
import os
import resource
import stat
import string
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from machine_samples import EPYC, EVIDENCE, H100, dense_entry, measured, rich_profile

from ringattn import profile_io, yaml_strict
from ringattn.errors import InputError, ProfileError
from ringattn.profile import (
    MESSAGE_LIMIT,
    Choice,
    Evidence,
    Failure,
    Fingerprint,
    LinkSpeed,
    PlanEntry,
    Policy,
    Profile,
    Provenance,
    shareable_text,
)
from ringattn.profile_io import MAX_FILE_BYTES, checksum_of, dump_profile, load_profile, parse_profile, save_profile
from ringattn.workload import (
    CHECKPOINTS,
    COMPUTE_DTYPES,
    GATHERS,
    INPUT_DTYPES,
    POOL_STRATEGIES,
    BranchTunables,
    Pattern,
    Tunables,
    Workload,
    not_narrower,
)

RICH = rich_profile()
RICH_TEXT = dump_profile(RICH)
POLICY = Policy(tuple((name, name) for name in INPUT_DTYPES), ("flash", "math"), ("math",), 8)

# --- strategies -------------------------------------------------------------------------------------------------

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
names = st.text(st.sampled_from(string.ascii_lowercase + string.digits + ".-_"), min_size=1, max_size=12)
positive = st.integers(1, 1 << 20)
amounts = st.floats(0, 1e12, allow_nan=False)


@st.composite
def evidences(draw: st.DrawFn) -> Evidence:
    low, high = sorted((draw(amounts), draw(amounts)))
    return Evidence(
        *(draw(amounts), draw(amounts), low, high),
        peak_bytes=draw(st.integers(0, 1 << 45)),
        error=draw(amounts),
        first_call_ms=draw(amounts),
        host_us=draw(amounts),
        blocks=draw(st.integers(0, 999)),
    )


@st.composite
def choices(draw: st.DrawFn, branches: int) -> Choice:
    params = draw(st.dictionaries(text, st.integers(-9, 1 << 40) | st.booleans() | text, max_size=3))
    tunables = Tunables(
        dtype=draw(st.sampled_from(COMPUTE_DTYPES)),
        branches=tuple(
            BranchTunables(draw(names), draw(names | st.just("")), draw(st.sampled_from(GATHERS)))
            for _ in range(branches)
        ),
        checkpoint=draw(st.sampled_from(CHECKPOINTS)),
        window_tokens=draw(st.none() | positive),
        pattern_cache=draw(st.booleans()),
        pool_threshold_mib=draw(st.none() | st.integers(0, 4096)),
        pool_strategy=draw(st.sampled_from(POOL_STRATEGIES)),
        compile=draw(st.booleans()),
        params=tuple(sorted(params.items())),
    )
    return Choice(tunables, draw(st.none() | evidences()))


@st.composite
def patterns(draw: st.DrawFn) -> Pattern:
    offset = draw(st.sampled_from(["interleaved", "blocked"]))
    branches = draw(st.lists(st.tuples(positive, positive), max_size=3))
    if not branches:
        return Pattern((), offset)
    return Pattern.of([w for w, _ in branches], [r for _, r in branches], offset)


@st.composite
def entries(draw: st.DrawFn) -> PlanEntry:
    kv_heads = draw(st.integers(1, 8))
    workload = Workload(
        mode=draw(st.sampled_from(["train", "infer"])),
        causal=draw(st.booleans()),
        seq_len=draw(positive),
        heads=kv_heads * draw(st.integers(1, 8)),
        head_dim=draw(positive),
        dtype=draw(st.sampled_from(INPUT_DTYPES)),
        kv_heads=kv_heads,
        batch=draw(positive),
        pattern=draw(patterns()),
        world=draw(st.integers(1, 8)),
    )
    branches = max(1, len(workload.pattern.branches))
    failures = st.builds(Failure, text, st.sampled_from(["oom", "wrong", "timeout"]), text)
    kept = tuple(draw(st.lists(failures, max_size=2)))
    if draw(st.booleans()):
        return PlanEntry(workload, refusal=draw(text.filter(bool)), failures=kept)
    one = choices(branches)
    return PlanEntry(
        workload,
        draw(one),
        runners_up=tuple(draw(st.lists(one, max_size=2))),
        auto=draw(st.none() | one),
        front=tuple(draw(st.lists(one, max_size=2))),
        default=draw(st.none() | one),
        failures=kept,
    )


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    dtypes = tuple((name, draw(st.sampled_from(not_narrower(name)))) for name in INPUT_DTYPES)
    kernels = st.lists(names.filter(lambda name: name != "math"), max_size=3, unique=True)
    forward, backward = ((*draw(kernels), "math") for _ in range(2))
    return Policy(dtypes, forward, backward, draw(st.integers(2, 64)))


versions = st.dictionaries(text, text, max_size=4).map(lambda pairs: tuple(sorted(pairs.items())))
provenances = st.builds(
    Provenance,
    tool_version=text,
    date=st.just("") | st.dates().map(str),
    effort=text,
    budget_s=st.none() | amounts,
    elapsed_s=st.none() | amounts,
    seed=st.none() | st.integers(),
    notes=st.lists(text, max_size=2).map(tuple),
)
counts = st.integers(0, 1 << 30)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    known = draw(st.booleans())
    some = text.filter(bool) if known else text
    fingerprint = Fingerprint(
        vendor=draw(st.sampled_from(["nvidia", "cpu"])),
        device_name=draw(some),
        sku=draw(some),
        arch=draw(some),
        sm_count=draw(positive if known else counts),
        memory_mib=draw(positive if known else counts),
        l2_mib=draw(counts),
        mig=draw(text),
        power_limit_w=draw(st.none() | counts),
        device_count=draw(positive),
        link=draw(text),
        isa=tuple(draw(st.lists(text, max_size=3))),
        threads=draw(counts),
    )
    software, provenance = draw(versions), draw(provenances)
    if not known:
        return Profile("heuristic", fingerprint, software, draw(policies()), provenance=provenance)
    plans = draw(st.lists(entries(), max_size=3, unique_by=lambda entry: entry.workload))
    return Profile("measured", fingerprint, software, draw(st.none() | policies()), tuple(plans), provenance)


# --- round trip -------------------------------------------------------------------------------------------------


@given(profiles())
@example(RICH)
def test_what_is_dumped_loads_equal(profile: Profile) -> None:
    dumped = dump_profile(profile)
    loaded = parse_profile(dumped, "p.yaml")
    assert loaded == profile
    assert hash(loaded) == hash(profile)
    assert dump_profile(loaded) == dumped


@given(profiles())
@settings(max_examples=15)
def test_the_parser_without_c_reads_the_same(profile: Profile) -> None:
    dumped = dump_profile(profile)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml_strict, "_Loader", yaml.SafeLoader)
        assert parse_profile(dumped, "p.yaml") == profile


def test_a_dump_is_what_safe_load_reads_and_people_can() -> None:
    plain = yaml.safe_load(RICH_TEXT)
    assert plain["schema"] == 1
    assert plain["software"]["cuda"] == "13.0"
    assert 'cuda: "13.0"' in RICH_TEXT
    assert "- {forward: cudnn, backward: cudnn, gather: view}" in RICH_TEXT
    assert "segment_lengths: [2048, 8192]" in RICH_TEXT
    assert [*plain][:: len(plain) - 1] == ["schema", "checksum"]
    assert max(len(line) for line in RICH_TEXT.splitlines()) <= 140


def test_every_tunable_is_written_so_that_a_later_default_changes_no_old_profile() -> None:
    plain = yaml.safe_load(dump_profile(measured(H100, dense_entry())))
    written = plain["plans"][0]["choice"]["tunables"]
    assert written["checkpoint"] == "selective"
    assert written["compile"] is False
    assert written["pattern_cache"] is True
    assert written["schedule"] == "local"


def test_comments_and_layout_are_free() -> None:
    lines = ["# by hand", *RICH_TEXT.splitlines(), "", "# the end"]
    assert parse_profile("\n\n".join(lines), "p.yaml") == RICH
    assert parse_profile(json.dumps(yaml.safe_load(RICH_TEXT)), "p.yaml") == RICH  # JSON is YAML


def test_single_is_a_profile_of_one_plan() -> None:
    entry = dense_entry()
    assert entry.choice is not None
    profile = Profile.single(H100, entry.workload, entry.choice.tunables)
    assert profile.plans == (PlanEntry(entry.workload, Choice(entry.choice.tunables)),)
    assert profile.fingerprint == Fingerprint.of(H100)
    assert profile.software == H100.software
    assert parse_profile(dump_profile(profile), "p") == profile


LINKS = (LinkSpeed(2, 1, 270.5, 21.0), LinkSpeed(16, 2, 24.25, 44.0))


def with_links(*speeds: LinkSpeed) -> Profile:
    return replace(RICH, fingerprint=replace(RICH.fingerprint, link_speeds=speeds))


def test_link_speeds_are_kept_and_tell_no_two_machines_apart() -> None:
    profile = parse_profile(dump_profile(with_links(*LINKS)), "p")
    assert profile.fingerprint.link_speeds == LINKS
    assert profile.fingerprint == RICH.fingerprint  # readings, never twice the same
    assert "link_speeds" not in dump_profile(RICH)  # nothing is written of what was not measured


@pytest.mark.parametrize(
    ("changes", "key", "told"),
    [
        ({"world": 1}, "fingerprint.link_speeds[0].world", "is 1"),
        ({"hosts": 3}, "fingerprint.link_speeds[0].hosts", "from 1 to world, 2"),
        ({"ring_gb_s": 0.0}, "fingerprint.link_speeds[0].ring_gb_s", "finite number > 0"),
        ({"latency_us": "fast"}, "fingerprint.link_speeds[0].latency_us", "must be a number"),
        ({"ring_GBps": 2.0}, "fingerprint.link_speeds[0].ring_GBps", "not a known key"),
    ],
)
def test_link_speeds_are_read_strictly(changes: dict[str, object], key: str, told: str) -> None:
    plain = yaml.safe_load(dump_profile(with_links(*LINKS)))
    plain["fingerprint"]["link_speeds"][0] |= changes
    with pytest.raises(ProfileError, match=told) as caught:
        parse_profile(resealed(plain), "p")
    assert caught.value.key == key


def test_each_number_of_ranks_has_one_link_speed() -> None:
    with pytest.raises(InputError, match=r"link_speeds holds worlds \[2, 2\]"):
        with_links(LINKS[0], LINKS[0])


def test_profiles_are_frozen_and_hashable() -> None:
    with pytest.raises(FrozenInstanceError):
        RICH.schema = 2  # type: ignore[misc]
    assert len({RICH, rich_profile()}) == 1


# --- mutations --------------------------------------------------------------------------------------------------


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in YAML data."""
    if path:
        yield path
    items: Any = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


PLAIN = yaml.safe_load(RICH_TEXT)
PLACES = list(places(PLAIN))
junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2),
    max_leaves=4,
)


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


@given(st.sampled_from(PLACES), st.sampled_from(["replace", "delete", "add"]), junk)
@settings(max_examples=100)
def test_a_mutated_profile_loads_equal_or_is_refused(path: tuple[Any, ...], change: str, value: Any) -> None:
    plain = mutated(path, change, value)
    try:
        loaded = parse_profile(yaml_strict.write_yaml(plain), "p.yaml")
    except ProfileError as error:
        assert_one_line(error, "p.yaml")
    else:
        assert loaded == RICH


@given(st.sampled_from(PLACES), st.sampled_from(["replace", "delete", "add"]), junk)
@settings(max_examples=100)
def test_a_mutated_profile_with_a_fitting_checksum_is_still_a_profile_or_refused(
    path: tuple[Any, ...], change: str, value: Any
) -> None:
    try:
        loaded = parse_profile(resealed(mutated(path, change, value)), "p.yaml")
    except ProfileError as error:
        assert_one_line(error, "p.yaml")
    else:
        assert parse_profile(dump_profile(loaded), "p.yaml") == loaded


@given(
    st.integers(0, len(RICH_TEXT)),
    st.integers(0, 3),
    st.text(max_size=3) | st.sampled_from("\t\n:-[]{}&*!#'\"%@,?|>\0"),
)
@settings(max_examples=100)
def test_a_mutated_text_loads_equal_or_is_refused(start: int, removed: int, inserted: str) -> None:
    content = RICH_TEXT[:start] + inserted + RICH_TEXT[start + removed :]
    try:
        loaded = parse_profile(content, "p.yaml")
    except ProfileError as error:
        assert_one_line(error, "p.yaml")
    else:
        assert loaded == RICH


@given(st.integers(0, len(RICH_TEXT.encode()) - 1))
@settings(max_examples=60)
def test_a_truncated_file_is_refused(length: int) -> None:
    content = RICH_TEXT.encode()[:length]
    if content.rstrip() == RICH_TEXT.encode().rstrip():
        return
    with pytest.raises(ProfileError):
        parse_profile(content, "p.yaml")


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_in_one_line(content: bytes) -> None:
    with pytest.raises(ProfileError) as caught:
        parse_profile(content, "p.yaml")
    assert_one_line(caught.value, "p.yaml")


def assert_one_line(error: ProfileError, source: str) -> None:
    message = str(error)
    assert message.startswith(source + ": ")
    assert message.isprintable(), message
    assert len(message) < 600


# --- faults, each by its key path -------------------------------------------------------------------------------


def at(path: str, value: Any) -> dict[str, Any]:
    """The rich profile with ``value`` at a dotted path; numbers index lists."""
    steps = [int(step) if step.isdigit() else step for step in path.split("/")]
    return mutated(tuple(steps), "replace", value)


MEDIAN = "plans/0/choice/evidence/median_ms"
FAULTS = [
    ("schema", 2, "schema", "is 2, and this version reads 1"),
    ("schema", "1", "schema", "must be an integer"),
    ("schema", True, "schema", "is True; it must be an integer"),
    ("source", "guessed", "source", "one of measured, heuristic"),
    ("surplus", 1, "surplus", "not a known key"),
    ("polcy", None, "polcy", "is it policy?"),
    ("fingerprint", [], "fingerprint", "is a list; it must be a mapping"),
    ("fingerprint/vendor", "amd", "fingerprint.vendor", "use one of nvidia, cpu"),
    ("fingerprint/sm_count", True, "fingerprint.sm_count", "is True; it must be an integer"),
    ("fingerprint/sm_count", -1, "fingerprint.sm_count", ">= 0"),
    ("fingerprint/sm_count", 132.0, "fingerprint.sm_count", "must be an integer"),
    ("fingerprint/memory_mib", "80G", "fingerprint.memory_mib", "is '80G'"),
    ("fingerprint/device_count", 0, "fingerprint.device_count", ">= 1"),
    ("fingerprint/isa", "avx2", "fingerprint.isa", "must be a list"),
    ("fingerprint/isa", [1], "fingerprint.isa[0]", "must be text"),
    ("fingerprint/sku", "", "fingerprint", "has no sku"),
    ("fingerprint/host", "node7", "fingerprint.host", "not a known key"),
    ("software/torch", 2.13, "software.torch", "is 2.13; it must be text"),
    ("software", None, "software", "is nothing; it must be a mapping"),
    ("provenance/date", "yesterday", "provenance.date", "YYYY-MM-DD"),
    ("provenance/budget_s", -1.0, "provenance.budget_s", ">= 0"),
    ("provenance/notes", {}, "provenance.notes", "must be a list"),
    ("plans", {}, "plans", "must be a list"),
    ("plans/0", 7, "plans[0]", "must be a mapping"),
    ("plans/0/workload/mode", "both", "plans[0].workload.mode", "one of train, infer"),
    ("plans/0/workload/causal", 1, "plans[0].workload.causal", "true or false"),
    ("plans/0/workload/heads", 17, "plans[0].workload.heads", "not a multiple"),
    ("plans/0/workload/seq_len", 0, "plans[0].workload.seq_len", ">= 1"),
    ("plans/0/workload/pattern", "sparse", "plans[0].workload.pattern", "`dense`"),
    ("plans/0/workload/pattern/segment_lengths", [1], "plans[0].workload.pattern.segment_lengths", "has 1 entry"),
    ("plans/0/workload/pattern/dilation_rates", [1, 0], "plans[0].workload.pattern.dilation_rates", "holds 0"),
    ("plans/0/workload/pattern/offset", "blocked", "plans[0].workload.pattern.offset", "not a known key"),
    ("plans/0/choice", None, "plans[0].refusal", "must say why"),
    ("plans/1/refusal", "", "plans[1].refusal", "must say why"),
    ("plans/0/choice/tunables/dtype", "fp8", "plans[0].choice.tunables.dtype", "use one of"),
    ("plans/0/choice/tunables/branches", [], "plans[0].choice.tunables.branches", "is empty"),
    ("plans/0/auto/tunables/branches", [{"forward": "math"}], "plans[0].auto", "1 branch"),
    ("plans/0/choice/tunables/params", {"a.b": 1.5}, "plans[0].choice.tunables.params.a.b", "one of int, bool, str"),
    ("plans/0/choice/tunables/window_tokens", 0, "plans[0].choice.tunables.window_tokens", ">= 1"),
    (MEDIAN, -0.5, "plans[0].choice.evidence.median_ms", "finite number >= 0"),
    (MEDIAN, float("nan"), "plans[0].choice.evidence.median_ms", "is nan; it must be a finite number"),
    (MEDIAN, float("inf"), "plans[0].choice.evidence.median_ms", "is inf; it must be a finite number"),
    (MEDIAN, "fast", "plans[0].choice.evidence.median_ms", "must be a number"),
    (MEDIAN, True, "plans[0].choice.evidence.median_ms", "is True; it must be a number"),
    (MEDIAN, None, "plans[0].choice.evidence.median_ms", "is nothing"),
    ("plans/0/choice/evidence/ratio_low", 0.9, "plans[0].choice.evidence.ratio_low", "above ratio_high"),
    ("plans/0/failures/0/kind", "bored", "plans[0].failures[0].kind", "one of oom"),
    ("plans/0/runners_up", [PLAIN["plans"][0]["choice"]] * 3, "plans[0].runners_up", "at most 2"),
    ("plans/1", PLAIN["plans"][0], "plans", "more than once"),
    ("plans/0/workload/a\nb", 1, "plans[0].workload.'a\\nb'", "not a known key"),
    ("checksum", 5, "checksum", "must be text"),
    ("checksum", "sha256:0", "checksum", "does not match the content"),
]


@pytest.mark.parametrize(("path", "value", "key", "message"), FAULTS)
def test_fault_names_file_key_and_reason(tmp_path: Path, path: str, value: Any, key: str, message: str) -> None:
    plain = at(path, value)
    file = tmp_path / "p.yaml"
    file.write_text(yaml_strict.write_yaml(plain) if path == "checksum" else resealed(plain))
    with pytest.raises(ProfileError) as caught:
        load_profile(file)
    assert caught.value.key == key
    assert message in str(caught.value)
    assert_one_line(caught.value, f"{file}: {key}")


@pytest.mark.parametrize(
    "path", ["schema", "source", "fingerprint", "fingerprint/vendor", "plans/0/workload", MEDIAN, "checksum"]
)
def test_a_missing_key_is_named(path: str) -> None:
    steps = tuple(int(step) if step.isdigit() else step for step in path.split("/"))
    plain = mutated(steps, "delete", None)
    content = yaml_strict.write_yaml(plain) if path == "checksum" else resealed(plain)
    with pytest.raises(ProfileError, match="is missing") as caught:
        parse_profile(content, "p.yaml")
    assert caught.value.key == path.replace("/0/", "[0].").replace("/", ".")


def test_another_schema_names_the_remedy() -> None:
    with pytest.raises(ProfileError, match=r"schema: is 2.*`ringtune probe`.*the ringtune that wrote it"):
        parse_profile("schema: 2\nall_new: true\n", "p.yaml")


def test_an_edit_is_noticed_and_the_message_tells_how_to_mean_it() -> None:
    edited = RICH_TEXT.replace("median_ms: 1.25", "median_ms: 0.25")
    with pytest.raises(ProfileError, match="damaged or edited") as caught:
        parse_profile(edited, "p.yaml")
    meant = str(caught.value).split("put ")[1].split(" here")[0]
    old = RICH_TEXT.strip().rsplit(" ", 1)[1]
    assert parse_profile(edited.replace(old, meant), "p.yaml") != RICH


# --- hostile files ----------------------------------------------------------------------------------------------

ALIAS_BOMB = "a: &a [x, x]\n" + "\n".join(f"{new}: &{new} [*{old}, *{old}]" for old, new in pairwise("abcdefghij"))
HOSTILE = {
    "alias bomb": (ALIAS_BOMB, "anchors"),
    "alias": ("schema: *one", "alias"),
    "anchor": ("schema: &one 1", "anchors"),
    "merge key": ("schema: 1\n<<: {source: measured}", "meaning of its own"),
    "object tag": ("schema: !!python/object/apply:os.system ['true']", "tags"),
    "object tag as root": ("!!python/object:os.path {}", "tags"),
    "name tag": ("schema: !!python/name:os.system ''", "tags"),
    "standard tag": ("schema: !!int 1", "tags"),
    "local tag": ("!profile\nschema: 1", "tags"),
    "binary": ("schema: !!binary aGk=", "tags"),
    "two equal keys": ("schema: 1\nschema: 1", "line 2: key 'schema' appears twice"),
    "equal keys deep down": ("schema: 1\nplans: [{a: 1, b: 2, a: 1}]", "appears twice"),
    "key that is no text": ("schema: 1\n2: x", "a key must be text"),
    "key that is a list": ("? [a]\n: 1", "a key must be text"),
    "two documents": ("schema: 1\n---\nschema: 1", "second document"),
    "date": ("schema: 2026-11-27", "put it in quotes"),
    "deep lists": ("[" * 100_000, "nest"),
    "deep mappings": ("{a: " * 100_000, "nest"),
    "deep blocks": ("\n".join(" " * depth + "a:" for depth in range(500)), "nest"),
    "deep dashes": ("- " * 100_000, "nest"),
    "many values": ("[" + "1," * 1_000_000 + "]", "more than 200000 values"),
    "long number": ("schema: " + "9" * 5000, "must be an integer"),
    "base 60": ("schema: 1" + ":59" * 100_000, "must be an integer"),
    "no number": ("schema: 0b_", "is not a number"),
    "not yaml": ("schema: [1", "not valid YAML"),
    "tab": ("schema:\n\t- 1", "not valid YAML"),
    "control character": ("schema: \x01", "not valid YAML"),
    "escaped surrogate": ('schema: "\\ud800"', "not valid YAML|must be an integer"),
    "empty": ("", "empty"),
    "only a comment": ("# nothing\n", "empty"),
    "a scalar": ("hello", "is a mapping"),
    "a list": ("- schema: 1", "is a mapping"),
    "null": ("~", "is a mapping"),
}


@pytest.mark.parametrize("loader", [getattr(yaml, "CSafeLoader", yaml.SafeLoader), yaml.SafeLoader])
@pytest.mark.parametrize(("content", "message"), HOSTILE.values(), ids=HOSTILE)
@pytest.mark.timeout(10)
def test_hostile_text_is_refused(monkeypatch: pytest.MonkeyPatch, loader: Any, content: str, message: str) -> None:
    if loader is yaml.SafeLoader and len(content) > 1_000_000:
        pytest.skip("the same bound, with a parser that takes seconds to get there")
    monkeypatch.setattr(yaml_strict, "_Loader", loader)
    with pytest.raises(ProfileError, match=message) as caught:
        parse_profile(content, "p.yaml")
    assert_one_line(caught.value, "p.yaml")


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "huge.yaml"
    with file.open("wb") as sparse:
        sparse.truncate(100 * 2**20)
    monkeypatch.setattr(Path, "open", None)
    with pytest.raises(ProfileError, match=f"has 104857600 bytes; a profile has at most {MAX_FILE_BYTES}"):
        load_profile(file)


def test_a_file_that_grows_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "p.yaml"
    file.write_bytes(b" " * (MAX_FILE_BYTES + 1))
    small = os.stat_result((stat.S_IFREG, 0, 0, 1, 0, 0, 10, 0, 0, 0))
    monkeypatch.setattr(Path, "stat", lambda self: small)
    with pytest.raises(ProfileError, match="more than"):
        load_profile(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe" + RICH_TEXT.encode("utf-16-le"), r"not UTF-8 text \(byte 0\)"),
        (RICH_TEXT.replace("clocks", "cl\u00f6cks").encode("latin-1"), "not UTF-8 text"),
        (b"\x00" * 64, "not valid YAML"),
    ],
)
def test_what_is_not_utf8_text_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "p.yaml"
    file.write_bytes(content)
    with pytest.raises(ProfileError, match=message):
        load_profile(file)


def test_paths_that_are_no_profile(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, message in [("", "is a directory"), ("none.yaml", "no such file"), ("pipe", "not a regular file")]:
        with pytest.raises(ProfileError, match=message) as caught:
            load_profile(tmp_path / name)
        assert_one_line(caught.value, str(tmp_path / name))
        assert str(caught.value).count(str(tmp_path)) == 1
    for path in (tmp_path / "none.yaml" / "p.yaml", "nul\0l.yaml", tmp_path / ("x" * 300)):
        with pytest.raises(ProfileError):
            load_profile(path)


# --- writing ----------------------------------------------------------------------------------------------------


def test_save_then_load(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "folder" / "p.yaml"
    save_profile(RICH, file)
    assert load_profile(file) == RICH
    assert file.read_text() == RICH_TEXT
    assert [path.name for path in file.parent.iterdir()] == ["p.yaml"]


def test_save_leaves_the_permissions_to_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        save_profile(RICH, tmp_path / "p.yaml")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "p.yaml").stat().st_mode) == 0o644


def test_save_goes_through_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    link = tmp_path / "p.yaml"
    link.symlink_to(tmp_path / "shared" / "real.yaml")
    save_profile(RICH, link)
    assert link.is_symlink()
    assert load_profile(tmp_path / "shared" / "real.yaml") == RICH


def test_save_is_on_the_disk_before_it_takes_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    sync, put = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (steps.append("fsync"), sync(descriptor))[1])
    monkeypatch.setattr(Path, "replace", lambda self, target: (steps.append("replace"), put(self, target))[1])
    save_profile(RICH, tmp_path / "p.yaml")
    assert steps == ["fsync", "replace", "fsync"]


OLD = b"the old profile"


def fail_with(error: BaseException) -> Any:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    ("owner", "function", "code"),
    [
        (os, "open", errno.EROFS),
        (os, "open", errno.EACCES),
        (os, "fsync", errno.ENOSPC),
        (os, "fsync", errno.EIO),
        (Path, "replace", errno.EACCES),
    ],
)
def test_a_failed_save_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, function: str, code: int
) -> None:
    file = tmp_path / "p.yaml"
    file.write_bytes(OLD)
    with monkeypatch.context() as patch:
        patch.setattr(owner, function, fail_with(OSError(code, os.strerror(code))))
        with pytest.raises(ProfileError, match=f"cannot be written: {os.strerror(code)}") as caught:
            save_profile(RICH, file)
    assert_one_line(caught.value, str(file))
    assert file.read_bytes() == OLD
    assert list(tmp_path.iterdir()) == [file]


def test_a_write_cut_short_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_bytes(OLD)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # as a disk with 100 bytes left
    try:
        with pytest.raises(ProfileError, match="cannot be written"):
            save_profile(RICH, file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.read_bytes() == OLD
    assert list(tmp_path.iterdir()) == [file]


def test_an_interrupted_save_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "p.yaml"
    file.write_bytes(OLD)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_with(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            save_profile(RICH, file)
    assert file.read_bytes() == OLD
    assert list(tmp_path.iterdir()) == [file]


def test_save_refuses_places_that_cannot_hold_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(OLD)
    with pytest.raises(ProfileError, match="is a directory"):
        save_profile(RICH, tmp_path)
    with pytest.raises(ProfileError, match="cannot be written"):
        save_profile(RICH, tmp_path / "file" / "p.yaml")
    assert (tmp_path / "file").read_bytes() == OLD


def test_save_never_replaces_a_pipe_or_device(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(ProfileError, match="not a regular file"):
            save_profile(RICH, tmp_path / name)
    assert stat.S_ISFIFO((tmp_path / "pipe").lstat().st_mode)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe"]


def test_what_could_not_be_read_back_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_io, "MAX_FILE_BYTES", 100)
    with pytest.raises(ProfileError, match="above the limit of 100"):
        save_profile(RICH, tmp_path / "p.yaml")
    wrong = replace(EVIDENCE, peak_bytes=1.5)  # type: ignore[arg-type]
    entry = dense_entry()
    assert entry.choice is not None
    broken = measured(H100, replace(entry, choice=replace(entry.choice, evidence=wrong)))
    with pytest.raises(ProfileError, match=r"plans\[0\].choice.evidence.peak_bytes: is 1.5; it must be an integer"):
        save_profile(broken, tmp_path / "p.yaml")
    with pytest.raises(ProfileError, match="lone surrogates"):
        save_profile(replace(RICH, fingerprint=replace(RICH.fingerprint, device_name="\ud800")), tmp_path / "p.yaml")
    assert list(tmp_path.iterdir()) == []


# --- the dataclasses themselves ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [("median_ms", float("nan")), ("error", float("inf")), ("host_us", -1.0), ("peak_bytes", -1), ("blocks", -1)],
)
def test_evidence_is_finite_and_not_negative(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{name} is"):
        replace(EVIDENCE, **{name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forward": ("flash",)}, "end in math"),
        ({"forward": ()}, "end in math"),
        ({"backward": ("math", "flash")}, "end in math"),
        ({"backward": ("flash", "flash", "math")}, "once"),
        ({"copy_from_rate": 1}, "copy_from_rate"),
        ({"compute_dtype": (("bf16", "bf16"),)}, "must map each of"),
        ({"compute_dtype": tuple((n, "bf16" if n == "fp32" else n) for n in INPUT_DTYPES)}, "maps fp32 to 'bf16'"),
        ({"compute_dtype": tuple((n, "fp16" if n == "bf16" else n) for n in INPUT_DTYPES)}, "maps bf16 to 'fp16'"),
    ],
)
def test_policies_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(POLICY, **changes)


def test_policy_answers() -> None:
    policy = Policy(tuple((n, "fp32" if n == "bf16" else n) for n in INPUT_DTYPES), ("flash", "math"), ("math",), 8)
    assert [policy.dtype_for(name) for name in INPUT_DTYPES] == ["fp32", "fp16", "fp32", "fp64"]
    assert policy.kernels_for("forward", "fp16") == ("flash", "math")
    assert policy.kernels_for("backward", "fp16") == ("math",)
    assert policy.kernels_for("forward", "fp64") == ("math",)
    assert [policy.gather_for(rate) for rate in (1, 7, 8, 16)] == ["view", "view", "copy", "copy"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": None, "source": "heuristic", "plans": ()}, "policy is missing"),
        ({"policy": POLICY, "source": "heuristic"}, "plans holds entries"),
        ({"schema": 3}, "schema is 3"),
        ({"source": "dreamt"}, "source is 'dreamt'"),
        ({"plans": (dense_entry(), dense_entry(kernel="math"))}, "more than once"),
        ({"fingerprint": Fingerprint("cpu")}, "has no device_name"),
    ],
)
def test_profiles_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(RICH, **changes)


# --- nothing about people or places -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "shared"),
    [
        ('File "/home/alice/src/x.py", line 3', 'File "~/src/x.py", line 3'),
        ("cannot open /opt/venv/lib/python3.11/site-packages/torch/nn.py: gone", "cannot open nn.py: gone"),
        ("no such folder: /home/alice", "no such folder: ~"),
        (r"at C:\Users\alice\x.py:7", r"at ~\x.py:7"),
        ("two\nlines\t and   spaces ", "two lines and spaces"),
        ("12 ms/call, B/S/H, 3 / 4, a/b", "12 ms/call, B/S/H, 3 / 4, a/b"),
        ("see https://example.org/a/b", "see https://example.org/a/b"),
        ("half a pair \ud800", "half a pair ?"),
        ("x" * 1000, "x" * MESSAGE_LIMIT),
    ],
)
def test_shareable_text(raw: str, shared: str) -> None:
    assert shareable_text(raw) == shared
    assert Failure("c", "error", raw).message == shared
    assert Provenance(notes=(raw,)).notes == (shared,)


@given(st.text(st.sampled_from("/\\~ab:C. \n'\"-"), max_size=40) | st.text(max_size=40))
def test_shareable_text_is_idempotent(raw: str) -> None:
    assert shareable_text(shareable_text(raw)) == shareable_text(raw)


def test_a_profile_of_this_machine_names_no_host_user_or_path(tmp_path: Path) -> None:
    dumped = dump_profile(measured(EPYC, dense_entry()))
    assert "/" not in dumped
    for private in (os.uname().nodename, str(Path.home()), str(tmp_path)):
        assert private not in dumped

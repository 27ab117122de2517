"""What a person may get wrong in a profile: the message names the file, the key and the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from profile_samples import PLAIN, RICH, RICH_TEXT, assert_one_line, mutated, resealed

from ringattn.errors import ProfileError
from ringattn.profile import strict_yaml as yaml_strict
from ringattn.profile.yaml_io import load_profile, parse_profile


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
    with pytest.raises(ProfileError, match=r"schema: is 2.*`ringtune probe --fresh --output FILE`, or use .*"):
        parse_profile("schema: 2\nall_new: true\n", "p.yaml")


def test_an_edit_is_noticed_and_the_message_tells_how_to_mean_it() -> None:
    edited = RICH_TEXT.replace("median_ms: 1.25", "median_ms: 0.25")
    with pytest.raises(ProfileError, match="edited; write it anew with `ringtune probe --fresh ") as caught:
        parse_profile(edited, "p.yaml")
    meant = str(caught.value).split(", put ")[1].split(" here")[0]
    old = RICH_TEXT.strip().rsplit(" ", 1)[1]
    assert parse_profile(edited.replace(old, meant), "p.yaml") != RICH

"""The report and the terminal summary: the right numbers, everything escaped, and a page that works in a browser."""

from __future__ import annotations

import dataclasses
import io
import math
import os
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from browser import Page, chromium, headless_page
from report_samples import cpu_profile, evidence, gpu_profile, heuristic_profile, plan
from rich.console import Console

from autotune.cli.probing.probe import probe as probe_command
from autotune.cli.profile.report import names_apart
from autotune.display_text import escape, format_bytes, format_duration, format_length, format_ms, plain
from autotune.journal.history import SearchHistory, TimedTrial
from autotune.report.pages import page as page_module
from autotune.report.pages.charts import SERIES, Bar, bar_chart, color_class, history_chart
from autotune.report.pages.comparison import comparison_page
from autotune.report.pages.page import html_report, uncovered
from autotune.report.summary import (
    Family,
    Rates,
    Speedup,
    failure_groups,
    families,
    first_call_text,
    headline,
    machine_title,
    other_plans,
    provenance_line,
    recorded_choices,
    relative_time,
    ruled_out,
    series_of,
    single_backends,
    sole_kernel,
    verdict,
    waiting_host_ms,
)
from autotune.report.terminal import terminal_summary
from ringattn.errors import KernelReason
from ringattn.kernels.registry import KERNELS
from ringattn.profile.row_origin import RowOrigin
from ringattn.profile.schema import Choice, Failure, PlanEntry, Profile
from ringattn.workload import BranchTunables, Tunables, Workload, describe, kernels_described

SAMPLES = {"gpu": gpu_profile, "cpu": cpu_profile, "heuristic": heuristic_profile}
HOSTILE = "<script>alert(1)</script>\"'&\x1b[31m"


def summary_text(profile: Profile, width: int = 110) -> str:
    console = Console(file=io.StringIO(), width=width, markup=False, record=True)
    console.print(terminal_summary(profile))
    return console.export_text()


def entry(*ratios: float, chosen: int = 0) -> PlanEntry:
    """An entry whose choices are named after the kernels cudnn, flash, efficient with these ratios to the default."""
    choices = [
        Choice(plan(k, k), evidence(10 * r, r, 8))
        for k, r in zip(("cudnn", "flash", "efficient"), ratios, strict=False)
    ]
    rest = tuple(c for i, c in enumerate(choices) if i not in (0, chosen))
    return PlanEntry(Workload("train", True, 4096, 8, 64, "bf16"), choices[chosen], runners_up=rest, default=choices[0])


# --- numbers ----------------------------------------------------------------------------------------------------


def test_speedup_inverts_the_ratio_and_its_interval() -> None:
    speedup = Speedup.of(dataclasses.replace(evidence(1.0, 0.5, 1), ratio_low=0.4, ratio_high=0.625))
    assert speedup == Speedup(2.0, 1.6, 2.5)
    assert str(speedup) == "2.00x (1.60-2.50)"


def test_relative_time_is_against_the_chosen_plan() -> None:
    e = entry(1.0, 0.8, 1.6, chosen=1)
    singles = single_backends(e)
    assert set(singles) == {"cudnn", "flash", "efficient"}
    assert [relative_time(singles[k], e) for k in ("flash", "cudnn", "efficient")] == pytest.approx([1.0, 1.25, 2.0])


def test_the_kernels_of_a_candidates_name() -> None:
    assert kernels_described("flash") == {"flash"}
    assert kernels_described("flash-cpu/math fp32 copy") == {"flash-cpu", "math"}
    assert kernels_described("cudnn/flash,math/math bf16") == {"cudnn", "flash", "math"}
    for entry in gpu_profile().plans:
        for choice in recorded_choices(entry):
            assert kernels_described(describe(choice.tunables)) == choice.tunables.kernels


def test_a_mixed_plan_is_no_single_backend() -> None:
    assert sole_kernel(plan("cudnn", "flash")) is None
    assert sole_kernel(plan("cudnn", "cudnn")) == "cudnn"
    assert sole_kernel(plan("cudnn", "")) == "cudnn"
    mixed = Tunables("bf16", (BranchTunables("cudnn", "cudnn"), BranchTunables("flash", "cudnn")))
    assert sole_kernel(mixed) is None


def test_families_hold_what_differs_in_length_only_and_sort_by_it() -> None:
    profile = gpu_profile()
    shuffled = dataclasses.replace(profile, plans=tuple(reversed(profile.plans)))
    for grouped in (families(profile), families(shuffled)):
        assert len(grouped) == 5
        assert sorted(len(f.entries) for f in grouped) == [1, 5, 5, 5, 5]
        assert all(
            [e.workload.seq_len for e in f.entries] == sorted(e.workload.seq_len for e in f.entries) for f in grouped
        )


def test_headline_counts() -> None:
    numbers = headline(gpu_profile())
    profile = gpu_profile()
    assert numbers.cells == len(profile.plans) == 21
    assert numbers.refused == 1
    assert numbers.changed == sum(
        e.choice is not None and e.default is not None and e.choice.tunables != e.default.tunables
        for e in profile.plans
    )
    assert dict(numbers.failures) == {"oom": 8, "wrong": 4}
    assert numbers.best is not None
    assert numbers.best[1].middle == max(
        1 / e.choice.evidence.default_ratio for e in profile.plans if e.choice and e.choice.evidence
    )


def test_failures_are_grouped_by_kind_and_candidate() -> None:
    groups = failure_groups(gpu_profile())
    assert list(groups) == ["wrong", "oom"]
    ((_, workloads),) = groups["wrong"].items()
    assert len(workloads) == 4


def test_what_was_ruled_out_is_told_once_a_kernel() -> None:
    rejections = [
        ("cudnn/math bf16", KernelReason(0, "forward", "cudnn", "no bf16; it has fp16")),
        ("cudnn/math bf16", KernelReason(1, "forward", "cudnn", "no bf16; it has fp16")),
        ("cudnn/math fp32", KernelReason(0, "forward", "cudnn", "no fp32")),
        ("cudnn/math fp32", KernelReason(0, "backward", "math", "needs sm_80")),
        ("xformers", "branch 0 forward flash: the package xformers is not installed"),
    ]
    assert ruled_out(rejections) == {
        "cudnn": ("no bf16; it has fp16", "no fp32"),
        "math": ("needs sm_80",),
        "xformers": ("branch 0 forward flash: the package xformers is not installed",),
    }


def test_a_cell_without_evidence_counts_as_neither_kept_nor_changed() -> None:
    profile = cpu_profile()
    bare = PlanEntry(Workload("train", True, 9999, 4, 64, "fp32"), Choice(plan("math", "math", dtype="fp32")))
    numbers = headline(dataclasses.replace(profile, plans=(*profile.plans, bare)))
    assert (numbers.cells, numbers.measured, numbers.changed) == (5, 4, 0)


def test_the_summary_shows_a_few_notes_and_counts_the_rest() -> None:
    profile = cpu_profile()
    notes = tuple(f"note number {n}" for n in range(9))
    noted = dataclasses.replace(profile, provenance=dataclasses.replace(profile.provenance, notes=notes))
    text = summary_text(noted)
    assert text.count("Last probe: note number") == 4
    assert "and 5 more notes" in text


def test_verdict_of_a_profile_whose_default_stays() -> None:
    assert verdict(cpu_profile()) == "4 workloads, all measured; the default stays in all."
    refused = PlanEntry(Workload("train", True, 64, 4, 64, "fp32"), refusal="none of 3 plans keeps the memory limit")
    assert (
        verdict(dataclasses.replace(cpu_profile(), plans=(refused,)))
        == "1 workload, 0 of them measured. 1 without a plan."
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0241, "24.1 us"), (0.254, "0.254 ms"), (1.52, "1.52 ms"), (32.14, "32.1 ms"), (2100, "2.10 s")],
)
def test_format_ms(value: float, text: str) -> None:
    assert format_ms(value) == text


def test_other_formats() -> None:
    assert [format_bytes(n) for n in (512, 3072, 3 * 2**29)] == ["512 B", "3.00 KiB", "1.50 GiB"]
    assert [format_length(n) for n in (1000, 1024, 8192, 2**20, 1536)] == ["1,000", "1K", "8K", "1M", "1,536"]
    assert [format_duration(s) for s in (0.2, 8, 125, 4320)] == ["0 s", "8 s", "2 min 05 s", "1 h 12 min"]
    assert plain("a\x1b[31m\nb\x00") == "a\\x1b[31m b\\x00"


# --- the terminal ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLES)
def test_the_summary_tells_every_plan_within_the_width(name: str) -> None:
    profile = SAMPLES[name]()
    text = summary_text(profile, width=100)
    assert all(len(line) <= 100 for line in text.splitlines())
    if profile.fingerprint.device_name:
        assert profile.fingerprint.device_name in text
    for e in profile.plans:
        if e.choice is not None and e.choice.evidence is not None:
            assert format_ms(e.choice.evidence.median_ms) in text
        else:
            assert "refused" in text


def test_the_summary_lets_no_profile_steer_the_terminal() -> None:
    profile = hostile_profile()
    text = summary_text(profile)
    assert "\x1b" not in text
    assert "\\x1b" in text


# --- the page ----------------------------------------------------------------------------------------------------


class Reader(HTMLParser):
    """Reads a page as a strict reader would: balanced tags, unique ids, and what it refers to."""

    VOID = frozenset({"meta", "br", "link", "img", "input", "hr", "wbr"})

    def __init__(self) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.ids: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        if attributes.get("id"):
            self.ids.append(str(attributes["id"]))
        if tag not in self.VOID:
            self.open_tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open_tags.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags, f"</{tag}> closes nothing"
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open_tags:
            self.text.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open_tags == []
    return reader


def hostile_profile() -> Profile:
    profile = gpu_profile()
    bad = PlanEntry(
        Workload("train", True, 777, 16, 128, "bf16"),
        refusal=HOSTILE,
        failures=(Failure(HOSTILE, "crash", HOSTILE),),
    )
    odd = Choice(plan(HOSTILE, HOSTILE, params=((f"{HOSTILE}.x", HOSTILE),)), evidence(1.0, 0.5, 1))
    ill = PlanEntry(
        Workload("infer", True, 778, 16, 128, "bf16"),
        odd,
        front=(odd, dataclasses.replace(odd, tunables=plan("a", ""))),
    )
    return dataclasses.replace(
        profile,
        fingerprint=dataclasses.replace(profile.fingerprint, device_name=HOSTILE),
        software=((HOSTILE, HOSTILE),),
        plans=(*profile.plans, bad, ill),
        provenance=dataclasses.replace(profile.provenance, notes=(HOSTILE,), effort=HOSTILE, tool_version=HOSTILE),
    )


@pytest.mark.parametrize("name", [*SAMPLES, "hostile"])
def test_the_page_is_whole_and_loads_nothing(name: str) -> None:
    page = html_report(hostile_profile() if name == "hostile" else SAMPLES[name]())
    reader = read(page)
    assert len(reader.ids) == len(set(reader.ids))
    tags = {tag for tag, _ in reader.elements}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    for tag, attributes in reader.elements:
        assert not {"src", "srcset", "onclick", "onload", "style", "xlink:href"} & attributes.keys(), tag
        assert not str(attributes.get("href", "#")).removeprefix("#") or attributes["href"] in {
            f"#{i}" for i in reader.ids
        }
    assert "url(" not in page
    assert "@import" not in page
    assert not re.search(r"https?://", page)
    assert "\x1b" not in page


@pytest.mark.parametrize("name", SAMPLES)
def test_the_page_is_accessible(name: str) -> None:
    reader = read(html_report(SAMPLES[name]()))
    ids = set(reader.ids)
    for tag, attributes in reader.elements:
        if tag == "th":
            assert attributes.get("scope") in ("col", "row")
        for reference in str(attributes.get("aria-labelledby") or "").split():
            assert reference in ids
        if tag == "svg":
            assert attributes.get("aria-hidden") == "true" or (
                attributes.get("role") == "img" and attributes.get("aria-labelledby")
            )
    tables = sum(tag == "table" for tag, _ in reader.elements)
    assert tables == sum(tag == "caption" for tag, _ in reader.elements)
    levels = [int(tag[1]) for tag, _ in reader.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert ("html", {"lang": "en"}) in reader.elements


def test_the_page_tells_every_number() -> None:
    profile = gpu_profile()
    text = " ".join(read(html_report(profile)).text)
    assert profile.fingerprint.device_name in text
    for e in profile.plans:
        if e.choice is None:
            assert e.refusal in text
            continue
        for choice in (e.choice, e.default, *e.runners_up):
            assert choice is not None
            assert choice.evidence is not None
            assert format_ms(choice.evidence.median_ms) in text
            assert format_bytes(choice.evidence.peak_bytes) in text
        for failure in e.failures:
            assert failure.message in text
    for name, version in profile.software:
        assert name in text
        assert version in text
    for note in profile.provenance.notes:
        assert note in text


def test_what_a_profile_says_is_text_not_markup() -> None:
    page = html_report(hostile_profile())
    assert "<script>" not in page
    assert escape(HOSTILE) in page
    assert "&lt;script&gt;" in page


def test_evidence_at_the_edges_of_what_a_profile_may_hold_still_makes_a_page() -> None:
    w = Workload("train", True, 1, 1, 1, "fp32")
    entries = []
    for length, ratio, low, high in (
        (1, 0.0, 0.0, 0.0),
        (2, 1.0, 0.0, 5.0),
        (3, 1e-300, 0.0, 1e300),
        (4, 1e300, 1e300, 1e300),
    ):
        proof = dataclasses.replace(evidence(0.0, 1.0, 0), default_ratio=ratio, ratio_low=low, ratio_high=high)
        choice = Choice(plan("math", "math", dtype="fp32"), proof)
        other = Choice(
            plan("flash-cpu", "flash-cpu", dtype="fp32"), dataclasses.replace(proof, median_ms=1e300, peak_bytes=2**80)
        )
        entries.append(PlanEntry(w.at(length), choice, runners_up=(other,), front=(choice, other), default=other))
    entries.append(PlanEntry(w.at(5), Choice(plan("math", "math", dtype="fp32"))))
    profile = dataclasses.replace(cpu_profile(), plans=tuple(entries))
    page = html_report(profile)
    read(page)
    assert not re.search(r"(?i)\b(nan|inf)\b(?!x)", page.split("</style>")[1].replace("(inf", "").replace(";inf", ""))
    assert "1 length" not in summary_text(profile)


def check_inside(svg: str) -> None:
    width, height = map(float, re.search(r'viewBox="0 0 (\d+) (\d+)"', svg).groups())  # type: ignore[union-attr]
    for name, limit in (("x", width), ("cx", width), ("x1", width), ("x2", width), ("y", height), ("cy", height)):
        found = [float(value) for value in re.findall(rf' {name}="([-\d.]+)"', svg)]
        assert all(0 <= value <= limit for value in found), f"{name} in {found}"
    for x, _, w, h in bars_of(svg):
        assert x + w <= width + 0.1
        assert h >= 1


def bars_of(svg: str) -> list[tuple[float, float, float, float]]:
    """x, y, width and height of the bars, without the swatches of the legend."""
    found = re.findall(r'<rect class="bar [^"]*" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)">', svg)
    return [(float(x), float(y), float(w), float(h)) for x, y, w, h in found]


@pytest.mark.parametrize("groups", [1, 3, 9])
@pytest.mark.parametrize("scale", [1e-6, 0.7, 640.0, 1e5])
def test_bars_stay_in_their_frame_and_show_their_values(groups: int, scale: float) -> None:
    names = [*SERIES, "a kernel that no style sheet knows"]
    given = [
        (
            f"{n}K",
            [Bar(name, color_class(name), scale * (place + 1) / (n + 1), "tip") for place, name in enumerate(names)],
        )
        for n in range(groups)
    ]
    svg = bar_chart("c", "title", given, lambda value: f"{value:.3g}")
    check_inside(svg)
    drawn = bars_of(svg)
    assert len(drawn) == groups * len(names)
    (_, _, _, first), (_, _, _, last) = drawn[4], drawn[9]  # of the first group, tall enough for rounding not to matter
    assert last / first == pytest.approx(2.0, rel=0.02)
    for (x, _, w, _), (following, *_) in pairwise(drawn):
        assert x + w <= following + 0.1
    assert svg.count('class="value"') == groups


def test_a_chart_of_nothing_and_of_zeros_is_drawn() -> None:
    assert bars_of(bar_chart("c", "t", [("1K", [])], str)) == []
    assert len(bars_of(bar_chart("c", "t", [("1K", [Bar("tuned", "k-tuned", 0.0, "tip")])], str))) == 1


def history_of(*trials: TimedTrial, end_s: float = 0.0) -> SearchHistory:
    return SearchHistory(gpu_profile().plans[0].workload, trials, end_s)


def steps_of(svg: str) -> list[float]:
    """The heights of the best so far, from the first on."""
    best = re.search(r'class="best" d="([^"]+)"', svg)
    assert best is not None
    return [float(y) for y in re.findall(r"V([\d.]+)", best[1])]


def test_a_history_draws_what_was_timed_and_marks_the_rest() -> None:
    trials = [TimedTrial(1.0 * n, 1 + n / 10, f"plan {n}", 6) for n in range(5)]
    trials += [TimedTrial(6.0, None, "oom"), TimedTrial(7.0, 0.001, "slow"), TimedTrial(9.0, 1e6, "far", 6)]
    svg = history_chart("h", "title", history_of(*trials))
    check_inside(svg)
    assert (svg.count('class="trial"'), svg.count('class="failed"'), svg.count('class="slow"')) == (6, 1, 1)
    assert len(steps_of(svg)) == 5, "one step for each that beat those before, the first at 1x is none"
    check_inside(history_chart("h", "title", history_of(TimedTrial(0.0, 1.0, "default"))))


def test_the_best_so_far_has_no_step_for_a_reading_that_nothing_confirms() -> None:
    chosen = TimedTrial(2.0, 1.2, "chosen", 8, chosen=True)
    lucky = [TimedTrial(1.0 * n, 1.5 + n, f"read {n} times", n) for n in range(1, 4)]
    beyond = TimedTrial(1.5, 1.4, "timed more often than once, and not chosen", 5)
    svg = history_chart("h", "title", history_of(TimedTrial(0.0, 1.0, "default"), *lucky, beyond, chosen))
    assert len(steps_of(svg)) == 1
    assert "best 1.20x" in svg
    assert svg.count('class="trial unsure"') == 3
    (x, y), *_ = re.findall(r'class="trial chosen" cx="([\d.]+)" cy="([\d.]+)"', svg)
    assert [float(y)] == steps_of(svg)
    assert float(x) < 250, "it stands where it began, of a search that went on"


def test_the_time_of_a_history_goes_to_the_end_of_its_last_trial() -> None:
    svg = history_chart("h", "title", history_of(TimedTrial(1.0, 1.1, "plan", 6), end_s=20.0))
    check_inside(svg)
    assert ">20 s<" in svg
    assert float(re.findall(r'cx="([\d.]+)"', svg)[0]) < 100


def test_a_group_without_bars_says_why() -> None:
    one = Bar("tuned", "k-tuned", 1.0, "tip")
    svg = bar_chart("c", "t", [("1K", [one]), ("2K", []), ("4K", [one])], str)
    assert svg.count(">not measured<") == 1
    assert "not measured" not in bar_chart("c", "t", [("1K", [one])], str)


def test_a_first_call_is_never_said_to_take_less_than_a_call() -> None:
    known = evidence(10.0, 1.0, 5)
    assert first_call_text(dataclasses.replace(known, first_call_ms=2.5)) == "no longer"
    assert first_call_text(dataclasses.replace(known, first_call_ms=25.0)) == "25.0 ms"


def test_every_kernel_has_a_colour_that_differs_from_all_others_in_both_schemes() -> None:
    style = (Path(page_module.__file__).parent / "templates" / "report.css").read_text()
    assert set(KERNELS) | {"tuned", "torch", "default"} == set(SERIES)
    schemes = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    assert len(schemes) == 2, "light and dark"
    for scheme in schemes:
        colors = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", scheme))
        labs = {name: oklab(colors[name]) for name in SERIES}
        for one, other in combinations(SERIES, 2):
            assert math.dist(labs[one], labs[other]) > 0.07, f"{one} and {other} look alike"
    for name in SERIES:
        assert f".{color_class(name)} {{ --c: var(--{name}); }}" in style


def oklab(color: str) -> tuple[float, float, float]:
    """Coordinates in which distances are those that eyes see (Ottosson 2020); two greys a shade apart are 0.02."""
    linear = [(v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4) for v in bytes_of(color)]
    cones = [sum(a * b for a, b in zip(row, linear, strict=True)) ** (1 / 3) for row in TO_CONES]
    one, two, three = (sum(a * b for a, b in zip(row, cones, strict=True)) for row in TO_LAB)
    return one, two, three


def bytes_of(color: str) -> list[float]:
    return [value / 255 for value in bytes.fromhex(color.removeprefix("#"))]


TO_CONES = ((0.41222, 0.53633, 0.05145), (0.21190, 0.68070, 0.10740), (0.08830, 0.28172, 0.62998))
TO_LAB = ((0.21045, 0.79362, -0.00407), (1.97800, -2.42859, 0.45059), (0.02590, 0.78277, -0.80868))


# --- torch, the host, the search, what is missing -----------------------------------------------------------------


def with_torch(profile: Profile) -> Profile:
    """The same with torch's own dispatch recorded in the dense cells: 1.2 times as slow as the default."""

    def beside(entry: PlanEntry) -> PlanEntry:
        if entry.default is None or not entry.workload.pattern.dense:
            return entry
        assert entry.default.evidence is not None
        ms = 1.2 * entry.default.evidence.median_ms
        torch = Choice(
            plan("efficient", "efficient" if entry.workload.train else "", pattern_cache=False), evidence(ms, 1.2, 9)
        )
        return dataclasses.replace(entry, torch=torch)

    return dataclasses.replace(profile, plans=tuple(map(beside, profile.plans)))


def test_the_gain_over_torch_is_told_where_it_was_recorded() -> None:
    assert "Over torch" not in " ".join(read(html_report(gpu_profile())).text)
    assert "than torch" not in summary_text(gpu_profile())
    profile = with_torch(gpu_profile())
    numbers = headline(profile)
    dense = [e for e in profile.plans if e.torch is not None]
    gains = sorted(1.2 / e.choice.evidence.default_ratio for e in dense if e.choice and e.choice.evidence)
    assert numbers.over_torch == pytest.approx((gains[4] + gains[5]) / 2)
    page, text = " ".join(read(html_report(profile)).text), summary_text(profile)
    assert "Faster than torch" in text
    for gain in gains:
        assert f"{gain:.2f}x" in page
        assert f"{gain:.2f}x" in text
    assert list(series_of(dense[0]))[:3] == ["tuned", "torch", "default"]


def test_a_plan_slower_than_torch_is_no_gain() -> None:
    profile = with_torch(cpu_profile())
    entry = profile.plans[0]
    assert entry.torch is not None
    assert entry.torch.evidence is not None
    fast = dataclasses.replace(entry.torch, evidence=dataclasses.replace(entry.torch.evidence, default_ratio=0.5))
    slower = dataclasses.replace(profile, plans=(dataclasses.replace(entry, torch=fast),))
    assert headline(slower).over_torch == pytest.approx(0.5)
    assert re.search(r'<span class="bad">0\.50x</span>', html_report(slower))


def test_the_hosts_time_is_shown_where_it_is_the_longer() -> None:
    known = dataclasses.replace(evidence(0.05, 1.0, 1), host_us=70.0)
    assert waiting_host_ms(known, "nvidia") == pytest.approx(0.07)
    assert waiting_host_ms(dataclasses.replace(known, host_us=40.0), "nvidia") is None
    assert waiting_host_ms(known, "cpu") is None, "its calls are timed on the host"
    short = min(gpu_profile().plans, key=lambda e: e.evidence.median_ms if e.evidence else math.inf)
    assert short.evidence is not None
    slow_host = dataclasses.replace(short.evidence, host_us=4321.0)
    assert short.choice is not None
    profile = dataclasses.replace(
        gpu_profile(), plans=(dataclasses.replace(short, choice=dataclasses.replace(short.choice, evidence=slow_host)),)
    )
    assert "4.32 ms" in summary_text(profile)
    assert "host 4.32 ms" in " ".join(read(html_report(profile)).text)


def test_other_plans_come_in_the_order_of_time_each_once() -> None:
    for e in with_torch(gpu_profile()).plans:
        others = other_plans(e)
        times = [choice.evidence.median_ms for _, choice in others if choice.evidence is not None]
        assert times == sorted(times)
        tunables = [choice.tunables for _, choice in others]
        assert len(tunables) == len(set(tunables))
        assert e.choice is None or e.choice.tunables not in tunables
        named = {choice.tunables: which for which, choice in others}
        assert e.default is None or "default" in named.get(e.default.tunables, "the plan itself is the default")
        assert all("runner-up" in named[choice.tunables] for choice in e.runners_up)


def test_the_plan_for_a_cuda_graph_is_told_beside_that_of_an_eager_loop() -> None:
    first = gpu_profile().plans[0]
    captured = Choice(plan("efficient", "efficient", pattern_cache=False), evidence(0.0123, 0.25, 3))
    profile = dataclasses.replace(gpu_profile(), plans=(dataclasses.replace(first, captured=captured),))
    assert ("in a CUDA graph", captured) in other_plans(profile.plans[0])
    for text in (summary_text(profile), " ".join(read(html_report(profile)).text)):
        assert "in a CUDA graph" in text
        assert "12.3 us" in text
    assert "4.00x" in summary_text(profile)
    assert relative_time(captured, profile.plans[0]) is None, "its ratio is that of the device alone"


def test_a_runner_up_that_is_the_plan_for_a_cuda_graph_too_keeps_its_own_figures() -> None:
    first = gpu_profile().plans[0]
    runner_up = first.runners_up[0]
    captured = dataclasses.replace(runner_up, evidence=evidence(0.0001, 0.01, 1))
    ((which, choice),) = [
        pair
        for pair in other_plans(dataclasses.replace(first, captured=captured))
        if pair[1].tunables == captured.tunables
    ]
    assert which.startswith("runner-up")
    assert which.endswith("in a CUDA graph")
    assert choice is runner_up


def test_rates_count_two_products_forward_and_five_backward() -> None:
    w = Workload("infer", False, 1000, 2, 100, "bf16")
    tera = Rates("TFLOP/s", 1.0)
    assert tera.value(w, 1.0) == pytest.approx(4 * 2 * 1000**2 * 100 / 1e-3 / 1e12)
    assert tera.value(dataclasses.replace(w, mode="train", causal=True), 1.0) == pytest.approx(0.8 * 3.5 / 2)
    assert tera.value(dataclasses.replace(w, world=4), 1.0) == pytest.approx(0.8 * 4), "a rank's rows meet all keys"
    assert tera.value(w, 0.0) is None
    assert Rates.of(gpu_profile().plans).unit == "TFLOP/s"
    assert Rates.of(cpu_profile().plans).unit == "GFLOP/s"


def test_rows_of_documents_are_called_so() -> None:
    """They looked like those of a batch."""
    packed = Workload("infer", True, 256, 4, 16, "fp32", batch=4, packed_tokens=512)
    told = [Family(w, ()).title for w in (packed, dataclasses.replace(packed, packed_tokens=0))]
    assert told == [
        "infer, dense, causal, 4 documents in 512 tokens H4 D16, fp32",
        "infer, dense, causal, B4 H4 D16, fp32",
    ]


def test_the_title_says_how_many_gpus_hold_a_sequence() -> None:
    one = gpu_profile()
    name = one.fingerprint.device_name
    four = tuple(dataclasses.replace(e, workload=dataclasses.replace(e.workload, world=4)) for e in one.plans)
    assert machine_title(one) == name
    assert machine_title(dataclasses.replace(one, plans=four)) == f"4x {name}"
    assert machine_title(dataclasses.replace(one, plans=(*one.plans, *four))) == f"1x and 4x {name}"
    assert f"<h1>4x {name}</h1>" in html_report(dataclasses.replace(one, plans=four))
    assert summary_text(dataclasses.replace(one, plans=four)).startswith(f"4x {name}\n")


def bare(workload: Workload) -> PlanEntry:
    """An entry that could not be measured: its default, without evidence."""
    return PlanEntry(workload, Choice(plan("math", "math", dtype="fp32")))


def test_a_plan_that_was_not_measured_is_told_apart_from_one_that_was() -> None:
    profile = cpu_profile()
    mixed = dataclasses.replace(profile, plans=(*profile.plans, bare(profile.plans[0].workload.at(9999))))
    assert verdict(mixed).startswith("5 workloads, 4 of them measured; ")
    assert "1 could not be measured and keeps the default." in verdict(mixed)
    assert re.search(r"9,999 .* not measured", summary_text(mixed))
    text = " ".join(" ".join(read(html_report(mixed)).text).split())
    assert "With a plan 5 every workload has one Measured 4 1 at the default, not measured" in text


def test_every_command_for_what_is_not_covered_is_one_that_probe_takes() -> None:
    profile = gpu_profile()
    lone = dataclasses.replace(profile.plans[0].workload, head_dim=64, kv_heads=4, batch=3)
    mixed = dataclasses.replace(profile, plans=(*profile.plans, bare(lone)))
    found = uncovered(mixed)
    for _, command in found:
        words = command.split()
        assert words[:2] == ["ringtune", "probe"]
        with probe_command.make_context("probe", words[2:]) as context:
            assert context.params["heads"] == 16
    mine = [command for _, command in found if "--batch-size 3" in command]
    options = "--heads 16 --kv-heads 4 --head-dim 64 --causal --dense --batch-size 3"
    assert [command.removeprefix(f"ringtune probe {options} ") for command in mine] == [
        f"--mode train --seq-len {lone.seq_len}",
        f"--mode infer --seq-len {lone.seq_len}",
        f"--mode train --seq-len {2 * lone.seq_len}",
    ]
    page = html_report(mixed)
    assert all(escape(command) in page for _, command in found)


def test_the_page_draws_the_history_of_the_search() -> None:
    profile = gpu_profile()
    history = history_of(TimedTrial(1.0, 1.3, HOSTILE, 6), TimedTrial(2.0, None, "oom"))
    page = html_report(profile, (history,))
    text = " ".join(read(page).text)
    assert f"{profile.plans[0].workload} 2 trials, 1 without a time" in " ".join(text.split())
    assert page.count('class="trial"') == 1
    assert "How the search went" not in " ".join(read(html_report(profile)).text)


# --- two profiles -------------------------------------------------------------------------------------------------


def test_two_profiles_are_joined_by_workload() -> None:
    a = gpu_profile()
    slower = tuple(
        dataclasses.replace(
            e, choice=dataclasses.replace(e.choice, evidence=evidence(2 * e.evidence.median_ms, 1.0, 5))
        )
        for e in a.plans[1:]
        if e.choice is not None and e.evidence is not None
    )
    added = bare(Workload("infer", False, 777, 4, 64, "fp32"))
    b = dataclasses.replace(cpu_profile(), plans=(*slower, added))
    page = comparison_page((a, b), ("one", HOSTILE))
    assert "<script>" not in page
    text = " ".join(" ".join(read(page).text).split())
    assert f"{len(slower)} workloads in both, {len(slower)} of them measured in both. B is faster in 0" in text
    assert page.count(">2.00x<") == len(slower) + 1, "each row, and the median"
    only_a, only_b = re.search(r"Only in A (.*?) Only in B (.*?) The machines", text).groups()  # type: ignore[union-attr]
    assert "at 1K" in only_a
    assert "head_dim 512" not in only_b
    assert "at 777" in only_b
    assert a.fingerprint.device_name in text
    assert b.fingerprint.device_name in text


def test_two_profiles_of_one_machine_are_told_apart() -> None:
    page = comparison_page((cpu_profile(), cpu_profile()), ("before", "after"))
    title = re.search(r"<title>(.*?)</title>", page)
    heading = re.search(r"<h1>(.*?)</h1>", page)
    assert title is not None
    assert heading is not None
    for text in (title[1], heading[1]):
        assert text.count(cpu_profile().fingerprint.device_name) == 1
        assert "before" in text
        assert "after" in text


def test_the_names_of_two_files_differ() -> None:
    assert names_apart(Path("/a/m.yaml"), Path("/a/n.yaml")) == ("m", "n")
    assert names_apart(Path("/a/x/m.yaml"), Path("/b/x/m.yaml")) == ("a/x/m", "b/x/m")
    assert names_apart(Path("/a/m.yaml"), Path("/a/m.yaml")) == ("m", "m")


def test_two_profiles_with_nothing_in_common_are_a_page() -> None:
    page = comparison_page((cpu_profile(), heuristic_profile()), ("a", "b"))
    assert "No workload is in both." in " ".join(read(page).text)


# --- a real browser ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    executable = chromium()
    if executable is None:
        if os.environ.get("CI"):
            pytest.fail("CI must have Chromium (Debian's package chromium)")
        pytest.skip("no Chromium here; apt-get install chromium")
    with headless_page(executable, tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.mark.parametrize(
    ("name", "width", "dark"),
    [
        *((name, width, False) for name in (*SAMPLES, "hostile") for width in (390, 1280)),
        ("hostile", 390, True),
        ("gpu", 500, False),
    ],
)
def test_a_browser_shows_the_page(tab: Page, tmp_path: Path, name: str, width: int, dark: bool) -> None:
    profile = hostile_profile() if name == "hostile" else SAMPLES[name]()
    path = tmp_path / "report.html"
    path.write_text(html_report(profile), encoding="utf-8")
    tab.requests.clear()
    tab.errors.clear()
    tab.open(path, width, dark=dark)
    assert tab.requests == [path.as_uri()]
    assert tab.errors == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    wide = tab.evaluate(
        "[...document.querySelectorAll('body *')]"
        ".filter(e => !e.closest('.scroll') && e.getBoundingClientRect().right > innerWidth + 1)"
        ".map(e => e.tagName + '.' + e.className)"
    )
    assert wide == []
    scrolled = tab.evaluate(
        "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).length"
    )
    assert scrolled == 0 or name == "hostile", "every column is in sight, but for a kernel whose name is a script"
    shown = tab.evaluate("document.body.innerText")
    assert plain(profile.fingerprint.device_name or "sm_100+") in shown
    sizes = tab.evaluate("[...document.querySelectorAll('svg.chart')].map(e => e.getBoundingClientRect().width)")
    assert all(size > 250 for size in sizes)
    fonts = tab.evaluate(
        "[...document.querySelectorAll('svg.chart text')]"
        ".map(e => parseFloat(getComputedStyle(e).fontSize) * e.getScreenCTM().a)"
    )
    assert width < 500 or all(size >= 11 for size in fonts if size)
    assert len(sizes) == 0 or name != "heuristic"
    tab.screenshot(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 10_000


def test_text_and_background_contrast_in_both_schemes(tab: Page, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(html_report(gpu_profile()), encoding="utf-8")
    for dark in (False, True):
        tab.open(path, 1280, dark=dark)
        pairs = tab.evaluate(CONTRAST_SCRIPT)
        assert len(pairs) > 50
        poor = [(what, round(ratio, 2)) for what, ratio in pairs if ratio < 4.5]
        assert poor == []


CONTRAST_SCRIPT = """
(() => {
  const parse = c => c.match(/[\\d.]+/g).map(Number);
  const linear = v => v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = e => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const ratio = (a, b) => {
    const [dark, light] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (light + 0.05) / (dark + 0.05);
  };
  const texts = 'h1,h2,h3,p,th,td,dt,dd,small,.chip,.under,caption,figcaption,summary,a,svg text';
  return [...document.querySelectorAll(texts)].map(e => {
    const drawn = e instanceof SVGElement;
    const color = parse(drawn ? getComputedStyle(e).fill : getComputedStyle(e).color);
    const onBlock = drawn && e.classList.contains('on-block');
    const under = onBlock ? parse(getComputedStyle(e.parentElement.querySelector('rect')).fill) : behind(e);
    return [e.tagName + '.' + e.getAttribute('class') + ' ' + e.textContent.slice(0, 20), ratio(color, under)];
  });
})()
"""


def test_rows_timed_under_load_are_marked_where_they_stand() -> None:
    profile = gpu_profile()
    loaded = dataclasses.replace(profile.plans[1], under_load=True)
    marked = dataclasses.replace(profile, plans=(profile.plans[0], loaded, *profile.plans[2:]))
    for width in (80, 200):
        shown = summary_text(marked, width)
        assert len(re.findall("under load", shown)) == 2  # its row, and what that means
        assert "--fresh" in shown
    assert "under load" not in summary_text(profile)
    assert html_report(marked).count("timed under load") == html_report(profile).count("timed under load") + 1


def test_date_time_and_notes_are_said_to_be_of_the_last_probe() -> None:
    """A profile may hold rows of several probes, and one date."""
    profile = gpu_profile()
    assert f"measured; last probe {profile.provenance.date}, " in provenance_line(profile)
    assert "last probe" not in provenance_line(heuristic_profile())
    noted = dataclasses.replace(profile, provenance=dataclasses.replace(profile.provenance, notes=("a busy core",)))
    assert "Last probe: a busy core" in summary_text(noted)
    of = f"of {len(profile.plans)} rows of other probes:"
    kept = {
        (3, 3): f"; 2 {of} 2 quick 2026-10-03",
        (4, 3): f"; 2 {of} 1 quick 2026-10-03, 1 quick 2026-10-04",
        (1, 2, 3, 5): f"; 4 {of} from 2026-10-01 to 2026-10-05",
    }
    for days, told in kept.items():
        plans = list(profile.plans)
        for place, day in enumerate(days):
            plans[place] = dataclasses.replace(plans[place], origin=RowOrigin("quick", f"2026-10-{day:02}"))
        line = provenance_line(dataclasses.replace(profile, plans=tuple(plans)))
        assert line == provenance_line(profile) + told
    assert "Notes of the last probe" in html_report(noted)

"""The report and the terminal summary: the right numbers, everything escaped, and a page that works in a browser."""

from __future__ import annotations

import dataclasses
import io
import math
import os
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from browser import Page, chromium, headless_page
from report_samples import LENGTHS, cpu_profile, evidence, gpu_profile, heuristic_profile, plan
from rich.console import Console

from autotune.formats import escape, format_bytes, format_duration, format_length, format_ms, plain
from autotune.report.charts import Point, Series, front_chart, interval_bar, relative_chart
from autotune.report.page import html_report
from autotune.report.summary import (
    Speedup,
    failure_groups,
    families,
    headline,
    recorded_choices,
    relative_time,
    ruled_out,
    single_backends,
    sole_kernel,
    terminal_summary,
    verdict,
)
from ringattn.errors import KernelReason
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
    (wrong,) = groups["wrong"]
    assert len(wrong.workloads) == 4


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
    assert text.count("Note: note number") == 4
    assert "and 5 more notes" in text


def test_verdict_of_a_profile_whose_default_stays() -> None:
    assert verdict(cpu_profile()) == "4 workloads measured; the default stays in all."
    refused = PlanEntry(Workload("train", True, 64, 4, 64, "fp32"), refusal="none of 3 plans keeps the memory limit")
    assert (
        verdict(dataclasses.replace(cpu_profile(), plans=(refused,))) == "0 of 1 workload measured. 1 without a plan."
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

    VOID = frozenset({"meta", "br", "link", "img", "input", "hr"})

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


def test_a_chart_holds_every_point_inside_its_frame() -> None:
    series = [Series("flash", tuple(Point(n, 1 + i * 7.0, 1 + i * 6.0, 2 + i * 8.0) for i, n in enumerate(LENGTHS)))]
    names = [(n, "a-kernel-with-a-very-long-name") for n in LENGTHS]
    svg = relative_chart("c", "title", series, [("forward", names)])
    width, height = map(float, re.search(r'viewBox="0 0 (\d+) (\d+)"', svg).groups())  # type: ignore[union-attr]
    for name, limit in (("x", width), ("cx", width), ("x1", width), ("x2", width), ("y", height), ("cy", height)):
        for value in re.findall(rf' {name}="([-\d.]+)"', svg):
            assert 0 <= float(value) <= limit, f"{name}={value}"


def test_end_labels_do_not_overlap() -> None:
    series = [
        Series(name, (Point(1024, 1.0, 1.0, 1.0),)) for name in ("cudnn", "flash", "efficient", "math", "default")
    ]
    svg = relative_chart("c", "t", series, [("forward", [(1024, "cudnn")])])
    ends = sorted(
        float(y)
        for y in re.findall(r'<text class="label [^"]*" x="282.0" y="([\d.]+)"', svg.replace('x="282"', 'x="282.0"'))
    )
    assert len(ends) == 6
    assert min(b - a for a, b in pairwise(ends)) >= 12


def test_one_length_and_one_front_point_are_charts_too() -> None:
    assert "NaN" not in relative_chart("c", "t", [], [("forward", [(1024, "cudnn")])])
    with pytest.raises(ValueError, match="empty"):
        front_chart("c", "t", [])
    assert interval_bar(1.2, 1.1, math.nextafter(1.3, 2), (1.0, 2.0)).count("faster") == 2
    assert interval_bar(1.0, 0.9, 1.1, (0.5, 2.0)).count("same") == 2
    assert interval_bar(0.8, 0.7, 0.9, (0.5, 2.0)).count("slower") == 2


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
    [*((name, width, False) for name in (*SAMPLES, "hostile") for width in (390, 1280)), ("hostile", 390, True)],
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
    shown = tab.evaluate("document.body.innerText")
    assert plain(profile.fingerprint.device_name or "sm_100+") in shown
    sizes = tab.evaluate("[...document.querySelectorAll('svg.chart')].map(e => e.getBoundingClientRect().width)")
    assert all(size > 250 for size in sizes)
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

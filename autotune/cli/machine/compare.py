"""``ringtune compare``: presets, torch, torchscale and this machine's plan, side by side."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..options import (
    Integer,
    causal_option,
    check_page,
    check_pattern,
    check_shape,
    device_option,
    dtype_option,
    json_option,
    pattern_asked,
    pattern_options,
    seed_option,
    seq_lens_option,
    shape_asked,
    shape_options,
    train_or_infer_option,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotune.report.contenders import Crossover, Standing

LENGTHS, ON_A_CPU = (4096, 8192, 16384), (512, 1024, 2048)  # two cores took over 200 s for the longer ones


@click.command(short_help="Compare presets, torch and this machine's plan.")
@seq_lens_option("A length to compare at", f"{', '.join(map(str, LENGTHS))}, on a CPU {', '.join(map(str, ON_A_CPU))}")
@train_or_infer_option
@causal_option
@shape_options()
@pattern_options
@dtype_option("bf16", "fp16", "fp32")
@click.option(
    "--blocks",
    type=Integer(1, 10_000),
    metavar="N",
    default=9,
    show_default=True,
    help="Paired readings of each.",
)
@seed_option("Fixes order and inputs.")
@device_option
@click.option(
    "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write the comparison as a web page, too."
)
@json_option
def compare(blocks: int, seed: int, output: Path | None, as_json: bool, **asked: Any) -> None:
    """Time plans of earlier systems and other libraries beside this machine's.

    \b
    Examples:
        ringtune compare
        ringtune compare --segment-lengths 2048,4096 --dilation-rates 1,2
        ringtune compare --mode infer --output compared.html

    production, flash-first, collective-ring and improved-dilated are the
    systems that ringtune grew from, each as a plan; the page on migration says
    what each of them did.

    Speed-up is over torch's scaled_dot_product_attention, which is dense also
    where a dilated pattern is asked for. Error is the largest relative 2-norm
    of outputs and gradients against float64. A length from which on one is
    faster or slower than torch is named, with a margin, where the 95 %
    intervals of its speed-ups on both sides leave no doubt.
    """
    check_pattern(asked)
    check_shape(asked["heads"], asked["kv_heads"])
    if output is not None:
        check_page(output)

    from autotune.measure.evaluator import told
    from autotune.report.contenders import compare as measured
    from autotune.report.contenders import crossovers, workloads_of
    from autotune.report.pages.contenders_page import contenders_page
    from ringattn.hardware.facts import detect
    from ringattn.planning.module_setup import device_of

    from ..console import emit_json, print_answer, warn
    from ..profile.report import write_page

    device = device_of(asked["device"])
    facts = detect(device)
    of_heads = shape_asked(asked, facts.vendor)
    shape = {name: asked[name] for name in ("mode", "causal")} | {"batch": asked["batch_size"]}
    shape |= {name: getattr(of_heads, name) for name in ("heads", "kv_heads", "head_dim")}
    shape["dtype"] = asked["dtype"] or ("fp32" if facts.vendor == "cpu" else "bf16")
    pattern = pattern_asked(asked)
    lengths = asked["seq_lens"] or (ON_A_CPU if facts.vendor == "cpu" else LENGTHS)
    workloads = workloads_of(lengths, pattern, **shape)
    found, interference = measured(workloads, facts, device, blocks=blocks, seed=seed, progress=warn)
    crossed = crossovers(found)
    of_all = str(workloads[0]).replace(f" S{workloads[0].seq_len}", "")
    if output is not None:
        write_page(contenders_page(facts.device_name, of_all, found, crossed), output)
    if as_json:
        document = {"facts": facts, "workload": of_all, "standings": found, "crossovers": crossed}
        emit_json(document | {"interference": [str(each) for each in interference]})
    else:
        print_answer(comparison_summary(f"{facts.device_name}: {of_all}", found, crossed))
    if disturbed := told(interference):
        warn(disturbed)


def comparison_summary(title: str, standings: Sequence[Standing], crossed: Sequence[Crossover]) -> Any:
    """Return the comparison as a table for the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from autotune.display_text import format_bytes, format_factor, format_length, format_ms, plain
    from autotune.report.wording.fitting_tables import FittingTables

    keys, columns = ("Length", "Contender"), ("Time", "Tokens/s", "Peak", "Error", "Speed-up")
    rows = []
    ran = Table(box=SIMPLE_HEAD, pad_edge=False)  # apart: beside the figures it broke names inside at 80 columns
    for name in keys:
        ran.add_column(name, justify="left" if name == "Contender" else "right", no_wrap=True)
    ran.add_column("What ran", overflow="fold")
    last = 0
    for s in standings:
        length = format_length(s.seq_len) if s.seq_len != last else ""
        last = s.seq_len
        figures = ("-",) * 5
        if not math.isnan(s.ms):
            error = "-" if math.isnan(s.error) else f"{s.error:.1e}"
            speedup = "-" if math.isnan(s.speedup) else format_factor(s.speedup)
            figures = (format_ms(s.ms), f"{s.tokens_per_s:,.0f}", format_bytes(s.peak_bytes), error, speedup)
        cells = (Text(cell) for cell in (length, s.name, *figures))
        rows.append(dict(zip((*keys, *columns), cells, strict=True)))
        ran.add_row(length, s.name, plain(s.note))
    figures_of = FittingTables(rows, columns, keys, texts=("Contender",))
    return Group(Text(plain(title), style="bold"), figures_of, ran, *(Text(plain(each)) for each in crossed))

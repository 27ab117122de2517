"""Options that several commands share, and the types of their values.

An option is named after the field of ProbeRequest that it fills: the request is built from the options by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click
from click.core import ParameterSource

from autotune.exit_codes import ProbeFailure
from autotune.folders import is_there, write_trouble
from autotune.probe.request import ON_A_CPU, ON_A_GPU, usual_shape
from ringattn.arguments import dtype_name
from ringattn.wording import plural
from ringattn.workload import MOST, Pattern

if TYPE_CHECKING:
    from ringattn.hardware.facts import HardwareFacts

Command = TypeVar("Command", bound=Callable[..., Any])


class DtypeChoice(click.Choice):  # type: ignore[type-arg]  # generic since click 8.2 alone
    """Parses a dtype by any of the names that ``ringattn`` takes, or another of the values listed."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(dtype_name(value) or value, param, ctx)


def integer_list(value: str | tuple[int, ...]) -> tuple[int, ...]:
    """Parse positive integers with commas between them: ``2048,4096,8192``."""
    if isinstance(value, tuple):
        return value
    try:
        numbers = tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of integers such as 2048,4096,8192") from None
    if min(numbers) < 1:
        raise click.BadParameter(f"{value!r} holds {min(numbers)}; every entry must be an integer >= 1")
    return numbers


_PAGE = b"<!doctype html>"  # the beginning of a page
_DIGITS = 12  # of a number that counts bytes, devices or ranks: no machine has more


def mebibytes(value: str | int) -> int:
    """Parse a memory size in MiB; a unit may be given: ``512``, ``512MiB``, ``24GiB``."""
    match = re.fullmatch(rf"(\d{{1,{_DIGITS}}})\s*(mib|gib)?", str(value).strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise click.BadParameter(f"{value!r} is not a memory size such as 512 (MiB), 512MiB or 24GiB")
    return int(match[1]) * (1024 if (match[2] or "").lower() == "gib" else 1)


def device_name(value: str) -> str:
    """Parse a torch device. Only its spelling is checked here; the machine is asked later whether it exists."""
    text = value.strip().lower()
    if re.fullmatch(rf"\d{{1,{_DIGITS}}}", text):
        return f"cuda:{int(text)}"
    if not re.fullmatch(rf"(cpu|cuda|mps|xpu|hip|rocm)(:\d{{1,{_DIGITS}}})?", text):
        raise click.BadParameter(f"{value!r} is not a device; use cpu, cuda, cuda:N or the number N of a GPU")
    return text


def positive_number(value: str | float) -> float:
    """Parse a finite number above zero."""
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 < number < float("inf"):
        raise click.BadParameter(f"{value!r} is not a number above 0")
    return number


def seconds(value: str | float) -> float:
    """Parse a time in seconds; a unit may be given: ``90``, ``90s``, ``3m``."""
    text = str(value).strip().lower()
    try:
        number = 60 * float(text[:-1]) if text.endswith("m") else float(text.removesuffix("s"))
    except ValueError:
        number = -1.0
    if not 0 < number < float("inf"):
        raise click.BadParameter(f"{value!r} is not a number above 0 of seconds, such as 90, 90s or 3m")
    return number


budget_option = click.option(
    "--budget",
    "budget_s",
    type=seconds,
    metavar="SECONDS",
    help="Seconds to spend once torch is loaded; 90s and 3m work, too.  [default: what --effort says]",
)


class Integer(click.IntRange):
    """Integer in a range, called so in errors: Click says of ``x`` that it is no valid integer range."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the integer; of several in one the error shows how they are given."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            parts = [part.strip() for part in str(value).split(",")]
            if not (isinstance(param, click.Option) and param.multiple and len(parts) > 1):
                raise
            if not all(part.isdecimal() for part in parts):
                raise
            options = " ".join(f"{param.opts[0]} {part}" for part in parts)
            self.fail(f"{error.message.rstrip('.')}; give the option once for each: {options}.", param, ctx)


def number_of(name: str) -> click.IntRange:
    """Return the type of an option that is this number of a workload."""
    return Integer(min=1, max=MOST[name])


MOST_RANKS = MOST["world"]  # that a command plans for: their ring takes 15 s


causal_option = click.option("--causal/--no-causal", default=True, show_default=True, help="Causal attention or full.")
seq_len_option = click.option(
    "--seq-len",
    type=number_of("seq_len"),
    metavar="N",
    help=f"Sequence length.  [default: {ON_A_GPU.seq_len}, on a CPU {ON_A_CPU.seq_len}]",
)


def seq_lens_option(text: str, default: str) -> Callable[[Command], Command]:
    """Return the option --seq-len of a command that takes several lengths; ``default`` says which without it."""
    text = f"{text}; repeatable.  [default: {default}]"
    return click.option("--seq-len", "seq_lens", type=number_of("seq_len"), metavar="N", multiple=True, help=text)


train_or_infer_option = click.option(
    "--mode",
    type=click.Choice(["train", "infer"]),
    default="train",
    show_default=True,
    help="With gradients or without.",
)


def dtype_option(*names: str) -> Callable[[Command], Command]:
    """Return the option --dtype of a command that takes inputs in these."""
    return click.option(
        "--dtype", type=DtypeChoice(names), help="Input dtype.  [default: bf16 on a GPU, fp32 on a CPU]"
    )


def effort_option(default: str, text: str) -> Callable[[Command], Command]:
    """Return the option --effort of a command with its own default and help text."""
    efforts = click.Choice(["quick", "standard", "full"])
    return click.option("--effort", type=efforts, default=default, show_default=True, help=text)


def seed_option(text: str) -> Callable[[Command], Command]:
    """Return the option --seed of a command with its own help text."""
    return click.option(
        "--seed", type=Integer(min=0, max=2**63 - 1), metavar="N", default=0, show_default=True, help=text
    )


launch_option = click.option(
    "--launch",
    type=click.Choice(["eager", "captured"]),
    default="eager",
    show_default=True,
    help="How calls are launched: one by one by the host, whose time counts, or in a CUDA graph or compiled model. "
    "Both are one on a CPU.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")

device_option = click.option(
    "--device",
    type=device_name,
    metavar="DEVICE",
    help="cpu, cuda, cuda:N or N.  [default: the current CUDA device, else cpu]",
)


def process_count(value: str) -> str:
    """Parse a number of processes, or ``gpu`` for one on each GPU of this host."""
    text = value.strip().lower()
    if text != "gpu" and not (re.fullmatch(rf"\d{{1,{_DIGITS}}}", text) and 1 <= int(text) <= MOST_RANKS):
        raise click.BadParameter(
            f"{value!r} is no number of processes; use an integer from 1 to {MOST_RANKS}, or gpu for all GPUs"
        )
    return text


nproc_option = click.option(
    "--nproc",
    type=process_count,
    metavar="N|gpu",
    help="Start N ranks here that hold one sequence together, one to a GPU, and treat them as one; torchrun can start "
    "them, too.  [default: 1]",
)

world_option = click.option(
    "--nproc",
    type=process_count,
    metavar="N|gpu",
    help="Ranks that hold one sequence together; gpu: as many as there are GPUs.  [default: 1]",
)


def ranks_asked(nproc: str | None, facts: HardwareFacts) -> int:
    """Return the number of ranks that ``world_option`` asks about, on a machine with these facts."""
    if nproc != "gpu":
        return int(nproc or 1)
    if facts.vendor == "cpu":
        raise click.UsageError(f"--nproc gpu: {facts.device_name} is no GPU; give a number of ranks")
    return facts.device_count


profile_argument = click.argument("profile", required=False, type=click.Path(path_type=Path, readable=False))


def shape_options(*, of_grid: bool = False) -> Callable[[Command], Command]:
    """Add batch, heads and head dimension; ``of_grid``: without them a whole grid is meant, else ``usual_shape``."""

    def default(name: str) -> str:
        return "the grid's" if of_grid else f"{getattr(ON_A_GPU, name)}, on a CPU {getattr(ON_A_CPU, name)}"

    def add(command: Command) -> Command:
        for option in (
            click.option(
                "--head-dim",
                type=number_of("head_dim"),
                metavar="N",
                help=f"Size of one head.  [default: {default('head_dim')}]",
            ),
            click.option(
                "--kv-heads",
                type=number_of("kv_heads"),
                metavar="N",
                help="Key/value heads.  [default: as many as --heads]",
            ),
            click.option(
                "--heads",
                type=number_of("heads"),
                metavar="N",
                help=f"Query heads.  [default: {default('heads')}]",
            ),
            click.option(
                "--batch-size",
                type=number_of("batch"),
                metavar="N",
                default=None if of_grid else 1,
                show_default=not of_grid,
                help="Sequences in a batch." + ("  [default: the grid's]" if of_grid else ""),
            ),
        ):
            command = option(command)
        return command

    return add


def shape_asked(asked: Mapping[str, Any], vendor: str) -> Shape:
    """Return the shape that a command with ``shape_options`` was given, completed by the usual one of this vendor."""
    usual = usual_shape(vendor)
    heads = asked["heads"] or usual.heads
    kv_heads = asked["kv_heads"] or heads
    return Shape(asked.get("seq_len") or usual.seq_len, heads, kv_heads, asked["head_dim"] or usual.head_dim)


class Shape(NamedTuple):
    """Length and heads of one workload."""

    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int


model_option = click.option(
    "--model",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="A Hugging Face config.json, or the folder it is in: probe what that model runs, in the dtype it names. Other "
    "options win over it.",
)

like_option = click.option(
    "--like",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="What a program with RINGTUNE_RECORD=FILE recorded, a regular file: probe the workloads that cost it most.",
)

SHAPE = {
    *("model", "modes", "causal", "seq_lens", "batch_size", "documents", "heads", "kv_heads", "head_dim"),
    *("segment_lengths", "dilation_rates", "head_offset", "dense", "precision"),
}


def check_alone(option: str, excluded: Collection[str]) -> None:
    """Raise UsageError where ``option``, which says what to probe, comes with a parameter that it excludes."""
    context = click.get_current_context()
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        if given and parameter.name in excluded:
            raise click.UsageError(f"{option} says what to probe; leave {parameter.opts[0]} out")


def pattern_options(command: Command) -> Command:
    """Add a dilated pattern as two lists of one length, neither of which means dense, and its rule for offsets."""
    for option in (
        click.option(
            "--head-offset",
            type=click.Choice(["interleaved", "blocked"]),
            default="interleaved",
            show_default=True,
            help="First position of a head in a segment: LongNet's rule, or torchscale's.",
        ),
        click.option(
            "--dilation-rates", type=integer_list, metavar="N,N,...", help="Dilation rate of every branch: 1,2,4."
        ),
        click.option(
            "--segment-lengths",
            type=integer_list,
            metavar="N,N,...",
            help="Segment length of every branch: 2048,4096,8192.",
        ),
    ):
        command = option(command)
    return command


def check_shape(heads: int | None, kv_heads: int | None) -> None:
    """Raise UsageError when the head counts cannot be one attention."""
    if kv_heads is None:
        return
    if heads is None:
        raise click.UsageError("--kv-heads needs --heads as well")
    if heads % kv_heads:
        raise click.UsageError(f"--heads is {heads}, not a multiple of --kv-heads, {kv_heads}")


def check_pattern(asked: Mapping[str, Any]) -> None:
    """Raise UsageError unless what ``pattern_options`` were given is one pattern."""
    segment_lengths, dilation_rates = asked["segment_lengths"], asked["dilation_rates"]
    if (segment_lengths is None) != (dilation_rates is None):
        raise click.UsageError("--segment-lengths and --dilation-rates go together; give both, or neither for dense")
    if segment_lengths is not None and dilation_rates is not None and len(segment_lengths) != len(dilation_rates):
        raise click.UsageError(
            f"--segment-lengths has {plural(len(segment_lengths), 'entry')} and --dilation-rates "
            f"{len(dilation_rates)}; "
            "give two lists of one length"
        )
    if segment_lengths is None and asked["head_offset"] != "interleaved":
        raise click.UsageError(
            f"--head-offset {asked['head_offset']} is for a dilated pattern; give --segment-lengths and "
            "--dilation-rates, too"
        )


def pattern_asked(asked: Mapping[str, Any]) -> Pattern:
    """Return the pattern that a command with ``pattern_options`` was given."""
    return Pattern.of(asked["segment_lengths"], asked["dilation_rates"], asked["head_offset"])


def check_page(output: Path) -> None:
    """Raise ProbeFailure where a web page cannot be written, or would take the place of a file that is none."""
    check_writable(output)
    if is_there(output):
        with output.open("rb") as file:
            if file.read(len(_PAGE)).lower() != _PAGE:
                raise ProbeFailure(f"{output}: exists and is no web page; choose another --output, or remove it")


def check_writable(output: Path) -> None:
    """Raise ProbeFailure now rather than after minutes of measuring, when ``output`` cannot be written later."""
    folder = output.parent
    if is_there(output) and output.is_dir():
        raise ProbeFailure(f"{output}: is a folder; --output names a file")
    if not (is_there(folder) and folder.is_dir()):
        raise ProbeFailure(
            f"{output}: the folder {folder} does not exist; make it (mkdir -p) or choose another --output"
        )
    if is_there(output) and not output.is_file():  # a device or pipe, which a file would replace
        raise ProbeFailure(f"{output}: is not a regular file; choose another --output")
    if trouble := write_trouble(folder):
        raise ProbeFailure(f"{output}: cannot write in {folder} ({trouble}); choose another --output")

"""Worker process that compares kernels with float64, and may die.

``python -m autotune.report.numerics_worker DEVICE PARENT`` reads one shape and its kernels a line from stdin, as
JSON. It prints ``{"begin": N}`` before number N of them,
``{"end": N, "figures": [[name, error, bound], ...], "message": ""}`` after it, and ``{"done": true}`` after the last.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from autotune.measure.worker import die_with_parent

from .numerics_map import Shape

if TYPE_CHECKING:
    import torch

    from ringattn.planning.accuracy_check import Case


def say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def make(shape: Shape, device: torch.device) -> Case:
    from ringattn.planning.accuracy_check import make_case

    return make_case(
        shape.head_dim,
        shape.dtype,
        causal=shape.causal,
        grouped=shape.grouped,
        rows=shape.rows,
        device=device,
        exact_on=device,
    )


def serve(job: dict[str, Any], device: torch.device) -> None:
    """Check every kernel and direction that is asked for at one shape."""
    from ringattn.device_errors import is_sticky
    from ringattn.hardware.kernel_faults import Combination, Verdict
    from ringattn.kernels.registry import KERNELS
    from ringattn.planning.accuracy_check import config_of, verdict_on

    shape = Shape(*job["shape"])
    case = make(shape, device)
    for number, (name, backward) in enumerate(job["asked"]):
        say(begin=number)
        asked = Combination(name, shape.head_dim, shape.dtype, backward, shape.causal, shape.grouped)
        lost = False
        try:
            verdict = verdict_on(KERNELS[name].load(config_of(asked)), asked, case)
        except Exception as error:  # noqa: BLE001 - a broken package or a lost device: all of it is the answer
            verdict, lost = (
                Verdict(message=" ".join(f"{type(error).__name__}: {error}".split())[:300]),
                is_sticky(error),
            )
        figures = [[figure.name, str(figure.error), str(figure.bound)] for figure in verdict.figures]
        say(end=number, figures=figures, message=verdict.message)
        if lost:
            os._exit(1)
    say(done=True)


def main(arguments: list[str]) -> None:
    device_name, parent = arguments
    die_with_parent(int(parent))
    import torch

    with torch.no_grad():
        for line in sys.stdin:
            serve(json.loads(line), torch.device(device_name))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Calls repeated as their bare launches, on a package made here: two compiled kernels with a workspace of zeros."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ringattn.kernels.packages import recorded_launch
from ringattn.kernels.packages.recorded_launch import RecordedLaunch


class Extra(NamedTuple):
    tensors: object = None
    scalars: object = None


class Package:
    """A module like FlashAttention 4's: ``attend`` returns (a * b + scale, row sums), ``decided`` counts its Python."""

    def __init__(self) -> None:
        self.decided = 0
        self.unexplained: str | None = None
        self.module = ModuleType("package")

        def scaled(a: Tensor, b: Tensor, out: Tensor, scale: float, extra: Extra) -> None:
            torch.mul(a, b, out=out)
            out += scale

        def summed(out: Tensor, accumulator: Tensor, sums: Tensor) -> None:
            accumulator += out.sum(-1)  # right only where the accumulator begins as zeros
            sums.copy_(accumulator)

        def attend(a: Tensor, b: Tensor, *, out: Tensor | None = None, scale: float) -> tuple[Tensor, Tensor, None]:
            self.decided += 1
            if "scaled" not in attend.compile_cache:
                attend.compile_cache["scaled"] = scaled
            out = torch.empty_like(a) if out is None else out
            extra: Any = Extra(torch.ones(2) if self.unexplained == "nested" else None)
            if self.unexplained == "an address":
                extra = Extra(None, (b.data_ptr(),))
            b_call = b + 0 if self.unexplained == "copied" else b.detach()
            with torch.no_grad():
                attend.compile_cache["scaled"](a.detach(), b_call, out, scale, extra)
                accumulator = torch.zeros(a.shape[:-1], dtype=a.dtype)
                sums = torch.empty(a.shape[:-1], dtype=a.dtype)
                convert.compile_cache["summed"](out, accumulator, sums)
            self.meddle(out, sums)
            return out, sums, None

        def convert() -> None: ...

        attend.compile_cache, convert.compile_cache = {}, {"summed": summed}  # type: ignore[attr-defined]
        self.module.attend, self.module.convert = attend, convert  # type: ignore[attr-defined]

    def meddle(self, out: Tensor, sums: Tensor) -> None:
        """Touch the results in a way that no launch tells of and that leaves the numbers as they are."""
        with torch.no_grad():
            if self.unexplained == "in place":
                sums.mul_(1)
            elif self.unexplained == "an item set":
                sums[..., 0] = sums[..., 0].clone()
            elif self.unexplained == "a list of tensors":
                torch._foreach_mul_([sums], 1)
            elif self.unexplained == "into a tuple":
                torch.max(out, -1, out=(torch.empty_like(sums), torch.empty(sums.shape, dtype=torch.long)))
            elif self.unexplained == "by numpy":
                sums.numpy()[...] *= 1
            elif self.unexplained == "a value read":
                assert sums.sum().isnan().item() is False

    def launch(self) -> RecordedLaunch:
        return RecordedLaunch(self.module.attend, self.module, {"scale": 0.5}, results=2)


def check(found: tuple[Tensor, ...], a: Tensor, b: Tensor) -> None:
    out = (a * b + 0.5).detach()
    torch.testing.assert_close(found[0], out)
    torch.testing.assert_close(found[1], out.sum(-1))


def test_from_the_third_call_on_the_packages_python_is_not_run() -> None:
    package = Package()
    launch = package.launch()
    for _ in range(5):
        a, b = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 3, 4)
        check(launch(a, b), a, b)
    assert package.decided == 2


def test_every_call_has_results_of_its_own() -> None:
    launch = Package().launch()
    a = torch.randn(2, 3, 4)
    first, second = [launch(a, torch.full_like(a, float(n))) for n in range(4)][2:]
    check(first, a, torch.full_like(a, 2.0))
    check(second, a, torch.full_like(a, 3.0))


def test_shapes_strides_and_dtypes_have_recipes_of_their_own() -> None:
    package = Package()
    launch = package.launch()
    for _ in range(3):
        for a in (
            torch.randn(2, 3, 4),
            torch.randn(2, 4, 3).transpose(1, 2),
            torch.randn(2, 3, 4, dtype=torch.float64),
            torch.randn(1, 3, 4),
        ):
            check(launch(a, a.clone()), a, a)
    assert package.decided == 8


def test_results_go_into_given_tensors() -> None:
    package = Package()
    launch = package.launch()
    for _ in range(3):
        a, b, out = torch.randn(3, 4), torch.randn(3, 4), torch.full((3, 4), torch.nan)
        found = launch(a, b, into={"out": out})
        assert found[0] is out
        check(found, a, b)
        check(launch(a, b), a, b)
    assert package.decided == 4


MEDDLING = ("in place", "an item set", "a list of tensors", "into a tuple", "by numpy", "a value read")


@pytest.mark.parametrize("unexplained", ["nested", "an address", "copied", *MEDDLING])
def test_a_call_that_is_not_explained_stays_the_packages(unexplained: str) -> None:
    package = Package()
    package.unexplained = unexplained
    launch = package.launch()
    for _ in range(4):
        a, b = torch.randn(3, 4), torch.randn(3, 4)
        check(launch(a, b), a, b)
    assert package.decided == 4


def test_a_package_without_such_caches_is_called_as_it_is() -> None:
    package = Package()
    launch = RecordedLaunch(package.module.attend, ModuleType("bare"), {"scale": 0.5}, results=2)
    a = torch.randn(3, 4)
    for _ in range(4):
        check(launch(a, a), a, a)
    assert package.decided == 4


def test_pointers_that_are_not_aligned_are_left_to_the_package() -> None:
    package = Package()
    launch = package.launch()
    aligned, odd = torch.randn(12).view(3, 4), torch.randn(13)[1:].view(3, 4)
    for _ in range(3):
        check(launch(aligned, aligned.clone()), aligned, aligned)
        check(launch(aligned, odd), aligned, odd)
    assert package.decided == 2 + 3


def test_one_tensor_given_twice_is_left_to_the_package() -> None:
    package = Package()
    launch = package.launch()
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    for _ in range(3):
        check(launch(a, a), a, a)
    for _ in range(3):
        check(launch(a, b), a, b)
        check(launch(b, b), b, b)
    assert package.decided == 3 + 2 + 3


def test_names_in_another_order_are_another_call() -> None:
    package = ModuleType("package")

    def kernel(a: Tensor, low: Tensor, high: Tensor) -> None:
        low.copy_(a - 1)
        high.copy_(a + 1)

    def both(a: Tensor, *, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        both.compile_cache["kernel"](a, low, high)
        return low, high

    both.compile_cache = {"kernel": kernel}  # type: ignore[attr-defined]
    package.both = both  # type: ignore[attr-defined]
    launch = RecordedLaunch(both, package, {}, results=2)
    a = torch.randn(3, 4)
    for order in (("low", "high"), ("high", "low")) * 4:
        given = {name: torch.empty_like(a) for name in order}
        low, high = launch(a, into=given)
        torch.testing.assert_close(low, a - 1)
        torch.testing.assert_close(high, a + 1)
        assert low is given["low"]


def test_an_error_leaves_the_package_as_it_was() -> None:
    package = Package()
    launch = package.launch()
    caches = package.module.attend.compile_cache, package.module.convert.compile_cache
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    launch(a, b)
    failing = package.module.convert.compile_cache["summed"]
    package.module.convert.compile_cache["summed"] = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        launch(a, b)
    assert (package.module.attend.compile_cache, package.module.convert.compile_cache) == caches
    package.module.convert.compile_cache["summed"] = failing
    for _ in range(2):
        check(launch(a, b), a, b)


def test_recipes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_launch, "MOST_RECIPES", 4)
    launch = Package().launch()
    for length in range(1, 40):
        a = torch.randn(length, 4)
        for _ in range(3):
            check(launch(a, a.clone()), a, a)
    assert len(launch._recipes) <= 4


def test_threads_record_and_run_side_by_side() -> None:
    launch = Package().launch()

    def calls(seed: int) -> int:
        generator = torch.Generator().manual_seed(seed)
        for number in range(60):
            a, b = torch.randn(2, 1 + number % 7, 4, generator=generator).unbind(0)
            check(launch(a, b), a, b)
        return seed

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(calls, range(4))) == [0, 1, 2, 3]

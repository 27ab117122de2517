"""What a transformers model gives its attention over several ranks: the rows and loss of one rank, or refused there."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from example_ranks import run_here, run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from masked import masked
from pool import Pool
from tiny_models import VOCABULARY, attention, tiny
from torch import Tensor

from ringattn import RingAttention
from ringattn.distributed.peer_errors import PeerError
from ringattn.errors import InputError
from ringattn.integrations.transformers import register
from ringattn.integrations.transformers_calls import Call, attend_over_ranks
from ringattn.integrations.transformers_masks import mask_codes
from ringattn.modules.pool import AttentionPool

EXAMPLE = str(Path(__file__).parents[4] / "examples" / "finetune_transformers.py")


def test_the_example_has_one_loss_whatever_the_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of a length that the ranks do not divide, in the zigzag layout, whose positions jump."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    sizes = ("--steps", "2", "--seq-len", "41")
    run_here(EXAMPLE, monkeypatch, *sizes)
    alone = re.findall(r"loss ([\d.]+)", capsys.readouterr().out)
    assert len(alone) == 2
    assert float(alone[1]) < float(alone[0])
    codes, out, err = run_ranks(EXAMPLE, 2, tmp_path, *sizes)
    assert codes == [0, 0], err
    spread = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert spread == pytest.approx([float(loss) for loss in alone], abs=1e-4)


def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """As transformers writes a mask."""
    return key <= query


def mask_on_rank(positions: Tensor) -> Any:
    """As transformers writes the mask of positions that jump."""
    number = (positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(1)

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = number[batch, query] == number[batch, key]
        return (positions[batch, key] <= positions[batch, query]) & same

    return mask


def attended_on_rank(whole: list[Tensor], layout: str) -> list[Tensor]:
    """Outputs of the whole, with what a model may give: no mask, one of ones, and that of jumping positions."""
    pool = AttentionPool(profile=None, process_group=dist.group.WORLD, layout=layout)
    attention = pool.module_for(whole[0], whole[1], True, 0.5)
    q, k, v = map(attention.shard, whole)
    positions = attention.positions(whole[0].shape[1])[None]
    length = q.shape[1]
    ones = torch.ones(1, length, dtype=torch.bool)
    masks = (
        None,
        mask_codes(causal, mask_on_rank, 1, length, length, attention_mask=ones),
        mask_codes(causal, causal, 1, length, length, mask_function=mask_on_rank(positions)),
    )
    call = Call(True, None, positions, None, None, whole[0].shape[1])
    options = {"scale": 0.5, "with_lse": False}
    return [attention.unshard(attend_over_ranks(pool, q, k, v, mask, call, options)[0], 13) for mask in masks]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_ranks_hold_the_rows_of_the_whole(ranks: Callable[[int], Pool], layout: str) -> None:
    whole = [torch.randn(1, 13, heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    expected = masked(*whole, torch.ones(13, 13).tril().bool(), 0.5)
    for found in ranks(2).run(attended_on_rank, whole, layout):
        for out in found:
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def windowed_on_rank(whole: list[Tensor]) -> Tensor:
    pool = AttentionPool(profile=None, process_group=dist.group.WORLD)
    attention = pool.module_for(whole[0], whole[1], True, 0.5, window=4)
    assert attention.layout == "contiguous"
    q, k, v = map(attention.shard, whole)
    call = Call(True, 4, attention.positions(13)[None], None, None, 13)
    out, _ = attend_over_ranks(pool, q, k, v, None, call, {"scale": 0.5, "softcap": None, "with_lse": False})
    return attention.unshard(out, 13)


def test_a_sliding_window_over_ranks(ranks: Callable[[int], Pool]) -> None:
    whole = [torch.randn(1, 13, heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    expected = masked(*whole, torch.ones(13, 13).tril().triu(-3).bool(), 0.5)
    for found in ranks(2).run(windowed_on_rank, whole):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


ROW_BOUNDS = (0, 6, 7, 7, 18)  # and two positions of padding


def packed_on_rank(layout: str, family: str) -> list[Tensor]:
    """Logits of a model whose row of documents the ranks hold together, and the gradients of all its weights."""
    register("over-ranks", profile=None, process_group=dist.group.WORLD, layout=layout)
    model, ids, positions = packed_row(family)
    config = model.config
    cutter = RingAttention(
        config.num_attention_heads, config.head_dim, config.num_key_value_heads, causal=True, profile=None,
        process_group=dist.group.WORLD, layout=layout,
    )  # fmt: skip
    bounds = torch.tensor(ROW_BOUNDS, dtype=torch.int32)
    whole = torch.stack((ids[0], positions[0]), 1)[None]
    part_ids, part_positions = cutter.shard(whole, cu_seqlens=ROW_BOUNDS).unbind(2)
    with attention(model, "over-ranks"):
        logits = model(
            part_ids, position_ids=part_positions, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds,
            total_length=ids.shape[1], use_cache=False,
        ).logits  # fmt: skip
    kept = cutter.positions(ids.shape[1], ROW_BOUNDS) < ROW_BOUNDS[-1]
    dlogits = cutter.shard(weights_of(ids), cu_seqlens=ROW_BOUNDS)
    grads = torch.autograd.grad(logits[:, kept], list(model.parameters()), dlogits[:, kept])
    for grad in grads:
        dist.all_reduce(grad)
    return [cutter.unshard(logits.detach(), ids.shape[1], cu_seqlens=ROW_BOUNDS), *grads]


def packed_row(family: str) -> tuple[Any, Tensor, Tensor]:
    """A model in float64, and tokens and positions (1, S) of a row of documents with padding at its end."""
    positions = torch.cat([torch.arange(n) for n in (6, 1, 11, 2)])[None]
    ids = torch.randint(3, VOCABULARY, positions.shape, generator=torch.Generator().manual_seed(1))
    return copy.deepcopy(tiny(family)).double(), ids, positions


def weights_of(ids: Tensor) -> Tensor:
    return torch.randn(*ids.shape, VOCABULARY, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_packed_documents_over_ranks_are_those_of_calls_of_their_own(
    family: str, layout: str, ranks: Callable[[int], Pool]
) -> None:
    """Logits and gradients of ``sdpa`` on one device, a call for each document."""
    model, ids, _ = packed_row(family)
    with attention(model, "sdpa"):
        parts = [model(ids[:, begin:end]).logits for begin, end in itertools.pairwise(ROW_BOUNDS) if begin < end]
    expected = torch.cat(parts, 1)
    grads = torch.autograd.grad(expected, list(model.parameters()), weights_of(ids)[:, : ROW_BOUNDS[-1]])
    for logits, *found in ranks(2).run(packed_on_rank, layout, family):
        torch.testing.assert_close(logits[:, : ROW_BOUNDS[-1]], expected.detach(), rtol=0, atol=1e-9)
        for one, other in zip(found, grads, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


LENGTHS_OF_ROWS = (17, 4, 0)


def padded_on_rank(layout: str, family: str) -> list[Tensor]:
    """Logits of a model whose padded rows the ranks hold together, and the gradients of all its weights."""
    register("over-ranks", profile=None, process_group=dist.group.WORLD, layout=layout)
    model, ids, mask = padded_rows(family)
    config, total = model.config, ids.shape[1]
    # As the pool makes the module: a window decides where rows lie.
    cutter = RingAttention(
        config.num_attention_heads, 8, getattr(config, "num_key_value_heads", None), causal=family != "bert",
        profile=None, process_group=dist.group.WORLD, layout=layout, window=getattr(config, "sliding_window", None),
    )  # fmt: skip
    positions = cutter.positions(total)[None]
    with attention(model, "over-ranks"):
        logits = model(
            cutter.shard(ids), attention_mask=cutter.shard(mask), position_ids=positions, total_length=total,
            lengths=mask.sum(1), **({} if family == "bert" else {"use_cache": False}),
        ).logits  # fmt: skip
    kept = cutter.shard(mask).bool()
    grads = torch.autograd.grad(logits[kept], list(model.parameters()), cutter.shard(weights_of(ids))[kept])
    for grad in grads:
        dist.all_reduce(grad)
    return [cutter.unshard(logits.detach(), total), *grads]


def padded_rows(family: str) -> tuple[Any, Tensor, Tensor]:
    """A model in float64, and tokens and mask (B, S) of rows with padding at their ends."""
    model = copy.deepcopy(tiny(family)).double()
    ids = torch.randint(3, VOCABULARY, (3, 19), generator=torch.Generator().manual_seed(1))
    return model, ids, (torch.arange(19) < torch.tensor(LENGTHS_OF_ROWS)[:, None]).long()


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", "contiguous"),
        ("llama", "zigzag"),
        ("bert", "contiguous"),
        ("bert", "zigzag"),
        ("mistral, window 5", "contiguous"),  # the layout of windows
    ],
)
def test_padded_rows_over_ranks_are_those_of_calls_of_their_own(
    family: str, layout: str, ranks: Callable[[int], Pool]
) -> None:
    """Logits and gradients of ``sdpa`` on one device, a call for each row without its padding."""
    model, ids, mask = padded_rows(family)
    weights = weights_of(ids)
    with attention(model, "sdpa"):
        parts = [model(row[:n][None]).logits[0] for row, n in zip(ids, LENGTHS_OF_ROWS, strict=True) if n]
    grads = torch.autograd.grad(torch.cat(parts), list(model.parameters()), weights[mask.bool()])
    for logits, *found in ranks(3).run(padded_on_rank, layout, family):
        torch.testing.assert_close(logits[mask.bool()], torch.cat(parts).detach(), rtol=0, atol=1e-9)
        for one, other in zip(found, grads, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


def attended_by_lengths(
    lengths: list[int], total: int, causal_too: bool, layout: str, kv_heads: int, group: int
) -> list[Tensor]:
    """Outputs and gradients of whole rows, from every rank's part of them and of their mask."""
    pool = AttentionPool(profile=None, process_group=dist.group.WORLD, layout=layout)
    whole = inputs_by_lengths(lengths, total, kv_heads, group)
    attention = pool.module_for(whole[0], whole[1], causal_too, 0.5)
    q, k, v = (attention.shard(x).clone().requires_grad_() for x in whole[:3])
    positions = attention.positions(total)
    call = Call(causal_too, None, positions[None], None, None, total, torch.tensor(lengths))
    mask = (positions < call.lengths[:, None]).long()  # type: ignore[index]
    out, _ = attend_over_ranks(pool, q, k, v, mask, call, {"scale": 0.5, "with_lse": False})
    grads = torch.autograd.grad(out, (q, k, v), attention.shard(whole[3]).contiguous())
    return [attention.unshard(x.detach(), total) for x in (out, *grads)]


def inputs_by_lengths(lengths: list[int], total: int, kv_heads: int, group: int) -> list[Tensor]:
    """q, k, v and dout."""
    generator, heads = torch.Generator().manual_seed(total), kv_heads * group
    return [
        torch.randn(len(lengths), total, h, 4, generator=generator, dtype=torch.float64)
        for h in (heads, kv_heads, kv_heads, heads)
    ]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_rows_of_any_lengths_over_ranks(world: int, ranks: Callable[[int], Pool]) -> None:
    """Outputs and gradients of the definition, of rows shorter than a rank's part, or of no position."""

    @settings(max_examples=max(6, settings().max_examples // 6))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        total = data.draw(st.sampled_from([2 * world, 12, 4 * world + 3]), "total")
        lengths = data.draw(st.lists(st.integers(0, total), min_size=1, max_size=4).filter(any), "lengths")
        causal_too, layout = data.draw(st.booleans()), data.draw(st.sampled_from(["contiguous", "zigzag"]))
        heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
        q, k, v, dout = inputs_by_lengths(lengths, total, *heads)
        there = torch.arange(total) < torch.tensor(lengths)[:, None]
        allowed = there[:, None] & there[..., None]
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = masked(*leaves, allowed.tril() if causal_too else allowed, 0.5)
        expected = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
        for found in ranks(world).run(attended_by_lengths, lengths, total, causal_too, layout, *heads):
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-10)

    check()


def one_rank_is_wrong() -> str:
    pool = AttentionPool(profile=None, process_group=dist.group.WORLD, layout="contiguous")
    attention = pool.module_for(Q, K, True, 1.0)
    positions = attention.positions(6 * dist.get_world_size())[None] + int(dist.get_rank() == 1)
    with pytest.raises((InputError, PeerError)) as error:
        attend_over_ranks(
            pool, Q, K, K, None, Call(True, None, positions, None, None, None), {"scale": 1.0, "with_lse": False}
        )
    return f"{type(error.value).__name__}: {error.value}"


def test_a_call_that_one_rank_refuses_ends_on_all(fragile: Pool) -> None:
    """Those of the others would wait for it."""
    told = fragile.run(one_rank_is_wrong)
    assert [text.partition(":")[0] for text in told] == ["PeerError", "InputError", "PeerError"]
    assert all("position_ids are not this rank's of 18 positions in layout 'contiguous'" in text for text in told)


Q, K = torch.zeros(2, 6, 4, 8), torch.zeros(2, 6, 2, 8)
POSITIONS = torch.arange(6)[None]
BOUNDS = torch.tensor([0, 6])
LENGTHS, RIGHT = torch.tensor([5, 3]), torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"k": torch.zeros(2, 7, 2, 8)},
            "over several ranks there is no cross attention, and no cache but that of ringattn.integra",
        ),
        ({"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS}, "cu_seqlens is for packed documents in one row"),
        ({"cu_seq_lens_q": BOUNDS}, "one of cu_seq_lens_q and cu_seq_lens_k is given; give both"),
        ({"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS[:1]}, "cu_seqlens has 1 entry"),
        ({"sliding_window": 5, "causal": False}, "sliding_window is 5 without a causal mask, and a sequence has 6"),
        ({"position_ids": None}, "over several ranks the model's call needs position_ids"),
        ({"position_ids": POSITIONS.expand(3, 1, -1)}, "over several ranks the model's call needs position_ids"),
        ({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}, "position_ids are not this rank's of 6 positions"),
        ({"total_length": 7}, "position_ids are not this rank's of 7 positions"),
        ({"mask": RIGHT}, "over several ranks an attention_mask says nothing of the other ranks' padding; give the"),
        ({"mask": RIGHT.flip(1), "lengths": LENGTHS}, "attention_mask is not that of this rank's positions of rows"),
        ({"mask": RIGHT[:, :5], "lengths": LENGTHS}, "attention_mask is not that of this rank's positions of rows"),
        ({"mask": torch.ones(2, 1, 1, 6).bool()}, "over several ranks an attention mask is of padding alone"),
        ({"lengths": LENGTHS[:1]}, "lengths has 1 entry and q batch size 2"),
        ({"lengths": LENGTHS + 3}, "lengths holds 8, and q has 6 positions"),
        ({"lengths": LENGTHS, "cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS}, "cu_seq_lens_q and lengths are both"),
        ({"lengths": LENGTHS, "position_ids": POSITIONS.expand(3, -1)}, "position_ids are not this rank's of 6"),
        ({"lengths": LENGTHS, "position_ids": POSITIONS.flip(1)}, "position_ids are not this rank's of 6"),
    ],
)
def test_what_is_refused_over_ranks(given: dict[str, Any], told: str) -> None:
    """Where a group of one rank shows it as well."""
    fields: dict[str, Any] = dict.fromkeys(Call._fields) | {"causal": True, "position_ids": POSITIONS}
    k, mask = given.pop("k", K), given.pop("mask", None)
    pool = AttentionPool(profile=None)
    with pytest.raises(InputError) as error:
        attend_over_ranks(pool, Q, k, k, mask, Call(**fields | given), {"scale": 1.0, "with_lse": False})
    assert str(error.value).startswith(told)
    out, _ = attend_over_ranks(pool, Q, K, K, None, Call(**fields), {"scale": 1.0, "with_lse": False})
    assert out.shape == Q.shape

"""Prov-GigaPath's slide encoder here: its parts, ragged slides, and against the original with random weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchscale_peer import randomized, slide_encoder_of

from ringattn.errors import InputError
from ringattn.integrations.gigapath import SlideEncoder, segment_lengths_of

SMALL: dict[str, Any] = {"in_chans": 20, "embed_dim": 64, "depth": 2, "slide_ngrids": 50, "profile": None}


def slide(tiles: int, width: int = 20, seed: int = 0) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    coords = torch.randint(0, 50 * 256, (1, tiles, 2), generator=made).float()
    return torch.randn(1, tiles, width, generator=made), coords


def small(**arguments: Any) -> SlideEncoder:
    torch.manual_seed(0)
    return randomized(SlideEncoder(**{**SMALL, **arguments}))


def test_the_published_shape_has_the_published_number_of_parameters() -> None:
    """86,330,880 in all, of which the encoder has 85,148,160, as Prov-GigaPath prints them."""
    with torch.device("meta"):
        encoder = SlideEncoder()
    assert sum(p.numel() for p in encoder.parameters()) == 86_330_880
    assert sum(p.numel() for p in encoder.encoder.parameters()) == 85_148_160
    settings = encoder.encoder.settings
    assert (settings.num_heads, settings.embed_dim // settings.num_heads) == (16, 48)
    assert settings.segment_lengths == (1024, 5792, 32768, 185363, 1048576)
    assert settings.dilation_rates == (1, 2, 4, 8, 16)


@pytest.mark.parametrize("size", [(262144, 256), (131072, 256), (250000, 224), (65536, 512), (1024, 256), (300, 256)])
def test_segments_follow_the_largest_slide(size: tuple[int, int]) -> None:
    tiles = (size[0] // size[1]) ** 2
    expected = np.power(2, np.linspace(np.log2(1024), int(np.log2(tiles)), 5)).astype(int)
    assert segment_lengths_of(*size) == expected.tolist()


@pytest.mark.parametrize("global_pool", [False, True])
@pytest.mark.parametrize("all_layers", [False, True])
def test_ragged_slides_are_each_alone(global_pool: bool, all_layers: bool) -> None:
    encoder, lengths = small(global_pool=global_pool), [33, 1, 70]
    slides = [slide(length, seed=length) for length in lengths]
    alone = [encoder(*one, all_layers) for one in slides]
    assert len(alone[0]) == (3 if all_layers else 1)
    x, coords = torch.full((3, 70, 20), torch.nan), torch.zeros(3, 70, 2)
    for row, (tiles, at) in enumerate(slides):
        x[row, : tiles.shape[1]], coords[row, : tiles.shape[1]] = tiles[0], at[0]
    padded = encoder(x, coords, all_layers, lengths=lengths)
    cu_seqlens = torch.tensor([0, 33, 34, 104])
    packed = encoder(*(torch.cat(parts, 1) for parts in zip(*slides, strict=True)), all_layers, cu_seqlens=cu_seqlens)
    for found in (padded, packed):
        for layer, results in enumerate(found):
            expected = torch.cat([of_slide[layer] for of_slide in alone])
            torch.testing.assert_close(results, expected, rtol=2e-5, atol=2e-5)


def test_training_reaches_every_parameter() -> None:
    encoder = small(dropout=0.0, drop_path_rate=0.0).train()
    tiles, coords = slide(40)
    encoder(tiles, coords, lengths=[30])[0].square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in encoder.parameters())


@pytest.mark.parametrize("global_pool", [False, True])
def test_a_state_dict_of_gigapath_gives_its_results(global_pool: bool) -> None:
    """Layers of 16 heads of 48; 1023 tiles and the class token are one whole segment, where theirs pads nothing."""
    torch.manual_seed(0)
    theirs = slide_encoder_of(embed_dim=768, depth=3, slide_ngrids=50, global_pool=global_pool)
    ours = SlideEncoder(depth=3, slide_ngrids=50, global_pool=global_pool, norm_eps=theirs.norm.eps, profile=None)
    assert ours.load_state_dict(theirs.state_dict()) == ([], [])
    tiles, coords = slide(1023, 1536)
    with torch.no_grad():
        expected, found = theirs(tiles, coords, all_layer_embed=True), ours.eval()(tiles, coords, all_layer_embed=True)
        last = theirs(tiles, coords)[0], ours(tiles, coords)[0]
    for one, other in [*zip(found, expected, strict=True), last]:
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_with_the_table_of_positions_loads() -> None:
    encoder = small()
    state = encoder.state_dict() | {"pos_embed": torch.zeros(1, 50 * 50 + 1, 64)}
    assert encoder.load_state_dict(state) == ([], [])
    state["pos_embed"] = torch.zeros(1, 10 * 10 + 1, 64)
    with pytest.raises(RuntimeError, match="pos_embed has 101 positions, and slide_ngrids is 50"):
        encoder.load_state_dict(state)


def test_what_makes_no_sense_is_refused() -> None:
    encoder, (tiles, coords) = small(), slide(8)
    with pytest.raises(InputError, match=r"^coords lie in tiles -\d to \d+, and slide_ngrids is 50"):
        encoder(tiles, coords - 1000.0)
    with pytest.raises(InputError, match=r"a slide has no tiles; leave it out"):
        encoder(tiles, coords, cu_seqlens=[0, 4, 4, 8])
    with pytest.raises(InputError, match="give one"):
        encoder(tiles, coords, cu_seqlens=[0, 8], lengths=[8])
    with pytest.raises(InputError, match=r"^max_wsi_size is 100, less than a tile"):
        segment_lengths_of(100, 256)
    with pytest.raises(InputError, match=r"^embed_dim is 18; positions need a multiple of 4"):
        SlideEncoder(embed_dim=18)

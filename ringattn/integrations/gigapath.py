"""Runs Prov-GigaPath's slide encoder (``LongNetViT``) from its own state_dict, over ``RingAttention``.

Legend: B slides of a batch, L tiles of a slide, T tiles of all packed slides, C width of tile embeddings, E embed_dim.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ringattn.arguments import integer
from ringattn.errors import InputError
from ringattn.runtime.packed.documents import Documents

from .torchscale import TorchscaleLongNet

HEADS = 16
DILATION_RATES = (1, 2, 4, 8, 16)
SHORTEST_SEGMENT = 1024


def segment_lengths_of(max_wsi_size: int = 262144, tile_size: int = 256) -> list[int]:
    """Return the segments for slides of at most ``max_wsi_size`` pixels a side, cut into tiles of ``tile_size``.

    Five, in equal steps of log2, from 1024 to the largest power of two that is at most the number of tiles, truncated
    to integers, as Prov-GigaPath does: 1024, 5792, 32768, 185363 and 1048576 for its defaults.
    """
    side = integer("max_wsi_size", max_wsi_size) // integer("tile_size", tile_size)
    if side < 1:
        raise InputError(f"max_wsi_size is {max_wsi_size}, less than a tile of {tile_size}")
    first, last = SHORTEST_SEGMENT.bit_length() - 1, (side * side).bit_length() - 1
    steps = len(DILATION_RATES) - 1
    return [int(2.0 ** (first + (last - first) * step / steps)) for step in range(steps + 1)]


class SlideEncoder(nn.Module):
    """Encoder of a slide from its tiles' embeddings, with the parameters of Prov-GigaPath's ``LongNetViT``.

    A checkpoint's ``"model"`` loads as it is. Positions are two rows of a table of (slide_ngrids, E / 2) in place of
    one of (slide_ngrids ** 2 + 1, E): 1.5 MB for 3.1 GB at the defaults.

    Args:
        in_chans: C.
        embed_dim: E, of 16 heads.
        depth: layers.
        slide_ngrids: tiles a side that positions are told apart for.
        tile_size: pixels a side of a tile.
        max_wsi_size: pixels a side of the largest slide, which decides over segments.
        global_pool: the mean over tiles, not the class token, is the result.
        dropout: of embeddings, attention outputs and feed-forward networks, in training mode.
        drop_path_rate: stochastic depth of the last layer, in training mode.
        mlp_ratio: hidden width of the feed-forward network over E.
        norm_eps: of the last norm.
        options: arguments of ``RingAttention``: profile, backend, dtype, checkpoint and others; no process_group.

    Raises:
        InputError: an argument that makes no sense.
    """

    position_table: Tensor

    def __init__(
        self,
        in_chans: int = 1536,
        embed_dim: int = 768,
        depth: int = 12,
        slide_ngrids: int = 1000,
        tile_size: int = 256,
        max_wsi_size: int = 262144,
        global_pool: bool = False,
        dropout: float = 0.25,
        drop_path_rate: float = 0.1,
        mlp_ratio: float = 4.0,
        norm_eps: float = 1e-6,
        **options: Any,
    ) -> None:
        super().__init__()
        if options.get("process_group") is not None:
            raise InputError("process_group is given; shard the tiles' embeddings and call .encoder, which takes it")
        if embed_dim % 4:
            raise InputError(f"embed_dim is {embed_dim}; positions need a multiple of 4")
        self.slide_ngrids, self.tile_size, self.global_pool = slide_ngrids, tile_size, global_pool
        self.patch_embed = nn.ModuleDict({"proj": nn.Linear(in_chans, embed_dim)})
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim).normal_(std=0.02))
        config = {
            "encoder_layers": depth,
            "encoder_embed_dim": embed_dim,
            "encoder_ffn_embed_dim": int(mlp_ratio * embed_dim),
            "encoder_attention_heads": HEADS,
            "segment_length": segment_lengths_of(max_wsi_size, tile_size),
            "dilated_ratio": DILATION_RATES,
            "dropout": dropout,
            "drop_path_rate": drop_path_rate,
        }
        self.encoder = TorchscaleLongNet(config, **options)
        self.norm = nn.LayerNorm(embed_dim, norm_eps)
        self.register_buffer("position_table", _sines(slide_ngrids, embed_dim // 2), persistent=False)

    def forward(
        self,
        x: Tensor,
        coords: Tensor,
        all_layer_embed: bool = False,
        lengths: Any = None,
        cu_seqlens: Any = None,
    ) -> list[Tensor]:
        """Encode slides of tile embeddings x (B, L, C) at ``coords`` (B, L, 2), pixels.

        Args:
            all_layer_embed: a result of the first layer's input and of every layer's output, before the last layer
                norm of the encoder, in place of one result.
            lengths: tiles of each slide, (B,); rows beyond are padding, which is left out before the first layer.
            cu_seqlens: (N + 1,), where packed slides begin and end in x (1, T, C); the results are (N, E).

        Returns a list of results (B, E).

        Raises:
            InputError: coordinates outside of the grid, or lengths that do not fit.
        """
        if lengths is not None and cu_seqlens is not None:
            raise InputError("lengths and cu_seqlens are both given; give one")
        x = self.patch_embed["proj"](x) + self._positions(coords)
        if lengths is None and cu_seqlens is None:
            rows = torch.cat((self.cls_token.to(x.dtype).expand(len(x), -1, -1), x), 1)
            return [self._pooled(y[:, 0], y[:, 1:]) for y in self._encoded(rows, all_layer_embed, None)]
        documents = Documents(cu_seqlens, lengths=lengths)
        placed = documents.placed(*x.shape[:2])
        if len(placed) < len(documents.values) - (not documents.padded):
            raise InputError(f"{documents.name} is {list(documents.values)}: a slide has no tiles; leave it out")
        first = self.cls_token[0].to(x.dtype)
        rows = torch.cat([part for d in placed for part in (first, x[d.row, d.begin : d.end])])
        sizes = [1 + d.length for d in placed]
        return [
            torch.cat([self._pooled(slide[:1], slide[None, 1:]) for slide in torch.split(y[0], sizes)])
            for y in self._encoded(rows.unsqueeze(0), all_layer_embed, Documents([0, *accumulate(sizes)]))
        ]

    def _encoded(self, rows: Tensor, all_layer_embed: bool, packed: Documents | None) -> list[Tensor]:
        found = self.encoder(token_embeddings=rows, return_all_hiddens=all_layer_embed, cu_seqlens=packed)
        states: list[Tensor] = found["encoder_states"] if all_layer_embed else [found["encoder_out"]]
        return states

    def _pooled(self, first_BE: Tensor, tiles_BLE: Tensor) -> Tensor:
        """Return the result (B, E) of a slide's class token and its tiles."""
        y: Tensor = self.norm(tiles_BLE.mean(1) if self.global_pool else first_BE)
        return y

    def _positions(self, coords: Tensor) -> Tensor:
        """Return the embedding (B, L, E) of pixels (B, L, 2): the second coordinate's sines, then the first's."""
        at = torch.div(coords, self.tile_size, rounding_mode="floor").long()
        if at.numel() and not 0 <= int(at.min()) <= int(at.max()) < self.slide_ngrids:
            raise InputError(
                f"coords lie in tiles {int(at.min())} to {int(at.max())}, and slide_ngrids is {self.slide_ngrids}; "
                "give coordinates in pixels from the slide's corner, or more slide_ngrids"
            )
        return self.position_table[at.flip(-1)].flatten(-2)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Take a checkpoint that has the fixed table of all positions, which this module needs not."""
        table = state_dict.pop(prefix + "pos_embed", None)
        if table is not None and table.shape[1] != self.slide_ngrids**2 + 1:
            errors: list[str] = rest[-1]
            errors.append(f"pos_embed has {table.shape[1]} positions, and slide_ngrids is {self.slide_ngrids}")
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _sines(length: int, width: int) -> Tensor:
    """Return sines, then cosines, of positions 0 to length - 1 at width / 2 frequencies, (length, width) float32."""
    frequencies = 10000.0 ** -(torch.arange(width // 2, dtype=torch.float64) / (width // 2))
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), 1).float()

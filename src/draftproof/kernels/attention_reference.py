"""Compute decode attention in plain torch: the definition of what the kernels compute."""

import torch
from torch import Tensor


def decode_attention_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    lengths: Tensor,
    widths: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    ancestors: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Return the attention of every token of a pass, [B, T, heads, value size], computed in the query's dtype.

    Arguments are those of `draftproof.kernels.attention.decode_attention`. Every row reads as many slots as the longest
    one, on any device; the lengths are read on the host.
    """
    T, kv_heads = query.shape[1], keys.shape[1]
    widths = torch.full_like(lengths, T) if widths is None else widths
    ends = torch.where(widths > 0, lengths + widths, 0)
    j = torch.arange(max(int(ends.max()), 1), device=query.device)
    there = j < ends[:, None]  # [B, S]
    slots = torch.where(there, starts[:, None] + j, 0)
    # what lies after a row may be NaN, which a weight of 0 keeps
    row_keys, row_values = (x[slots].to(query.dtype).masked_fill(~there[:, :, None, None], 0) for x in (keys, values))
    grouped = query.unflatten(2, (kv_heads, -1))  # [B, T, kv heads, group, size]
    scores = scale * torch.einsum("btkgd,bskd->bkgts", grouped, row_keys).flatten(1, 2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    t = torch.arange(T, device=query.device)
    token_positions = lengths[:, None] + t if positions is None else positions  # [B, T]
    key_positions = _key_positions(token_positions, lengths, j)
    distance = token_positions[:, :, None] - key_positions[:, None, :]  # [B, T, S]
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(scores)[:, None, None] * distance[:, None]
    visible = _visible(ancestors, lengths, j, T) & there[:, None] & (t < widths[:, None])[:, :, None]
    if window is not None:
        visible &= distance < window
    if chunk is not None:
        visible &= token_positions[:, :, None] // chunk == key_positions[:, None, :] // chunk
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    weights = _softmax(scores, sinks).unflatten(1, (kv_heads, -1))
    return torch.einsum("bkgts,bskd->btkgd", weights, row_values).flatten(2, 3)


def _key_positions(token_positions: Tensor, lengths: Tensor, j: Tensor) -> Tensor:
    """Return the position of every key [B, S]: its number in the row, and that of its token for keys of this pass."""
    inside = j - lengths[:, None]
    given = token_positions.gather(1, inside.clamp(0, token_positions.shape[1] - 1))
    return torch.where(inside >= 0, given, j)


def _visible(ancestors: Tensor | None, lengths: Tensor, j: Tensor, T: int) -> Tensor:
    """Return which keys each token may attend to [B, T, S]: earlier passes, its ancestors in this one and itself."""
    inside = j - lengths[:, None]  # [B, S]
    t = torch.arange(T, device=j.device)
    if ancestors is None:
        return inside[:, None, :] <= t[:, None]
    if ancestors.dtype != torch.bool:
        ancestors = (ancestors[:, :, None] >> t) & 1 != 0
    related = ancestors.gather(2, inside.clamp(0, T - 1)[:, None, :].expand(-1, T, -1))
    return (inside < 0)[:, None, :] | (related & (inside < T)[:, None, :])


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return weights [B, heads, T, S], 0 for a token that attends to nothing; a sink takes a share and has no value."""
    if sinks is None:
        return torch.where(scores.isneginf().all(-1, keepdim=True), 0.0, scores.softmax(-1))
    column = sinks.to(scores)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]

"""Completions in batches, token for token those of one prompt at a time.

What makes it fast: batches sorted by length, one computation of the tokens with which all prompts begin, a cache that is written in place, and rows that
are finished leave the batch. What keeps it exact: a batch rounds otherwise than a row alone does, which matters only where two tokens are almost equally
likely; a greedy completion with such a place is made once more, alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# A gap between the two largest float32 logits below this may be rounding; batches were seen to change a gap by a tenth of it (docs/evaluation.md).
CLOSE = 1e-3
# Finished rows are taken out of the batch, which copies the cache, once they are this share of it.
LEAVE = 1 / 8
# Tokens of prompts that are computed together.
AT_ONCE = 1024
# Positions by which the cache grows.
ROOM = 64


@dataclass
class Counts:
    """What `generate` did: tokens produced, and how many prompts were done once more, alone."""

    tokens: int = 0
    alone: int = 0


def generate(
    model: Any,
    prompts: list[list[int]],
    stops: list[int],
    pad_id: int,
    max_new_tokens: int,
    batch_size: int,
    temperature: float | None = None,
    seeds: list[int] | None = None,
    progress: Callable[..., None] = lambda **event: None,
    counts: Counts | None = None,
) -> list[list[int]]:
    """Completions of the prompts (token ids), in their order, up to and including the token that ends them; greedy without a temperature.

    Sampling takes a seed per prompt, which alone decides its completion, whatever is in the batch with it (rounding aside). Greedy completions of a
    float32 model are those that each prompt has alone. Batches are sorted by length, the longest first: what does not fit into memory fails at once.
    """
    import torch

    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    found: dict[int, list[int]] = {}
    counts = counts or Counts()
    exact = temperature is None and batch_size > 1 and len(prompts) > 1 and model.dtype == torch.float32
    with torch.inference_mode():
        prefix = _Prefix.of(model, prompts) if batch_size > 1 else None
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            draws = None if temperature is None else _draws([seeds[i] for i in rows], max_new_tokens)
            tokens, gaps = _batch(
                model, [prompts[i] for i in rows], stops, pad_id, max_new_tokens, prefix, temperature, draws
            )
            for i, completion, gap in zip(rows, tokens, gaps, strict=True):
                if exact and gap < CLOSE:
                    completion = _batch(model, [prompts[i]], stops, pad_id, max_new_tokens)[0][0]
                    counts.alone += 1
                found[i] = completion
                counts.tokens += len(completion)
            progress(event="progress", done=len(found), total=len(order))
    return [found[i] for i in range(len(prompts))]


def until_stop(tokens: list[int], stops: list[int]) -> list[int]:
    """The tokens up to and including the first that ends a completion.

    >>> until_stop([5, 6, 1, 0, 0], [1])
    [5, 6, 1]
    """
    end = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[:end]


def _batch(
    model: Any,
    prompts: list[list[int]],
    stops: list[int],
    pad_id: int,
    max_new_tokens: int,
    prefix: "_Prefix | None" = None,
    temperature: float | None = None,
    draws: Any = None,
) -> tuple[list[list[int]], list[float]]:
    """Completions of one batch, and for each the least gap that there was between the logits of its two likeliest tokens (infinite for samples)."""
    import torch

    where = model.device
    logits, cache, mask = _prompted(model, prompts, pad_id, prefix)
    positions = mask.sum(-1, keepdim=True) - 1
    alive = torch.arange(len(prompts), device=where)
    produced = torch.full((len(prompts), max_new_tokens), stops[0], device=where)
    gaps = torch.full((len(prompts),), float("inf"), device=where)
    ends = torch.tensor(stops, device=where)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=where)  # of the rows that are in the batch
    for step in range(max_new_tokens):
        if draws is None:
            top = logits.topk(2, dim=-1)
            token = top.indices[:, 0]
            gap = torch.where(ended, float("inf"), top.values[:, 0] - top.values[:, 1])
            gaps[alive] = torch.minimum(gaps[alive], gap)
        else:
            token = _drawn(logits, temperature, draws[alive, step])
        produced[alive, step] = torch.where(ended, ends[0], token)
        ended |= torch.isin(token, ends)
        if step + 1 == max_new_tokens or bool(ended.all()):
            break
        mask, positions = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=-1), positions + 1
        if _plain(cache) and int(ended.sum()) >= LEAVE * len(ended):
            stay = (~ended).nonzero()[:, 0]
            cache.batch_select_indices(stay)
            alive, token, positions, mask, ended = (t[stay] for t in (alive, token, positions, mask, ended))
        logits = _forward(model, cache, token[:, None], mask, positions)
    return [until_stop(row, stops) for row in produced.tolist()], gaps.tolist()


def _forward(model: Any, cache: Any, ids: Any, mask: Any, positions: Any) -> Any:
    """Logits of the last position, float32 (rows, vocabulary)."""
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, _cache_name(model): cache}
    return model(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1].float()


def _prompted(model: Any, prompts: list[list[int]], pad_id: int, prefix: "_Prefix | None") -> tuple[Any, Any, Any]:
    """Logits after the prompts, their cache and its mask (rows, positions): the prefix, padding, and what is each prompt's own.

    A few rows at a time: intermediate results stay small, which a CPU needs to be fast and a GPU to have room.
    """
    import torch

    shared = prefix.length if prefix else 0
    width = max(map(len, prompts))
    mask = torch.tensor(
        [[1] * shared + [0] * (width - len(p)) + [1] * (len(p) - shared) for p in prompts], device=model.device
    )
    whole = _cache(model)
    size = len(prompts) if not _plain(whole) else max(1, AT_ONCE // (width - shared))
    logits, caches = [], []
    for start in range(0, len(prompts), size):
        rows = prompts[start : start + size]
        longest = max(map(len, rows))
        own = mask[start : start + size, [*range(shared), *range(width - longest + shared, width)]]
        ids = torch.tensor([[pad_id] * (longest - len(p)) + p[shared:] for p in rows], device=model.device)
        caches.append(prefix.cache(len(rows)) if prefix else _cache(model))
        logits.append(_forward(model, caches[-1], ids, own, (own.cumsum(-1) - 1).clamp(min=0)[:, shared:]))
    if len(caches) == 1:
        return logits[0], caches[0], mask
    for number, layer in enumerate(whole.layers):
        layer.gather([one.layers[number] for one in caches], shared, width)
    return torch.cat(logits), whole, mask


def _draws(seeds: list[int], count: int) -> Any:
    """Numbers from 0 to 1, a row per seed."""
    import torch

    return torch.stack(
        [torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in seeds]
    )


def _drawn(logits: Any, temperature: float, draws: Any) -> Any:
    """The tokens at which the distribution function passes each row's number."""
    import torch

    sums = (logits.double() / temperature).softmax(-1).cumsum(-1)
    # The last sum is 1 but for rounding; the draw is put on the same scale, so that no token without weight is ever drawn.
    return torch.searchsorted(sums, draws.to(sums.device)[:, None] * sums[:, -1:], right=True)[:, 0].clamp(
        max=logits.shape[-1] - 1
    )


# ---------------------------------------------------------------- the cache


def _cache(model: Any) -> Any:
    """An empty cache of the model's kind, whose plain layers grow in place."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    cache = DynamicCache(config=model.config)
    cache.layers = [_growing() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _cache_name(model: Any) -> str:
    """What the model calls its cache: transformers' own models `cache` since 5.24, others `past_key_values`."""
    import inspect

    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _plain(cache: Any) -> bool:
    """Whether every layer keeps all keys and values, row by row: only then may rows be taken out or put in."""
    return all(hasattr(layer, "_room") for layer in cache.layers)


def _growing() -> Any:
    """A layer of the cache with room to spare: transformers' own copies all keys and values for every token."""
    import torch
    from transformers.cache_utils import DynamicLayer

    class Growing(DynamicLayer):
        _room: Any = (None, None)

        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
                self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
            old, end = self.keys.shape[-2], self.keys.shape[-2] + key_states.shape[-2]
            if self._room[0] is None or self._room[0].shape[-2] < end:
                self._room = tuple(
                    s.new_empty(*s.shape[:2], end + ROOM, s.shape[-1]) for s in (key_states, value_states)
                )
                for room, kept in zip(self._room, (self.keys, self.values), strict=True):
                    room[:, :, :old] = kept
            for room, states in zip(self._room, (key_states, value_states), strict=True):
                room[:, :, old:end] = states
            self.keys, self.values = (room[:, :, :end] for room in self._room)
            return self.keys, self.values

        def gather(self, others: list[DynamicLayer], shared: int, width: int) -> None:
            """Takes the rows of other layers, `shared` positions from their beginning and the rest up to their end; each is emptied."""
            kinds = ("keys", "values")
            first = others[0]
            self.lazy_initialization(first.keys, first.values)
            rows = sum(len(other.keys) for other in others)
            # Zeros: what is never attended to must still be a number.
            self._room = tuple(
                getattr(first, k).new_zeros(rows, first.keys.shape[1], width + ROOM, getattr(first, k).shape[-1])
                for k in kinds
            )
            for room, kind in zip(self._room, kinds, strict=True):
                start = 0
                for other in others:
                    states = getattr(other, kind)
                    end = start + len(states)
                    room[start:end, :, :shared] = states[:, :, :shared]
                    room[start:end, :, width - (states.shape[-2] - shared) : width] = states[:, :, shared:]
                    start = end
            for other in others:
                other.keys = other.values = None
                other._room = (None, None)
            self.keys, self.values = (room[:, :, :width] for room in self._room)

        def batch_select_indices(self, indices: torch.Tensor) -> None:
            end = self.keys.shape[-2]
            self._room = tuple(room[indices] for room in self._room)
            self.keys, self.values = (room[:, :, :end] for room in self._room)

    return Growing()


@dataclass
class _Prefix:
    """The tokens with which all prompts begin, computed once: a system message and what the chat template writes before the question."""

    length: int
    keys: list[tuple[Any, Any]]
    model: Any

    @classmethod
    def of(cls, model: Any, prompts: list[list[int]]) -> "_Prefix | None":
        """None where prompts share nothing, or the model keeps something else than keys and values. Every prompt keeps a token of its own."""
        import torch

        low, high = min(prompts, default=[]), max(prompts, default=[])
        most = min(map(len, prompts), default=1) - 1
        length = next((i for i in range(most) if low[i] != high[i]), most)
        cache = _cache(model)
        if length <= 0 or not _plain(cache):
            return None
        model(
            input_ids=torch.tensor([low[:length]], device=model.device),
            use_cache=True,
            logits_to_keep=1,
            **{_cache_name(model): cache},
        )
        return cls(length, [(layer.keys, layer.values) for layer in cache.layers], model)

    def cache(self, rows: int) -> Any:
        """A cache for that many rows that holds the prefix."""
        cache = _cache(self.model)
        for layer, (keys, values) in zip(cache.layers, self.keys, strict=True):
            layer.update(keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1))
        return cache

"""Text from a model: prompts in, tokens out, with one compilation for all steps.

A few steps run as one compiled loop on the device, and the next few are on their way
before the tokens of the last are fetched, so that the device never waits for Python.
The key of a draw follows from the numbers of its step and its row: neither the size of
the chunks nor how rows are split over devices changes anything.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from rope_jax.nn.cache import Cache
from rope_jax.nn.decoding import extend, init_cache
from rope_jax.nn.sampling import Sampling, next_token


def generate(
    graphdef: nnx.GraphDef,
    params,
    prompts: jax.Array,
    *,
    max_new_tokens: int,
    key: jax.Array,
    key_mask: jax.Array | None = None,
    sampling: Sampling | None = None,
    cache: Cache | None = None,
    chunk: int = 16,
) -> tuple[np.ndarray, np.ndarray]:
    """Continue prompts.

    Args:
      graphdef: of `nnx.split(model)`.
      params: of `nnx.split(model)`.
      prompts: integers `[B, T]`.
      max_new_tokens: tokens to add to each row; 0 gives the prompts back.
      key: a JAX random key.
      key_mask: bool `[B, T]`, False where a prompt is padding, on either side.
      sampling: how tokens are drawn; None is from the model's own distribution.
      cache: an empty one, or one that holds what stands before the prompts; it is
        donated. None makes one of the size needed. One with `rolling` has no end.
      chunk: steps that run as one.

    Returns:
      Tokens `[B, T + max_new_tokens]`, every prompt without its padding and what was
      added right behind it, zeros after; and the lengths of the rows `[B]`.

    Raises:
      ValueError: a prompt is empty, holds what is no token, or does not fit into the
        cache with what is to be added; or a value is out of its range.
    """
    if max_new_tokens is None:
        raise ValueError("max_new_tokens must be a number, got None; see stream")
    parts = stream(
        graphdef,
        params,
        prompts,
        max_new_tokens=max_new_tokens,
        key=key,
        key_mask=key_mask,
        sampling=sampling,
        cache=cache,
        chunk=chunk,
    )
    prompts, mask = np.asarray(prompts), _mask(prompts, key_mask)
    added = [np.zeros((len(prompts), 0), np.int32), *parts]
    added = np.concatenate(added, axis=1)
    tokens = np.zeros((len(prompts), prompts.shape[1] + max_new_tokens), np.int32)
    lengths = mask.sum(axis=1) + max_new_tokens
    for row, length in enumerate(lengths):
        tokens[row, :length] = np.concatenate([prompts[row][mask[row]], added[row]])
    return tokens, lengths


def stream(
    graphdef: nnx.GraphDef,
    params,
    prompts: jax.Array,
    *,
    max_new_tokens: int | None,
    key: jax.Array,
    key_mask: jax.Array | None = None,
    sampling: Sampling | None = None,
    cache: Cache | None = None,
    chunk: int = 16,
    first_row: int = 0,
) -> Iterator[np.ndarray]:
    """Continue prompts, a few tokens at a time.

    Everything is checked in the call, before the first token is asked for.

    Args:
      graphdef: as for `generate`, and so on.
      params: see there.
      prompts: see there.
      max_new_tokens: see there; None goes on for as long as it is asked, which takes a
        rolling cache.
      key: see there.
      key_mask: see there.
      sampling: see there.
      cache: see there.
      chunk: tokens in each part; the last may have fewer.
      first_row: the number of the first row, for its draws.

    Returns:
      Arrays `[B, n]` of new tokens.

    Raises:
      ValueError: as for `generate`.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    mask = _mask(prompts, key_mask)
    model = nnx.merge(graphdef, params)
    _check_tokens(prompts, mask, model.embedding.shape[0])
    cache = _roomy(model, mask.sum(axis=1), max_new_tokens, cache)
    sampling = Sampling() if sampling is None else sampling
    return _parts(
        (graphdef, sampling, chunk),
        params,
        (jnp.asarray(prompts), None if mask.all() else jnp.asarray(mask)),
        cache,
        (key, np.int32(first_row)),
        max_new_tokens,
    )


def stream_over(
    devices: Sequence[jax.Device],
    graphdef: nnx.GraphDef,
    params,
    prompts: jax.Array,
    *,
    make_cache: Callable[[int], Cache],
    key_mask: jax.Array | None = None,
    **options,
) -> Iterator[np.ndarray]:
    """`stream` with its rows split over devices, each of which goes on by itself.

    Rows do not look at each other, so the devices never wait. Each has all the
    parameters. The cores of a CPU as devices are faster than one device with all cores
    from two rows on: the products of one token are too small to be split.

    Args:
      devices: as many as there are rows are used.
      graphdef: as for `stream`, and so on.
      params: see there.
      prompts: see there.
      make_cache: makes the cache of a device for a number of rows.
      key_mask: see `stream`.
      options: further ones of `stream`, but for the cache.

    Returns:
      Arrays `[B, n]` of new tokens, the same as of `stream`.

    Raises:
      ValueError: as for `stream`.
    """
    prompts = np.asarray(prompts)
    streams = []
    for device, rows in zip(devices, _split(len(prompts), len(devices)), strict=False):
        with jax.default_device(device):
            streams.append(
                stream(
                    graphdef,
                    jax.device_put(params, device),
                    prompts[rows],
                    key_mask=None if key_mask is None else np.asarray(key_mask)[rows],
                    cache=make_cache(len(prompts[rows])),
                    first_row=rows.start,
                    **options,
                )
            )
    return (np.concatenate(parts) for parts in zip(*streams, strict=True))


def _split(rows: int, parts: int) -> list[slice]:
    """At most `parts` slices of equal or nearly equal numbers of rows, none empty."""
    parts = max(1, min(rows, parts))
    ends = [rows * part // parts for part in range(parts + 1)]
    return [slice(*pair) for pair in itertools.pairwise(ends)]


def _parts(static, params, prompts, cache, draws, total):
    """The parts of `stream`: each is fetched when the one after it is under way."""
    graphdef, sampling, chunk = static
    if total == 0:
        return
    logits, cache = _prefill(graphdef, params, *prompts, cache)
    start, under_way = 0, None
    while total is None or start < total:
        end = np.int32(2**31 - 1 if total is None else total)
        tokens, logits, cache = _steps(
            graphdef,
            sampling,
            chunk,
            params,
            logits,
            cache,
            draws,
            np.int32(start),
            end,
        )
        if under_way is not None:
            yield np.asarray(under_way)
        under_way, start = tokens, start + chunk
    yield np.asarray(under_way)[:, : chunk - (start - total)]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def _prefill(graphdef, params, prompts, key_mask, cache):
    """Logits `[B, V]` after each prompt, and the cache with the prompts in it."""
    model = nnx.merge(graphdef, params)
    return extend(model, prompts, cache, key_mask=key_mask, last_only=True)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(4, 5))
def _steps(graphdef, sampling, chunk, params, logits, cache, draws, start, end):
    """`chunk` tokens `[B, chunk]` from step `start`; steps past the end write nothing.

    Also the logits and the cache to go on with.
    """
    model = nnx.merge(graphdef, params)
    key, first_row = draws
    rows = first_row + jnp.arange(logits.shape[0], dtype=jnp.int32)

    def draw(key, logits):
        return next_token(key, logits, sampling)

    def step(carry, number):
        logits, cache = carry
        of_step = jax.random.fold_in(key, number)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(of_step, rows)
        token = jax.vmap(draw)(keys, logits)
        wanted = jnp.broadcast_to(number < end, (token.shape[0], 1))
        logits, cache = extend(
            model, token[:, None], cache, key_mask=wanted, last_only=True
        )
        return (logits, cache), token

    numbers = start + jnp.arange(chunk, dtype=jnp.int32)
    (logits, cache), tokens = lax.scan(step, (logits, cache), numbers)
    return tokens.T, logits, cache


def _mask(prompts, key_mask):
    prompts = np.asarray(prompts)
    if prompts.ndim != 2 or not np.issubdtype(prompts.dtype, np.integer):
        raise ValueError(
            f"prompts must be integers [B, T], got {prompts.dtype} {prompts.shape}"
        )
    if key_mask is None:
        return np.ones(prompts.shape, bool)
    mask = np.asarray(key_mask)
    if mask.shape != prompts.shape or mask.dtype != bool:
        raise ValueError(
            f"key_mask must be bool of the shape of prompts, {prompts.shape}, got "
            f"{mask.dtype} {mask.shape}"
        )
    return mask


def _check_tokens(prompts, mask, vocab_size):
    prompts = np.asarray(prompts)
    lengths = mask.sum(axis=1)
    if not len(lengths) or not lengths.all():
        raise ValueError(
            "a prompt must have at least one token, got lengths "
            f"{lengths.tolist()}; a model has no logits for the first token of a text"
        )
    real = prompts[mask]
    if real.min() < 0 or real.max() >= vocab_size:
        raise ValueError(
            f"prompts must hold tokens of 0 to {vocab_size - 1}, got {real.min()} to "
            f"{real.max()}"
        )


def _roomy(model, lengths, max_new_tokens, cache):
    """A cache with room for prompts and new tokens, or ValueError."""
    if max_new_tokens is not None and max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must not be negative, got {max_new_tokens}")
    if cache is not None and len(cache.lengths) != len(lengths):
        raise ValueError(
            f"cache must have a row for each prompt, {len(lengths)}, got "
            f"{len(cache.lengths)}"
        )
    if max_new_tokens is None:
        if cache is None or cache.rolling is None:
            raise ValueError("max_new_tokens None needs a cache with rolling")
        return cache
    if cache is None:
        return init_cache(model, len(lengths), int(lengths.max()) + max_new_tokens)
    cache.check_room(lengths + max_new_tokens)
    return cache

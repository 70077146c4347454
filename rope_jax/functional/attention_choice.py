"""Which implementation of attention serves a request, and why."""

import functools
import logging
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax

from rope_jax.functional.attention_cudnn import needs_pairs
from rope_jax.functional.attention_request import Request
from rope_jax.functional.attention_target import is_partitioned, target_platform


class Implementation(NamedTuple):
    """A way to compute attention.

    Attributes:
        run: gives `[..., K, G, T, V]` for a request.
        refusal: why it cannot serve a request, "" if it can.
        folds_alibi: it reads `Request.alibi`, where others call `bias_function`.
    """

    run: Callable[[Request], jax.Array]
    refusal: Callable[[Request], str] = lambda request: ""
    folds_alibi: bool = False


# "auto" goes by blocks beyond this many logits per head. On a CPU the logits leave the
# cache sooner, and then they cost more time to read back than to compute twice.
_MOST_LOGITS_ON_CPU, _MOST_LOGITS = 384 * 384, 1024 * 1024
# Below, a fused kernel has too little to do to be worth starting.
_FEWEST_LOGITS_FUSED = 256 * 256


def choose(
    request: Request, name: str, implementations: Mapping[str, Implementation]
) -> tuple[str, str]:
    """The name of the implementation for a request, and the reason for it.

    Args:
        request: what is to be computed.
        name: of an implementation, or "auto".
        implementations: all there are, by name.

    Raises:
        ValueError: no such name, or it cannot serve the request; the message says why
            and which ones can.
    """
    if name == "auto":
        return _automatic(request, implementations)
    if name not in implementations:
        names = ", ".join(["auto", *implementations])
        raise ValueError(f"implementation must be one of {names}; got {name!r}")
    refusal = implementations[name].refusal(request)
    if refusal:
        able = [n for n, other in implementations.items() if not other.refusal(request)]
        if target_platform() == "cpu" and "splash" in able:
            able.remove("splash")  # interpreted there, for tests
        raise ValueError(
            f"implementation {name!r} cannot serve this call: {refusal}; "
            f"{', '.join(able)} can"
        )
    return name, "asked for"


def _automatic(request, implementations):
    platform, logits = target_platform(), math.prod(request.shape[-2:])
    sizes = f"{request.shape[-2]} x {request.shape[-1]} logits a head on {platform}"
    if platform == "cpu":
        small = logits <= _MOST_LOGITS_ON_CPU
        return "chunked" if small else "blockwise", sizes
    fused = "splash" if platform == "tpu" else "cudnn"
    refusal = implementations[fused].refusal(request) or _reluctance(request, fused)
    if not refusal:
        return fused, sizes
    plain = "xla" if logits <= _MOST_LOGITS else "blockwise"
    return plain, f"{sizes}; not {fused}: {refusal}"


def _reluctance(request, fused):
    """Why a fused kernel that could serve is better left alone; "" if it is not."""
    logits = math.prod(request.shape[-2:])
    if logits < _FEWEST_LOGITS_FUSED:
        return "too short to gain"
    if fused == "splash" and is_partitioned() is None:
        return "several devices, and no mesh that says how they are used"
    if fused == "cudnn" and needs_pairs(request) and logits > _MOST_LOGITS:
        return "its masks would be an array of all pairs"
    return ""


@functools.cache
def log_choice(name: str, reason: str) -> None:
    """Log a choice, each distinct one once in a process."""
    logging.getLogger("rope_jax").info("attention by %s: %s", name, reason)

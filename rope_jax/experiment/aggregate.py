"""Several seeds as one number with an interval, and encodings against each other.

Two things are uncertain in a mean over seeds: the seed (weights and data order) and
the bytes that happened to be scored. `aggregate` covers both. `paired_differences`
takes two encodings seed by seed on the same bytes and covers the seeds alone: what is
hard in those bytes is hard for both and drops out, but other bytes could favour
either, which rows of means cannot tell.

Sources: Zou & Donner 2008 (limits of a sum from the limits of its parts); Student
1908 (the t interval).
"""

import math
from collections.abc import Iterable

import numpy as np
from scipy import special

from rope_jax.experiment.rows import IDENTITY, complete, identity

_MEASURED = ("bpc", "delta", "gain")
_WITHOUT_SEED = tuple(name for name in IDENTITY if name != "seed")


def t_half_width(values: Iterable[float], confidence: float = 0.95) -> float | None:
    """Half of the t interval of a mean of independent values; None for fewer than two.

    Example:
      >>> round(t_half_width([1.0, 2.0, 3.0]), 4)  # 4.3027 / sqrt(3)
      2.4841
    """
    values = np.asarray(list(values), np.float64)
    if len(values) < 2:
        return None
    quantile = special.stdtrit(len(values) - 1, (1 + confidence) / 2)
    return float(quantile * values.std(ddof=1) / math.sqrt(len(values)))


def aggregate(rows: Iterable[dict]) -> list[dict]:
    """Means over the seeds of whatever else is the same.

    The interval of a mean joins two independent parts: that of the bytes, for which
    the mean of the seeds' own limits stands, and the t interval over the seeds. Each
    limit is as far from the mean as the root of the sum of both squares. With one
    seed it is that seed's own interval.

    Args:
      rows: rows of an evaluation; those without a value count as missing.

    Returns:
      Rows with the names of a row's identity but `seed`, with seeds (how many have a
      value) and, of bpc, delta and gain in bits per byte: the mean under that name,
      and under NAME_sd, NAME_low, NAME_high the sample standard deviation over the
      seeds (ddof 1; None for fewer than two) and the 95 % limits (None where
      unknown). In the order of first appearance.
    """
    groups: dict[tuple, list[dict]] = {}
    for row in map(complete, rows):
        groups.setdefault(identity(row, without=("seed",)), []).append(row)
    made = []
    for key, group in groups.items():
        one = dict(zip(_WITHOUT_SEED, key, strict=True))
        one["seeds"] = sum(row["bpc"] is not None for row in group)
        for name in _MEASURED:
            one |= _over_seeds(group, name)
        made.append(one)
    return made


def _over_seeds(group: list[dict], name: str) -> dict:
    known = [row for row in group if row.get(name) is not None]
    if not known:
        return dict.fromkeys((name, f"{name}_sd", f"{name}_low", f"{name}_high"))
    values = [row[name] for row in known]
    mean = float(np.mean(values))
    spread = t_half_width(values)
    made = {name: mean, f"{name}_sd": None}
    if spread is not None:
        made[f"{name}_sd"] = float(np.std(values, ddof=1))
    for side, sign in (("low", -1), ("high", 1)):
        limits = [row.get(f"{name}_{side}") for row in known]
        made[f"{name}_{side}"] = None
        if None not in limits:
            reach = abs(float(np.mean(limits)) - mean)
            made[f"{name}_{side}"] = mean + sign * math.hypot(reach, spread or 0.0)
    return made


def paired_differences(rows: Iterable[dict], reference: str = "rope") -> list[dict]:
    """How each encoding differs from a reference in bits per byte, seed by seed.

    Args:
      rows: rows of an evaluation.
      reference: the encoding that others are compared with, as it was trained:
        with softmax attention and without an eval-time scaling.

    Returns:
      A row for everything else that shares all but encoding, scaling and attention
      with rows of the reference: the names of a row's identity but `seed`, and
      reference, seeds (pairs), difference (mean of bpc less the reference's),
      difference_sd and the limits of its t interval over the seeds, difference_low
      and difference_high (None for fewer than two); all in bits per byte.
    """
    own = ("encoding", "attention", "scaling")
    rows = [row for row in map(complete, rows) if row["bpc"] is not None]
    standard = {
        identity(row, without=own): row["bpc"]
        for row in rows
        if tuple(row[name] for name in own) == (reference, "softmax", "")
    }
    pairs: dict[tuple, list[float]] = {}
    for row in rows:
        other = standard.get(identity(row, without=own))
        itself = tuple(row[name] for name in own) == (reference, "softmax", "")
        if other is None or itself:
            continue
        key = identity(row, without=("seed",))
        pairs.setdefault(key, []).append(row["bpc"] - other)
    made = []
    for key, values in pairs.items():
        mean, half = float(np.mean(values)), t_half_width(values)
        made.append(
            dict(zip(_WITHOUT_SEED, key, strict=True))
            | {
                "reference": reference,
                "seeds": len(values),
                "difference": mean,
                "difference_sd": None
                if half is None
                else float(np.std(values, ddof=1)),
                "difference_low": None if half is None else mean - half,
                "difference_high": None if half is None else mean + half,
            }
        )
    return made

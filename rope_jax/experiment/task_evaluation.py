"""How well a model does a task, by the length of the task.

The model is fed whole examples, answers included, and is right about a scored byte
where that byte has the greatest logit. An example counts as an exact match if the model
is right about all of its scored bytes, its end included. That is the exact match of
greedy decoding, though nothing is decoded: while every byte so far was right,
decoding would have fed the same bytes as the example holds, so both agree on the next
one, and at the first wrong byte both have failed. (Where an example goes on with bytes
that are not scored, the keys of mqar, decoding is given them.) The share of scored
bytes that are right, the token accuracy, is of this forced feeding; decoding would go
on from its own mistakes.

Rows are as long as the longest example of a length, with padding at the end that
nothing before it sees and that is never scored. Positions count from 0 in the row. The
table of `learned` is as long as the row of the longest training example, so it ends at
the training length exactly.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rope_jax.experiment.bootstrap import mean_interval, unit_values
from rope_jax.experiment.config import EvalConfig
from rope_jax.experiment.data.task_source import TEST_STREAMS, Task, rows
from rope_jax.experiment.data.tasks import TASKS, Example
from rope_jax.experiment.loss import token_nats
from rope_jax.experiment.plans import Windows, flag
from rope_jax.experiment.scoring import Apply, score

PROTOCOL = "task"
SOLVED = 0.9  # the exact match at which a length counts as solved
_NORMAL = 1.959963984540054  # quantile of 97.5 %
# Options of the other protocols.
_OF_TEXT = ("multiples", "anchors", "block", "reach", "stride", "max_bytes", "scaling")

# What a row without a value knows nothing of.
MEASURED = (
    *("bpc", "bpc_low", "bpc_high", "standard_error", "perplexity"),
    *("delta", "delta_low", "delta_high", "gain", "gain_low", "gain_high", "distance"),
    *("exact_match", "exact_low", "exact_high", "token_accuracy", "longest_solved"),
)


def check(config: EvalConfig, task: Task) -> None:
    """Raise ValueError, naming the flag, where a task could not be evaluated."""

    def require(ok, name, what):
        if not ok:
            got = getattr(config, name)
            raise ValueError(f"{flag(name)} must be {what}, got {got!r}")

    require(config.protocol == PROTOCOL, "protocol", f"{PROTOCOL!r} for a task")
    splits = f"one of {', '.join(TEST_STREAMS)}"
    require(config.split in TEST_STREAMS, "split", splits)
    for name in ("examples", "batch_tokens", "bootstrap"):
        require(getattr(config, name) >= 1, name, "at least 1")
    require(config.seed >= 0, "seed", "0 or more")
    for name in _OF_TEXT:
        usual = getattr(EvalConfig(), name)
        unused = f"left at {usual}: it has no effect on a task"
        require(getattr(config, name) == usual, name, unused)
    kind, lengths = TASKS[task.source], config.lengths
    most = kind.most(task.options)
    valid = all(1 <= length <= most for length in lengths) and bool(lengths)
    require(
        valid and len(set(lengths)) == len(lengths),
        "lengths",
        f"different numbers of {kind.unit}, from 1 to {most} for {task.source}",
    )


def measure(
    apply: Apply,
    params,
    task: Task,
    config: EvalConfig,
    *,
    max_length: int | None = None,
    mesh: Mesh | None = None,
) -> list[dict]:
    """Run a model on a task's test examples: one row for each length.

    The longest length of training is always among them.

    Args:
      apply: as for `scoring.score`.
      params: what `apply` takes.
      task: what to test.
      config: lengths, split, examples, batch size, resamples and seed.
      max_length: the longest row that the model takes; None for any. A length
        beyond it becomes a row without a value, and with a `reason`.
      mesh: as for `scoring.score`.

    Returns:
      Rows by ascending length, with the keys of `measurement.measure`, where bpc is
      the bits per scored byte, and examples, exact_match with its Wilson interval
      exact_low and exact_high, token_accuracy, and longest_solved, the same in all
      rows: the longest length here whose exact match is at least `SOLVED`. There is no
      difference to the training length: other lengths are other examples.
    """
    made = []
    for length in sorted({*config.lengths, task.options.max_length}):
        window = task.row_length(length)
        row = {"length": length, "window": window, "stride": None, "reason": None}
        row |= dict.fromkeys(MEASURED)
        row |= {"scored_bytes": 0, "control": "", "examples": config.examples}
        if max_length is not None and window > max_length:
            row["reason"] = f"the model's positions end at {max_length}"
        else:
            examples = [
                task.test_example(config.split, length, i)
                for i in range(config.examples)
            ]
            options = {"batch_tokens": config.batch_tokens, "mesh": mesh}
            values = _sums(apply, params, examples, window, **options)
            row |= _statistics(*values, config)
        made.append(row)
    solved = [row["length"] for row in made if (row["exact_match"] or 0) >= SOLVED]
    return [row | {"longest_solved": max(solved, default=None)} for row in made]


def _sums(apply, params, examples: list[Example], window: int, **options):
    """Nats, right bytes and scored bytes of each example, float64 `[n]` each."""
    batch = rows(examples, window)
    weights = batch["weights"] != 0
    # The examples stand one after the other: a byte string as any other to `score`.
    data = np.concatenate([batch["inputs"], batch["targets"][:, -1:]], axis=1)
    first = weights.argmax(axis=1)
    stop = window - weights[:, ::-1].argmax(axis=1)
    starts = np.arange(len(examples)) * (window + 1)
    windows = Windows(window, starts, first, stop)
    data = data.astype(np.uint8).ravel()
    values = score(apply, params, windows, data, statistic=_nats_and_right, **options)
    kept = weights[:, -windows.last :][windows.scored()]
    example = np.repeat(np.arange(len(examples)), stop - first)[kept]
    nats, right = values[kept].astype(np.float64).T
    return (
        np.bincount(example, nats, len(examples)),
        np.bincount(example, right, len(examples)),
        weights.sum(axis=1),
    )


def _nats_and_right(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The nats of each target, and 1 where it has the greatest logit: `[..., 2]`."""
    right = jnp.argmax(logits, axis=-1) == targets
    return jnp.stack([token_nats(logits, targets), right.astype(jnp.float32)], axis=-1)


def _statistics(nats, right, counts, config: EvalConfig) -> dict:
    row = {"scored_bytes": int(counts.sum())}
    if not np.isfinite(nats).all():
        return row | {"reason": "the loss is not finite"}
    values = unit_values(nats / math.log(2), counts)
    options = {"resamples": config.bootstrap, "seed": config.seed}
    # Blocks of one: examples are independent of each other.
    mean, error, low, high, _ = mean_interval(values, block=1, **options)
    known = {"bpc": mean, "bpc_low": low, "bpc_high": high, "standard_error": error}
    row |= {name: None if math.isnan(v) else v for name, v in known.items()}
    row["perplexity"] = 2.0**mean if mean < 1024 else None
    exact = int((right == counts).sum())
    low, high = wilson(exact, len(counts))
    row |= {"exact_match": exact / len(counts), "exact_low": low, "exact_high": high}
    return row | {"token_accuracy": float(right.sum() / counts.sum())}


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share, of independent trials.

    Wilson 1927, solved for the share p: |successes/trials - p| is at most z standard
    errors of p itself. Unlike the interval around the estimate it keeps a width where
    no trial or every trial succeeded.

    Returns:
      `(low, high)`, in [0, 1].

    >>> [round(limit, 4) for limit in wilson(9, 10)]
    [0.5958, 0.9821]
    >>> [round(limit, 4) for limit in wilson(0, 256)]
    [0.0, 0.0148]
    """
    share, square = successes / trials, _NORMAL**2
    middle = share + square / (2 * trials)
    spread = share * (1 - share) / trials + square / (4 * trials**2)
    half, scale = _NORMAL * math.sqrt(spread), 1 + square / trials
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)

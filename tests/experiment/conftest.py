"""Rows as an evaluation makes them, for tests of what reads rows."""

import pytest

from rope_jax.experiment.rows import complete

LENGTHS = (128, 256, 512, 1024, 2048)


def _rows_of(encoding, values, *, seed=0, lengths=LENGTHS, train_length=128, **more):
    """Rows with an interval of -0.06 and +0.08; None is a refused length.

    `more` are further keys of each row.
    """
    rows = []
    for length, bpc in zip(lengths, values, strict=True):
        row = {
            "encoding": encoding,
            "seed": seed,
            "protocol": "anchored",
            "split": "validation",
            "train_length": train_length,
            "length": length,
            "bpc": bpc,
            "bpc_low": None,
            "bpc_high": None,
            "delta": None,
            "delta_low": None,
            "delta_high": None,
            "scored_bytes": 0,
            "step": 1000,
            "dtype": "float32",
            "reason": "the model's positions end at 128",
        }
        if bpc is not None:
            delta = bpc - values[0]
            row |= {"bpc_low": bpc - 0.06, "bpc_high": bpc + 0.08, "reason": None}
            row |= {"delta": delta, "delta_low": delta - 0.01, "scored_bytes": 8192}
            row["delta_high"] = delta + 0.01
        rows.append(complete(row | more))
    return rows


@pytest.fixture(scope="session")
def rows_of():
    """rows_of(encoding, [bpc by length], seed=0, **more keys) gives rows."""
    return _rows_of

"""Old bytes made useless, and attention capped: what is fed, and the gains."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rope_jax.experiment.config import EvalConfig
from rope_jax.experiment.measurement import measure
from rope_jax.experiment.protocols import plan

TRAINED = 32  # the training length
ORDERED = np.arange(1000).astype(np.uint8)  # each byte is the one before plus 1


def planned(protocol, size=1000, lengths=(TRAINED, 64), **options):
    options = {"anchors": 4, "block": 8, "bootstrap": 50} | options
    config = EvalConfig(protocol=protocol, lengths=lengths, **options)
    return config, plan(size, config, TRAINED)


def uniform(params, inputs, *, last, key_mask=None):
    return jnp.zeros((*inputs[:, -last:].shape, 256))


def follows(part):
    """1 bit for the next number where a part of the bytes fed is in order, else 8.

    `part(W)` is the slice of steps, from a byte to the next, that must be by 1 and
    from bytes that are seen.
    """

    def apply(params, inputs, *, last, key_mask=None):
        step = (inputs[:, 1:] - inputs[:, :-1]) % 256 == 1
        if key_mask is not None:
            step &= key_mask[:, :-1]
        sure = step[:, part(inputs.shape[1])].all(axis=1)
        # log 255 against 255 zeros is a probability of 1/2.
        logits = np.log(255) * jax.nn.one_hot((inputs[:, -last:] + 1) % 256, 256)
        return jnp.where(sure[:, None, None], logits, 0.0)

    return apply


def test_control_feeds_other_old_bytes_and_the_same_recent_ones():
    data = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint8)
    _, cells = planned("control")
    assert [(c.length, c.control) for c in cells] == [
        (32, "real"),
        (64, "real"),
        (64, "elsewhere"),
        (64, "shuffled"),
        (64, "masked"),
    ]
    starts = np.array([7, 316, 625, 935])
    for cell in cells[1:]:
        np.testing.assert_array_equal(cell.windows.starts, starts)
    tokens = data[starts[:, None] + np.arange(65)]
    everything = slice(0, 4)
    elsewhere = cells[2].windows.edit(tokens, data, everything)
    # 969 places for 32 bytes; half of them is 484 further on.
    places = np.array([491, 800, 140, 450])
    np.testing.assert_array_equal(
        elsewhere[:, :32], data[places[:, None] + np.arange(32)]
    )
    shuffled = cells[3].windows.edit(tokens, data, everything)
    np.testing.assert_array_equal(
        np.sort(shuffled[:, :32], axis=1), np.sort(tokens[:, :32], axis=1)
    )
    assert np.all(np.any(shuffled[:, :32] != tokens[:, :32], axis=1))
    for edited in (elsewhere, shuffled):
        np.testing.assert_array_equal(edited[:, 32:], tokens[:, 32:])
    assert [c.windows.hidden for c in cells] == [None, 0, 0, 0, 32]
    # A batch gets the same bytes as all rows at once do.
    for cell, whole in ((cells[2], elsewhere), (cells[3], shuffled)):
        part = cell.windows.edit(tokens[1:3], data, slice(1, 3))
        np.testing.assert_array_equal(part, whole[1:3])


def test_another_seed_is_another_permutation():
    tokens = np.tile(np.arange(65, dtype=np.uint8), (4, 1))
    edits = [planned("control", seed=seed)[1][3].windows.edit for seed in (0, 0, 1)]
    same, again, other = (edit(tokens, ORDERED, slice(0, 4)) for edit in edits)
    np.testing.assert_array_equal(same, again)
    assert np.all(np.any(same != other, axis=1))
    assert len({row.tobytes() for row in same}) == 4  # each anchor has its own


@pytest.mark.parametrize("size", [159, 160, 1000, 5000])
def test_text_from_elsewhere_never_touches_the_window(size):
    longest = (size + TRAINED - 1) // 3
    lengths = (TRAINED, 33, longest)
    _, cells = planned("control", size, lengths, anchors=9, block=4)
    checked = 0
    for cell in cells:
        if cell.control == "elsewhere":
            old = cell.length - TRAINED
            places = cell.windows.edit.keywords["places"]
            assert places.min() >= 0 and places.max() + old <= size
            before = places + old <= cell.windows.starts
            after = places > cell.windows.starts + cell.length  # the last target
            assert np.all(before | after)
            checked += 1
    assert checked == 2


@pytest.mark.parametrize(
    ("part", "gains"),
    [
        # The whole window, that old and recent bytes join included.
        (lambda length: slice(None), (7, 7, 7)),
        # The order of the old bytes among each other: text from elsewhere has it.
        (lambda length: slice(0, max(0, length - TRAINED - 1)), (0, 7, 7)),
        # The recent bytes: it survives a long window and does not use it.
        (lambda length: slice(1 - TRAINED, None), (0, 0, 0)),
    ],
)
def test_control_shows_the_gain_of_an_oracle(part, gains):
    config, cells = planned("control", lengths=(TRAINED, 64, 128), anchors=16)
    rows = measure(follows(part), (), cells, ORDERED, config, train_length=TRAINED)
    right = dict(zip(("elsewhere", "shuffled", "masked"), gains, strict=True))
    assert len(rows) == 1 + 4 + 4
    for row in rows:
        gain = right.get(row["control"], 0)
        assert row["bpc"] == pytest.approx(1 + gain, abs=1e-5)
        assert row["delta"] == pytest.approx(gain, abs=1e-5)
        assert row["scored_bytes"] == 16 * 8 and row["distance"] is None
        for name in ("gain", "gain_low", "gain_high"):
            if row["control"] == "real":
                assert row[name] is None
            else:
                assert row[name] == pytest.approx(gain, abs=1e-5)


def test_window_cap_shows_the_gain_of_an_oracle():
    config, cells = planned("window_cap", lengths=(16, TRAINED, 64), anchors=16)
    assert [(c.length, c.control, c.capped) for c in cells] == [
        (16, "full", False),
        (32, "full", False),
        (64, "full", False),
        (64, "capped", True),
    ]
    whole = follows(lambda length: slice(None))
    recent = follows(lambda length: slice(-15, None))
    options = {"train_length": TRAINED}
    for capped, gain in ((uniform, 7.0), (recent, 0.0)):
        rows = measure(whole, (), cells, ORDERED, config, capped=capped, **options)
        assert [row["gain"] for row in rows[:3]] == [None] * 3
        assert [row["bpc"] for row in rows[:3]] == pytest.approx([1.0] * 3, abs=1e-5)
        for name in ("gain", "gain_low", "gain_high", "delta"):
            assert rows[3][name] == pytest.approx(gain, abs=1e-5)
    with pytest.raises(ValueError, match="capped must be given"):
        measure(whole, (), cells, ORDERED, config, **options)


def test_gains_are_paired():
    """Hard and easy blocks: the level is uncertain, what the control costs is not."""

    def apply(params, inputs, *, last, key_mask=None):
        # Probability 1/2 for a byte after 0 and 1/32 after 1, half of it when masked.
        share = jnp.where(inputs[:, -last:] == 1, 1 / 64, 1 / 4)
        if key_mask is not None:
            share = jnp.where(key_mask[:, :1], share, share / 2)
        rest = jnp.log((1 - 2 * share) / 254)
        logits = jnp.broadcast_to(rest[..., None], (*share.shape, 256))
        return logits.at[..., :2].set(jnp.log(share)[..., None])

    rng = np.random.default_rng(0)
    data = np.repeat(rng.integers(0, 2, 300), 10).astype(np.uint8)
    config, cells = planned("control", 3000, anchors=100, bootstrap=500)
    rows = measure(apply, (), cells, data, config, train_length=TRAINED)
    masked = next(row for row in rows if row["control"] == "masked")
    assert masked["bpc_high"] - masked["bpc_low"] > 0.5
    for name in ("gain", "gain_low", "gain_high"):
        assert masked[name] == pytest.approx(1.0, abs=1e-5)

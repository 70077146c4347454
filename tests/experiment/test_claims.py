"""Published claims: agreement only where whole intervals are on one side."""

import pytest

from rope_jax.experiment.claims import AGREES, CLAIMS, DISAGREES, OPEN, judge


def verdicts(rows):
    return {claim.text: verdict for claim, _, verdict in judge(rows)}


def outcomes(rows):
    return {text: verdict.outcome for text, verdict in verdicts(rows).items()}


def test_shapes_that_were_published_agree(rows_of):
    rows = rows_of("rope", [2.0, 2.4, 3.0, 4.0, 5.0])
    rows += rows_of("sinusoidal", [2.1, 4.0, 5.0, 5.0, 5.0])
    rows += rows_of("alibi", [2.0, 2.0, 2.01, 2.02, 2.03])
    rows += rows_of("learned", [2.2, None, None, None, None])
    rows += rows_of("t5", [2.0, 2.1, 2.3, 2.6, 3.0])
    rows += rows_of("none", [2.5, 2.7, 3.0, 3.0, 3.0])
    found = outcomes(rows)
    assert set(found.values()) == {AGREES} and len(found) == 7
    evidence = verdicts(rows)["RoPE has risen at twice its length"].evidence
    assert evidence == "rope +0.400 [+0.390, +0.410] at 256; limit +0.05"


def test_other_shapes_disagree(rows_of):
    rows = rows_of("rope", [2.0] * 5) + rows_of("sinusoidal", [2.1, 2.0, 2, 2, 2])
    rows += rows_of("alibi", [2.0, 2.1, 2.2, 2.3, 2.4])
    rows += rows_of("learned", [2.0] * 5)
    found = outcomes(rows)
    assert set(found.values()) == {DISAGREES} and len(found) == 5


def test_an_interval_across_the_limit_says_nothing(rows_of):
    rows = rows_of("alibi", [2.0, 2.0, 2.0, 2.0, 2.045])
    assert outcomes(rows) == {"ALiBi stays flat to the longest length": OPEN}
    for row in rows:
        row |= {"delta_low": None, "delta_high": None}
    assert outcomes(rows) == {"ALiBi stays flat to the longest length": OPEN}


def test_what_the_rows_are_not_about_is_left_out(rows_of):
    assert judge(rows_of("shaw", [2.0] * 5)) == []
    assert judge(rows_of("alibi", [2.0], lengths=(128,))) == []
    # Beyond all lengths, a scaled RoPE is another model.
    assert judge(rows_of("rope", [2.0] * 5, scaling="yarn:4")) == []


def test_kerple_is_claimed_both_ways(rows_of):
    found = outcomes(rows_of("kerple", [2.0, 2.0, 2.1, 2.2, 2.3]))
    assert found["KERPLE has risen at sixteen times its length"] == AGREES
    assert found["KERPLE stays flat to the longest length"] == DISAGREES


def test_a_gain_without_overlap_alone(rows_of):
    text = "ALiBi's gain from longer windows comes from windows that do not overlap"
    falls = rows_of("alibi", [2.0, 1.9, 1.85, 1.82, 1.8], protocol="nonoverlap")
    assert text not in outcomes(falls)  # nothing to compare it with
    assert outcomes(falls + rows_of("alibi", [2.0] * 5))[text] == AGREES
    # Where the same bytes gain as much, the windows are not the reason.
    same = rows_of("alibi", [2.0, 1.9, 1.8, 1.7, 1.6])
    assert outcomes(falls + same)[text] == DISAGREES
    flat = rows_of("alibi", [2.0] * 5, protocol="nonoverlap")
    assert outcomes(flat + rows_of("alibi", [2.0] * 5))[text] == OPEN


def test_corpora_are_judged_apart(rows_of):
    rows = rows_of("rope", [2.0, 2.4, 3, 4, 5]) + rows_of("rope", [2.0] * 5, corpus="x")
    found = [j[2].outcome for j in judge(rows) if "twice its length" in j[0].text]
    assert found == [AGREES, DISAGREES]


def test_budgets_are_compared_at_the_longest_length(rows_of):
    rows = rows_of("fox", [2.5, 2.5, 2.5, 2.5, 2.52], trained_bytes=10**6)
    rows += rows_of("fox", [2.0, 2.0, 2.0, 2.1, 2.4], trained_bytes=10**7)
    judged = [j for j in judge(rows) if j[0].text.startswith("more training")]
    ((_, runs, verdict),) = judged
    assert (
        runs == "trained at 128, 10 MB, validation, 1 seed"
        and verdict.outcome == AGREES
    )
    assert verdict.evidence.startswith("1 MB and 10 MB: fox +0.020")


def test_context_that_is_not_used(rows_of):
    gains = {"protocol": "control", "gain": 0.0, "gain_low": -0.01, "gain_high": 0.01}
    rows = rows_of("alibi", [2.0] * 5, control="masked", **gains)
    gains |= {"gain": 0.3, "gain_low": 0.2, "gain_high": 0.4}
    text = "ALiBi makes no use of what lies beyond its training length"
    assert outcomes(rows)[text] == AGREES
    rows += rows_of("alibi", [2.0] * 5, control="shuffled", **gains)
    assert outcomes(rows)[text] == DISAGREES
    assert "; shuffled: alibi +0.300" in verdicts(rows)[text].evidence
    # The other condition may be small and yet leave the question open.
    for row in rows:
        wide = row["control"] == "shuffled"
        row |= {"gain": -0.01, "gain_low": -0.3 if wide else -0.02}
        row["gain_high"] = 0.3 if wide else 0.0
    rows[4]["gain"] = 0.0
    assert outcomes(rows)[text] == OPEN


@pytest.mark.parametrize(
    ("spread", "outcome"), [(1.0, OPEN), (9.0, AGREES), (1 / 9, DISAGREES)]
)
def test_spread_over_seeds_is_an_f_test(rows_of, spread, outcome):
    """F(2, 2) at 95 % is 19: the spread must be 4.36 times as large."""
    rows = []
    for seed, shift in enumerate((-0.1, 0.0, 0.1)):
        values = [2 + shift, 3, 3, 3, 5 + spread * shift]
        rows += rows_of("rope", values, seed=seed)
    assert outcomes(rows)["RoPE's spread over seeds grows with length"] == outcome


def test_every_claim_has_a_source():
    assert all(claim.text and claim.source for claim in CLAIMS)
    assert len({claim.text for claim in CLAIMS}) == len(CLAIMS)

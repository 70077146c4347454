"""What has been published about extrapolation, held against the rows of a sweep.

Each claim is a text, its source and a test that looks at 95 % intervals alone: a
claim agrees or disagrees where a whole interval lies on one side of its limit, and
cannot be said anything about otherwise. Published numbers are perplexities per token
of other texts and larger models, so that the limits are about shapes, not values. A
source says so where its numbers were taken from another text that quotes it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from scipy import special

from rope_jax.experiment.aggregate import aggregate
from rope_jax.experiment.rows import IDENTITY
from rope_jax.experiment.table import budget_text

AGREES, DISAGREES, OPEN = "agrees", "disagrees", "cannot say"
FLAT = 0.05  # bits per byte that a flat line may rise
BREAK = 0.5  # bits per byte from which on a line has broken
USED = 0.02  # bits per byte from which on a context is used
_MAIN = ("anchored", "last_token", "sliding", "nonoverlap")  # the first present decides

_ALIBI = "Press et al. 2022 (ALiBi), WikiText-103, 247 M, tables as quoted elsewhere"
_CABLE = "CABLE paper 2025, FineWeb-Edu, 334 M, table as quoted elsewhere"
_DAPE = "Zheng et al. 2024 (DAPE), arXiv, 125 M, table as quoted elsewhere"


@dataclass(frozen=True)
class Verdict:
    """What the rows say to a claim: an outcome, and the numbers behind it."""

    outcome: str
    evidence: str


@dataclass(frozen=True)
class View:
    """Mean rows of one split, and the training length and budget that are looked at."""

    rows: list[dict]
    train_length: int
    trained_bytes: int | None

    @property
    def title(self) -> str:
        """Which runs these are."""
        seeds = max((row["seeds"] for row in self.rows if self._own(row)), default=0)
        return (
            f"trained at {self.train_length:,}, {budget_text(self.trained_bytes)}, "
            f"{self.rows[0]['split']}, "
            + ("1 seed" if seeds == 1 else f"{seeds} seeds")
        )

    def _own(self, row: dict) -> bool:
        kind = row["train_length"], row["trained_bytes"]
        return kind == (self.train_length, self.trained_bytes)

    def of(self, encoding: str, protocol: str = "") -> list[dict]:
        """Rows of an encoding as it was trained, by length; of the main protocol."""
        wanted = {"encoding": encoding, "attention": "softmax", "scaling": ""}
        wanted["protocol"] = protocol or self.main
        found = [
            row
            for row in self.rows
            if self._own(row) and all(row[k] == v for k, v in wanted.items())
        ]
        return sorted(found, key=lambda row: row["length"])

    @property
    def main(self) -> str:
        """The protocol that the claims are held against."""
        present = {row["protocol"] for row in self.rows}
        return next((name for name in _MAIN if name in present), "anchored")

    def at(self, encoding: str, multiple: int) -> dict | None:
        """The row at a multiple of the training length."""
        length = multiple * self.train_length
        return next((r for r in self.of(encoding) if r["length"] == length), None)

    def last(self, rows: list[dict], name: str = "delta") -> dict | None:
        """The longest row beyond the training length that has a value."""
        known = [
            row
            for row in rows
            if row[name] is not None and row["length"] > self.train_length
        ]
        return known[-1] if known else None


Test = Callable[[View], Verdict | None]


@dataclass(frozen=True)
class Claim:
    """A published finding; `test` gives None where the rows are not about it."""

    text: str
    source: str
    test: Test


def judge(rows: Iterable[dict]) -> list[tuple[Claim, str, Verdict]]:
    """Every claim that the rows are about, for each text, training length and budget.

    Args:
      rows: rows of an evaluation of text, of any protocols and seeds.

    Returns:
      (claim, which runs, verdict), in the order of `CLAIMS`.
    """
    texts: dict[tuple, list[dict]] = {}
    for row in aggregate(rows):
        texts.setdefault((row["corpus"], row["split"]), []).append(row)
    views = [
        View(own, *kind)
        for own in texts.values()
        for kind in dict.fromkeys((r["train_length"], r["trained_bytes"]) for r in own)
    ]
    return [
        (claim, view.title, verdict)
        for claim in CLAIMS
        for view in views
        if (verdict := claim.test(view)) is not None
    ]


def _interval(row: dict, name: str) -> str:
    text = f"{row[name]:+.3f}"
    if row[f"{name}_low"] is not None:
        text += f" [{row[f'{name}_low']:+.3f}, {row[f'{name}_high']:+.3f}]"
    return f"{row['encoding']} {text} at {row['length']:,}"


def _side(row: dict | None, limit: float, above: bool, name: str = "delta"):
    """Whether a row's whole interval lies above, or below, a limit."""
    if row is None or row[name] is None:
        return None
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    outcome = OPEN
    if low is not None and (low > limit or high < limit):
        outcome = AGREES if (low > limit) == above else DISAGREES
    return Verdict(outcome, f"{_interval(row, name)}; limit {limit:+.2f}")


def _rises(encoding: str, multiple: int, limit: float = FLAT) -> Test:
    return lambda view: _side(view.at(encoding, multiple), limit, above=True)


def _flat(encoding: str, multiple: int = 0) -> Test:
    def test(view):
        row = view.at(encoding, multiple) if multiple else view.last(view.of(encoding))
        return _side(row, FLAT, above=False)

    return test


def _less(encoding: str, other: str, multiple: int) -> Test:
    """One encoding loses less than another at a multiple of the training length."""

    def test(view):
        pair = view.at(encoding, multiple), view.at(other, multiple)
        return None if None in pair else _ordered(*pair)

    return test


def _ordered(low_row: dict, high_row: dict) -> Verdict | None:
    """Whether the interval of one row lies wholly below that of another."""
    if low_row["delta"] is None or high_row["delta"] is None:
        return None
    outcome = OPEN
    limits = [
        r[f"delta_{side}"] for r in (low_row, high_row) for side in ("low", "high")
    ]
    if None not in limits:
        low, high, other_low, other_high = limits
        outcome = (
            AGREES if high < other_low else DISAGREES if low > other_high else OPEN
        )
    evidence = f"{_interval(low_row, 'delta')}; {_interval(high_row, 'delta')}"
    return Verdict(outcome, evidence)


def _all(*tests: Test) -> Test:
    """All of several claims: one that disagrees decides, then one that is open."""

    def test(view):
        verdicts = [one(view) for one in tests]
        return None if None in verdicts else _worst(verdicts)

    return test


def _worst(verdicts: list[Verdict]) -> Verdict:
    outcomes = {verdict.outcome for verdict in verdicts}
    worst = next(o for o in (DISAGREES, OPEN, AGREES) if o in outcomes)
    return Verdict(worst, "; ".join(verdict.evidence for verdict in verdicts))


def _ends(encoding: str) -> Test:
    """Nothing beyond the training length has a value."""

    def test(view):
        beyond = [r for r in view.of(encoding) if r["length"] > view.train_length]
        if not beyond:
            return None
        known = [row["length"] for row in beyond if row["bpc"] is not None]
        lengths = ", ".join(f"{row['length']:,}" for row in beyond)
        evidence = f"{len(known)} of {len(beyond)} lengths have a value: {lengths}"
        return Verdict(DISAGREES if known else AGREES, evidence)

    return test


def _unused(encoding: str, protocol: str) -> Test:
    """No condition of a control costs more than what counts as use."""

    def test(view):
        rows = view.of(encoding, protocol)
        controls = dict.fromkeys(row["control"] for row in rows)
        parts = [
            view.last([r for r in rows if r["control"] == c], "gain") for c in controls
        ]
        verdicts = []
        for row in parts:
            if row is not None:
                verdict = _side(row, USED, above=False, name="gain")
                text = f"{row['control']}: {verdict.evidence}"
                verdicts.append(Verdict(verdict.outcome, text))
        return _worst(verdicts) if verdicts else None

    return test


def _falls_without_overlap(encoding: str) -> Test:
    """Windows that do not overlap fall, and further than the main protocol does."""

    def test(view):
        if view.main == "nonoverlap":
            return None
        fall = view.last(view.of(encoding, "nonoverlap"))
        main = {row["length"]: row for row in view.of(encoding)}
        if fall is None or fall["length"] not in main:
            return None
        less = _ordered(fall, main[fall["length"]])
        return less and _worst([_side(fall, 0.0, above=False), less])

    return test


def _worse_with_training(encoding: str) -> Test:
    """Compared at the largest budget with the smallest, at the longest length."""

    def test(view):
        row = view.last(view.of(encoding))
        if row is None:
            return None
        same = [name for name in IDENTITY if name not in ("seed", "trained_bytes")]
        budgets = {
            r["trained_bytes"]: r
            for r in view.rows
            if all(r[name] == row[name] for name in same)
            and r["delta"] is not None
            and r["trained_bytes"] is not None
        }
        if len(budgets) < 2 or row["trained_bytes"] != max(budgets):
            return None
        verdict = _ordered(budgets[min(budgets)], row)
        amounts = f"{budget_text(min(budgets))} and {budget_text(max(budgets))}"
        return Verdict(verdict.outcome, f"{amounts}: {verdict.evidence}")

    return test


def _spread_grows(encoding: str) -> Test:
    """F test of the seeds' variances at the longest and at the training length."""

    def test(view):
        short, long = view.at(encoding, 1), view.last(view.of(encoding))
        if not short or not long or not short["bpc_sd"] or not long["bpc_sd"]:
            return None
        seeds = min(short["seeds"], long["seeds"])
        ratio = (long["bpc_sd"] / short["bpc_sd"]) ** 2
        limit = special.fdtri(seeds - 1, seeds - 1, 0.95)
        outcome = AGREES if ratio > limit else DISAGREES if ratio * limit < 1 else OPEN
        return Verdict(
            outcome,
            f"sd over {seeds} seeds {short['bpc_sd']:.3f} at {short['length']:,}, "
            f"{long['bpc_sd']:.3f} at {long['length']:,}",
        )

    return test


CLAIMS = (
    Claim(
        "sinusoidal explodes at once beyond its length",
        _ALIBI,
        _rises("sinusoidal", 2, BREAK),
    ),
    Claim(
        "RoPE has risen at twice its length",
        f"{_CABLE}; much less in the ALiBi paper's windows that do not overlap",
        _rises("rope", 2),
    ),
    Claim(
        "RoPE loses less than sinusoidal at twice the length",
        _ALIBI,
        _less("rope", "sinusoidal", 2),
    ),
    Claim(
        "T5's bias is mild at first, below RoPE, then rises",
        _ALIBI,
        _all(
            _less("t5", "rope", 2),
            lambda v: _side(v.last(v.of("t5")), FLAT, above=True),
        ),
    ),
    Claim("ALiBi stays flat to the longest length", _ALIBI, _flat("alibi")),
    Claim(
        "KERPLE stays flat to the longest length",
        "Chi et al. 2022 (KERPLE), OpenWebText2, 512 to 16,384, as quoted elsewhere",
        _flat("kerple"),
    ),
    Claim("KERPLE has risen at sixteen times its length", _DAPE, _rises("kerple", 16)),
    Claim("without an encoding the loss rises early", _DAPE, _rises("none", 2)),
    Claim(
        "the forgetting transformer (FoX) stays flat or falls",
        "PaTH paper 2025 (FoX beside it), 760 M, 4,096 to 65,536",
        _flat("fox"),
    ),
    Claim(
        "PoPE stays flat or falls to eight times its length",
        "PoPE paper 2025, a figure to ten times the length",
        _flat("pope", 8),
    ),
    Claim("CABLE stays flat or falls", _CABLE, _flat("cable")),
    Claim("FIRE breaks within four times its length", _CABLE, _rises("fire", 4, BREAK)),
    Claim(
        "xPos loses less than RoPE at four times the length",
        "Sun et al. 2023 (xPos), as quoted elsewhere, and there with blockwise "
        "attention, which is not used here",
        _less("xpos", "rope", 4),
    ),
    Claim("a learned table ends at its length", "by construction", _ends("learned")),
    Claim(
        "ALiBi's gain from longer windows comes from windows that do not overlap",
        _ALIBI + ", windows with and without overlap",
        _falls_without_overlap("alibi"),
    ),
    Claim(
        "ALiBi makes no use of what lies beyond its training length",
        "a conjecture from its flat loss in windows that overlap, in the same tables",
        _unused("alibi", "control"),
    ),
    Claim(
        "a window of the training length serves ALiBi as well as all context",
        "the same conjecture, asked of attention",
        _unused("alibi", "window_cap"),
    ),
    Claim(
        "more training can make FoX extrapolate worse",
        "author of FoX, zhixuan-lin/forgetting-transformer issue 2",
        _worse_with_training("fox"),
    ),
    Claim(
        "more training can make RoPE extrapolate worse",
        "the same, asked here of RoPE",
        _worse_with_training("rope"),
    ),
    Claim(
        "RoPE's spread over seeds grows with length",
        "bob80333/investigating_extrapolation, 15 seeds: standard deviation of the "
        "perplexity 0.9 at 128 (of 122), 8.6 at 2,048 (of 280)",
        _spread_grows("rope"),
    ),
)

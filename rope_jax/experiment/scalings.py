"""Changes of a trained model at evaluation, none of which touches its parameters.

    linear:FACTOR ntk:FACTOR ntk_by_parts:FACTOR yarn:FACTOR llama3:FACTOR dynamic_ntk
                              rotary frequencies, for lengths up to FACTOR times the
                              one that was trained; dynamic_ntk goes by each row's
    rerope:WINDOW             rotary distances end at WINDOW
    self_extend:GROUP,WINDOW  beyond WINDOW, they are those between groups of GROUP
    logn                      scores grow with log n past the training length
    window:WINDOW             attention ends WINDOW tokens back

Joined by "+", changes act together: `yarn:4+logn`. A change is a pure function from
one `DecoderConfig` to another; a model built from that takes the old parameters. It
replaces what the model was trained with: `yarn:8` on a model fine-tuned with `yarn:4`
is a factor of 8 on the length before both.
"""

import dataclasses
import math
from collections.abc import Iterable

from rope_jax.experiment.plans import flag
from rope_jax.nn.config import DecoderConfig
from rope_jax.nn.encodings import ENCODINGS
from rope_jax.nn.rotations import Rope

# Each change: the numbers after its colon, and the part of the model that it sets.
_CHANGES: dict[str, tuple[tuple[str, ...], str]] = {
    "linear": (("factor",), "rope"),
    "ntk": (("factor",), "rope"),
    "dynamic_ntk": ((), "rope"),
    "ntk_by_parts": (("factor",), "rope"),
    "yarn": (("factor",), "rope"),
    "llama3": (("factor",), "rope"),
    "rerope": (("window",), "rope"),
    "self_extend": (("group", "window"), "rope"),
    "logn": ((), "temperature"),
    "window": (("window",), "window"),
}
_FLAG = flag("scaling")

Change = tuple[str, dict[str, float]]


def check(texts: Iterable[str]) -> None:
    """Raise ValueError, naming the flag, for a text that is no change or comes twice.

    Whether a change applies to a model is seen by `apply`.
    """
    seen = []
    for text in texts:
        changes = parse(text)
        if changes in seen:
            raise ValueError(f"{_FLAG} must be different changes, got {text!r} twice")
        seen.append(changes)


def parse(text: str) -> list[Change]:
    """The changes that a text joins by "+": name and numbers of each.

    Raises:
      ValueError: naming the flag, the text and the valid forms.

    Example:
      >>> parse("self_extend:4,64+logn")
      [('self_extend', {'group': 4, 'window': 64}), ('logn', {})]
    """
    changes = [_parse_one(part.strip(), text) for part in text.split("+")]
    parts = [_CHANGES[name][1] for name, _ in changes]
    for part in parts:
        if parts.count(part) > 1:
            names = " and ".join(n for n, _ in changes if _CHANGES[n][1] == part)
            raise ValueError(
                f"{_FLAG}: {names} in {text!r} both set the {part}; give them apart"
            )
    return changes


def apply(config: DecoderConfig, text: str, *, train_length: int) -> DecoderConfig:
    """A model's config with a change, of the same parameters.

    Args:
      config: as the model was trained.
      text: changes, joined by "+".
      train_length: its training length, which the temperature is relative to.

    Raises:
      ValueError: malformed; or the change does not apply to this model.

    Example:
      >>> changed = apply(DecoderConfig(), "linear:4+window:64", train_length=128)
      >>> changed.rope.scaling, changed.rope.factor, changed.window
      ('linear', 4.0, 64)
    """
    changed = config
    for name, numbers in parse(text):
        if name == "window":
            changed = dataclasses.replace(changed, **numbers)
        elif name == "logn":
            length = config.temperature_length or train_length
            changed = dataclasses.replace(
                changed, temperature=name, temperature_length=length
            )
        else:
            rope = _scaled(changed, name, numbers)
            changed = dataclasses.replace(changed, rope=rope)
    if changed == config:
        raise ValueError(f"{text} changes nothing: the model was trained with it")
    return changed


def _scaled(config: DecoderConfig, name: str, numbers: dict):
    if not issubclass(ENCODINGS[config.encoding], Rope):
        raise ValueError(
            f"{name} changes a rotary encoding, and {config.encoding!r} is none"
        )
    unscaled = {"factor": 1.0, "window": 0, "group": 0}
    return dataclasses.replace(config.rope, scaling=name, **unscaled | numbers)


def _parse_one(part: str, text: str) -> Change:
    name, colon, rest = part.partition(":")
    names = _CHANGES[name][0] if name in _CHANGES else None
    given = rest.split(",") if colon else []
    if names is None or len(given) != len(names):
        raise _malformed(text)
    numbers = {}
    for key, number in zip(names, given, strict=True):
        try:
            numbers[key] = float(number) if key == "factor" else int(number)
        except ValueError as error:
            raise _malformed(text) from error
        least, most, valid = 1, 2**31 - 1, "at least 1, at most 2**31 - 1"
        if key == "factor":
            least, most, valid = math.nextafter(1, 2), 2.0**31, "above 1, at most 2**31"
        if not least <= numbers[key] <= most:
            raise ValueError(
                f"{_FLAG}: the {key} of {name} must be {valid}, got {text!r}"
            )
    return name, numbers


def _malformed(text: str) -> ValueError:
    forms = (
        ":".join([name, *[",".join(numbers).upper()] * bool(numbers)])
        for name, (numbers, _) in _CHANGES.items()
    )
    return ValueError(
        f"{_FLAG} must be one of {', '.join(forms)}, or several joined by +; got "
        f"{text!r}"
    )

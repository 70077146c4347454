"""Names of topologies, and the numbers of chips."""

import pytest

from rope_jax.experiment.chips import CHIPS, parse_topology


@pytest.mark.parametrize(
    ("name", "platform", "devices", "chip"),
    [
        ("v5e:16x16", "tpu", 256, "TPU v5e"),
        ("v5p:8x8x8", "tpu", 512, "TPU v5p"),
        ("v6e:1x1", "tpu", 1, "TPU v6e"),
        ("cuda:h100:8", "gpu", 8, "NVIDIA H100 SXM"),
        ("cuda:a100:64", "gpu", 64, "NVIDIA A100 80GB SXM"),
    ],
)
def test_names(name, platform, devices, chip):
    made = parse_topology(name)
    assert (made.platform, made.devices) == (platform, devices)
    assert made.chip.name == chip


def test_virtual_devices_have_no_chip():
    made = parse_topology("cpu:8")
    assert (made.platform, made.devices, made.chip) == ("cpu", 8, None)


WRONG = (
    *("", "v5e", "v5e:3x5", "v5e:4x4x4", "v5p:16x16", "v4:2x2x1", "cuda:v5e:8"),
    *("cuda:h100", "cuda:h100:0", "cuda:b300:8", "h100:8", "cpu:0", "tpu:v5e:2x2"),
)


@pytest.mark.parametrize("name", WRONG)
def test_other_names_raise_with_the_valid_ones(name):
    with pytest.raises(ValueError, match=r"--topology must be one of v5e:SHAPE") as e:
        parse_topology(name)
    message = str(e.value)
    assert "16x16" in message and "cuda:h100:N" in message and "cpu:N" in message
    assert message.endswith(f"got {name!r}")


def test_the_table():
    """The makers' figures, and the points where arithmetic becomes the limit."""
    ridges = {name: round(chip.ridge) for name, chip in CHIPS.items()}
    assert ridges == {
        "v5e": 241, "v5p": 166, "v6e": 574, "a100": 153, "h100": 295, "h200": 206
    }  # fmt: skip
    assert CHIPS["v5e"].memory == 16 * 2**30
    assert CHIPS["v5p"].ring_bandwidth == 200e9
    assert all(chip.source.startswith("https://") for chip in CHIPS.values())

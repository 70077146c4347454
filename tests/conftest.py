"""Settings for every test: eight virtual devices, and no silent broadcasting."""

import pathlib

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

SHARED = pathlib.Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def enwik6() -> pathlib.Path:
    """The first million bytes of enwik8, where the shared data is laid out."""
    path = SHARED / "data" / "enwik6"
    if not path.exists():
        pytest.skip(f"real data is not here: {path}")
    return path

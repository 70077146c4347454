"""Settings for every test: eight virtual devices, and no silent broadcasting."""

import os
import pathlib

# The suite spends most of its time in the compiler: the optimizer of machine code is
# left out, which takes a third less time, and programs that several tests compile,
# some in processes of their own, are kept. Set before jax is imported.
ROOT = pathlib.Path(__file__).resolve().parents[1]
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache/jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

SHARED = ROOT.parent / "shared"


@pytest.fixture(scope="session")
def enwik6() -> pathlib.Path:
    """The first million bytes of enwik8, where the shared data is laid out."""
    path = SHARED / "data" / "enwik6"
    if not path.exists():
        pytest.skip(f"real data is not here: {path}")
    return path

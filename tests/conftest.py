"""Settings for every test: eight virtual devices, and no silent broadcasting.

Also what several files need: real data, the commands, and a run to use.
"""

import json
import os
import pathlib
import subprocess
import sys

# The suite spends most of its time in the compiler: the optimizer of machine code is
# left out, which takes a third less time, and programs that several tests compile,
# some in processes of their own, are kept. Set before jax is imported.
ROOT = pathlib.Path(__file__).resolve().parents[1]
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache/jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

import jax
import pytest

# Before doctests are collected: pytest else makes second modules of their files, whose
# classes are not those that the tests know.
import rope_jax  # noqa: F401

jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

SHARED = ROOT.parent / "shared"


def pytest_addoption(parser):
    parser.addoption(
        "--every_mesh",
        action="store_true",
        help="every encoding on every mesh, in tests/experiment/test_sharding.py",
    )


@pytest.fixture(scope="session")
def enwik6() -> pathlib.Path:
    """The first million bytes of enwik8, where the shared data is laid out."""
    path = SHARED / "data" / "enwik6"
    if not path.exists():
        pytest.skip(f"real data is not here: {path}")
    return path


@pytest.fixture(scope="session")
def server():
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "command_server.py")],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
    )
    yield process
    process.stdin.close()
    process.wait(timeout=60)


@pytest.fixture
def run(server, tmp_path):
    """run("train.py", "--flag=...") gives the exit code and what was printed.

    A script of the repository, or the name of a module.
    """

    def call(script, *arguments, folder=tmp_path):
        request = {
            "script": str(ROOT / script) if script.endswith(".py") else script,
            "arguments": arguments,
            "folder": str(folder),
        }
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        answer = json.loads(server.stdout.readline())
        return answer["code"], answer["output"]

    return call


@pytest.fixture(scope="session")
def write_run():
    """write_run(folder, encoding="rope", seed=0, step=7) makes a run, untrained.

    Its weights are random, the head's too: what it predicts is far from uniform.
    """
    return _write_run


def _write_run(run_dir, encoding="rope", *, seed=0, step=7, length=16):
    import functools

    import grain
    import jax.numpy as jnp
    import numpy as np

    from rope_jax.experiment import run_directory
    from rope_jax.experiment.checkpoint import Checkpoints
    from rope_jax.experiment.config import Config, resolve
    from rope_jax.experiment.metrics import empty_window
    from rope_jax.experiment.optimizer import make_optimizer
    from rope_jax.experiment.train_step import init_state
    from rope_jax.nn.decoder import Decoder

    config = Config()
    sizes = {"num_layers": 1, "model_dim": 16, "num_heads": 2, "head_dim": 8}
    for name, value in (sizes | {"encoding": encoding}).items():
        setattr(config.model, name, value)
    config.data.length = length
    config = resolve(config)
    build = functools.partial(Decoder, config.model)
    init = functools.partial(init_state, build, make_optimizer(config.train))
    shapes = jax.eval_shape(init, jax.random.key(0))
    rng = np.random.default_rng(seed)
    state = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(0, 0.4, x.shape), x.dtype),
        shapes._replace(key=None),
    )
    state = state._replace(step=jnp.int32(step), key=jax.random.key(0))
    data = iter(grain.MapDataset.range(9).to_iter_dataset())
    run_directory.save_config(config, run_dir)
    with Checkpoints(run_dir, config) as checkpoints:
        checkpoints.save(step, state, empty_window(), data)
    return run_dir

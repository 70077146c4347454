"""Checkpoints of a run: what is saved, and how it comes back.

A checkpoint is named by the updates done and has four parts:

    params/ opt_state/    trees of arrays
    progress/             step, random key, sums since the last log row
    data/                 position of the data iterator, the same for every process

Orbax writes them asynchronously and restores each array to the sharding that is
asked for, whatever mesh and however many processes saved it.
"""

import asyncio
import json
import os
import pathlib

import jax
from flax import nnx
from orbax.checkpoint import v1 as ocp

from rope_jax.experiment import distributed, run_directory
from rope_jax.experiment.config import Config, from_dict, to_dict
from rope_jax.experiment.errors import RunError
from rope_jax.experiment.mesh import param_shardings
from rope_jax.nn.config import DecoderConfig
from rope_jax.nn.decoder import Decoder


class Checkpoints:
    """The checkpoints of a run that is being trained; a context manager.

    Opening it clears away what an interrupted save left behind. Leaving it waits
    until everything is written.

    Attributes:
      latest: step of the newest checkpoint, None if there is none.
    """

    def __init__(self, run_dir: pathlib.Path, config: Config, corpus: str = ""):
        """Open the checkpoints of a run.

        Args:
          run_dir: the run's directory.
          config: the run's config, which is saved inside each checkpoint.
          corpus: hash of the bytes trained on; saved, and compared on return.
        """
        self._directory = run_dir / "checkpoints"
        self._config = config
        self._corpus = corpus
        if jax.process_index() == 0:
            self._directory.mkdir(parents=True, exist_ok=True)
            run_directory.clear_unfinished(run_dir)
        distributed.sync("unfinished checkpoints cleared")
        keep = config.train.keep_checkpoints
        self._checkpointer = ocp.training.Checkpointer(
            self._directory,
            preservation_policy=ocp.training.preservation_policies.LatestN(keep),
        )
        steps = run_directory.complete_steps(run_dir)
        self.latest = steps[-1] if steps else None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        # A save that is under way would wait for a process that may be gone.
        if exception[0] is None or jax.process_count() == 1:
            self._checkpointer.close()

    def path(self, step: int) -> pathlib.Path:
        """The directory of one checkpoint."""
        return self._directory / str(step)

    def save(self, step: int, state, window, iterator) -> None:
        """Save the state after `step` updates, unless that was done already.

        Returns when the arrays are copied off the device: the state may then be
        donated. The writing goes on in the background.

        Args:
          step: updates done; equal to `state.step`, and known to the host.
          state: a `TrainState`.
          window: tree of arrays, the sums since the last log row.
          iterator: the data iterator, after the batch of this step.
        """
        if step == self.latest:
            return
        self._checkpointer.save_checkpointables_async(
            step,
            {
                "params": state.params,
                "opt_state": state.opt_state,
                "progress": _progress(state, window),
                "data": _Position(iterator),
            },
            force=True,
            custom_metadata={"config": to_dict(self._config), "corpus": self._corpus},
        )
        self.latest = step

    def wait(self) -> None:
        """Return when everything saved is on disk."""
        self._checkpointer.wait()

    def restore(self, state, window, iterator):
        """The newest checkpoint, on the shardings of abstract arrays.

        Args:
          state: a `TrainState` of abstract arrays with shardings.
          window: tree of abstract arrays with shardings.
          iterator: a fresh data iterator; it is moved to the saved position.

        Returns:
          `(state, window)`.

        Raises:
          ValueError: another model or other data was saved; the first mismatch is
            named.
          RunError: the files cannot be read.
        """
        path = self.path(self.latest)
        wanted = {
            "params": state.params,
            "opt_state": state.opt_state,
            "progress": _abstract_progress(state, window),
        }
        _check_origin(path, self._config, self._corpus)
        _check_trees(path, wanted)
        loaded = _load(path, wanted | {"data": _Position(iterator)})
        progress = loaded["progress"]
        state = state._replace(
            step=progress["step"],
            params=loaded["params"],
            opt_state=loaded["opt_state"],
            key=jax.random.wrap_key_data(progress["key"]),
        )
        return state, progress["window"]


class _Position:
    """Where a data iterator stands, as orbax saves and loads it.

    Every process is at the same batch, so there is one file for all. Grain's own
    way, one file for each process, ties a checkpoint to their number; its files are
    read as well.
    """

    def __init__(self, iterator):
        self._iterator = iterator

    async def save(self, directory):
        state = json.dumps(self._iterator.get_state())  # now: it moves on

        async def write():
            path = await directory.await_creation()
            if jax.process_index() == 0:
                await asyncio.to_thread((path / "position.json").write_text, state)

        return write()

    async def load(self, directory):
        async def read():
            path = min(directory.glob("*.json"))
            state = json.loads(await asyncio.to_thread(path.read_text))
            self._iterator.set_state(state)

        return read()


def load_params(
    run_dir: str | os.PathLike,
    step: int | None = None,
    *,
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[Config, nnx.GraphDef, dict, int]:
    """A trained model, to evaluate or sample from: the parameters alone.

    Args:
      run_dir: the directory of the run.
      step: which checkpoint; None takes the newest.
      mesh: where the parameters go; None puts them on one device.

    Returns:
      `(config, graphdef, params, step)`; `nnx.merge(graphdef, params)` is the model.

    Raises:
      FileNotFoundError: no run or no complete checkpoint is there.
      ValueError: no such step, a path inside of a run, or another model was saved.
      RunError: the files cannot be read.
    """
    config = run_directory.load_config(run_dir)
    path = _find(run_dir, step)
    graphdef, params = abstract_model(config.model)
    if mesh is None:
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: device, params)
    else:
        shardings = param_shardings(mesh, params)
    wanted = {"params": with_shardings(params, shardings)}
    _check_origin(path, config)
    _check_trees(path, wanted)
    return config, graphdef, _load(path, wanted)["params"], int(path.name)


def check_fit(run_dir: str | os.PathLike, params) -> None:
    """Raise ValueError, naming the array, unless a run has a model's parameters.

    Args:
      run_dir: the directory of the run.
      params: abstract arrays.

    Raises:
      FileNotFoundError: no complete checkpoint is there.
    """
    _check_trees(_find(run_dir), {"params": params})


def load_into(run_dir: str | os.PathLike, params) -> tuple[dict, int]:
    """The parameters of a run's newest checkpoint, for a model that takes them.

    The run may be of another encoding, or trained with another length or scaling.

    Args:
      run_dir: the directory of the run.
      params: abstract arrays with shardings, where the parameters go.

    Returns:
      `(params, step)`.

    Raises:
      FileNotFoundError: no complete checkpoint is there.
      ValueError: an array is missing there, or has another shape.
      RunError: the files cannot be read.
    """
    path, wanted = _find(run_dir), {"params": params}
    _check_trees(path, wanted)
    return _load(path, wanted)["params"], int(path.name)


def corpus_sha256(run_dir: str | os.PathLike) -> str:
    """Hash of the bytes that a run was trained on; "" where none was saved.

    Raises:
      FileNotFoundError: no complete checkpoint is there.
    """
    return _origin(_find(run_dir))["corpus"]


def _find(run_dir: str | os.PathLike, step: int | None = None) -> pathlib.Path:
    """The directory of one complete checkpoint, the newest for None."""
    run_dir = run_directory.absolute(run_dir)
    steps = run_directory.complete_steps(run_dir)
    if not steps:
        raise FileNotFoundError(f"no checkpoint found in {run_dir / 'checkpoints'}")
    step = steps[-1] if step is None else step
    if step not in steps:
        raise ValueError(f"no checkpoint {step} in {run_dir}; there are {steps}")
    return run_dir / "checkpoints" / str(step)


def abstract_model(model: DecoderConfig) -> tuple[nnx.GraphDef, dict]:
    """`(graphdef, params)` of a decoder, with shapes in place of arrays."""
    abstract = nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(abstract)
    return graphdef, nnx.to_pure_dict(params)


def with_shardings(tree, shardings):
    """The shapes and dtypes of a tree, each with its sharding."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings
    )


def _progress(state, window):
    key = jax.random.key_data(state.key)
    return {"step": state.step, "key": key, "window": window}


def _abstract_progress(state, window):
    shardings = {
        "step": state.step.sharding,
        "key": state.key.sharding,
        "window": jax.tree.map(lambda x: x.sharding, window),
    }
    return with_shardings(jax.eval_shape(_progress, state, window), shardings)


def _load(path: pathlib.Path, wanted: dict) -> dict:
    try:
        return ocp.load_checkpointables(path, wanted)
    except Exception as error:
        raise _unreadable(path) from error


def _unreadable(path: pathlib.Path) -> RunError:
    return RunError(f"checkpoint {path} cannot be read; delete it to use an older one")


def _origin(path: pathlib.Path) -> dict:
    """What `Checkpoints.save` wrote of where the arrays come from."""
    return ocp.metadata(path, "params").custom_metadata


def _check_origin(path: pathlib.Path, config: Config, corpus: str = "") -> None:
    """Two encodings may have the same parameters; only the config tells them apart."""
    saved = _origin(path)
    for conflict in run_directory.conflicts(from_dict(saved["config"]), config):
        if conflict.startswith("model."):
            raise ValueError(
                f"checkpoint {path} is of another model: {conflict} (there and here)"
            )
    if corpus and saved["corpus"] != corpus:
        raise ValueError(
            f"checkpoint {path} was trained on other bytes: sha256 "
            f"{saved['corpus']!r} there, {corpus!r} here"
        )


def _check_trees(path: pathlib.Path, wanted: dict) -> None:
    """Orbax may restore a part of a tree in silence; the first difference raises."""
    for name, tree in wanted.items():
        metadata = ocp.metadata(path, name).metadata
        if metadata is None:
            raise _unreadable(path)
        saved = _named_leaves(metadata)
        expected = _named_leaves(tree)
        for leaf in list(expected) + list(saved):
            here, there = expected.get(leaf, "absent"), saved.get(leaf, "absent")
            if here != there:
                raise ValueError(
                    f"checkpoint {path} does not fit the model: {name}/{leaf} is "
                    f"{there} there and {here} here"
                )


def _named_leaves(tree) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): (
            f"{leaf.dtype}{list(leaf.shape)}"
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }

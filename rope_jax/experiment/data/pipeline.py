"""From a run of bytes to batches on the devices, shuffled, sliced and resumable.

Window k is `bytes[k*T : k*T + T + 1]`: its first T bytes are the inputs and its last T
the targets, so that every byte but the first is a target once an epoch (and the up to
T - 1 bytes at the end that fill no window, never).

The order is a function of the seed and the update number alone. Grain maps each index
of the endless stream to a window; nothing is drawn, so an iterator's whole state is the
number of batches that it has handed out, and a resumed run sees the same windows.
"""

import collections
from collections.abc import Callable

import grain
import jax
import numpy as np

# Rows handed out in a run that never ends. Grain's own endless `repeat()` has a
# length that overflows where a process has one window per batch.
ENDLESS = 2**62


def train_dataset(
    content: np.ndarray,
    *,
    length: int,
    batch_size: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.IterDataset:
    """Endless batches of shuffled windows; this process's rows of each.

    Every epoch has another order. Epochs follow each other without a seam: a batch may
    hold the end of one and the beginning of the next, and no window is left out.
    Process p of n gets rows p*b/n ... (p+1)*b/n - 1 of each batch that one process
    would get, so the number of processes does not change what an update sees.

    No thread and no worker process is started: the bytes are in memory.

    Args:
      content: uint8 [number of bytes].
      length: T, the training context in bytes.
      batch_size: b, windows per update over all processes.
      seed: of the shuffle.
      process_index: p; `process_slice` tells it from a sharding.
      process_count: n.

    Returns:
      A dataset of dict(inputs, targets), int32 [b/n, T] each. Its iterators have
      `get_state` and `set_state`, and Orbax saves and restores them.

    Raises:
      ValueError: a size that is not positive, a batch that the processes do not divide
        or that is larger than the number of windows, or a negative seed.

    >>> text = np.arange(9, dtype=np.uint8)
    >>> data = train_dataset(text, length=4, batch_size=2, seed=0)
    >>> batch = next(iter(data))
    >>> batch["inputs"].shape, int((batch["targets"] - batch["inputs"]).min())
    ((2, 4), 1)
    """
    check(content, length=length, batch_size=batch_size)
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    windows = np.lib.stride_tricks.sliding_window_view(content, length + 1)[::length]

    def gather(indices: np.ndarray) -> dict[str, np.ndarray]:
        rows = windows[indices]
        return {
            "inputs": rows[:, :-1].astype(np.int32),
            "targets": rows[:, 1:].astype(np.int32),
        }

    # Grain adds the epoch to the seed. Hashed first, seed 0's second epoch is not
    # seed 1's first, which would make the runs of a sweep share their batches.
    mixed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    indices = grain.MapDataset.range(len(windows)).shuffle(seed=mixed)
    return batches(
        indices.repeat(ENDLESS // len(windows)),
        gather,
        batch_size=batch_size,
        process_index=process_index,
        process_count=process_count,
    )


def batches(
    indices: grain.MapDataset,
    gather: Callable[[np.ndarray], dict[str, np.ndarray]],
    *,
    batch_size: int,
    process_index: int,
    process_count: int,
) -> grain.IterDataset:
    """This process's rows of each batch of an endless dataset of indices.

    Args:
      indices: in the order in which one process would take them.
      gather: makes a batch's rows from its indices, int64 [b/n].
      batch_size: b, over all processes.
      process_index: p.
      process_count: n.

    Returns:
      A dataset of what `gather` returns, without threads or worker processes.

    Raises:
      ValueError: a part that does not exist, or a batch that is not divided.
    """
    if not 0 <= process_index < process_count:
        raise ValueError(
            f"process_index must be in [0, process_count), got {process_index} of "
            f"{process_count}"
        )
    if batch_size % process_count:
        raise ValueError(
            f"batch_size must be a multiple of the {process_count} processes, got "
            f"{batch_size}"
        )
    return (
        indices.batch(batch_size // process_count, batch_fn=np.asarray)
        .slice(slice(process_index, None, process_count))
        .map(gather)
        .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    )


def check(content: np.ndarray, *, length: int, batch_size: int) -> None:
    """Raise ValueError where the bytes do not fill one batch of windows.

    Args:
      content: uint8 [number of bytes].
      length: T, the training context in bytes.
      batch_size: windows per update.
    """
    if content.ndim != 1 or content.dtype != np.uint8:
        raise ValueError(
            f"content must be uint8 [number of bytes], got {content.dtype} "
            f"{list(content.shape)}"
        )
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    windows = max(content.size - 1, 0) // length
    if batch_size > windows:
        raise ValueError(
            f"batch_size must be at most {windows}, the windows of length {length} in "
            f"{content.size} bytes, got {batch_size}"
        )


def process_slice(sharding: jax.sharding.Sharding) -> tuple[int, int]:
    """Which rows of a batch this process has to supply: part `index` of `count`.

    This is not always (process_index, process_count): where a tensor or sequence axis
    of the mesh spans processes, they hold the same rows, and all must read them.

    Args:
      sharding: of [B, T] batches.

    Returns:
      (index, count), to be given to `train_dataset` as process_index, process_count.

    Raises:
      ValueError: the processes' rows are not consecutive parts of one size.
    """
    # Any sharding divides this shape; only the shares matter, not the sizes.
    rows = sharding.num_devices
    parts: dict[int, set[int]] = collections.defaultdict(set)
    for device, index in sharding.devices_indices_map((rows, rows)).items():
        parts[device.process_index].update(range(*index[0].indices(rows)))
    idle = sorted(set(range(jax.process_count())) - set(parts))
    if idle:
        raise ValueError(
            f"--config.mesh must use devices of all {jax.process_count()} processes, "
            f"but leaves none to process {', '.join(map(str, idle))}: {sharding}"
        )
    own = parts[jax.process_index()]
    if max(own) - min(own) + 1 == len(own):
        size = len(own)
        starts = {min(part) for part in parts.values()}
        uniform = all(
            part == set(range(min(part), min(part) + size)) for part in parts.values()
        )
        if uniform and starts == set(range(0, rows, size)):
            return min(own) // size, rows // size
    raise ValueError(
        f"sharding must give each process consecutive rows of a batch, got {sharding}"
    )


class _DeviceIterator(grain.DatasetIterator):
    """Keeps the next batches on the devices; its state is that of the last one out."""

    def __init__(self, parent, sharding, depth):
        super().__init__(parent)
        self._source = parent
        self._sharding = sharding
        self._count = process_slice(sharding)[1]
        self._depth = depth
        self._ready = collections.deque()  # (batch on the devices, state after it)
        self._state = parent.get_state()

    def _put(self, rows: np.ndarray) -> jax.Array:
        shape = (rows.shape[0] * self._count, *rows.shape[1:])
        return jax.make_array_from_process_local_data(self._sharding, rows, shape)

    def __next__(self):
        while len(self._ready) < self._depth:
            batch = next(self._source, None)
            if batch is None:
                break
            # The copies are asynchronous: they run while the device computes.
            batch = jax.tree.map(self._put, batch)
            self._ready.append((batch, self._source.get_state()))
        if not self._ready:
            raise StopIteration
        batch, self._state = self._ready.popleft()
        return batch

    def get_state(self):
        return self._state

    def set_state(self, state):
        self._ready.clear()
        self._source.set_state(state)
        self._state = state

    def close(self):
        self._ready.clear()
        super().close()


def to_device(
    dataset: grain.IterDataset, sharding: jax.sharding.Sharding, *, depth: int = 2
) -> grain.DatasetIterator:
    """Iterates over a dataset's batches as global arrays that are on the devices.

    Up to `depth` batches are copied ahead of their use. The state describes the batch
    handed out last, not the ones copied ahead, so a run that resumes from it goes on
    with the next batch exactly. No thread is used.

    Args:
      dataset: batches of [b/n, T] arrays: this process's part, see `process_slice`.
      sharding: of the global [b, T] batch.
      depth: batches on the devices at most, at least 1.

    Returns:
      An iterator with `get_state` and `set_state`, which Orbax saves and restores.

    Raises:
      ValueError: `depth` is below 1, or `sharding` is not one of `process_slice`.
    """
    if depth < 1:
        raise ValueError(f"depth must be at least 1, got {depth}")
    return _DeviceIterator(iter(dataset), sharding, depth)

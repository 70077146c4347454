"""The least time that a step can take on a chip, by the chip's stated numbers."""

from rope_jax.experiment.chips import Topology


def estimate(topology: Topology, made: dict) -> dict | None:
    """Step time and MFU at best, from what `plan` found.

    Each of arithmetic, memory and network is taken to run at the full stated rate. At
    best they hide behind each other and the slowest is the step's time; without any
    overlap it is their sum. MFU is the operations that the model needs, without those
    that are done again, over what the chips could do in that time.

    Args:
      topology: with a chip.
      made: `work` and `train`, as in the result of `plan`.

    Returns:
      Seconds for each of compute, memory and network, best and sum, mfu_best and
      mfu_sum, intensity and ridge (operations per byte), limit (the slowest). Network
      is what the compiled step sends; where none was compiled, what it should send. It
      is None among more chips than their links join. None without a chip.
    """
    chip, work = topology.chip, made["work"]
    if chip is None:
        return None
    flops = work["executed_flops"] / topology.devices
    traffic = work["memory_traffic_per_chip"]
    times = {
        "compute": flops / chip.flops,
        "memory": traffic / chip.memory_bandwidth,
        "network": _sent(made) / chip.ring_bandwidth,
    }
    if topology.devices > chip.joined:
        times["network"] = None
    known = {name: time for name, time in times.items() if time is not None}
    best, total = max(known.values()), sum(known.values())
    at_peak = work["model_flops"] / topology.devices / chip.flops
    return times | {
        "best": best,
        "sum": total,
        "limit": max(known, key=known.get),
        "mfu_best": at_peak / best,
        "mfu_sum": at_peak / total,
        "intensity": flops / traffic,
        "ridge": chip.ridge,
    }


def _sent(made: dict) -> float:
    """Bytes that a chip sends in a step."""
    if made["train"]["memory"] is None:
        return sum(made["work"]["network_traffic_per_chip"].values())
    return sum(row["sent"] for row in made["train"]["collectives"])

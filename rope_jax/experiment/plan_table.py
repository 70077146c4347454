"""The text of a plan."""

import math

from rope_jax.experiment.chips import parse_topology

_KINDS = ("parameters", "optimizer", "batch, padding", "results", "temporary")
_KINDS += ("program",)


def render(made: dict) -> str:
    """A plan as lines for a terminal.

    Args:
      made: as `plan.plan` returns it.
    """
    parts = [_heading(made), _memory(made)]
    for name in ("train", "eval"):
        parts.append(_collectives(name, made[name]))
    parts += [_arithmetic(made), _estimate(made), _cost(made)]
    return "\n\n".join(part for part in parts if part)


def _heading(made: dict) -> str:
    work, mesh = made["work"], made["mesh"]
    sizes = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
    versions = ", ".join(f"{k} {v}" for k, v in made["versions"].items())
    return (
        f"{made['topology']}: {math.prod(mesh.values())} chips as {sizes}\n"
        f"{made['encoding']}, {work['parameters']:,} parameters, {work['dtype']}, "
        f"remat {work['remat']}\n"
        f"train step: {work['rows']} x {work['length']} bytes in {work['accumulate']} "
        f"micro-batches; eval step: windows of {made['eval']['length']}\n{versions}"
    )


def _memory(made: dict) -> str:
    """Memory of a chip: what the compiler says, or what the sizes say."""
    chip = parse_topology(made["topology"]).chip
    state = made["state"]
    held = {"parameters": state["parameters"], "optimizer": state["optimizer"]}
    lines = [f"{'memory of a chip':24}{'train':>12}{'eval':>12}"]
    columns = [_column(held, made["train"])]
    columns.append(_column({**held, "optimizer": 0}, made["eval"]))
    for kind in _KINDS:
        lines.append(_row(kind, [column.get(kind) for column in columns]))
    totals = [
        _total(made[name], column)
        for name, column in zip(("train", "eval"), columns, strict=True)
    ]
    lines.append(_row("total", totals))
    if made["train"]["fits"] is None:
        about = state["activations_estimated"]
        lines.append(
            f"no compiler for it here; activations by arithmetic: {_size(about)}"
        )
        totals[0] += about
    if chip is not None:
        for name, total in zip(("train", "eval"), totals, strict=True):
            lines.append(_verdict(name, made[name], total, chip.memory))
    return "\n".join(lines)


def _column(held: dict, step: dict) -> dict:
    if step["memory"] is None:
        return held
    memory = step["memory"]
    rest = memory["arguments"] - sum(held.values())
    return {
        **held,
        "batch, padding": rest,
        "results": memory["results"],
        "temporary": memory["temporary"],
        "program": memory["program"],
    }


def _total(step: dict, column: dict) -> float:
    return step["memory"]["total"] if step["memory"] else sum(column.values())


def _verdict(name: str, step: dict, total: float, capacity: float) -> str:
    if step["fits"] is False:
        return f"{name}: DOES NOT FIT. {step['why_not']}"
    share = f"{100 * total / capacity:.1f} % of {_size(capacity)}"
    if step["fits"] is None:
        word = "would fit" if total < capacity else "WOULD NOT FIT"
        return f"{name}: {word} by arithmetic, {share}"
    return f"{name}: fits, {share}"


def _collectives(name: str, step: dict) -> str:
    if step["memory"] is None:
        return ""
    rows = step["collectives"]
    if not rows:
        return f"{name} step: no collectives"
    lines = [
        f"{name} step: collectives of a chip (bytes in one step)",
        f"{'kind':20}{'mesh axes':26}{'runs':>7}{'payload':>12}{'sent':>12}  largest",
    ]
    for row in rows:
        largest = row["largest"]
        what = f"{largest['shapes'][0]} {_origin(largest['op_name'])}"
        mark = "" if row["exact"] else " (at least)"
        lines.append(
            f"{row['kind']:20}{','.join(row['axes']):26}{row['times']:>7}"
            f"{_size(row['payload']):>12}{_size(row['sent']):>12}  {what}{mark}"
        )
    return "\n".join(lines)


def _arithmetic(made: dict) -> str:
    work, chips = made["work"], math.prod(made["mesh"].values())
    lines = [
        "operations of a train step, all chips",
        f"  with weights          {work['weight_flops']:.4g}",
        f"  attention             {work['attention_flops']:.4g}",
        f"  the model's           {work['model_flops']:.4g}",
        f"  with what is redone   {work['executed_flops']:.4g}",
    ]
    flops = made["train"]["compiler_flops"]
    if flops:
        lines.append(
            f"  the compiler's count  {flops * chips:.4g} (each loop's body once: one "
            "layer, one micro-batch)"
        )
    return "\n".join(lines)


def _estimate(made: dict) -> str:
    found = made["estimate"]
    if found is None:
        return "no roofline: virtual devices have no stated numbers"
    chip = parse_topology(made["topology"]).chip
    times = [
        f"{name} {_time(found[name])}" for name in ("compute", "memory", "network")
    ]
    should = made["work"]["network_traffic_per_chip"]
    sent = ", ".join(f"{axis} {_size(bytes_)}" for axis, bytes_ in should.items())
    return (
        f"estimated by roofline, at best: {chip.name} at {chip.flops / 1e12:.0f} "
        f"TFLOP/s, {chip.memory_bandwidth / 1e9:.0f} GB/s, rings of "
        f"{chip.ring_bandwidth / 1e9:.0f} GB/s ({chip.source})\n"
        f"  {', '.join(times)}; {found['limit']} is the limit\n"
        f"  step {_time(found['best'])} and MFU {100 * found['mfu_best']:.1f} % if all "
        f"hides behind it; {_time(found['sum'])} and {100 * found['mfu_sum']:.1f} % if "
        "nothing does\n"
        f"  arithmetic intensity {found['intensity']:.0f} operations per byte, the "
        f"chip's ridge {found['ridge']:.0f}\n"
        f"  a chip has to send, by arithmetic: {sent}"
    )


def _cost(made: dict) -> str:
    """What planning took."""
    word = "lowered" if made["train"]["fits"] is None else "compiled"
    steps = [
        f"the {name} step in {made[name]['seconds']:.0f} s, "
        f"{made[name]['cpu_seconds']:.0f} s of CPU"
        for name in ("train", "eval")
    ]
    return f"{word} {'; '.join(steps)}"


def _origin(op_name: str) -> str:
    """The last parts of an operation's name, without the wrappers around them."""
    parts = [part for part in op_name.split("/") if part not in ("body", "closed_call")]
    return "/".join(parts[-2:])


def _row(name: str, values: list) -> str:
    cells = ["-" if value is None else _size(value) for value in values]
    return f"  {name:22}{cells[0]:>12}{cells[1]:>12}"


def _size(count: float) -> str:
    """Bytes in binary units, three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    raise AssertionError("not reached")


def _time(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{1e3 * seconds:.3g} ms"

"""The text of a compiled program, read as far as counting what it runs needs.

`jax.stages.Compiled.as_text()` prints computations that call each other: loops,
fusions and conditionals. `executions` walks them from the entry and says how often
each instruction runs.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\(")
_CALLED = re.compile(
    r"\b(?:calls|body|condition|to_apply|true_computation|false_computation)="
    r"%?([\w.\-]+)"
)
_CALLED_SET = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,<=]*)\]")
_WIDTHS = {"pred": 8, "token": 0, "opaque": 0}  # bits, where the name has none


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: unique in the program.
      type: the result's type as text, a tuple in parentheses.
      opcode: such as "all-reduce" or "while".
      operands: names of the operands; of a constant, its value.
      line: the whole line, with the attributes.
    """

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    line: str


@dataclass(frozen=True)
class Execution:
    """An instruction, and how often one run of the program runs it.

    Attributes:
      instruction: what runs.
      computation: name of the computation that it stands in.
      times: the product of the trip counts of the loops around it.
      exact: False where the trip count of a loop could not be read; that loop is
        then counted once.
    """

    instruction: Instruction
    computation: str
    times: int
    exact: bool


def executions(text: str) -> Iterator[Execution]:
    """Every instruction that a program runs, in the order of the text's calls.

    All branches of a conditional are counted, as if each were taken.

    Args:
      text: of one compiled module.

    Raises:
      ValueError: the text has no entry computation.
    """
    entry, computations = _computations(text)
    yield from _walk(computations, entry, 1, True)


def array_bytes(type_text: str) -> int:
    """Bytes of all the arrays in a type, without padding.

    >>> array_bytes("(bf16[8,2]{1,0:T(8,128)(2,1)}, f32[], s4[6]{0})")
    39
    """
    return sum(_bits(*found) // 8 for found in _ARRAY.findall(type_text))


def array_shapes(type_text: str) -> tuple[str, ...]:
    """The arrays of a type without their layouts, as in `("bf16[8,2]", "f32[]")`."""
    return tuple(f"{dtype}[{dims}]" for dtype, dims in _ARRAY.findall(type_text))


def elements(type_text: str) -> list[str]:
    """The top-level elements of a tuple's type; of an array's, itself.

    >>> elements("((f32[2], f32[4]), f32[8])")
    ['(f32[2], f32[4])', 'f32[8]']
    """
    if not type_text.startswith("("):
        return [type_text]
    parts, depth, start = [], 0, 1
    for place, character in enumerate(type_text):
        depth += (character in "([{") - (character in ")]}")
        if (character == "," and depth == 1) or depth == 0:
            parts.append(type_text[start:place].strip())
            start = place + 1
        if depth == 0:
            break
    return parts


def _bits(dtype: str, dims: str) -> int:
    digits = re.search(r"\d+", dtype)
    width = _WIDTHS.get(dtype) if digits is None else int(digits[0])
    if width is None:
        raise ValueError(f"no width is known for the type {dtype!r} in a program")
    for size in filter(None, dims.replace("<=", "").split(",")):
        width *= int(size)
    return width


def _computations(text: str) -> tuple[str, dict[str, dict[str, Instruction]]]:
    entry, computations, current = None, {}, None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif current is not None and (found := _INSTRUCTION.match(line)):
            name, kind, opcode = found.groups()
            operands = _operands(line, found.end(), opcode)
            current[name] = Instruction(name, kind, opcode, operands, line)
    if entry is None:
        raise ValueError(
            f"a program's text must have an ENTRY computation, got {text[:60]!r}..."
        )
    return entry, computations


def _operands(line: str, start: int, opcode: str) -> tuple[str, ...]:
    """Names of the operands: what stands up to the first closing parenthesis."""
    inside = line[start:].partition(")")[0]
    if opcode == "constant":
        return (inside,)
    return tuple(re.findall(r"%([\w.\-]+)", inside))


def _walk(computations, name, times, exact):
    for instruction in computations[name].values():
        yield Execution(instruction, name, times, exact)
        if instruction.opcode in ("async-update", "async-done"):
            continue  # their computation was counted at its start
        trips = 1
        if instruction.opcode == "while":
            trips = _trip_count(computations, name, instruction)
        for called in _called(instruction.line):
            if called in computations:
                inner = (times * (trips or 1), exact and trips is not None)
                yield from _walk(computations, called, *inner)


def _called(line: str) -> list[str]:
    names = _CALLED.findall(line)
    for group in _CALLED_SET.findall(line):
        names += [name.strip().lstrip("%") for name in group.split(",")]
    return names


def _trip_count(computations, caller: str, loop: Instruction) -> int | None:
    """How often a loop's body runs, None if its bound is no constant.

    Some compilers write it down. Else it is read off a condition `counter < bound`;
    the loops of JAX count by 1, and from 0 where the start is not to be seen.
    """
    if known := _TRIP_COUNT.search(loop.line):
        return int(known[1])
    condition = computations[re.search(r"\bcondition=%?([\w.\-]+)", loop.line)[1]]
    (root,) = [x for x in condition.values() if x.line.lstrip().startswith("ROOT ")]
    if root.opcode != "compare" or "direction=LT" not in root.line:
        return None
    around = computations[caller]
    first = around[loop.operands[0]]
    counter, bound = (
        _at_start(condition, name, first, around) for name in root.operands
    )
    return None if bound is None else max(0, bound - (counter or 0))


def _at_start(condition, name, first, around) -> int | None:
    """What a scalar of a loop's condition is at first, where it is a constant."""
    value = condition[name]
    if value.opcode == "get-tuple-element" and first.opcode == "tuple":
        index = int(re.search(r"\bindex=(\d+)", value.line)[1])
        value = around[first.operands[index]]
    while value.opcode in ("copy", "bitcast") and value.operands[0] in around:
        value = around[value.operands[0]]
    return int(value.operands[0]) if value.opcode == "constant" else None
